"""Steps before the first request: of every size, so that a GPU's kernels are compiled by then; a few on a CPU.

Compiled kernels are kept on disk (Triton's cache), so a worker that starts again is quick. Which there
are follows from these steps alone: `tests/worker_svc/test_variants.py` looks for others.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from phalanx.kernels.ops import sample
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import run_expert_pairs, run_picks
from phalanx.worker_svc.model.moving import moved
from phalanx.worker_svc.scoring import LOGITS_ELEMENTS

# (sequences, rows of each): decode steps, verification rows, prompts short and long. Launch settings follow the
# power of two above the rows: each is met here.
_ROWS = (
    *((count, 1) for count in (1, 24, 48, 100, 200)),
    *((4, 6), (12, 5), (40, 6)),
    *((1, length) for length in (17, 60, 120, 250, 500, 1000, 2000, 4096)),
)
# Tokens before the first row: kernels over a context know short and very long ones, and between them those whose
# entries many rows score all, not each its candidates; and rows that have a sequence each, or share one with few or
# many.
_CONTEXTS = (3_000, 20_000, 40_000, 150_000)
_ROWS_OF_CONTEXTS = ((8, 1), (4, 6), (1, 60))
# Draws of every kind, for few rows and for many: greedy, with and without a nucleus, and from logits that were
# edited before.
_SAMPLED = (1, 200)
_SAMPLING = (
    RowParams(temperature=0.0),
    RowParams(temperature=0.8),
    RowParams(temperature=0.8, top_p=0.9),
    RowParams(temperature=0.8, frequency_penalty=0.5, output_ids=(1,)),
)
# Of a rehearsal: tokens, sequences that decode, rows of a prompt.
_REHEARSED_CONTEXT, _REHEARSED_SEQUENCES, _REHEARSED_ROWS = 1_500, 4, 60
# Pairs a slot at which the experts' settings change.
_PAIRS_A_SLOT = (1, 8, 20)


class _OwnExperts:
    """Whatever expert a row picks is one of this rank's slots: no peers are asked."""

    def __init__(self, weights: Weights, on_layer: Callable[[], None]) -> None:
        self._weights, self._on_layer = weights, on_layer

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Tensor:
        self._on_layer()
        slots = topk_idx % len(self._weights.slots(layer))
        return run_picks(self._weights, layer, x, slots, topk_weights)

    def combine(self, handle: Tensor) -> Tensor:
        return handle


def warm_up(
    model: Model,
    weights: Weights,
    max_rows: int,
    on_layer: Callable[[], None],
    on_step: Callable[[str, float], None],
    ranks: int = 1,
) -> None:
    """Compute steps that nobody asked for, and drop them: first without launching a kernel, to learn
    which are needed and compile them side by side; then in earnest, so that all are loaded.

    Args:
        max_rows: of one step.
        on_layer: called in every layer: the sign of life.
        on_step: called with what is done ("compile kernels", "load kernels", or what is waited for) and the
            share that is done; -1 where that is not known.
        ranks: of the group, whose rows may all come here.
    """
    experts, model.experts = model.experts, _OwnExperts(weights, on_layer)
    try:
        _compile_and_load(list(_work(model, weights, max_rows, ranks)), on_layer, on_step)
    finally:
        model.experts = experts


def rehearse(weights: Weights) -> None:
    """Some steps of a model of its own, on a CPU, before there is anything to serve: what torch and the interpreter
    do at a first time only is done then, not while all ranks wait for a newcomer's first step.

    Args:
        weights: with one expert of each layer at least.
    """
    config = weights.config
    columns = -(-min(_REHEARSED_CONTEXT, config.max_positions) // BLOCK_TOKENS)
    pools = CachePools(CacheLayout(config), 1 + columns, _REHEARSED_SEQUENCES)
    model = Model(weights, pools, _OwnExperts(weights, lambda: None))
    end = min(columns * BLOCK_TOKENS, config.max_positions)
    blocks = list(range(1, 1 + columns))
    with torch.inference_mode():
        for count, rows in ((1, 1), (_REHEARSED_SEQUENCES, 1), (1, min(_REHEARSED_ROWS, end))):
            ids = [token % config.vocab_size for token in range(rows)]
            sequences = [
                SequenceRows(at, end - rows, ids, blocks, logits=True) for at in range(count)
            ]
            _step(model, StepBatch.of(sequences))
        for row in _SAMPLING:
            _sample(model, SamplingRows.of([row]))


def warm_up_experts(
    weights: Weights,
    max_rows: int,
    ranks: int,
    alive: Callable[[], None],
    on_step: Callable[[str, float], None],
) -> None:
    """What `warm_up` does, for that alone which changes with the group: how many pairs may come here at a
    time, and how many slots there are."""
    _compile_and_load(list(_expert_work(weights, max_rows, ranks)), alive, on_step)


def _compile_and_load(
    work: list[Callable[[], None]], alive: Callable[[], None], on_step: Callable[[str, float], None]
) -> None:
    from phalanx.kernels.triton.compiling import compiling_ahead  # there is no Triton without a GPU

    needed: list[Callable[[], None]] = []
    with compiling_ahead(
        alive, lambda done, of: on_step("compile kernels", done / of), on_step
    ) as asked_for:
        for do in work:
            before = asked_for()
            do()
            if asked_for() > before:
                needed.append(do)
    for done, do in enumerate(needed):
        on_step("load kernels", done / len(needed))
        do()
    torch.cuda.synchronize()


def _work(
    model: Model, weights: Weights, max_rows: int, ranks: int
) -> Iterator[Callable[[], None]]:
    """What serving may do, in pieces; first what takes longest to compile."""
    for count, row in itertools.product(_SAMPLED, _SAMPLING):
        yield partial(_sample, model, SamplingRows.of([row] * count))
    for batch in _batches(model, max_rows):
        yield partial(_step, model, batch)
    for counted in _powers(max(1, LOGITS_ELEMENTS // model.config.vocab_size)):
        yield partial(_head, model, counted)
    yield from _expert_work(weights, max_rows, ranks)


def _expert_work(weights: Weights, max_rows: int, ranks: int) -> Iterator[Callable[[], None]]:
    slots, most = len(weights.slots(0)), ranks * max_rows * weights.config.num_experts_per_tok
    pairs = {*_powers(most), *(slots * mean for mean in _PAIRS_A_SLOT)}
    for counted in sorted(count for count in pairs if count <= most):
        yield partial(_experts, weights.config, weights, counted)


def _step(model: Model, batch: StepBatch) -> None:
    model.forward(batch).commit([0] * batch.num_seqs)


def _head(model: Model, num_rows: int) -> None:
    device = model.embedding.device
    model.logits(torch.zeros((num_rows, model.config.hidden_size), device=device))


def _sample(model: Model, rows: SamplingRows) -> None:
    device = model.embedding.device
    logits = torch.zeros((rows.num_rows, model.config.vocab_size), device=device)
    sample(logits, moved(rows, device))


def _experts(config: ModelConfig, weights: Weights, num_pairs: int) -> None:
    device = weights.device
    ids = torch.arange(num_pairs, device=device) % len(weights.slots(0))
    x = torch.zeros((num_pairs, config.hidden_size), dtype=torch.bfloat16, device=device)
    run_expert_pairs(weights, 0, ids, x, torch.zeros(num_pairs, device=device))


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, and `most` itself."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


def _batches(model: Model, max_rows: int) -> Iterator[StepBatch]:
    config = model.config
    num_blocks, num_slots = model.pools.blocks.shape[0] - 1, model.pools.slots.shape[0]
    longest = min(config.max_positions, model.pools.history.shape[1])
    wanted = [(shape, 0) for shape in (*_ROWS, (1, max_rows))]
    wanted += itertools.product(_ROWS_OF_CONTEXTS, (c for c in _CONTEXTS if c < longest))
    for (sequences, length), context in wanted:
        total = min(sequences * length, max_rows)
        count = min(max(sequences, -(-total // longest)), num_slots, total)
        rows = min(total // count, longest)
        ids = [token % config.vocab_size for token in range(rows)]
        start = min(context, longest - rows)
        # Blocks are read and written by several at once: nobody wants what lies in them.
        columns = -(-(start + rows) // BLOCK_TOKENS)
        blocks = [1 + column % num_blocks for column in range(columns)]
        yield StepBatch.of(
            [SequenceRows(slot, start, ids, blocks, logits=True) for slot in range(count)]
        )
