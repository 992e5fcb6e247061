"""Tables that stay in the host's memory and are read there by the GPU's kernels, row by row."""

from typing import Final

import torch
from torch import Tensor

from phalanx.worker_svc.model.memory import available_bytes

_SHARE: Final = 4  # at most this part of the available memory is pinned for one table
_MAPPED_READ_ONLY: Final = 0x02 | 0x08  # cudaHostRegisterMapped | cudaHostRegisterReadOnly


def readable_by_gpu(*tables: Tensor) -> bool:
    """Pin these host tensors where they lie, for as long as the process runs; whether a GPU can now read
    them.

    Pinned pages must be in memory, so a table that is large for this machine is left alone: its rows
    are then gathered by the host.
    """
    if sum(table.nbytes for table in tables) * _SHARE > available_bytes():
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for table in tables:
        if int(runtime.cudaHostRegister(table.data_ptr(), table.nbytes, _MAPPED_READ_ONLY)):
            return False  # not supported for this mapping
    return True
