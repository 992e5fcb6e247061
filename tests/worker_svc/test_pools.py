"""Pools come from the budget given, or from what is free, and say with both numbers when nothing fits."""

from pathlib import Path

import msgspec
import pytest

from phalanx.protocol.config import NodeConfig, SchedulerConfig, WorkerConfig
from phalanx.protocol.errors import ConfigError
from phalanx.worker_svc import pools
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.layout import CacheLayout
from phalanx.worker_svc.pools import pool_sizes

LAYOUT = CacheLayout(ModelConfig.load(Path(__file__).resolve().parents[1] / "golden" / "tiny-a"))
FULL = CacheLayout(ModelConfig.load(Path(__file__).parent / "full_config.json"))
MIB = 1 << 20


def config(seqs: int = 8, ranks: int = 1, **worker: int) -> NodeConfig:
    return NodeConfig(
        ranks=ranks,
        scheduler=SchedulerConfig(max_num_seqs=seqs),
        worker=msgspec.convert(worker, WorkerConfig),
    )


def test_the_budget_is_used_and_not_exceeded() -> None:
    sizes = pool_sizes(FULL, config(kv_bytes=100 * MIB))
    used = sizes.num_blocks * sizes.block_bytes + sizes.num_slots * sizes.slot_bytes
    assert sizes.num_slots == 8 and 100 * MIB - sizes.block_bytes < used <= 100 * MIB


def test_no_more_than_all_sequences_at_full_length() -> None:
    sizes = pool_sizes(LAYOUT, config(kv_bytes=10_000 * MIB))
    assert sizes.num_blocks == 8 * (256 // 128) + 1


def test_ranks_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "available_bytes", lambda: 800 * MIB)
    one, four = (pool_sizes(FULL, config(ranks=ranks)) for ranks in (1, 4))
    assert one.budget_bytes <= 200 * MIB and four.budget_bytes == one.budget_bytes // 4


def test_too_little_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"has {MIB} bytes .* two blocks need \d+"):
        pool_sizes(FULL, config(kv_bytes=MIB))


def test_a_number_of_blocks_given_is_taken() -> None:
    assert pool_sizes(LAYOUT, config(num_blocks=5)).num_blocks == 5


def test_a_replacement_gets_as_many_blocks_as_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is free just then: its arena says what is missing."""
    monkeypatch.setattr(pools, "available_bytes", lambda: 0)
    assert pool_sizes(LAYOUT, config(), before=7).num_blocks == 7
    assert pool_sizes(LAYOUT, config(num_blocks=5), before=7).num_blocks == 5
