"""Tables that stay in the host's memory: read there by the GPU's kernels, or picked from by the host."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Final

import torch
from torch import Tensor

from phalanx.worker_svc.model.memory import available_bytes

_SHARE: Final = 4  # at most this part of the available memory is pinned for one table
_PICKERS: Final = 8  # threads
_PICKED_AT_LEAST: Final = 128  # rows that are worth a thread
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
            _forget_error()
            return False  # not supported for this mapping, or something at this address was pinned before
    return True


def _forget_error() -> None:
    """CUDA keeps it for whoever asks next: the first launch would be blamed."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


@cache
def _pickers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_PICKERS, "picker")


def pick_rows(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = table[ids[i]], by several threads where there are many: a row that was not read before is
    waited for, and those of other threads meanwhile.

    Args:
        table, out: uint8 [rows, dim] and [n, dim], on the host.
        ids: int64 [n].
    """
    if len(ids) < 2 * _PICKED_AT_LEAST:
        torch.index_select(table, 0, ids, out=out)
        return
    size = max(_PICKED_AT_LEAST, -(-len(ids) // _PICKERS))
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    waiting = [_pickers().submit(_pick, table, ids[part], out[part]) for part in parts]
    for one in waiting:
        one.result()


@torch.inference_mode()  # which is each thread's own: `out` may be of either kind
def _pick(table: Tensor, ids: Tensor, out: Tensor) -> None:
    torch.index_select(table, 0, ids, out=out)


class PickedRows:
    """Rows that the host picked from a table, at a fixed place where a GPU reads them.

    Attributes:
        codes, scales: uint8 [n, dim] and [n, dim / 32], on the host.
    """

    def __init__(self, codes: Tensor, scales: Tensor, count: int, *, pinned: bool) -> None:
        """For `count` rows of the table."""
        self._tables = codes.view(torch.uint8), scales
        self.codes, self.scales = (
            torch.zeros((count, table.shape[1]), dtype=torch.uint8, pin_memory=pinned)
            for table in self._tables
        )

    def pick(self, ids: Tensor) -> None:
        """int64 [count], on the host. Nobody may read the rows of before any more."""
        for table, out in zip(self._tables, (self.codes, self.scales), strict=True):
            pick_rows(table, ids, out)
