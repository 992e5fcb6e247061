"""The routed experts at the model's shapes: few pairs against bytes, many against products.

48 slots are a rank of eight; 384 are all experts on one GPU. Bytes are those of the experts that
the drawn pairs touch, of the rows and of the results.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from phalanx.bench.kernels.harness import Ceilings, Figure, time_us
from phalanx.kernels.triton.configs import Config
from phalanx.kernels.triton.expert_groups import group_pairs
from phalanx.kernels.triton.experts import ExpertPool, key_for, run_experts

HIDDEN: Final = 5120
INTER: Final = 2304
LIMIT: Final = 10.0

_WEIGHTS: Final = 3 * HIDDEN * INTER  # of an expert
# pairs, slots, goal: of copy bandwidth up to 256 pairs, then of the bf16 GEMM rate
_SHAPES: Final = (
    (24, 48, 0.6),
    (64, 48, 0.6),
    (256, 48, 0.6),
    (4096, 48, 0.5),
    (64, 384, 0.6),
    (24576, 384, 0.5),
)


def _pool(num_slots: int) -> ExpertPool:
    """Drawn codes and scales of 2^-9 to 2^-5."""
    pool = ExpertPool.empty(num_slots, HIDDEN, INTER, "cuda")
    for words in (pool.up, pool.down):
        words.view(torch.int32).random_(-(2**31), 2**31 - 1)
    for scales in (pool.up_scales, pool.down_scales):
        scales.view(torch.uint8).random_(244, 249)
    pool.raised.fill_(1.0)
    return pool


class _Case:
    """Drawn pairs, their rows and weights."""

    def __init__(self, pool: ExpertPool, num_pairs: int) -> None:
        torch.manual_seed(num_pairs)
        self.pool = pool
        self.num_pairs = num_pairs
        self.slots = torch.randint(0, pool.num_slots, (num_pairs,), device="cuda")
        self.x = torch.randn(num_pairs, HIDDEN, device="cuda").bfloat16()
        self.weights = torch.rand(num_pairs, device="cuda")
        self.touched = int((torch.bincount(self.slots) > 0).sum())

    def run(self, settings: Config | None = None, compile_only: bool = False) -> Tensor:
        return run_experts(
            self.pool,
            self.slots,
            self.x,
            self.weights,
            LIMIT,
            settings=settings,
            compile_only=compile_only,
        )

    @property
    def num_bytes(self) -> int:
        rows = 2 * 2 * self.num_pairs * HIDDEN
        return self.touched * (_WEIGHTS // 2 + _WEIGHTS // 32) + rows

    @property
    def flops(self) -> int:
        return 2 * self.num_pairs * _WEIGHTS


def figures(limits: Ceilings) -> list[Figure]:
    """About 12 GB and 10 s."""
    rows: list[Figure] = []
    for num_slots in (48, 384):
        pool = _pool(num_slots)
        with _compiling():
            for num_pairs, slots, _ in _SHAPES:
                if slots == num_slots:
                    _Case(pool, num_pairs).run(compile_only=True)
        for num_pairs, slots, goal in _SHAPES:
            if slots != num_slots:
                continue
            case = _Case(pool, num_pairs)
            name, alternative = _alternative(case) if slots == 48 else (None, None)
            rows.append(
                Figure(
                    kernel="experts",
                    shape=f"{num_pairs} pairs, {case.touched} of {num_slots} slots",
                    us=time_us(case.run),
                    limit=limits.limit(case.num_bytes, case.flops),
                    goal=goal,
                    alternative=name,
                    alternative_us=alternative,
                )
            )
        del pool, case
        torch.cuda.empty_cache()
    return rows


def _alternative(case: _Case) -> tuple[str, float]:
    """The same products by the vendor's library, on experts unpacked to bf16 before."""
    order = case.slots.sort().indices
    counts = torch.bincount(case.slots, minlength=case.pool.num_slots)
    x = case.x[order].contiguous()
    up, down = (
        torch.randn(case.pool.num_slots, rows, columns, device="cuda", dtype=torch.bfloat16)
        for rows, columns in ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    )
    up, down = up.transpose(1, 2), down.transpose(1, 2)

    def activate(both: Tensor) -> Tensor:
        gate, linear = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * linear

    ends = counts.cumsum(0).to(torch.int32)

    def grouped() -> Tensor:
        a = activate(torch._grouped_mm(x, up, offs=ends))
        return torch._grouped_mm(a, down, offs=ends)

    spans = [
        (slot, end - count, end)
        for slot, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        if count
    ]

    def one_by_one() -> list[Tensor]:
        return [activate(x[a:b] @ up[slot]) @ down[slot] for slot, a, b in spans]

    times = {"cuBLAS bf16, an expert at a time": time_us(one_by_one)}
    try:
        times["torch grouped_mm bf16"] = time_us(grouped)
    except (AttributeError, RuntimeError):  # not in this build
        torch.cuda.synchronize()
    return min(times.items(), key=lambda item: item[1])


# --- Settings -----------------------------------------------------------------------------------

_Kernel = tuple[int, int, int]  # outputs, warps, stages

_UP: Final = ((64, 4, 3), (64, 4, 4), (64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 4))
_DOWN: Final = ((64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 4, 5), (256, 4, 3), (256, 8, 3))
# Pairs to time, and changes to compare at them before kernels are looked at one by one.
_TRIALS: Final[tuple[tuple[int, tuple[Config, ...]], ...]] = (
    (64, ({"m": 16},)),
    (512, ({"m": 32}, {"m": 16})),
    (4096, ({"hopper": 1}, {"hopper": 0, "m": 128}, {"hopper": 0, "m": 64})),
)


def candidates(settings: Config, part: str) -> Iterator[Config]:
    """Settings of one kernel to try in place of these."""
    if not settings["hopper"]:
        for n, warps, stages in _UP if part == "up" else _DOWN:
            kernel = {"n": n, "warps": warps, "stages": stages}
            yield settings | {f"{part}_{name}": value for name, value in kernel.items()}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tune(limits: Ceilings, report: Callable[[str], None] = _tell) -> dict[str, dict[str, Config]]:
    """The fastest settings of each number of pairs a slot, for `configs.json`.

    Every trial is reported. About a minute, most of it compilation on all cores.
    """
    pool = _pool(48)
    _compile(pool)
    table: dict[str, Config] = {}
    for num_pairs, changes in _TRIALS:
        case = _Case(pool, num_pairs)
        grouping = time_us(lambda: group_pairs(case.slots, 48, 16))  # noqa: B023
        report(f"experts, {num_pairs} pairs grouped: {grouping:.1f} us")
        key, default = key_for(num_pairs, 48, HIDDEN, INTER)
        trials = [default | change for change in changes]
        times = [_trial(case, trial, report) for trial in trials]
        best_us, best = min(zip(times, trials, strict=True), key=lambda timed: timed[0])
        for part in ("up", "down"):
            for trial in candidates(best, part):
                us = _trial(case, trial, report)
                if us < best_us:
                    best_us, best = us, trial
        table[key] = best
    return {"experts": table}


@contextmanager
def _compiling() -> Iterator[None]:
    """Kernels asked for in the block are compiled side by side, and ready after it."""
    with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
        yield


def _compile(pool: ExpertPool) -> None:
    with _compiling():
        for num_pairs, changes in _TRIALS:
            case = _Case(pool, num_pairs)
            for change in changes:
                base = key_for(num_pairs, 48, HIDDEN, INTER)[1] | change
                for part in ("up", "down"):
                    for settings in (base, *candidates(base, part)):
                        case.run(settings, compile_only=True)


def _trial(case: _Case, settings: Config, report: Callable[[str], None]) -> float:
    try:
        us = time_us(lambda: case.run(settings))
    except OutOfResources as error:  # does not fit the GPU: a candidate less
        report(f"experts, {case.num_pairs} pairs {list(settings.values())}: {error}")
        return float("inf")
    report(f"experts, {case.num_pairs} pairs {list(settings.values())}: {us:.1f} us")
    return us
