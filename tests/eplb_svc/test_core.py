"""The planner plans from reports of the current membership only, and says when a plan is not better."""

import msgspec
import numpy as np

from phalanx.eplb_svc.core import PLAN_PERIOD_NS, EplbCore
from phalanx.protocol.messages import ExpertCounts
from phalanx.protocol.placement import copies, initial_placement
from phalanx.protocol.topology import Seat, Topology

LAYERS, EXPERTS, SLOTS = 2, 8, 4
PLACEMENT = initial_placement(LAYERS, EXPERTS, range(3), SLOTS)
TOPOLOGY = Topology(
    2, tuple(Seat(s, 1, 1, "member") for s in range(3)), msgspec.msgpack.encode(PLACEMENT)
)


def report(rows: list[int], epoch: int = 2, seat: int = 0) -> ExpertCounts:
    counts = np.tile(np.array(rows, np.int64), (LAYERS, 1))
    return ExpertCounts(seat, epoch, 64, LAYERS, EXPERTS, counts.tobytes())


def ready() -> EplbCore:
    core = EplbCore()
    core.on_topology(TOPOLOGY)
    return core


def test_a_hot_expert_gets_copies_on_all_ranks() -> None:
    core = ready()
    assert core.on_counts(report([3000, *[100] * 7])) is None
    assert core.tick(1)
    assert core.placement is not None and core.placement.seats == (0, 1, 2)
    for layer in range(LAYERS):
        held = copies(core.placement, layer)
        assert {seat for seat, _ in held[0]} == {0, 1, 2}
        assert all(held)
        assert core.balances[layer].bound <= core.balances[layer].moe_lb < 1.1
    assert core.refused == 0
    assert core.plan_age_s(10**9 + 1) == 1.0


def test_a_plan_that_is_no_better_is_refused() -> None:
    """Balanced already: moving weights would cost and win nothing."""
    core = ready()
    even = copies(PLACEMENT, 0)
    core.on_counts(report([1000 * len(places) for places in even]))
    assert core.tick(1) and core.refused == 1


def test_reports_of_another_epoch_do_not_count() -> None:
    core = ready()
    core.on_counts(report([9999] * 8, epoch=4))
    assert not core.tick(1)
    core.on_counts(report([999] * 8))
    core.on_topology(msgspec.structs.replace(TOPOLOGY, epoch=4))
    assert not core.tick(1), "a new membership starts a new window"


def test_no_plan_without_fresh_and_meaningful_counts() -> None:
    core = ready()
    core.on_counts(report([1] * 8))
    assert not core.tick(1), "eight rows say nothing"
    core.on_counts(report([1000] * 8))
    assert core.tick(1)
    core.on_counts(report([1000] * 8))
    assert not core.tick(PLAN_PERIOD_NS), "too soon"
    assert core.tick(PLAN_PERIOD_NS + 1)
    assert not core.tick(3 * PLAN_PERIOD_NS), "nothing new came"


def test_a_misshapen_report_is_named_and_dropped() -> None:
    core = ready()
    wrong = msgspec.structs.replace(report([1] * 8), layers=3)
    assert "3 layers x 8 experts" in str(core.on_counts(wrong))
    short = msgspec.structs.replace(report([1] * 8), counts=b"")
    assert core.on_counts(short)
    assert not core.tick(1)


def test_before_any_topology_everything_waits() -> None:
    core = EplbCore()
    assert core.on_counts(report([1000] * 8)) is None
    assert not core.tick(1) and core.plan_age_s(5) is None
