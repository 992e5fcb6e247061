"""A slot is what the checkpoint's bytes make of it, to the last bit, in every form in which ranks hold experts."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forward_world import TINY
from torch import Tensor

from phalanx.kernels import registry
from phalanx.protocol.placement import EMPTY
from phalanx.worker_svc.expert_bits import ExpertBits
from phalanx.worker_svc.model import footprint
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.gpu_weights import GpuWeights
from phalanx.worker_svc.model.shards import Shard
from phalanx.worker_svc.model.tensors import expert_names
from phalanx.worker_svc.scrub import Slot

HELD = [[6, EMPTY, 1, 3]] * 10 + [[]] * 2


@pytest.fixture(params=["unpacked", "packed", "gpu"])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weights]:
    if request.param == "packed":
        monkeypatch.setattr(footprint, "PACKED_ABOVE_BYTES", 0)
    if request.param == "gpu":
        registry.interpret(True)
        registry.prefer("reference")
    found = load_checkpoint(TINY, HELD)
    assert isinstance(found, GpuWeights) == (request.param == "gpu")
    assert found.packs_experts == (request.param == "packed")
    yield found
    registry.interpret(False)
    registry.prefer("auto")


def stores(weights: Weights, held: Slot) -> list[Tensor]:
    """All that the slot consists of."""
    if isinstance(weights, GpuWeights):
        pool = weights.pool(held.layer)
        return [stack[held.slot] for stack in (*pool._codes, *pool._scales)]  # type: ignore[attr-defined]
    if weights.packs_experts:
        names = expert_names(weights.config, held.layer, held.expert)
        return [tensor for name in names for tensor in weights.packed(name)]
    return list(weights.expert(held.layer, held.slot))


def same(bits: ExpertBits, held: Slot) -> bool:
    pieces = list(bits.compare(held, bits.read(held)))
    assert len(pieces) == 3
    return all(pieces)


def test_every_slot_is_what_the_checkpoint_has(weights: Weights) -> None:
    bits = ExpertBits(weights, 0)
    assert bits.held()[:4] == [Slot(0, 0, 6), Slot(0, 2, 1), Slot(0, 3, 3), Slot(1, 0, 6)]
    assert len(bits.held()) == 30
    for held in bits.held():
        assert bits.holds(held) and same(bits, held)
    assert not bits.holds(Slot(0, 0, 5)) and not bits.holds(Slot(0, 4, 5))


def test_any_bit_that_is_wrong_is_seen(weights: Weights) -> None:
    bits, rng = ExpertBits(weights, 0), random.Random(5)
    for part in range(len(stores(weights, bits.held()[0]))):
        held = rng.choice(bits.held())
        raw = stores(weights, held)[part].view(-1).view(torch.uint8)
        at, bit = rng.randrange(len(raw)), 1 << rng.randrange(8)
        raw[at] ^= bit
        assert not same(bits, held), (held, part, at, bit)
        raw[at] ^= bit
        assert same(bits, held)


def test_a_bit_is_flipped_on_purpose(weights: Weights) -> None:
    bits, hit = ExpertBits(weights, 0), Slot(4, 3, 3)
    before = [store.clone() for store in stores(weights, hit)]
    assert bits.flip("4.3") == [hit]
    pairs = zip(stores(weights, hit), before, strict=True)
    raw = [(now.view(torch.uint8) ^ then.view(torch.uint8)).flatten() for now, then in pairs]
    assert sum(value.bit_count() for value in torch.cat(raw).tolist()) == 1
    assert [held for held in bits.held() if not same(bits, held)] == [hit]
    (some,) = bits.flip("")
    assert {held for held in bits.held() if not same(bits, held)} == {hit} ^ {some}
    assert bits.flip("4.5") == [], "it is not here"


def test_what_was_filled_since_is_fresh(weights: Weights) -> None:
    bits = ExpertBits(weights, 0)
    assert bits.take_fresh() == []
    weights.widen(2, 5)
    for slot, expert in ((4, 0), (1, 7)):
        weights.put_expert(2, slot, expert, weights.load_expert(2, expert))
    assert bits.take_fresh() == [Slot(2, 1, 7), Slot(2, 4, 0)]
    assert bits.take_fresh() == [] and same(bits, Slot(2, 4, 0))


def test_a_file_that_is_gone_is_read_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(next(TINY.glob("*.safetensors")).read_bytes())
    shard = Shard(path)
    name, other = list(shard.entries)[:2]
    shard.view(name)[0] ^= 1
    assert shard.read_anew(name) != shard.view(name), "the file is the judge"
    assert shard.read_anew(other) == shard.view(other)
    path.unlink()
    assert shard.read_anew(name) == shard.view(name)
