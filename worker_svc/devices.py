"""Memory of this machine that could hold a model: the processors', and that of its GPUs."""

from dataclasses import dataclass
from pathlib import Path

from phalanx.worker_svc.model.memory import available_bytes

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


def _gpus() -> list[Devices]:
    if not _NVIDIA.exists():
        return []
    import torch  # here, because it takes seconds

    free: dict[str, list[int]] = {}
    for i in range(torch.cuda.device_count()):
        free.setdefault(torch.cuda.get_device_name(i), []).append(torch.cuda.mem_get_info(i)[0])
    return [Devices(name, False, len(sizes), min(sizes)) for name, sizes in free.items()]
