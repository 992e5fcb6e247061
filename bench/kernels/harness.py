"""How a kernel is timed, and against what: copy bandwidth and bf16 GEMM rate of the same run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch

_REPLAYS: Final = 20
_L2_BYTES: Final = 256 << 20  # read between timed launches, so that none finds its data in the L2


@dataclass(frozen=True)
class Limit:
    """What bounds a piece of work: no kernel takes less than `us`, in which it would reach `ceiling`."""

    us: float
    ceiling: float
    unit: str  # of the ceiling


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches on the plainest work, measured in this run."""

    copy_bytes_per_s: float  # bytes read plus bytes written
    gemm_flops_per_s: float  # bf16, 8192 x 8192 x 8192, through torch

    def limit(self, num_bytes: float, flops: float = 0.0) -> Limit:
        """The one of the two that is reached first."""
        moving = moves(num_bytes, self.copy_bytes_per_s)
        rate = self.gemm_flops_per_s
        computing = Limit(1e6 * flops / rate, rate / 1e12, "TFLOP/s")
        return max(moving, computing, key=lambda limit: limit.us)


def moves(num_bytes: float, bytes_per_s: float) -> Limit:
    """So many bytes over something that carries so many a second."""
    return Limit(1e6 * num_bytes / bytes_per_s, bytes_per_s / 1e9, "GB/s")


@dataclass(frozen=True)
class Figure:
    """One row of `phalanx bench kernels`."""

    kernel: str
    shape: str
    us: float
    limit: Limit
    goal: float | None = None  # the ratio that is aimed at
    goal_us: float | None = None  # or a time
    alternative: str | None = None  # what else does the same: "cuBLAS bf16", "torch"
    alternative_us: float | None = None

    @property
    def ratio(self) -> float:
        """How much of the limit is reached, at most about 1."""
        return self.limit.us / self.us


def time_us(run: Callable[[], object], *, flush: bool = True) -> float:
    """Median time of one launch in microseconds, replayed from a CUDA graph.

    Args:
        run: launches on the current stream, without a synchronisation.
        flush: empty the L2 before each launch, as between the layers of a large model.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other = torch.ones(_L2_BYTES // 4, dtype=torch.int32, device="cuda")
    times: list[float] = []
    for _ in range(_REPLAYS):
        if flush:
            other.sum()  # not written: a launch would pay for bringing that to memory
        start, end = (_event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rotating(runs: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """One run after the other, so that a time divided by their number sees no warm data."""

    def all_of_them() -> None:
        for run in runs:
            run()

    return all_of_them


def ceilings() -> Ceilings:
    """Measure the two limits: about 0.2 s and 8 GiB."""
    return Ceilings(_copy_bytes_per_s(), _gemm_flops_per_s())


def _copy_bytes_per_s() -> float:
    """Of 4 GiB by a kernel: a graph would hand a copy to the slower copy engines."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(10):
        start, end = _event(), _event()
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end))
    return 2 * 4 * source.numel() / median(times[2:])


def _gemm_flops_per_s() -> float:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_us(lambda: torch.mm(a, b, out=out), flush=False) * 1e6
