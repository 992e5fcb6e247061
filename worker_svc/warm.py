"""Steps of every size before the first request, so that a GPU's kernels are compiled by then.

Compiled kernels are kept on disk (Triton's cache), so a worker that starts again is quick. Which there
are follows from these steps alone: `tests/worker_svc/test_variants.py` looks for others.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phalanx.kernels.ops import sample
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import run_expert_pairs
from phalanx.worker_svc.model.moving import moved
from phalanx.worker_svc.scoring import LOGITS_ELEMENTS

# (sequences, rows of each): decode steps, verification rows, prompts short and long. Launch settings follow the
# power of two above the rows, and above the rows that want logits: each is met here.
_STEPS = (
    *((count, 1) for count in (1, 8, 24, 48, 100, 200, 400)),
    *((4, 6), (12, 5), (40, 6)),
    *((1, length) for length in (17, 60, 120, 250, 500, 1000, 2000, 4096)),
    (2, 600),
)
# Tokens before the first row: kernels over a context know short, long and very long ones.
_CONTEXTS = (0, 3_000, 40_000, 150_000)
# Draws of every kind: greedy, with and without a nucleus, and from logits that were edited before.
_SAMPLING = (
    RowParams(temperature=0.0),
    RowParams(temperature=0.8),
    RowParams(temperature=0.8, top_p=0.9),
    RowParams(temperature=0.8, frequency_penalty=0.5, output_ids=(1,)),
)
# Pairs a slot at which the experts' settings change.
_PAIRS_A_SLOT = (1, 8, 20)
# Of rows times context: what their scores take is no reason to run out of memory.
_SCORES_MAX = 1 << 26


class _OwnExperts:
    """Whatever expert a row picks is one of this rank's slots: no peers are asked."""

    def __init__(self, weights: Weights, on_layer: Callable[[], None]) -> None:
        self._weights, self._on_layer = weights, on_layer

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Tensor:
        self._on_layer()
        num_rows, num_topk = topk_idx.shape
        slots = topk_idx.flatten() % len(self._weights.slots(layer))
        rows = x.repeat_interleave(num_topk, dim=0)
        results = run_expert_pairs(self._weights, layer, slots, rows, topk_weights.flatten())
        return results.view(num_rows, num_topk, -1)

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
        on_step: called with what is done ("compile kernels", "warm up") and the share that is done.
        ranks: of the group, whose rows may all come here.
    """
    from phalanx.kernels.triton.compiling import compiling_ahead  # there is no Triton without a GPU

    experts, model.experts = model.experts, _OwnExperts(weights, on_layer)
    try:
        with compiling_ahead(
            on_layer, lambda done, of: on_step("compile kernels", done / max(of, 1))
        ):
            for _ in _steps(model, weights, max_rows, ranks):
                pass
        for share in _steps(model, weights, max_rows, ranks):
            on_step("warm up", share)
        torch.cuda.synchronize()
    finally:
        model.experts = experts


def _steps(model: Model, weights: Weights, max_rows: int, ranks: int) -> Iterator[float]:
    """Run the steps; tells the share that is done before each."""
    batches = list(_batches(model, max_rows))
    for done, batch in enumerate(batches):
        yield done / len(batches)
        pending = model.forward(batch)
        pending.commit([0] * batch.num_seqs)
        for row in _SAMPLING:
            rows = SamplingRows.of([row] * pending.logits.shape[0])
            sample(pending.logits, moved(rows, pending.logits.device))
    _run_experts(model, weights, ranks * max_rows * model.config.num_experts_per_tok)


def _run_experts(model: Model, weights: Weights, most: int) -> None:
    """Pairs as many as a group's rows may be: settings change at powers of two, and at multiples of
    the slots (`experts.DEFAULTS`)."""
    slots, device = len(weights.slots(0)), weights.device
    counts = {1 << i for i in range(most.bit_length())}
    counts |= {slots * mean for mean in _PAIRS_A_SLOT}
    for count in sorted(count for count in counts | {most} if count <= most):
        x = torch.zeros((count, model.config.hidden_size), dtype=torch.bfloat16, device=device)
        ids = torch.arange(count, device=device) % slots
        run_expert_pairs(weights, 0, ids, x, torch.zeros(count, device=device))


def _batches(model: Model, max_rows: int) -> Iterator[StepBatch]:
    config = model.config
    num_blocks, num_slots = model.pools.blocks.shape[0] - 1, model.pools.slots.shape[0]
    longest = min(config.max_positions, model.pools.history.shape[1])
    for wanted, length in (*_STEPS, (1, max_rows)):
        total = min(wanted * length, max_rows)
        count = min(max(wanted, -(-total // longest)), num_slots, total)
        rows = min(total // count, longest)
        ids = [token % config.vocab_size for token in range(rows)]
        for context in _CONTEXTS:
            start = min(context, longest - rows)
            if context and (start == 0 or start * rows * count > _SCORES_MAX):
                continue
            # Blocks are read and written by several at once: nobody wants what lies in them.
            columns = -(-(start + rows) // BLOCK_TOKENS)
            blocks = [1 + column % num_blocks for column in range(columns)]
            logits = range(max(0, rows - LOGITS_ELEMENTS // (count * config.vocab_size)), rows)
            yield StepBatch.of(
                [SequenceRows(slot, start, ids, blocks, logits) for slot in range(count)]
            )
