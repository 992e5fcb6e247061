"""What a GPU does with weights as they are stored and records where they lie gives the same bits as the
CPU's way, as long as both run the references; so on a GPU only the kernels are left to differ."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from forward_world import DEVICE, SHAPES, World, weights_of
from torch import Tensor

from phalanx.kernels import registry
from phalanx.worker_svc.model import attention
from phalanx.worker_svc.model.gpu_weights import GpuWeights
from phalanx.worker_svc.model.moe import LocalExperts


@pytest.fixture
def gpu_way() -> Iterator[None]:
    torch.set_num_threads(1)
    weights_of.cache_clear()
    registry.interpret(True)
    registry.prefer("reference")
    yield
    registry.interpret(False)
    registry.prefer("auto")
    weights_of.cache_clear()


def stream(shape: str) -> list[Tensor]:
    """Logits of a prompt in two portions, of single tokens and of rows that are not kept, beside another
    sequence; and the records that they leave."""
    world = World(shape, seed=5, draft_experts=LocalExperts(weights_of(shape)))
    ids, other = world.tokens(140), world.tokens(60)
    found = [world.run(0, 0, ids[:71])]
    pending = world.forward(world.rows(1, 0, other), world.rows(0, 71, ids[71:130]))
    pending.commit([60, 59])
    found.append(pending.logits)
    pending = world.forward(world.rows(0, 130, [*ids[130:132], *world.tokens(4)]))
    pending.commit([2])
    found += [pending.logits, world.run(0, 132, ids[132:133])]
    assert world.model.drafter is not None
    drafts = world.model.drafter.propose(
        np.array([0, 1]), np.array([133, 60]), np.array([7, 8]), np.array([0, 1]), _best
    )
    found += [drafts.tokens, drafts.logits, drafts.confidences]
    return [*found, world.pools.blocks, world.pools.slots]


def _best(index: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits(shape: str, gpu_way: None) -> None:
    assert isinstance(weights_of(shape), GpuWeights)
    there = stream(shape)
    registry.interpret(False)
    weights_of.cache_clear()
    for got, expected in zip(there, stream(shape), strict=True):
        assert torch.equal(got, expected)


def check_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose index scores are made in portions choose the same, also among candidates."""

    def logits() -> list[Tensor]:
        world = World("tiny-a", seed=5)
        ids = world.tokens(230)
        return [world.run(0, 0, ids[:200]), world.run(0, 200, ids[200:]), world.pools.blocks]

    at_once, portions, scored = logits(), list[int](), attention.paged_scores

    def counted(queries: Tensor, *args: Tensor | int) -> Tensor:
        portions.append(len(queries))
        return scored(queries, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "paged_scores", counted)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1)
    for got, expected in zip(logits(), at_once, strict=True):
        assert torch.equal(got, expected)
    assert {64, 8} <= set(portions) and max(portions) == 64


def test_portions_with_references(gpu_way: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_portions(monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
def test_portions_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    check_portions(monkeypatch)
