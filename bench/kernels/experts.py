"""The routed experts at the model's shapes: few pairs against bytes, many against products.

48 slots are a rank of eight; 384 are all experts on one GPU. Bytes are those of the experts that
the drawn pairs touch, of the rows and of the results.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from phalanx.bench.kernels.harness import Ceilings, Figure, time_us
from phalanx.kernels.triton.configs import Config
from phalanx.kernels.triton.experts import ExpertPool, run_experts, settings_for

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

    def run(self, settings: Config | None = None) -> Tensor:
        return run_experts(self.pool, self.slots, self.x, self.weights, LIMIT, settings=settings)

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
        for num_pairs, slots, goal in _SHAPES:
            if slots != num_slots:
                continue
            case = _Case(pool, num_pairs)
            name, alternative = _alternative(case) if slots == 48 else (None, None)
            rows.append(
                Figure(
                    op="experts",
                    shape=f"{num_pairs} pairs, {case.touched} of {num_slots} slots",
                    us=time_us(case.run),
                    floor_us=limits.floor_us(case.num_bytes, case.flops),
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

_FEW_UP: Final = ((64, 4, 3), (64, 4, 4), (64, 4, 5), (128, 8, 3), (128, 8, 4), (128, 4, 4))
_FEW_DOWN: Final = ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4), (256, 8, 4))
_MANY_UP: Final = ((128, 8, 2), (128, 8, 3), (128, 8, 4), (64, 4, 3))
_MANY_DOWN: Final = ((256, 8, 2), (256, 8, 3), (256, 8, 4), (128, 4, 3), (128, 8, 4))


def candidates(settings: Config) -> Iterator[Config]:
    """Settings to try in place of these: one kernel's at a time."""
    few = settings["m"] + settings["more"] <= 32
    for part, choices in (
        ("up", _FEW_UP if few else _MANY_UP),
        ("down", _FEW_DOWN if few else _MANY_DOWN),
    ):
        for n, warps, stages in choices:
            yield settings | {
                f"{part}_n": n,
                f"{part}_warps": warps,
                f"{part}_stages": stages,
            }


def tune(limits: Ceilings, report: Callable[[str], None] = print) -> dict[str, dict[str, Config]]:
    """The fastest settings of each tile height, for `configs.json`; every trial is reported."""
    pool = _pool(48)
    table: dict[str, Config] = {}
    for num_pairs in (64, 512, 1536, 3072, 4096, 12288):
        case = _Case(pool, num_pairs)
        base = settings_for(num_pairs, 48, HIDDEN, INTER)
        best, best_us = base, _trial(case, base, report)
        for part in ("up", "down"):
            keys = {f"{part}_n", f"{part}_warps", f"{part}_stages"}
            for trial in candidates(best):
                changed = {key for key in trial if trial[key] != best[key]}
                if not changed or not changed <= keys:
                    continue
                us = _trial(case, trial, report)
                if us < best_us:
                    best, best_us = trial, us
        table[f"{HIDDEN}x{INTER}@{base['m'] + base['more']}"] = best
    return {"experts": table}


def _trial(case: _Case, settings: Config, report: Callable[[str], None]) -> float:
    try:
        us = time_us(lambda: case.run(settings))
    except OutOfResources as error:  # does not fit the GPU: a candidate less
        report(f"{case.num_pairs} pairs {settings}: {type(error).__name__} {error}"[:200])
        return float("inf")
    report(f"{case.num_pairs} pairs {list(settings.values())}: {us:.1f} us")
    return us
