"""The sampler over the full vocabulary, in one launch, against what torch does for the same rows."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Final

import torch

from phalanx.bench.kernels.harness import Ceilings, Figure, rotating, time_us
from phalanx.kernels.reference.sample import sample as reference
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows
from phalanx.kernels.triton.configs import Config
from phalanx.kernels.triton.sample import CANDIDATES, sample

VOCAB: Final = 129_280
SETTINGS: Final = {
    "greedy": RowParams(temperature=0.0),
    "top-p 0.95": RowParams(temperature=0.8, top_p=0.95),
    "top-k 50, min-p": RowParams(temperature=0.8, top_k=50, min_p=0.05),
    "all 4096": RowParams(temperature=0.8),
}
GOALS_US: Final = {1: 40.0, 64: 60.0, 256: 100.0}
_COPIES: Final = 2  # sets of logits read in turn


def figures(limits: Ceilings) -> list[Figure]:
    return [
        _figure(limits, num_rows, name, row)
        for num_rows in GOALS_US
        for name, row in SETTINGS.items()
    ]


def tune(limits: Ceilings) -> dict[str, dict[str, Config]]:
    """The fastest settings for top-p: about 15 s, most of it compiling. Trials go to stderr."""
    found: dict[str, Config] = {}
    for size, num_rows in (("few", 64), ("many", 256)):
        logits, rows = _inputs(num_rows, SETTINGS["top-p 0.95"])
        greedy = _inputs(num_rows, SETTINGS["greedy"])[1]
        times: list[float] = []
        for each in CANDIDATES[size]:
            times.append(time_us(partial(sample, logits[0], rows, settings=each)))
            greedy_us = time_us(partial(sample, logits[0], greedy, settings=each))
            line = f"{num_rows} rows, {each}: {times[-1]:.1f} us, greedy {greedy_us:.1f}"
            print(line, file=sys.stderr, flush=True)
        found[f"{VOCAB}:{size}"] = CANDIDATES[size][times.index(min(times))]
    return {"sample": found}


def _figure(limits: Ceilings, num_rows: int, name: str, row: RowParams) -> Figure:
    logits, rows = _inputs(num_rows, row)
    us = time_us(rotating([partial(sample, x, rows) for x in logits])) / _COPIES
    if name == "greedy":
        other = "torch argmax"
        other_us = time_us(rotating([partial(torch.argmax, x, 1) for x in logits])) / _COPIES
    elif name == "top-p 0.95":
        other = "torch softmax + multinomial, without top-p"
        other_us = _eager_us(lambda: (logits[0] / 0.8).softmax(1).multinomial(1))
    else:
        other, other_us = "torch reference", _eager_us(lambda: reference(logits[0], rows))
    return Figure(
        kernel="sample",
        shape=f"{num_rows} x {VOCAB}, {name}",
        us=us,
        limit=limits.limit(num_rows * (4 * VOCAB + 9 * 8 + 9)),
        goal_us=GOALS_US[num_rows],
        alternative=other,
        alternative_us=other_us,
    )


def _inputs(num_rows: int, row: RowParams) -> tuple[list[torch.Tensor], SamplingRows]:
    params = [replace(row, seed=seed) for seed in range(num_rows)]
    rows = SamplingRows.of(params).to(torch.device("cuda"))
    return [2.5 * torch.randn(num_rows, VOCAB, device="cuda") for _ in range(_COPIES)], rows


def _eager_us(run: Callable[[], object]) -> float:
    """Median time of what synchronises with the host, and so cannot be captured in a graph."""
    event = partial(torch.cuda.Event, enable_timing=True)
    times: list[float] = []
    for _ in range(8):
        start, end = event(), event()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return median(times[3:])
