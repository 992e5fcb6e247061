"""Weights in their other forms, packed, in pieces, handed over, give the same bits as float32 held whole."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forward_world import TINY

from phalanx.kernels.reference import rope
from phalanx.kernels.reference.rope import GrowingRope, frequencies, rope_table
from phalanx.worker_svc.model import footprint, head
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.golden import load

IDS = [3, 7, 500, 31, 3, 7, 200, 9, 11, 12, 450]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr(footprint, "PACKED_ABOVE_BYTES", 0)
    weights = load_checkpoint(TINY)
    assert weights.packs_experts
    return weights


def test_packed_experts_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(str(TINY)).logits(IDS)
    monkeypatch.setattr(footprint, "PACKED_ABOVE_BYTES", 0)
    assert np.array_equal(load(str(TINY)).logits(IDS), expected)


def test_packed_slots_hold_the_experts_they_were_given(packed: Weights) -> None:
    floats = load_checkpoint(TINY, [[5, 2, 7]] * 10 + [[1], [0]], memory_limit_bytes=1 << 40)
    whole = load_checkpoint(TINY, memory_limit_bytes=1 << 40)
    assert packed.load_expert(4, 5) is None
    packed.put_expert(4, 0, 5, None)
    assert packed.slots(4) == (5, 1, 2, 3, 4, 5, 6, 7)
    for slot, expert in ((0, 5), (1, 1)):
        for mine, other in zip(packed.expert(4, slot), whole.expert(4, expert), strict=True):
            assert torch.equal(mine, other)
    for mine, other in zip(packed.expert_stack(4), floats.expert_stack(4), strict=True):
        assert torch.equal(mine[0], other[0]) and mine.shape[0] == 8


def test_the_full_models_experts_are_packed_and_the_tiny_ones_are_not() -> None:
    full = ModelConfig.load(Path(__file__).parent / "full_config.json")
    assert footprint.packs_experts(full)
    assert not footprint.packs_experts(ModelConfig.load(TINY))


def test_needed_memory_counts_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the sum over what a loaded model has; embedding and output matrix stay in the file."""
    slots = [[0, 3]] * 10 + [[1], []]
    counts = [len(layer) for layer in slots]
    weights = load_checkpoint(TINY, slots)
    in_place = ("embed", "head")
    plain = sum(weights[name].numel() for name in weights.names() if name not in in_place)
    experts = sum(matrix.numel() for layer in range(12) for matrix in weights.expert_stack(layer))
    assert footprint.held_bytes(weights.config, counts) == 4 * (plain + experts)
    monkeypatch.setattr(footprint, "PACKED_ABOVE_BYTES", 0)
    assert footprint.held_bytes(weights.config, counts) == 4 * plain


def test_a_linear_is_handed_over_once_and_can_be_made_again() -> None:
    weights = load_checkpoint(TINY)
    name = "layers.3.attn.wq_b"
    held = weights[name]
    taken = weights.take(name)
    assert taken.data_ptr() == held.data_ptr()
    again = weights.take(name)
    assert torch.equal(again, taken) and again.data_ptr() != taken.data_ptr()
    assert name in weights and name in weights.names()


def test_a_mapped_tensor_is_copied_to_its_taker() -> None:
    weights = load_checkpoint(TINY)
    sink = weights.take("layers.3.attn.attn_sink")
    assert sink.dtype == torch.float32
    assert sink.data_ptr() != weights["layers.3.attn.attn_sink"].data_ptr()


def test_logits_in_pieces_are_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((700, 64), generator=generator).bfloat16()
    x = torch.randn((9, 64), generator=generator)
    whole = head.OutputHead(weight)(x)
    monkeypatch.setattr(head, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(head, "PIECE_ROWS", 96)
    pieces = head.OutputHead(weight)
    got = pieces(x)
    assert torch.allclose(got, whole, atol=1e-4) and got.shape == (9, 700)
    assert torch.equal(pieces(x[4:5]), got[4:5])


@pytest.mark.parametrize("positions", [[0], [4095, 3], [4096], [5, 20000, 1], []])
def test_a_growing_table_is_the_table(positions: list[int]) -> None:
    freqs = frequencies(32, 10000.0)
    whole = rope_table(freqs, 20001)
    growing = GrowingRope(freqs)
    for at in (torch.tensor(positions, dtype=torch.int64), torch.tensor([7, 4100])):
        got = growing.at(at)
        assert torch.equal(got.cos, whole.cos[at]) and torch.equal(got.sin, whole.sin[at])


def test_a_whole_table_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in pieces, wherever it is asked for."""
    monkeypatch.setattr(rope, "_PIECE", 700)
    freqs = frequencies(32, 10000.0)
    with torch.inference_mode():
        made = GrowingRope(freqs, num_positions=5003).at(torch.arange(5003))
    whole = rope_table(freqs, 5003)
    assert torch.equal(made.cos, whole.cos) and torch.equal(made.sin, whole.sin)
