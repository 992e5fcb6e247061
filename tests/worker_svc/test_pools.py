"""Pools come from the budget given, or from what is free, and say with both numbers when nothing fits."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from phalanx.protocol.config import NodeConfig, SchedulerConfig, WorkerConfig
from phalanx.protocol.errors import ConfigError, NoRoom
from phalanx.worker_svc import pools
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.layout import CacheLayout
from phalanx.worker_svc.pools import GpuPlan, graphs_bytes, pool_sizes, workspace_bytes

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


@pytest.mark.parametrize(("total", "raised"), [(8000 * MIB, NoRoom), (MIB, ConfigError)])
def test_too_little_of_dev_shm_is_named(
    total: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full it is no matter of the configuration, and may have room again; too small it is one."""

    def usage(path: object) -> SimpleNamespace:
        return SimpleNamespace(total=total, free=MIB)

    monkeypatch.setattr(pools, "shutil", SimpleNamespace(disk_usage=usage))
    monkeypatch.setattr(pools, "available_bytes", lambda: 8000 * MIB)
    with pytest.raises(raised, match=r"/dev/shm has 1.0 MiB free of .* must be free: ") as told:
        pool_sizes(FULL, config(ranks=2))
    assert type(told.value) is raised


def test_a_number_of_blocks_given_is_taken() -> None:
    assert pool_sizes(LAYOUT, config(num_blocks=5)).num_blocks == 5


def test_a_replacement_gets_as_many_blocks_as_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is free just then: its arena says what is missing."""
    monkeypatch.setattr(pools, "available_bytes", lambda: 0)
    assert pool_sizes(LAYOUT, config(), before=7).num_blocks == 7
    assert pool_sizes(LAYOUT, config(num_blocks=5), before=7).num_blocks == 5


# --- on a GPU ------------------------------------------------------------------------------------------

GPU = torch.device("cuda")


def gpu(monkeypatch: pytest.MonkeyPatch, others: int) -> GpuPlan:
    """80 GiB, of which a step needs 2 and the weights 8."""
    plan = GpuPlan("H", 80 << 30, 8 << 30, others, 2 << 30)
    monkeypatch.setattr(GpuPlan, "of", lambda *_: plan)
    return plan


def test_what_is_left_of_a_gpu_is_used_but_for_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = gpu(monkeypatch, 1 << 30)
    sizes = pool_sizes(FULL, config(seqs=500), GPU)
    used = sizes.num_blocks * sizes.block_bytes + sizes.num_slots * sizes.slot_bytes
    assert 0.97 * plan.room < used < plan.room
    # The next worker finds a little less, and gets as many.
    gpu(monkeypatch, (1 << 30) + 900 * MIB)
    assert pool_sizes(FULL, config(seqs=500), GPU, sizes.num_blocks).num_blocks == sizes.num_blocks


def test_more_blocks_than_a_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 1 << 30)
    with pytest.raises(ConfigError) as raised:
        pool_sizes(FULL, config(num_blocks=10**6), GPU)
    text = str(raised.value)
    assert "999999 KV blocks" in text and "69.0 GiB are left" in text and "weights 8.0 GiB" in text
    fit = int(text.split("): ")[1].split()[0])
    pool_sizes(FULL, config(num_blocks=fit + 1), GPU)
    with pytest.raises(ConfigError):
        pool_sizes(FULL, config(num_blocks=fit + 2), GPU)


def test_memory_that_others_hold_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 60 << 30)
    with pytest.raises(NoRoom, match=r"other processes 60\.0 GiB.*end the other processes"):
        pool_sizes(FULL, config(seqs=500, kv_bytes=20 << 30), GPU)
    with pytest.raises(ConfigError):
        pool_sizes(FULL, config(seqs=500, kv_bytes=90 << 30), GPU)


def test_a_gpu_without_room_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 70 << 30)
    with pytest.raises(NoRoom, match=r"1 KV blocks and 8 state slots need .*, 0 B are left"):
        pool_sizes(FULL, config(), GPU)


def test_recorded_steps_are_part_of_the_plan_where_there_are_any() -> None:
    model = FULL.config
    one = NodeConfig(device="cuda")
    assert 1 << 29 < graphs_bytes(model, one) < 1 << 31
    most = NodeConfig(device="cuda", scheduler=SchedulerConfig(max_num_seqs=1024))
    assert graphs_bytes(model, most) > graphs_bytes(model, one)
    for other in (
        NodeConfig(device="cpu"),
        NodeConfig(device="cuda", ranks=2),
        NodeConfig(device="cuda", worker=WorkerConfig(graphs=False)),
        NodeConfig(device="cuda", worker=WorkerConfig(kernels="reference")),
    ):
        assert graphs_bytes(model, other) == 0


def test_every_rank_has_room_for_the_pairs_of_all() -> None:
    model = FULL.config
    one, four = (workspace_bytes(model, NodeConfig(device="cuda", ranks=ranks)) for ranks in (1, 4))
    rows = SchedulerConfig().max_num_batched_tokens * model.num_experts_per_tok
    assert four - one > 3 * rows * (8 * model.hidden_size + 12 * model.moe_intermediate_size)
