"""Index scores over long contexts and the choice of entries, at the model's dimensions.

Scores are bound by the keys' bytes where every row has a sequence of its own, and by products where
a prompt's rows share one. The alternative for scores is torch on keys that were decoded to bf16
beforehand: what it would cost to keep them so is left out.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from phalanx.bench.kernels.harness import Ceilings, Figure, time_us
from phalanx.kernels.reference.quant import qf4_idx_roundtrip
from phalanx.kernels.triton.configs import Config
from phalanx.kernels.triton.indexer import (
    CANDIDATES,
    CANDIDATES_LISTED,
    CANDIDATES_MANY,
    candidate_blocks,
    candidate_scores,
    paged_scores,
    settings_key,
)
from phalanx.kernels.triton.topk import CANDIDATES as CHOICE_CANDIDATES
from phalanx.kernels.triton.topk import select_top

HEADS: Final = 32
DIM: Final = 128
RECORD: Final = 68
BLOCK: Final = 128  # entries of a block at ratio 1
BLOCK_BYTES: Final = 114048  # of the pool, all owners'
TOP: Final = 512
CANDIDATE_SIZE: Final = 8
CANDIDATE_BLOCKS: Final = 2048


class _Case:
    """`num_seqs` sequences of `num_entries` entries with `rows_each` rows."""

    def __init__(self, pool: Tensor, num_seqs: int, rows_each: int, num_entries: int) -> None:
        columns = num_entries // BLOCK
        self.num_rows, self.num_entries = num_seqs * rows_each, num_entries
        self.queries = qf4_idx_roundtrip(torch.randn(self.num_rows, HEADS, DIM, device="cuda"))
        self.weights = (torch.randn(self.num_rows, HEADS, device="cuda") / 64).bfloat16()
        self.keys = pool[:, -BLOCK * RECORD :].view(len(pool), BLOCK, RECORD)
        order = torch.randperm(len(pool), device="cuda")
        self.table = order[: num_seqs * columns].view(num_seqs, columns)
        self.seqs = torch.arange(num_seqs, device="cuda").repeat_interleave(rows_each)
        # A prompt's rows see one entry more each.
        back = torch.arange(rows_each - 1, -1, -1, device="cuda").repeat(num_seqs)
        self.visible = num_entries - back
        self.seen = num_seqs * (rows_each * num_entries - rows_each * (rows_each - 1) // 2)
        self.num_bytes = num_seqs * num_entries * RECORD + self.num_rows * (
            num_entries * 2 + HEADS * (DIM * 4 + 2)
        )
        self.flops = 2 * self.seen * HEADS * DIM

    def run(self, settings: Config | None = None) -> Tensor:
        return paged_scores(
            self.queries,
            self.weights,
            self.keys,
            self.table,
            self.seqs,
            self.visible,
            self.num_entries,
            settings=settings,
        )

    def candidates(self) -> Tensor:
        """Blocks as a choice among random scores spreads them, int64 [rows, CANDIDATE_BLOCKS]."""
        scores = torch.rand(self.num_rows, self.num_entries // CANDIDATE_SIZE, device="cuda")
        kept = scores.topk(CANDIDATE_BLOCKS, dim=1, sorted=False).indices
        return kept.sort(dim=1).values

    def run_candidates(self, blocks: Tensor, settings: Config | None = None) -> Tensor:
        return candidate_scores(
            self.queries,
            self.weights,
            self.keys,
            self.table,
            self.seqs,
            self.visible,
            blocks,
            CANDIDATE_SIZE,
            settings=settings,
        )

    def us(self, settings: Config | None = None) -> float:
        return time_us(lambda: self.run(settings))

    def torch_us(self) -> float:
        """Decoded keys, a batched product, element by element what remains; rows in parts."""
        num_seqs = len(self.table)
        each = self.num_rows // num_seqs
        some = min(num_seqs, 16)
        keys = torch.randn(some, self.num_entries, DIM, device="cuda").bfloat16()
        part = min(each, 256)
        queries = self.queries[: some * part].bfloat16().view(some, part * HEADS, DIM)
        weights = self.weights[: some * part].view(some, part, HEADS, 1)

        def run() -> Tensor:
            dots = torch.bmm(queries, keys.transpose(1, 2)).relu_()
            return (dots.view(some, part, HEADS, -1) * weights).sum(dim=2)

        return time_us(run) * (num_seqs / some) * (each / part)


def _pool(num_blocks: int) -> Tensor:
    pool = torch.randint(0, 256, (num_blocks, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    keys = pool[:, -BLOCK * RECORD :].view(len(pool), BLOCK, RECORD)
    keys[..., 64:] = torch.randint(120, 128, keys[..., 64:].shape, device="cuda").byte()
    return pool


_CASES: Final = (  # sequences, rows each, entries, goal
    (64, 1, 131072, 0.7),
    (1, 1, 131072, None),
    (64, 6, 16384, None),
    (1, 4096, 16384, 0.7),
)


def figures(limits: Ceilings) -> list[Figure]:
    pool = _pool(65536)
    rows = []
    for num_seqs, each, entries, goal in _CASES:
        case = _Case(pool, num_seqs, each, entries)
        rows.append(
            Figure(
                "index scores",
                f"{num_seqs} x {each} rows, {entries} entries",
                case.us(),
                limits.limit(case.num_bytes, case.flops),
                goal=goal,
                alternative="torch bf16",
                alternative_us=case.torch_us(),
            )
        )
        if entries > CANDIDATE_SIZE * CANDIDATE_BLOCKS:
            rows.append(_candidate_figure(case, limits))
        del case
    return rows + [
        figure
        for shape in ((64, 131072), (1, 131072), (64, 16384))
        for figure in _choices(shape, limits)
    ]


def _candidate_figure(case: _Case, limits: Ceilings) -> Figure:
    """The alternative: scores of all entries, as where nothing is known of candidates."""
    blocks, count = case.candidates(), CANDIDATE_SIZE * CANDIDATE_BLOCKS
    num_bytes = case.num_rows * (count * (RECORD + 2) + HEADS * (DIM * 4 + 2)) + blocks.nbytes
    return Figure(
        "index scores of candidates",
        f"{case.num_rows} rows, {count} of {case.num_entries} entries",
        time_us(lambda: case.run_candidates(blocks)),
        limits.limit(num_bytes, 2 * case.num_rows * count * HEADS * DIM),
        alternative="all scores",
        alternative_us=case.us(),
    )


def _choices(shape: tuple[int, int], limits: Ceilings) -> list[Figure]:
    """Against reading the scores once; nothing smaller than that is aimed at."""
    scores = (torch.randn(shape, device="cuda") / 8).bfloat16()
    visible = torch.full(shape[:1], shape[1], device="cuda")
    once = scores.numel() * 2
    text = f"{shape[0]} x {shape[1]}"

    def kept() -> Tensor:
        return candidate_blocks(
            scores, visible, block_size=CANDIDATE_SIZE, num_blocks=CANDIDATE_BLOCKS
        )

    def best_blocks() -> Tensor:
        best = scores.view(shape[0], -1, CANDIDATE_SIZE).amax(dim=-1)
        count = min(CANDIDATE_BLOCKS, best.shape[1])
        return best.topk(count, dim=1, sorted=False).indices.sort(dim=1).values

    def figure(
        name: str, run: Callable[[], object], size: int, other: Callable[[], object]
    ) -> Figure:
        return Figure(
            name,
            text,
            time_us(run),
            limits.limit(size),
            alternative="torch topk",
            alternative_us=time_us(other),
        )

    return [
        figure(
            "select top",
            lambda: select_top(scores, TOP),
            once,
            lambda: scores.topk(TOP, dim=1, sorted=False).indices.sort(dim=1),
        ),
        figure("candidate blocks", kept, once, best_blocks),
    ]


@contextmanager
def _compiled() -> Iterator[None]:
    """Kernels that are launched in the block are only compiled, side by side."""
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, **options: Any) -> Any:
        return run(self, *args, **options | {"warmup": True})

    with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
        JITFunction.run = warm_up
        try:
            yield
        finally:
            JITFunction.run = run


def tune(limits: Ceilings) -> dict[str, dict[str, Config]]:
    """The fastest settings; none of them changes a bit. About 20 s."""
    pool = _pool(32768)
    scores = (torch.randn(64, 131072, device="cuda") / 8).bfloat16()
    few, pairs = _Case(pool, 32, 1, 131072), _Case(pool, 64, 6, 16384)
    many = _Case(pool, 1, 4096, 16384)
    trials: list[tuple[str, str, Callable[[Config], object], list[Config]]] = [
        ("paged_scores", settings_key(32, 32, HEADS, DIM), few.run, CANDIDATES),
        ("paged_scores", settings_key(384, 64, HEADS, DIM), pairs.run, CANDIDATES_MANY),
        ("paged_scores", settings_key(4096, 1, HEADS, DIM), many.run, CANDIDATES_MANY),
        (
            "candidate_scores",
            f"{HEADS}x{DIM}",
            partial(few.run_candidates, few.candidates()),
            CANDIDATES_LISTED,
        ),
        ("select_top", f"{TOP}", partial(_choose, scores), CHOICE_CANDIDATES),
    ]
    with _compiled():
        for _, _, run, candidates in trials:
            for settings in candidates:
                run(settings)
    table: dict[str, dict[str, Config]] = {name: {} for name, *_ in trials}
    for operation, key, run, candidates in trials:
        table[operation][key] = _fastest(f"{operation} {key}", run, candidates)
    return table


def _choose(scores: Tensor, settings: Config) -> Tensor:
    return select_top(scores, TOP, settings=settings)


def _fastest(name: str, run: Callable[[Config], object], candidates: list[Config]) -> Config:
    times: list[tuple[float, int]] = []
    for index, settings in enumerate(candidates):
        try:
            times.append((time_us(partial(run, settings)), index))
        except OutOfResources:
            continue
        values = ", ".join(f"{n} {v}" for n, v in settings.items())
        print(f"{name}: {times[-1][0]:.1f} us, {values}", file=sys.stderr, flush=True)
    return candidates[min(times)[1]]
