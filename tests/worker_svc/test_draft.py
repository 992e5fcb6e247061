"""A draft block is the same bits beside any others and after any portions, and changes no state."""

import numpy as np
import pytest
import torch
from forward_world import SHAPES, World, weights_of
from torch import Tensor

from phalanx.worker_svc.model.draft import Drafts
from phalanx.worker_svc.model.moe import LocalExperts

ALL = pytest.mark.parametrize("shape", SHAPES)


def world_with_drafts(shape: str, seed: int = 0) -> World:
    return World(shape, seed=seed, draft_experts=LocalExperts(weights_of(shape)))


def propose(world: World, *anchors: tuple[int, int, int]) -> Drafts:
    """Greedy drafts for (slot, position of the anchor, anchor)."""
    assert world.model.drafter is not None
    slots, positions, tokens = np.array(anchors, np.int64).T
    return world.model.drafter.propose(
        slots, positions, tokens, slots, lambda index, logits: logits.argmax(-1)
    )


def assert_row(drafts: Drafts, row: int, alone: Drafts) -> None:
    for name in ("tokens", "confidences", "logits", "base_logits", "hidden"):
        assert torch.equal(getattr(drafts, name)[row], getattr(alone, name)[0]), name


@ALL
def test_company_changes_nothing(shape: str) -> None:
    world = world_with_drafts(shape)
    lengths = (1, 2, 21, 64, 150)
    for slot, length in enumerate(lengths):
        world.run(slot, 0, world.tokens(length))
    anchors = [(slot, length, world.tokens(1)[0]) for slot, length in enumerate(lengths)]
    world.random.shuffle(anchors)
    together = propose(world, *anchors)
    for row, anchor in enumerate(anchors):
        assert_row(together, row, propose(world, anchor))


@ALL
def test_portions_and_rejected_rows_change_nothing(shape: str) -> None:
    whole, parts = world_with_drafts(shape), world_with_drafts(shape)
    ids = whole.tokens(77)
    whole.run(0, 0, ids)
    parts.run(0, 0, ids[:30])
    at = 30
    while at < 77:
        right = min(parts.random.randint(1, 6), 77 - at)
        wrong = parts.tokens(6 - right)
        pending = parts.forward(parts.rows(0, at, ids[at : at + right] + wrong))
        propose(parts, (0, at, 5))  # changes nothing
        pending.commit([right])
        at += right
    assert_row(propose(parts, (0, 77, 9)), 0, propose(whole, (0, 77, 9)))


@ALL
def test_drafting_leaves_the_backbone_alone(shape: str) -> None:
    without, with_drafts = World(shape), world_with_drafts(shape)
    ids = without.tokens(40)
    for world in (without, with_drafts):
        world.run(0, 0, ids[:30])
    before = with_drafts.pools.slots.clone(), with_drafts.pools.blocks.clone()
    propose(with_drafts, (0, 30, ids[30]))
    assert torch.equal(with_drafts.pools.slots, before[0])
    assert torch.equal(with_drafts.pools.blocks, before[1])
    assert torch.equal(with_drafts.run(0, 30, ids[30:]), without.run(0, 30, ids[30:]))


def test_each_token_is_chosen_from_logits_that_know_the_one_before() -> None:
    world = world_with_drafts("tiny-a")
    world.run(0, 0, world.tokens(20))
    assert world.model.drafter is not None
    seen: list[Tensor] = []

    def choose(index: int, logits: Tensor) -> Tensor:
        assert index == len(seen)
        seen.append(logits)
        return torch.tensor([100 + index])

    one = np.array([20])
    drafts = world.model.drafter.propose(np.array([0]), one, np.array([7]), np.array([0]), choose)
    assert drafts.tokens.tolist() == [[100, 101, 102, 103, 104]]
    assert torch.equal(torch.stack(seen, dim=1), drafts.logits)
    weights = weights_of("tiny-a")
    embed, head = (weights[f"mtp.1.markov_head.{part}"].double() for part in ("embed", "head"))
    for i, before in enumerate((7, 100, 101, 102, 103)):
        expected = drafts.base_logits[0, i].double() + head @ embed[before]
        assert torch.allclose(drafts.logits[0, i].double(), expected, atol=1e-5)


def test_a_block_may_reach_past_the_last_position() -> None:
    world = world_with_drafts("tiny-a")
    ids = world.tokens(255)
    world.run(0, 0, ids)
    assert torch.isfinite(propose(world, (0, 255, 3)).logits).all()


@ALL
def test_what_a_broken_sequence_left_in_the_slot_is_not_seen(shape: str) -> None:
    used, fresh = world_with_drafts(shape), world_with_drafts(shape)
    window = used.config.sliding_window
    used.pools.rings[0] = 0x7F  # NaN in every place
    ids = used.tokens(window - 2)  # the ring's oldest places stay as they are
    for world in (used, fresh):
        world.run(0, 0, ids)
    assert_row(propose(used, (0, len(ids), 9)), 0, propose(fresh, (0, len(ids), 9)))
