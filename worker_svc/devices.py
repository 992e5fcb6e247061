"""Memory of this machine that could hold a model: the processors', and that of its GPUs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError
from phalanx.worker_svc.model.memory import available_bytes

if TYPE_CHECKING:
    import torch

_NVIDIA = Path("/dev/nvidiactl")  # without it there is no need to load torch to find no GPU


@dataclass(frozen=True)
class Devices:
    """Devices of one kind. CPU ranks share one memory; every GPU has its own and takes one rank."""

    name: str
    is_cpu: bool
    count: int
    free_bytes: int  # of one; the smallest of them


def devices_at_hand() -> list[Devices]:
    """The CPU's memory first, then the GPUs by kind."""
    return [Devices("cpu", True, 1, available_bytes()), *_gpus()]


def rank_device(config: NodeConfig, seat: int) -> "torch.device":
    """Where the rank of this seat computes; on a GPU it becomes the process's current device.

    Raises ConfigError when the node asks for more GPUs than this process sees.
    """
    import torch

    if config.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if seat >= count:
        raise ConfigError(
            f"rank {seat} needs a GPU of its own and this machine shows {count}: start fewer ranks, "
            "or look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    torch.cuda.set_device(seat)
    return torch.device("cuda", seat)


def _gpus() -> list[Devices]:
    if not _NVIDIA.exists():
        return []
    import torch  # here, because it takes seconds

    free: dict[str, list[int]] = {}
    for i in range(torch.cuda.device_count()):
        free.setdefault(torch.cuda.get_device_name(i), []).append(torch.cuda.mem_get_info(i)[0])
    return [Devices(name, False, len(sizes), min(sizes)) for name, sizes in free.items()]
