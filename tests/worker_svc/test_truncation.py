"""Truncated prompts: `compact` computes what `mask` computes, in any portions and company; every
entry is stored, outputs are whole, and what is saved really is not computed."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from forward_world import SHAPES, World, weights_of
from torch import Tensor

from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.fields import ConfigError
from phalanx.worker_svc.model.model import PendingStep
from phalanx.worker_svc.model.moe import LocalExperts
from phalanx.worker_svc.model.truncation import Truncation, TruncationMode

ALL = pytest.mark.parametrize("shape", SHAPES)
PROMPT, LENGTH = 141, 155


class TruncatedWorld(World):
    """All sequences have the same prompt length; logits are taken where they are computed."""

    def __init__(self, shape: str, mode: TruncationMode, *, prompt: int = PROMPT, **more: int):
        config = weights_of(shape).config
        self.keep = config.sliding_window + config.dspark_block_size + 1
        self.prompt = prompt
        experts = LocalExperts(weights_of(shape))
        super().__init__(
            shape, truncation=Truncation(mode, self.keep), draft_experts=experts, **more
        )

    def rows(self, slot: int, start: int, ids: Sequence[int]) -> SequenceRows:
        kept = range(max(0, self.prompt - self.keep - start), len(ids))
        return SequenceRows(slot, start, ids, self.blocks[slot], kept, slot, self.prompt)


def stream(world: TruncatedWorld, ids: Sequence[int], cuts: Sequence[int], slot: int = 0) -> Tensor:
    """Logits of all computed rows when the sequence is stepped from cut to cut."""
    ends = [*cuts, len(ids)]
    return torch.cat([world.run(slot, a, ids[a:b]) for a, b in zip([0, *cuts], ends, strict=True)])


@ALL
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_any_portions_give_the_same_bits(shape: str, mode: TruncationMode) -> None:
    """Chunks wholly before, across and within the kept rows, then single tokens, then six rows."""
    ids = TruncatedWorld(shape, mode).tokens(LENGTH)
    expected = stream(TruncatedWorld(shape, "compact", seed=3), ids, [])
    kept = TruncatedWorld(shape, mode).keep
    assert len(expected) == kept + LENGTH - PROMPT
    first = PROMPT - kept
    for cuts in (
        [PROMPT],
        [first, PROMPT],
        [first - 1, first + 1, PROMPT],
        [*range(7, PROMPT, 7), *range(PROMPT, LENGTH)],
        [*range(1, LENGTH, 6)],
    ):
        assert torch.equal(stream(TruncatedWorld(shape, mode), ids, cuts), expected), cuts


@ALL
def test_compact_equals_mask_in_company(shape: str) -> None:
    """Prompts at different places of their way, decode rows and verification rows, in one step."""
    worlds = [TruncatedWorld(shape, mode) for mode in ("mask", "compact")]
    texts = [worlds[0].tokens(LENGTH) for _ in range(5)]
    starts = [0, 40, PROMPT - 30, PROMPT, PROMPT + 5]
    lengths = [80, 90, 30, 6, 1]
    results = []
    for world in worlds:
        for slot, start in enumerate(starts):
            if start:
                world.run(slot, 0, texts[slot][:start])
        parts = [
            world.rows(slot, starts[slot], texts[slot][starts[slot] :][: lengths[slot]])
            for slot in (3, 0, 4, 2, 1)
        ]
        pending = world.forward(*parts)
        pending.commit([4, 80, 1, 30, 90])
        after = [world.run(slot, starts[slot] + n, [7]) for slot, n in ((2, 30), (3, 4), (4, 1))]
        results.append((pending.logits, torch.cat(after)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@ALL
def test_drafts_are_the_same(shape: str) -> None:
    drafts = []
    for mode in ("mask", "compact"):
        world = TruncatedWorld(shape, mode)
        stream(world, world.tokens(PROMPT + 3), [40, PROMPT])
        assert world.model.drafter is not None
        at = np.array([PROMPT + 3])
        drafts.append(
            world.model.drafter.propose(
                np.array([0]), at, np.array([5]), np.array([0]), lambda _, x: x.argmax(-1)
            )
        )
    assert torch.equal(drafts[0].logits, drafts[1].logits)
    assert torch.equal(drafts[0].confidences, drafts[1].confidences)


@ALL
def test_every_entry_is_stored_and_exact(shape: str) -> None:
    """Blocks may be shared with prompts of any length, so truncation must not show in them."""
    compact, off = TruncatedWorld(shape, "compact"), World(shape)
    ids = off.tokens(PROMPT)
    stream(compact, ids, [50])
    off.run(0, 0, ids)
    assert torch.equal(
        compact.pools.blocks[compact.blocks[0][0]], off.pools.blocks[off.blocks[0][0]]
    )
    start = compact.config.decoder_start
    window = [(PROMPT - back) % off.pools.layout.ring_size for back in range(1, 5)]
    assert torch.equal(compact.pools.pairs[0], off.pools.pairs[0])
    assert torch.equal(compact.pools.rings[0, :start, window], off.pools.rings[0, :start, window])
    assert not torch.equal(
        compact.pools.rings[0, start:, window], off.pools.rings[0, start:, window]
    )


@ALL
def test_it_changes_the_answer(shape: str) -> None:
    """Else the tests above could not fail."""
    ids = World(shape).tokens(LENGTH)
    whole = World(shape).run(0, 0, ids)
    truncated = stream(TruncatedWorld(shape, "compact"), ids, [])
    assert not torch.equal(truncated, whole[-len(truncated) :])


@ALL
@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_a_prompt_that_fits_is_whole(shape: str, mode: TruncationMode) -> None:
    keep = TruncatedWorld(shape, mode).keep
    world = TruncatedWorld(shape, mode, prompt=keep)
    ids = world.tokens(keep + 20)
    assert torch.equal(stream(world, ids, [keep]), World(shape).run(0, 0, ids))


def rows_by_layer(pending: PendingStep) -> list[int]:
    return [len(picks) for _, picks in sorted(pending.expert_picks.items())]


@ALL
def test_early_rows_do_not_reach_the_decoder_half(shape: str) -> None:
    world = TruncatedWorld(shape, "compact")
    start, depth, keep = world.config.decoder_start, world.config.num_hidden_layers, world.keep
    ids = world.tokens(PROMPT)
    early, late = world.forward(world.rows(0, 0, ids[:50])), world.forward(world.rows(0, 0, ids))
    assert rows_by_layer(late) == [PROMPT] * start + [keep] * (depth - start)
    assert rows_by_layer(early) == [50] * start
    assert early.logits.shape == (0, world.config.vocab_size)


class CountedExperts(LocalExperts):
    calls = 0

    def combine(self, handle: Tensor) -> Tensor:
        self.calls += 1
        return super().combine(handle)


def test_a_step_without_kept_rows_still_visits_every_layer() -> None:
    """Ranks exchange rows layer by layer: one that left early would leave the others waiting."""
    world = TruncatedWorld("tiny-a", "compact")
    world.model.experts = experts = CountedExperts(weights_of("tiny-a"))
    world.forward(world.rows(0, 0, world.tokens(50)))
    assert experts.calls == world.config.num_hidden_layers


def test_logits_of_an_early_row_are_refused_and_nothing_changes() -> None:
    world = TruncatedWorld("tiny-a", "compact")
    history = world.pools.history.clone()
    early = SequenceRows(0, 0, world.tokens(60), world.blocks[0], [59], 0, PROMPT)
    with pytest.raises(ValueError, match="prompt logprobs need yoco_truncation off"):
        world.forward(early)
    assert torch.equal(world.pools.history, history)


def test_a_step_must_say_how_long_its_prompts_are() -> None:
    world = TruncatedWorld("tiny-a", "mask")
    batch = StepBatch.of([world.rows(0, 0, world.tokens(6))])
    with pytest.raises(ValueError, match="how long"):
        world.model.forward(
            StepBatch(**{k: v for k, v in vars(batch).items() if k != "prompt_lens"})
        )


@pytest.mark.parametrize("shape", ["tiny-a", "wide"])
def test_too_few_kept_rows_are_refused_with_both_numbers(shape: str) -> None:
    config = weights_of(shape).config
    least = config.sliding_window + 6
    Truncation("compact", least).check(config)
    Truncation("off", 0).check(config)
    with pytest.raises(ConfigError, match=rf"is {least - 1}; .* at least {least}"):
        Truncation("mask", least - 1).check(config)
