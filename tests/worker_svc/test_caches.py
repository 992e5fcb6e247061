"""Cache records have the sizes of the model's formats, and pools may lie in memory of others."""

from pathlib import Path

import pytest
import torch

from phalanx.worker_svc.model.caches import CacheLayout, CachePools
from phalanx.worker_svc.model.config import ModelConfig

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


@pytest.fixture(scope="module")
def tiny() -> CacheLayout:
    return CacheLayout(ModelConfig.load(TINY))


def test_full_model_sizes() -> None:
    layout = CacheLayout(ModelConfig.load(Path(__file__).with_name("full_config.json")))
    assert layout.block_bytes == 114_048
    assert layout.ring_size == 134 and layout.num_rings == 43
    assert layout.pair_owners == (2, 8, 14)
    assert layout.slot_bytes == 43 * 134 * 528 + 3 * 4096 + 32  # aligned to 64


def test_tiny_sizes(tiny: CacheLayout) -> None:
    # Entries of 36 + 34 bytes: 64 of both ratio-2 owners, 128 of the ratio-1 owner; a multiple of 36.
    assert tiny.block_bytes == -(-(64 + 64 + 128) * 70 // 36) * 36
    assert tiny.ring_size == 16 + 6
    assert [owner.num_entries for owner in tiny.owners] == [64, 64, 128]


def test_views_cover_their_bytes_once(tiny: CacheLayout) -> None:
    pools = CachePools(tiny, num_blocks=3, num_slots=2)
    views = [*pools.compressed.values(), *pools.index_keys.values()]
    for view in views:
        view[1] += 1
    used = (64 + 64 + 128) * 70
    assert pools.blocks[1, :used].eq(1).all() and pools.blocks[1, used:].eq(0).all()
    assert pools.blocks[0].eq(0).all() and pools.blocks[2].eq(0).all()
    pools.rings[1] += 1
    pools.pairs[1] = 1.0
    assert pools.slots[0].eq(0).all()
    assert pools.slots[1].count_nonzero() == 12 * 22 * 66 + 2 * 2 * 64 * 2  # 1.0 has two zero bytes


def test_pools_in_given_memory(tiny: CacheLayout) -> None:
    blocks, slots = bytearray(4 * tiny.block_bytes), bytearray(2 * tiny.slot_bytes)
    pools = CachePools(tiny, 4, 2, memoryview(blocks), memoryview(slots), history_len=32)
    pools.compressed[6][3, 127] = 7
    pools.pairs[1, 1, 1, 63] = 2.0
    start = 3 * tiny.block_bytes + tiny.owners[2].compressed_offset
    assert blocks[start + 127 * 36 : start + 128 * 36] == bytes([7]) * 36
    end = tiny.slot_bytes + tiny.pair_offset + 2 * 2 * 64 * 4
    assert torch.frombuffer(slots, dtype=torch.float32, offset=end - 4, count=1).item() == 2.0
    assert pools.history.shape == (2, 32)


def test_memory_that_does_not_fit_is_refused(tiny: CacheLayout) -> None:
    small = memoryview(bytearray(tiny.block_bytes))
    with pytest.raises(ValueError, match=f"{tiny.block_bytes} bytes; 2 blocks need"):
        CachePools(tiny, 2, 1, small)
    with pytest.raises(ValueError, match="read-only"):
        CachePools(tiny, 1, 1, memoryview(bytes(tiny.block_bytes)))
