"""Every operation of the forward pass against its definition, written out slowly in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference.attention import sink_attention
from phalanx.kernels.reference.compressor import pool_pairs
from phalanx.kernels.reference.engram import gate, hash_rows
from phalanx.kernels.reference.hyper import Mix, collapse, expand, mean_copies, sinkhorn
from phalanx.kernels.reference.rope import frequencies, rope_table, rotate, stretch
from phalanx.kernels.reference.router import route
from phalanx.kernels.reference.rows import matmul_rows
from phalanx.kernels.reference.swiglu import swiglu

BF16_STEP = 2.0**-8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- rotary embedding ------------------------------------------------------------------------------


def test_neighbouring_channels_turn_as_one_complex_number() -> None:
    table = rope_table(frequencies(8, 10000.0), 50)
    x = random(50, 3, 12)
    got = rotate(x.clone(), table)
    assert torch.equal(got[..., :4], x[..., :4])
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            even, odd = 4 + 2 * pair, 5 + 2 * pair
            before = torch.complex(x[position, :, even].double(), x[position, :, odd].double())
            turned = before * complex(math.cos(angle), math.sin(angle))
            after = torch.complex(got[position, :, even].double(), got[position, :, odd].double())
            assert torch.allclose(after, turned, atol=0.03)


def test_turning_back_undoes_the_turn() -> None:
    table = rope_table(frequencies(32, 160000.0), 20)
    x = random(20, 64).bfloat16().float()
    back = rotate(rotate(x.clone(), table), table.inverse())
    assert torch.allclose(back, x, atol=0.06)


def test_full_model_frequencies_blend_between_pairs_15_and_25() -> None:
    plain = frequencies(64, 160000.0)
    blended = stretch(plain, factor=16.0, low=15, high=25)
    assert torch.equal(blended[:16], plain[:16])
    assert torch.equal(blended[25:], plain[25:] / 16)
    assert torch.allclose(blended[20], plain[20] / 16 * 0.5 + plain[20] * 0.5)


# --- hyper-connections -----------------------------------------------------------------------------


def test_sinkhorn_is_its_definition() -> None:
    logits = random(11, 16) * 3
    c = torch.softmax(logits.double().view(11, 4, 4), dim=2) + 1e-6
    c = c / (c.sum(dim=1, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(dim=2, keepdim=True) + 1e-6)
        c = c / (c.sum(dim=1, keepdim=True) + 1e-6)
    got = sinkhorn(logits, 4, iters=20, eps=1e-6)
    assert torch.allclose(got.double(), c, atol=1e-5)


def test_streams_are_read_and_written_by_the_written_sums() -> None:
    """To the bit: the sums over copies run from the first to the last."""
    for copies, dim in ((4, 128), (3, 96), (2, 32)):
        h, y = random(9, copies, dim), random(9, dim, seed=1)
        pre, post, comb = random(9, copies), random(9, copies, seed=2), random(9, copies, copies)
        total = pre[:, :1] * h[:, 0]
        for c in range(1, copies):
            total = total + pre[:, c : c + 1] * h[:, c]
        assert torch.equal(collapse(h, pre), total.bfloat16().float())
        got = expand(y, h, Mix(pre, post, comb))
        for k in range(copies):
            total = comb[:, 0, k : k + 1] * h[:, 0]
            for j in range(1, copies):
                total = total + comb[:, j, k : k + 1] * h[:, j]
            expected = post[:, k : k + 1] * y + total
            assert torch.equal(got[:, k], expected.bfloat16().float())
        assert torch.allclose(mean_copies(h), h.mean(dim=1), atol=0.02)


# --- attention -------------------------------------------------------------------------------------


def test_attention_is_one_softmax_with_a_sink() -> None:
    queries, sink = random(5, 3, 32), random(3)
    parts = []
    for slots, seed in ((7, 1), (4, 2)):
        empty = torch.rand((5, slots), generator=torch.Generator().manual_seed(seed)) < 0.4
        empty[:, 0] = False
        parts.append((random(5, slots, 32, seed=seed), empty))
    got = sink_attention(queries, parts, sink, 32**-0.5)
    vectors = torch.cat([v for v, _ in parts], dim=1).double()
    empty = torch.cat([e for _, e in parts], dim=1)
    for row in range(5):
        for head in range(3):
            scores = vectors[row] @ queries[row, head].double() * 32**-0.5
            weights = scores.exp() * ~empty[row]
            expected = weights @ vectors[row] / (weights.sum() + sink[head].double().exp())
            assert torch.allclose(got[row, head].double(), expected, atol=0.02)


def test_what_stands_in_an_empty_slot_does_not_matter() -> None:
    queries, vectors, sink = random(2, 4, 32), random(2, 6, 32, seed=1), random(4)
    empty = torch.tensor([[False, True, False, True, True, False]] * 2)
    got = sink_attention(queries, [(vectors, empty)], sink, 0.1)
    other = vectors.masked_fill(empty.unsqueeze(-1), 1e30)
    assert torch.equal(sink_attention(queries, [(other, empty)], sink, 0.1), got)


def test_a_pair_is_averaged_channel_by_channel() -> None:
    kv, scores = random(6, 2, 32), random(6, 2, 32, seed=1) * 4
    expected = (torch.softmax(scores.double(), dim=1) * kv.double()).sum(dim=1)
    assert torch.allclose(pool_pairs(kv, scores).double(), expected, rtol=BF16_STEP, atol=1e-3)


# --- experts ---------------------------------------------------------------------------------------


def test_routing_picks_by_biased_and_weighs_by_plain_scores() -> None:
    x, weight, bias = random(7, 32), random(6, 32, seed=1), random(6, seed=2)
    picked, weights = route(matmul_rows(x, weight), bias, num_topk=2, scaling=1.5)
    scores = torch.log1p((x.double() @ weight.double().t()).exp()).sqrt()
    for row in range(7):
        order = sorted(range(6), key=lambda e: float(scores[row, e] + bias[e]), reverse=True)[:2]
        assert picked[row].tolist() == order
        expected = scores[row, order] / scores[row, order].sum() * 1.5
        assert torch.allclose(weights[row].double(), expected, atol=1e-5)


def test_equal_experts_are_picked_in_order() -> None:
    picked, _ = route(torch.zeros(3, 9), torch.zeros(9), num_topk=4, scaling=1.0)
    assert picked.tolist() == [[0, 1, 2, 3]] * 3


def test_the_clamps_bite_on_their_sides() -> None:
    gate_half = torch.tensor([[-20.0, 0.5, 20.0]])
    up = torch.tensor([[-20.0, 0.5, 20.0]])
    got = swiglu(gate_half, up, 2.0, torch.tensor([0.5]))
    gated = [x / (1 + math.exp(-x)) for x in (-20.0, 0.5, 2.0)]
    expected = [0.5 * g * u for g, u in zip(gated, (-2.0, 0.5, 2.0), strict=True)]
    assert torch.allclose(got, torch.tensor([expected]), rtol=BF16_STEP)


# --- Engram ----------------------------------------------------------------------------------------


def test_hashes_are_those_of_python_integers() -> None:
    multipliers = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    primes = [[101, 103], [107, 109], [113, 127]]
    units = np.random.default_rng(0).integers(0, 99092, size=(20, 4))
    flat = [prime for order in primes for prime in order]
    offsets = [sum(flat[:column]) for column in range(6)]
    got = hash_rows(
        torch.from_numpy(units),
        torch.tensor(multipliers),
        torch.tensor(primes),
        torch.tensor(offsets),
    )
    for row, ids in enumerate(units.tolist()):
        accumulated, expected = ids[0] * multipliers[0], []
        for back in (1, 2, 3):
            accumulated ^= ids[back] * multipliers[back]
            expected += [accumulated % prime for prime in primes[back - 1]]
        assert got[row].tolist() == [e + o for e, o in zip(expected, offsets, strict=True)]


def test_the_gate_is_its_definition() -> None:
    h, key, weight = random(5, 4, 64), random(5, 4, 64, seed=1), random(4, 64, seed=2)
    wide, wide_key = h.double(), key.double()
    dot = (wide * weight.double() * wide_key).sum(-1)
    dot = dot * torch.rsqrt((wide**2).mean(-1)) * torch.rsqrt((wide_key**2).mean(-1)) / 8
    expected = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    assert torch.allclose(gate(h, key, weight, 1e-20).double(), expected, atol=1e-5)
