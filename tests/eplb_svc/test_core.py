"""The planner plans from reports of the current membership only, asks for what is better, and heeds the answer."""

import msgspec
import numpy as np

from phalanx.eplb_svc.core import PAUSE_S, PAUSE_S_MAX, REST, EplbCore
from phalanx.protocol.config import EplbConfig
from phalanx.protocol.errors import Code
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import Error, ExpertCounts, Rebalance, Rebalanced
from phalanx.protocol.placement import Placement, copies, initial_placement
from phalanx.protocol.topology import Seat, Topology

LAYERS, EXPERTS, SLOTS = 2, 8, 4
PLACEMENT = initial_placement(LAYERS, EXPERTS, range(3), SLOTS)
TOPOLOGY = Topology(
    2, tuple(Seat(s, 1, 1, "member") for s in range(3)), msgspec.msgpack.encode(PLACEMENT)
)
S = 10**9
PERIOD_NS = int(EplbConfig().period_s * S)
HOT = [3000, *[100] * 7]


def report(rows: list[int], epoch: int = 2, seat: int = 0) -> ExpertCounts:
    counts = np.tile(np.array(rows, np.int64), (LAYERS, 1))
    return ExpertCounts(seat, epoch, 64, LAYERS, EXPERTS, counts.tobytes())


def ready(config: EplbConfig | None = None) -> EplbCore:
    core = EplbCore(config)
    core.on_topology(TOPOLOGY)
    return core


def plan(core: EplbCore, now_ns: int) -> bool:
    """Whether a plan was made then, however many ticks it takes."""
    while not core.tick(now_ns, {}):
        if not core.busy:
            return False
    return True


def asked(core: EplbCore, now_ns: int) -> Rebalance:
    ask = core.take_ask(now_ns)
    assert ask is not None
    return ask


def test_a_hot_expert_gets_copies() -> None:
    core = ready()
    assert core.on_counts(report(HOT)) is None
    assert plan(core, 1)
    assert core.placement is not None and core.placement.seats == (0, 1, 2)
    for layer in range(LAYERS):
        held = copies(core.placement, layer)
        assert len(held[0]) > 1 and all(held)
        assert core.balances[layer].bound <= core.balances[layer].moe_lb < core.balances[layer].now
    assert core.refused == 0
    assert core.plan_age_s(10**9 + 1) == 1.0


def test_it_asks_until_it_is_answered() -> None:
    core = ready()
    core.on_counts(report(HOT))
    assert plan(core, 1)
    ask = asked(core, 1)
    assert ask.epoch == 2 and ask.before > ask.after
    assert msgspec.msgpack.decode(ask.placement, type=Placement) == core.placement
    assert core.take_ask(2) is None
    assert core.take_ask(1 + COMMAND_RETRY_MS * 1_000_000) == ask
    core.on_counts(report(HOT))
    assert not plan(core, 3 * PERIOD_NS), "the last one is not answered"
    core.on_answer(Rebalanced(ask.call + 7, 5, 3), S)
    core.on_answer(Error(ask.call - 1, Code.NOT_READY, "of an earlier one"), S)
    assert core.take_ask(2 * S) == ask and (core.applied, core.refused) == (0, 0)
    core.on_answer(Rebalanced(ask.call, 5, 3), S)
    assert core.take_ask(9 * S) is None and (core.applied, core.refused) == (1, 0)
    core.on_answer(Rebalanced(ask.call, 5, 3), S)
    assert core.applied == 1, "said twice"


def test_after_it_was_applied_the_window_goes_on_from_there() -> None:
    """Counts are of experts, wherever they lie; and what is balanced now is left alone."""
    core = ready()
    core.on_counts(report(HOT))
    plan(core, 1)
    ask = asked(core, 1)
    core.on_answer(Rebalanced(ask.call, 1, 3), S)
    core.on_topology(msgspec.structs.replace(TOPOLOGY, placement=ask.placement))
    core.on_counts(report(HOT))
    plans = 0
    while plan(core, (plans + 1) * PERIOD_NS + 1):
        plans += 1
        if (more := core.take_ask((plans + 1) * PERIOD_NS)) is not None:
            core.on_answer(Rebalanced(more.call, 1, 3), S)
            core.on_topology(msgspec.structs.replace(TOPOLOGY, placement=more.placement))
        core.on_counts(report(HOT))
        assert plans < 20, "it never comes to rest"
        if core.refused:
            break
    assert core.refused == 1 and "not worth it" in core.refusal


def test_one_that_could_not_be_applied_is_not_asked_for_at_once_again() -> None:
    core, now_ns, pause_s = ready(), 1, PAUSE_S
    for refusals in range(1, 7):
        core.on_counts(report(HOT))
        assert plan(core, now_ns)
        core.on_answer(Error(asked(core, now_ns).call, Code.NOT_READY, "no room"), now_ns)
        assert (core.refused, core.refusal) == (refusals, "no room")
        core.on_counts(report(HOT))
        now_ns += int(pause_s * S)
        assert not plan(core, now_ns - 1), "too soon"
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
    core.on_topology(msgspec.structs.replace(TOPOLOGY, epoch=4))
    core.on_counts(report(HOT, epoch=4))
    assert plan(core, now_ns), "of another group nothing is known"


def test_an_answer_about_an_earlier_group_says_nothing_of_this_one() -> None:
    core = ready()
    core.on_counts(report(HOT))
    plan(core, 1)
    ask = asked(core, 1)
    core.on_topology(msgspec.structs.replace(TOPOLOGY, epoch=4))
    core.on_answer(Error(ask.call, Code.NOT_READY, "the group changed"), 2)
    core.on_counts(report(HOT, epoch=4))
    assert plan(core, PERIOD_NS + 1)


def test_a_plan_that_took_long_is_followed_by_a_longer_rest() -> None:
    core = ready(EplbConfig(rebalance=False))
    core.on_counts(report(HOT))
    assert not core.tick(1, {})
    took_ns = 20 * PERIOD_NS
    assert plan(core, 1 + took_ns)
    core.on_counts(report(HOT))
    assert not plan(core, 1 + took_ns + REST * took_ns - 1)
    assert plan(core, 1 + took_ns + REST * took_ns)


def test_a_plan_in_the_making_is_dropped_when_the_group_changes() -> None:
    core = ready()
    core.on_counts(report(HOT))
    assert not core.tick(1, {}) and core.busy
    core.on_topology(msgspec.structs.replace(TOPOLOGY, epoch=4))
    assert not core.busy and not core.tick(PERIOD_NS + 1, {})


def test_plans_are_only_shown_when_the_operator_wants_it_so() -> None:
    core = ready(EplbConfig(rebalance=False))
    core.on_counts(report(HOT))
    assert plan(core, 1) and core.take_ask(1) is None
    assert core.balances[0].moe_lb < core.balances[0].now


def test_a_rank_has_no_more_slots_than_it_says() -> None:
    core = ready()
    core.on_counts(report(HOT))
    while not core.tick(1, dict.fromkeys(range(3), SLOTS)):
        assert core.busy
    assert core.take_ask(1) is None and core.refused == 1


def test_a_plan_that_is_no_better_is_refused() -> None:
    """Balanced already: moving weights would cost and win nothing."""
    core = ready()
    even = copies(PLACEMENT, 0)
    core.on_counts(report([1000 * len(places) for places in even]))
    assert plan(core, 1) and core.refused == 1


def test_reports_of_another_epoch_do_not_count() -> None:
    core = ready()
    core.on_counts(report([9999] * 8, epoch=4))
    assert not plan(core, 1)
    core.on_counts(report([999] * 8))
    core.on_topology(msgspec.structs.replace(TOPOLOGY, epoch=4))
    assert not plan(core, 1), "a new membership starts a new window"


def test_no_plan_without_fresh_and_meaningful_counts() -> None:
    core = ready()
    core.on_counts(report([1] * 8))
    assert not plan(core, 1), "eight rows say nothing"
    core.on_counts(report([1000] * 8))
    assert plan(core, 1)
    if (ask := core.take_ask(1)) is not None:
        core.on_answer(Rebalanced(ask.call, 1, 1), 1)
    core.on_counts(report([1000] * 8))
    assert not plan(core, PERIOD_NS), "too soon"
    assert plan(core, PERIOD_NS + 1)
    assert not plan(core, 3 * PERIOD_NS), "nothing new came"


def test_a_misshapen_report_is_named_and_dropped() -> None:
    core = ready()
    wrong = msgspec.structs.replace(report([1] * 8), layers=3)
    assert "3 layers x 8 experts" in str(core.on_counts(wrong))
    short = msgspec.structs.replace(report([1] * 8), counts=b"")
    assert core.on_counts(short)
    assert not plan(core, 1)


def test_before_any_topology_everything_waits() -> None:
    core = EplbCore()
    assert core.on_counts(report([1000] * 8)) is None
    assert not plan(core, 1) and core.plan_age_s(5) is None
