"""`phalanx bench model`: the tiny model's forward pass on this CPU, and what exactness costs.

A prompt of 512 tokens and a decode step of 8 sequences, on one thread, without a node around them.
The cost of exactness is the time of the exact step over that of the same step with plain products
(`kernels.reference.rows.exact_rows`), in CPU time of the thread, the two taking turns in one run.

A program of its own, `python -m phalanx.bench.model`, because it loads torch.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from phalanx.kernels.reference.rows import exact_rows
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import LocalExperts
from phalanx.worker_svc.model.random_tiny import ensure_random_tiny

PROMPT: Final = 512
SEQUENCES: Final = 8
CONTEXT: Final = 200  # tokens before the decode step
ROUNDS: Final = 7
_BLOCKS: Final = -(-PROMPT // BLOCK_TOKENS)


@dataclass(frozen=True)
class Figures:
    """One kind of step."""

    step: str
    rows: int
    ms: float  # on the clock, best of all
    cpu_ms: float  # of the thread, median of the rounds
    fast_cpu_ms: float  # the same with plain products
    cost: float  # their ratio, median of the rounds


class Workload:
    """A model with its caches, a prompt to compute and sequences that decode."""

    def __init__(self) -> None:
        weights = load_checkpoint(ensure_random_tiny())
        pools = CachePools(
            CacheLayout(weights.config), 1 + (SEQUENCES + 1) * _BLOCKS, SEQUENCES + 1
        )
        self._model = Model(weights, pools, LocalExperts(weights))
        draws = np.random.default_rng(1)
        self._tokens = draws.integers(16, weights.config.vocab_size, PROMPT).tolist()
        for slot in range(SEQUENCES):
            rows = self._rows(slot, 0, self._tokens[slot : slot + CONTEXT])
            self._model.forward(StepBatch.of([rows])).commit([CONTEXT])

    def _rows(self, slot: int, start: int, tokens: list[int]) -> SequenceRows:
        blocks = range(1 + slot * _BLOCKS, 1 + (slot + 1) * _BLOCKS)
        return SequenceRows(slot, start, tokens, blocks, logits=True)

    def prefill(self) -> torch.Tensor:
        """Logits of a whole prompt's last token. Nothing is kept, so it can be done again."""
        return self._model.forward(StepBatch.of([self._rows(SEQUENCES, 0, self._tokens)])).logits

    def decode(self) -> torch.Tensor:
        """Logits of one step of all sequences, which do not move on."""
        rows = [
            self._rows(slot, CONTEXT, self._tokens[slot : slot + 1]) for slot in range(SEQUENCES)
        ]
        return self._model.forward(StepBatch.of(rows)).logits


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """The fields of `phalanx bench model` (docs/cli.md), and the figures behind them in `rows`."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        workload = Workload()
        rows = [
            Figures("prefill", PROMPT, *_measure(workload.prefill, 2, rounds)),
            Figures("decode", SEQUENCES, *_measure(workload.decode, 8, rounds)),
        ]
    prefill, decode = (row.rows / row.ms * 1e3 for row in rows)
    return {
        "prefill_tokens_per_s": round(prefill, 1),
        "decode_tokens_per_s": round(decode, 1),
        "invariance_cost": max(row.cost for row in rows),
        "model": "random-tiny",
        "threads": 1,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }


def _measure(
    step: Callable[[], torch.Tensor], times: int, rounds: int
) -> tuple[float, float, float, float]:
    """The figures of a step from `ms` on: in a round, `times` exact steps take turns with fast ones."""
    clock, exact, fast = [], [], []
    try:
        for _ in range(rounds + 1):
            exact_rows(True)
            exact.append(_best(step, times, time.thread_time))
            clock.append(_best(step, times, time.perf_counter))
            exact_rows(False)
            fast.append(_best(step, times, time.thread_time))
    finally:
        exact_rows(True)
    ratios = [a / b for a, b in zip(exact[1:], fast[1:], strict=True)]  # the first round warms up
    return (
        round(min(clock) * 1e3, 3),
        round(statistics.median(exact[1:]) * 1e3, 3),
        round(statistics.median(fast[1:]) * 1e3, 3),
        round(statistics.median(ratios), 3),
    )


def _best(step: Callable[[], torch.Tensor], times: int, clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(times):
        started = clock()
        step()
        taken.append(clock() - started)
    return min(taken)


if __name__ == "__main__":
    print(json.dumps(run()))
