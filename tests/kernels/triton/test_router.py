"""Routing: the reference's experts and weights, ties to the lower id, always different experts."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from phalanx.kernels.reference import router as reference
from phalanx.kernels.reference.rows import matmul_rows
from phalanx.kernels.triton import router

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_routed_alike(
    logits: Tensor, bias: Tensor, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> None:
    """Where the choice differs, the reference's own biased scores lie within the bound."""
    idx, weights = (t.cpu() for t in got)
    scores = softplus(logits).sqrt() + bias
    near = scores.gather(1, idx) - scores.gather(1, expected[0])
    assert (near.abs() <= 2.0**-18).all()
    same = (idx == expected[0]).all(dim=1)
    assert same.float().mean() > 0.98
    assert torch.allclose(weights[same], expected[1][same], rtol=2.0**-18, atol=0)
    for row in idx.tolist():
        assert len(set(row)) == len(row)


@pytest.mark.parametrize("experts,num_topk", [(8, 2), (12, 3), (128, 3), (384, 6)])
def test_experts_are_the_references(device: torch.device, experts: int, num_topk: int) -> None:
    x, gate, bias = random(9, 32), random(experts, 32, seed=1) * 0.5, random(experts, seed=2) * 0.3
    logits = matmul_rows(x, gate)
    expected = reference.route(logits, bias, num_topk=num_topk, scaling=1.5)
    got = router.route(logits.to(device), bias.to(device), num_topk=num_topk, scaling=1.5)
    assert got[0].dtype == torch.int64 and got[1].dtype == torch.float32
    assert_routed_alike(logits, bias, got, expected)
    for some in ([8], [3, 1, 3]):
        alone = router.route(
            logits[some].to(device), bias.to(device), num_topk=num_topk, scaling=1.5
        )
        assert torch.equal(alone[0], got[0][some]) and torch.equal(alone[1], got[1][some])


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    logits, bias = torch.zeros(2, 12), torch.zeros(12)
    bias[[9, 4]] = 1.0
    idx, weights = router.route(logits.to(device), bias.to(device), num_topk=4, scaling=2.0)
    assert idx.tolist() == [[4, 9, 0, 1]] * 2
    assert torch.allclose(weights.cpu(), torch.full((2, 4), 0.5))
    bias = torch.zeros(12) - softplus(torch.zeros(1)).sqrt()  # sums of 0 and of -0 are equal
    idx, _ = router.route(logits.to(device), bias.to(device), num_topk=4, scaling=2.0)
    assert idx.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e30, 1e30])
def test_garbage_has_an_outcome_and_stays_in_its_row(device: torch.device, value: float) -> None:
    logits, bias = random(3, 16).to(device), random(16, seed=1).to(device)
    clean = router.route(logits, bias, num_topk=4, scaling=1.5)
    logits[1] = value
    got = router.route(logits, bias, num_topk=4, scaling=1.5)
    for alone, after in zip(clean, got, strict=True):
        assert torch.equal(alone[[0, 2]], after[[0, 2]])
    picked = got[0][1].tolist()
    assert len(set(picked)) == 4 and all(0 <= e < 16 for e in picked)
    assert router.route(logits[:0], bias, num_topk=4, scaling=1.5)[0].shape == (0, 4)


def test_scores_are_accurate_on_both_sides(device: torch.device) -> None:
    """With one expert picked of two, its weight shows the score of both."""
    x = torch.linspace(-20, 25, 181 if device.type == "cuda" else 19)
    logits = torch.stack((x, torch.zeros_like(x)), dim=1)
    _, weights = router.route(
        logits.to(device), torch.tensor([9.0, 0.0]).to(device), num_topk=2, scaling=1.0
    )
    exact = torch.stack((x, torch.zeros_like(x)), dim=1).double().exp().log1p().sqrt()
    exact = exact / exact.sum(dim=1, keepdim=True)
    assert torch.allclose(weights.cpu().double(), exact, rtol=2.0**-19, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_routing(device: torch.device) -> None:
    x, gate, bias = random(2000, 64), random(384, 64, seed=1) * 0.2, random(384, seed=2) * 0.1
    logits = matmul_rows(x, gate)
    expected = reference.route(logits, bias, num_topk=6, scaling=1.5)
    got = router.route(logits.to(device), bias.to(device), num_topk=6, scaling=1.5)
    assert_routed_alike(logits, bias, got, expected)
