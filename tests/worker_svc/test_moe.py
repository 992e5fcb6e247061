"""A (row, expert) pair gives the same bits beside any other pairs, and they are the expert's."""

import pytest
import torch
from forward_world import SHAPES, weights_of
from torch import Tensor

from phalanx.kernels.reference.quant import q8_roundtrip
from phalanx.kernels.reference.swiglu import swiglu
from phalanx.worker_svc.model.moe import run_expert_pairs

ALL = pytest.mark.parametrize("shape", SHAPES)


def random_pairs(shape: str, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, some of them crowded, rows and weights."""
    weights = weights_of(shape)
    generator = torch.Generator().manual_seed(seed)
    num_slots = weights.expert_stack(1)[0].shape[0]
    slots = torch.randint(0, num_slots, (count,), generator=generator)
    slots[torch.rand(count, generator=generator) < 0.3] = 2
    x = torch.randn((count, weights.config.hidden_size), generator=generator)
    return slots, q8_roundtrip(x).bfloat16(), torch.rand(count, generator=generator)


@ALL
@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 60, 300])
def test_company_changes_nothing(shape: str, count: int) -> None:
    weights = weights_of(shape)
    slots, x, scale = random_pairs(shape, 300, seed=1)
    whole = run_expert_pairs(weights, 1, slots, x, scale)
    chosen = torch.randperm(300, generator=torch.Generator().manual_seed(count))[:count]
    got = run_expert_pairs(weights, 1, slots[chosen], x[chosen], scale[chosen])
    assert torch.equal(got, whole[chosen])


@ALL
def test_pairs_are_computed_by_their_expert(shape: str) -> None:
    weights = weights_of(shape)
    slots, x, scale = random_pairs(shape, 40, seed=2)
    got = run_expert_pairs(weights, 2, slots, x, scale)
    for pair in range(40):
        w1, w3, w2 = (w.double() for w in weights.expert(2, int(slots[pair])))
        row = x[pair : pair + 1].double()
        gate, up = ((row @ w.t()).bfloat16().float() for w in (w1, w3))
        a = swiglu(gate, up, weights.config.swiglu_limit, scale[pair : pair + 1])
        expected = (q8_roundtrip(a).double() @ w2.t()).squeeze(0)
        distance = torch.linalg.vector_norm(got[pair].double() - expected)
        assert distance <= 0.02 * torch.linalg.vector_norm(expected)


def test_no_pairs_give_no_results() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    got = run_expert_pairs(
        weights_of("tiny-a"),
        0,
        nothing,
        torch.empty((0, 128), dtype=torch.bfloat16),
        torch.empty(0),
    )
    assert got.shape == (0, 128)
