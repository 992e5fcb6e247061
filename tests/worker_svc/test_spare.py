"""Spare expert slots: as many as asked for, where they are of use and there is memory for them."""

from pathlib import Path

import msgspec
import pytest
import torch

import phalanx.worker_svc.spare as spare_module
from phalanx.protocol.config import EplbConfig, NodeConfig, WorkerConfig
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import all_slots, held_bytes
from phalanx.worker_svc.model.layout import CacheLayout
from phalanx.worker_svc.spare import spare_slots, that_fit

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tiny-a"
MODEL = ModelConfig.load(GOLDEN)
CPU = torch.device("cpu")
NODE = NodeConfig(ranks=3)


@pytest.mark.parametrize(
    ("config", "used", "slots"),
    [
        (NODE, 4, 1),
        (NODE, 8, 0),  # a slot for every expert is there
        (msgspec.structs.replace(NODE, ranks=1), 4, 0),
        (msgspec.structs.replace(NODE, eplb=EplbConfig(spare_slots=3)), 4, 3),
        (msgspec.structs.replace(NODE, eplb=EplbConfig(spare_slots=3)), 6, 2),
        (msgspec.structs.replace(NODE, eplb=EplbConfig(spare_slots=0)), 4, 0),
        (msgspec.structs.replace(NODE, worker=WorkerConfig(expert_slots=4)), 4, 0),
        (msgspec.structs.replace(NODE, worker=WorkerConfig(expert_slots=3)), 4, 0),
    ],
)
def test_no_more_than_are_of_use(config: NodeConfig, used: int, slots: int) -> None:
    assert MODEL.n_routed_experts == 8
    assert spare_slots(config, MODEL, CPU, used) == slots


@pytest.mark.parametrize("worker", [WorkerConfig(), WorkerConfig(num_blocks=5), WorkerConfig(kv_bytes=1 << 20)])  # fmt: skip
def test_none_where_caches_need_the_memory(
    worker: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(NODE, worker=worker)
    weights, with_one = (held_bytes(MODEL, all_slots(MODEL, slots)) for slots in (4, 5))
    layout = CacheLayout(MODEL)
    caches = worker.kv_bytes or (
        5 * layout.block_bytes + config.scheduler.max_num_seqs * layout.slot_bytes
    )
    need = with_one + caches if worker != WorkerConfig() else weights + 8 * (with_one - weights)
    for missing in (0, 1):
        have = 3 * (need - missing)
        monkeypatch.setattr(spare_module, "available_bytes", lambda have=have: have)
        assert spare_slots(config, MODEL, CPU, 4) == 1 - missing


def test_as_many_as_fit() -> None:
    assert [that_fit(3, 10, left, 100) for left in (90, 109, 110, 129, 1000)] == [0, 0, 1, 2, 3]
    assert [that_fit(3, 10, left, 0) for left in (-9, 79, 80, 160, 1000)] == [0, 0, 1, 2, 3]


def test_a_spare_slot_is_there_and_holds_nothing() -> None:
    slots = [[0, 1, -1]] * MODEL.num_hidden_layers + [[]] * MODEL.draft_stages
    weights = load_checkpoint(GOLDEN, slots)
    assert weights.slots(3) == (0, 1, -1)
    weights.put_expert(3, 2, 6, weights.load_expert(3, 6))
    full = load_checkpoint(GOLDEN).expert(3, 6)
    assert all(torch.equal(a, b) for a, b in zip(weights.expert(3, 2), full, strict=True))
