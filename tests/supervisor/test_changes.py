"""Changes that somebody asks for, as stories: another number of ranks, processes replaced."""

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from supervisor.test_core import MS, Story, running

from phalanx.protocol.errors import Code, ExitCode
from phalanx.protocol.limits import (
    COMMAND_RETRY_MS,
    HAND_OVER_MS,
    HTTP_DRAIN_MS,
    NEWCOMER_STARTS,
    STANDBY_MS,
    TERM_GRACE_MS,
)
from phalanx.protocol.messages import Drain, Error, HandOver, Restart, Restarted, Scale, Scaled
from phalanx.supervisor.commands.change import scale
from phalanx.supervisor.events import (
    BecameReady,
    ChangeAsked,
    Kill,
    Publish,
    Reaped,
    RenewStandbys,
    Reply,
    Resized,
    Send,
    SetEpoch,
    ShutdownAsked,
    Spawn,
    StandbySeen,
)
from phalanx.supervisor.process import Stage
from phalanx.supervisor.status import status


def ask(story: Story, request: Scale | Restart) -> Story:
    return story.feed(ChangeAsked(b"me", request))


def ends(story: Story, *names: str) -> Story:
    """They obey SIGTERM."""
    for name in names:
        story.dies(name, ExitCode.OK)
    return story


def answer(story: Story) -> Scaled | Restarted | Error:
    (reply,) = story.take(Reply)
    assert reply.peer == b"me"
    return reply.message


def scaled_down() -> Story:
    """From three ranks to the first one."""
    story = ask(running(), Scale(7, 1, 60.0)).acks(stop=3).acks(go=4, seats=(0,))
    ends(story, "worker-1", "scheduler-1", "worker-2", "scheduler-2")
    assert answer(story) == Scaled(7, 3, 1, (0,), 0.0)
    return story


def test_a_rank_that_goes_leaves_the_group_first_and_ends_then() -> None:
    story = ask(running(), Scale(7, 2, 60.0))
    assert story.core.group.epoch == 3 and story.take(Kill) == []
    story.acks(stop=3)
    (go,) = story.take(Publish)
    assert go.topology.members() == [0, 1] and go.topology.seats[2].state == "absent"
    story.acks(go=4, seats=(0, 1)).wait(100)
    assert not story.core.reasons(), "two whole ranks; the third is on its way out"
    ends(story, "worker-2")
    assert story.core.changes.told == "scale from 3 to 2 ranks"
    ends(story, "scheduler-2")
    assert answer(story) == Scaled(7, 3, 2, (0, 1), 0.1)
    assert not story.core.reasons() and story.core.changes.told == ""
    found = status(story.core, story.config, 1, 1, story.now_ns)
    assert [rank.slot for rank in found.ranks] == [0, 1]
    assert not story.core.processes.keys() & {"worker-2", "scheduler-2"}
    topology = story.core.group.published
    assert topology is not None and topology.seats[2].scheduler_incarnation == 0


def test_ends_by_sigkill_if_it_must() -> None:
    story = ask(running(), Scale(7, 2, 60.0)).acks(stop=3)
    kills = {(k.name, k.signal) for k in story.acks(go=4, seats=(0, 1)).take(Kill)}
    assert kills == {("worker-2", signal.SIGTERM), ("scheduler-2", signal.SIGTERM)}
    ends(story, "scheduler-2").actions.clear()
    story.wait(TERM_GRACE_MS + 100)
    assert [(k.name, k.signal) for k in story.take(Kill)] == [("worker-2", signal.SIGKILL)]
    story.feed(Reaped("worker-2", 1, -9))
    assert isinstance(answer(story), Scaled)


def test_holes_are_filled_before_new_seats_and_newcomers_join_together() -> None:
    story = ask(scaled_down(), Scale(8, 4, 60.0)).wait(100)
    spawned = story.take(Spawn)
    workers = {(s.name, s.incarnation) for s in spawned if s.name.startswith("worker")}
    assert workers == {("worker-1", 2), ("worker-2", 2), ("worker-3", 1)}
    rows = [process.spec.index for process in story.core.processes.values()]
    assert len(set(rows)) == len(rows), "a heartbeat row each"
    story.ready("scheduler-1", "worker-1", "scheduler-2", "worker-2", "scheduler-3")
    assert story.core.group.epoch == 4 and not story.core.reasons(), "one is missing"
    story.ready("worker-3").acks(stop=5, seats=(0,))
    (go,) = story.take(Publish)
    assert go.topology.members() == [0, 1, 2, 3]
    story.acks(go=6, seats=(0, 1, 2, 3))
    done = answer(story)
    assert isinstance(done, Scaled) and (done.ranks, done.seats) == (4, (0, 1, 2, 3))
    assert not story.core.reasons()
    restarts = {p.name: p.restarts for p in status(story.core, story.config, 1, 1, 1).processes}
    assert set(restarts.values()) == {0}, "nothing failed"


def test_a_rank_that_is_not_well_goes_first() -> None:
    story = running().dies("worker-0").acks(stop=3, seats=(1, 2)).acks(go=4, seats=(1, 2))
    ask(story, Scale(7, 2, 60.0))
    story.dies("worker-0")
    ends(story, "scheduler-0")
    done = answer(story)
    assert isinstance(done, Scaled) and done.seats == (1, 2)
    assert story.core.group.epoch == 4, "nobody in the group had to notice"


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.NO_ROOM, ExitCode.INTERNAL, -9])
def test_a_newcomer_that_cannot_start_leaves_the_old_size(code: int) -> None:
    story = ask(scaled_down(), Scale(8, 3, 60.0)).wait(100).ready("scheduler-1", "worker-1")
    assert story.take(Resized) == [Resized(3)]
    if code not in (ExitCode.BAD_INPUT, ExitCode.NO_ROOM):  # then it may start the next time
        for _ in range(NEWCOMER_STARTS - 1):
            story.dies("worker-2", code).wait(200)
            assert story.core.changes.told and not story.core.reasons()
    story.dies("worker-2", code)
    story.wait(100)
    ends(story, "worker-1", "scheduler-1", "scheduler-2")
    resized = [action for action in story.actions if isinstance(action, Resized)]
    assert resized == [Resized(1)]
    failed = answer(story)
    assert isinstance(failed, Error) and failed.code is Code.INTERNAL
    assert "worker-2 could not be started" in failed.message and "1 ranks" in failed.message
    assert not story.core.reasons() and story.core.group.epoch == 4 and not story.core.failed
    ask(story, Scale(9, 2, 60.0)).wait(100)
    assert story.take(Spawn), "the next one is not refused"


def test_a_newcomer_that_falls_is_started_again_and_the_node_gets_its_size() -> None:
    """While it loads, and once more when it has joined: the others do not wait for it."""
    story = ask(scaled_down(), Scale(8, 3, 60.0)).wait(100).ready("scheduler-1", "scheduler-2")
    story.dies("worker-2").ready("worker-1", "worker-2").acks(stop=5, seats=(0,))
    story.dies("worker-2").acks(stop=7, seats=(0, 1)).acks(go=8, seats=(0, 1)).wait(200)
    assert story.core.group.members.keys() == {0, 1} and story.core.changes.told
    story.dies("scheduler-1").ready("scheduler-1", "worker-2").acks(stop=9).acks(go=10)
    done = answer(story)
    assert isinstance(done, Scaled) and done.seats == (0, 1, 2)
    assert not story.core.reasons()
    incarnations = {name: p.incarnation for name, p in story.core.processes.items()}
    assert (incarnations["worker-2"], incarnations["worker-1"]) == (4, 2)


def test_a_newcomer_that_waits_for_its_next_start_is_not_started_once_the_time_is_up() -> None:
    story = ask(scaled_down(), Scale(8, 2, 0.25)).wait(200).ready("scheduler-1")
    story.dies("worker-1").dies("worker-1")
    assert story.core.processes["worker-1"].stage is Stage.WAITING
    story.now_ns += 60 * MS
    story.actions += story.core.tick(story.now_ns)
    ends(story, "scheduler-1").wait(500)
    failed = answer(story)
    assert isinstance(failed, Error) and failed.code is Code.TIME_LIMIT
    assert Spawn("worker-1", 4) not in story.actions and not story.core.reasons()


def test_a_newcomer_that_hangs_is_given_up_in_time() -> None:
    """Whatever happens, no change is under way for ever."""
    story = ask(scaled_down(), Scale(8, 2, 5.0)).wait(4_900).ready("scheduler-1")
    assert story.core.changes.told
    story.wait(200)
    ends(story, "scheduler-1").wait(TERM_GRACE_MS)
    story.feed(Reaped("worker-1", 2, -9))
    failed = answer(story)
    assert isinstance(failed, Error) and failed.code is Code.TIME_LIMIT
    assert "not ready in time: worker-1" in failed.message
    assert story.core.changes.told == "" and not story.core.reasons()
    ask(story, Scale(9, 2, 60.0)).wait(100)
    assert Spawn("worker-1", 3) in story.take(Spawn), "the next one is not refused, and begins anew"
    story.ready("scheduler-1", "worker-1").acks(stop=5, seats=(0,)).acks(go=6, seats=(0, 1))
    assert answer(story) == Scaled(9, 1, 2, (0, 1), 0.1)


def test_other_numerics_do_not_join() -> None:
    story = ask(scaled_down(), Scale(8, 2, 5.0)).wait(100).ready("scheduler-1")
    story.feed(BecameReady("worker-1", 2, "other")).feed(Reaped("worker-1", 2, -9))
    failed = answer(ends(story, "scheduler-1"))
    assert isinstance(failed, Error) and "numerics fingerprint" in failed.message
    assert not story.core.reasons()


def test_only_one_change_at_a_time() -> None:
    story = ask(running(), Scale(7, 2, 60.0))
    ask(story, Scale(8, 4, 60.0))
    refused = answer(story)
    assert isinstance(refused, Error) and refused.code is Code.NOT_READY and refused.call == 8
    assert "scale from 3 to 2 ranks" in refused.message
    ask(story, Restart(9, ("eplb",), 60.0))
    assert isinstance(answer(story), Error)


def test_time_up_before_anybody_left_changes_nothing() -> None:
    story = ask(running(), Scale(7, 2, 0.2)).wait(300)
    failed = answer(story)
    assert isinstance(failed, Error) and failed.code is Code.TIME_LIMIT
    story.acks(stop=3)
    (go,) = story.take(Publish)
    assert go.topology.members() == [0, 1, 2]
    story.acks(go=4)
    assert not story.core.reasons()


@pytest.mark.parametrize("early", [True, False])
def test_who_loads_while_it_is_to_go_joins_when_it_may_stay(early: bool) -> None:
    """Whether it is ready before or after the time is up."""
    story = running().dies("worker-2").acks(stop=3, seats=(0, 1)).acks(go=4, seats=(0, 1))
    ask(story, Scale(7, 1, 0.2))
    if early:
        story.ready("worker-2")
    assert isinstance(answer(story.wait(300)), Error)
    if not early:
        story.ready("worker-2")
    story.acks(stop=5, seats=(0, 1)).acks(go=6)
    assert story.core.group.members.keys() == {0, 1, 2}
    assert not story.core.reasons()


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_absurd_sizes(ranks: int) -> None:
    refused = answer(ask(running(), Scale(7, ranks, 60.0)))
    assert isinstance(refused, Error) and refused.code is Code.BAD_REQUEST


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_absurd_times(timeout_s: float) -> None:
    refused = answer(ask(running(), Restart(7, ("all",), timeout_s)))
    assert isinstance(refused, Error) and refused.code is Code.BAD_REQUEST


def test_a_node_that_starts_or_stops_is_not_changed() -> None:
    story = ask(Story(2), Scale(7, 1, 60.0))
    refused = answer(story)
    assert isinstance(refused, Error) and refused.code is Code.NOT_READY
    story = ask(running().feed(ShutdownAsked(1000)), Scale(7, 1, 60.0))
    refused = answer(story)
    assert isinstance(refused, Error) and refused.code is Code.SHUTDOWN


def test_a_shutdown_answers_for_the_change_under_way() -> None:
    story = ask(running(), Restart(7, ("scheduler-1",), 60.0)).feed(ShutdownAsked(1000))
    refused = answer(story)
    assert isinstance(refused, Error) and refused.code is Code.SHUTDOWN


def test_standbys_are_renewed_once_for_each_restart_that_is_begun() -> None:
    story = ask(running(), Restart(7, ("nobody",), 60.0))
    assert story.take(RenewStandbys) == [], "it was refused"
    ask(ask(story, Restart(8, ("eplb",), 60.0)), Restart(8, ("eplb",), 60.0))
    ask(story, Restart(9, ("kvstore",), 60.0))  # refused: one is under way
    assert story.take(RenewStandbys) == [RenewStandbys()]
    ends(story, "eplb").ready("eplb").wait(100)
    assert any(isinstance(reply.message, Restarted) for reply in story.take(Reply))
    ask(story, Restart(8, ("eplb",), 60.0))  # the answer was lost
    assert story.take(RenewStandbys) == []


def test_a_process_is_replaced_and_that_is_no_failure() -> None:
    story = ask(running(), Restart(7, ("scheduler-1",), 60.0))
    assert [(k.name, k.signal) for k in story.take(Kill)] == [("scheduler-1", signal.SIGTERM)]
    ends(story, "scheduler-1")
    told = [one.topology.seat(1) for one in story.actions if isinstance(one, Publish)]
    assert told and all(seat is not None and seat.scheduler_left for seat in told)
    assert story.take(Spawn) == [Spawn("scheduler-1", 2)]
    story.wait(100).ready("scheduler-1")
    done = answer(story)
    assert isinstance(done, Restarted)
    assert [(one.process, one.s) for one in done.restarted] == [("scheduler-1", 0.1)]
    process = story.core.processes["scheduler-1"]
    assert process.policy.deaths_ns == [] and story.core.group.epoch == 2
    shown = status(story.core, story.config, 1, 1, story.now_ns).processes
    assert {p.restarts for p in shown} == {0}


def test_a_worker_leaves_the_group_before_it_is_replaced() -> None:
    story = ask(running(), Restart(7, ("worker-1",), 60.0))
    assert story.core.group.epoch == 3 and story.take(Kill) == []
    story.acks(stop=3)
    assert [(k.name, k.signal) for k in story.take(Kill)] == [("worker-1", signal.SIGTERM)]
    story.acks(go=4, seats=(0, 2))
    ends(story, "worker-1").ready("worker-1").acks(stop=5, seats=(0, 2)).acks(go=6)
    assert isinstance(answer(story), Restarted)
    assert not story.core.reasons()


def test_the_only_worker_is_replaced_too() -> None:
    story = ask(running(1), Restart(7, ("worker-0",), 60.0)).acks(stop=3)
    ends(story, "worker-0").ready("worker-0").acks(go=4)
    assert isinstance(answer(story), Restarted)
    assert story.take(SetEpoch) == [] and story.epoch == 4


def test_the_gateway_hands_over_instead_of_ending_what_runs() -> None:
    story = ask(running(), Restart(7, ("gateway",), 60.0))
    sent = [s.message for s in story.take(Send) if s.name == "gateway"]
    assert [type(message) for message in sent] == [HandOver]
    ends(story, "gateway").ready("gateway")
    assert isinstance(answer(story), Restarted)


def test_http_finishes_the_replies_that_have_begun() -> None:
    story = ask(running(http=True), Restart(7, ("http",), 60.0))
    assert [s.message for s in story.take(Send) if s.name == "http"] == [Drain(HTTP_DRAIN_MS)]
    ends(story, "http").ready("http")
    assert isinstance(answer(story), Restarted)


@pytest.mark.parametrize(
    ("name", "word", "limit_ms"),
    [("gateway", HandOver, HAND_OVER_MS), ("http", Drain, HTTP_DRAIN_MS)],
)
def test_the_word_to_end_is_said_again(
    name: str, word: type[HandOver | Drain], limit_ms: int
) -> None:
    """It may have been lost; and each time there is less time left."""
    story = ask(running(http=True), Restart(7, (name,), 60.0))
    for _ in range(10):
        story.wait(COMMAND_RETRY_MS // 4)
    left_ms = [limit_ms - COMMAND_RETRY_MS * number for number in range(3)]
    sent = [s.message for s in story.take(Send) if s.name == name]
    assert sent == [word(ms) for ms in left_ms if ms > 0]
    assert story.take(Kill) == []


@pytest.mark.parametrize("name", ["gateway", "worker-1"])
def test_a_process_goes_when_its_successor_has_imported_everything(name: str) -> None:
    story = running()
    standby = story.core.processes[name].spec.standby
    assert standby
    story.feed(StandbySeen(standby, ready=True))
    ask(story, Restart(7, (name,), 60.0))
    assert story.take(RenewStandbys) == [RenewStandbys()]
    story.feed(StandbySeen(standby, ready=False)).wait(1000)
    assert story.core.group.epoch == 2 and story.take(Kill) == []
    assert not story.core.processes[name].in_hand
    story.feed(StandbySeen(standby, ready=True))
    assert story.core.processes[name].in_hand


def test_a_successor_that_never_comes_is_not_waited_for() -> None:
    story = running().feed(StandbySeen("gateway-next", ready=True))
    ask(story, Restart(7, ("gateway",), 60.0))
    story.wait(STANDBY_MS - 200)
    assert not story.core.processes["gateway"].in_hand
    story.wait(400)
    assert story.core.processes["gateway"].in_hand
    ends(story, "gateway").ready("gateway")
    assert isinstance(answer(story), Restarted)


def test_all_is_one_after_the_other_each_when_the_node_is_whole() -> None:
    story = ask(running(2), Restart(7, ("all",), 60.0))
    order: list[str] = []
    for _ in range(len(story.core.processes)):
        (name,) = [n for n, p in story.core.processes.items() if p.in_hand]
        order.append(name)
        if name.startswith("worker"):
            epoch, other = story.epoch, 1 - int(name[-1])
            story.acks(stop=epoch).acks(go=epoch + 1, seats=(other,))
            ends(story, name).ready(name).acks(stop=epoch + 2).acks(go=epoch + 3)
        else:
            ends(story, name).ready(name)
        story.wait(100)
    assert isinstance(answer(story), Restarted)
    assert order == [
        *("eplb", "kvstore", "tokenizer-0", "scheduler-0", "scheduler-1"),
        *("worker-0", "worker-1", "gateway"),
    ]


def test_a_replacement_that_dies_ends_the_restart_with_its_reason() -> None:
    story = ask(running(), Restart(7, ("scheduler",), 60.0))
    ends(story, "scheduler-0")
    for _ in range(NEWCOMER_STARTS):
        assert story.core.changes.told
        story.dies("scheduler-0", ExitCode.INTERNAL).wait(100)
    failed = answer(story)
    assert isinstance(failed, Error)
    assert "the new scheduler-0 died 3 times, the last time: exit code 70" in failed.message
    assert "not replaced: scheduler-0, scheduler-1, scheduler-2" in failed.message
    story.wait(200).ready("scheduler-0")
    assert not story.core.reasons()


def test_a_replacement_that_is_killed_while_it_starts_has_a_successor() -> None:
    story = ask(running(), Restart(7, ("worker-1", "gateway"), 60.0)).acks(stop=3)
    ends(story.acks(go=4, seats=(0, 2)), "worker-1").dies("worker-1").dies("worker-1").wait(200)
    story.ready("worker-1").acks(stop=5).acks(go=6)
    ends(story, "gateway").dies("gateway").ready("gateway")
    done = answer(story)
    assert isinstance(done, Restarted)
    assert [phase.process for phase in done.restarted] == ["worker-1", "gateway"]


def test_a_replacement_without_room_ends_the_restart_at_once() -> None:
    """It is tried for ever all the same."""
    story = ask(running(), Restart(7, ("scheduler-0",), 60.0))
    ends(story, "scheduler-0").dies("scheduler-0", ExitCode.NO_ROOM)
    failed = answer(story)
    assert isinstance(failed, Error) and "NO_ROOM" in failed.message
    assert story.core.processes["scheduler-0"].stage is Stage.WAITING
    ask(story.wait(8_000), Restart(8, ("scheduler-0",), 60.0)).ready("scheduler-0")
    assert not story.core.reasons()


def test_a_replacement_whose_input_is_wrong_ends_the_restart_and_not_the_node() -> None:
    story = ask(running(), Restart(7, ("worker",), 60.0)).acks(stop=3)
    ends(story.acks(go=4, seats=(1, 2)), "worker-0").dies("worker-0", ExitCode.BAD_INPUT)
    failed = answer(story)
    assert isinstance(failed, Error) and "the new worker-0 died: exit code 2" in failed.message
    assert "not replaced: worker-0, worker-1, worker-2" in failed.message
    assert not story.core.failed
    story.wait(5_000).ready("worker-0").acks(stop=5).acks(go=6)
    assert not story.core.reasons()


def test_a_node_that_is_not_whole_loses_nobody_more() -> None:
    story = running().dies("kvstore")
    ask(story, Restart(7, ("eplb",), 1.0))
    assert [k.name for k in story.take(Kill) if k.name == "eplb"] == []
    story.wait(1_100)
    failed = answer(story)
    assert isinstance(failed, Error) and failed.code is Code.TIME_LIMIT
    assert "kvstore" in failed.message
    assert story.core.processes["eplb"].stage is Stage.READY


@pytest.mark.parametrize("names", [("nobody",), ("eplb", "x"), ("",), ("supervisor",), ()])
def test_unknown_names_are_refused_and_nothing_happens(names: tuple[str, ...]) -> None:
    story = ask(running(), Restart(7, names, 60.0))
    refused = answer(story)
    assert isinstance(refused, Error) and refused.code is Code.BAD_REQUEST
    assert story.core.changes.told == ""


def test_who_was_refused_is_replaced_though_it_is_not_reaped_yet() -> None:
    """Because of what was mended meanwhile: by itself it would not be started again."""
    story = running().dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.ready("worker-1", fingerprint="other")
    assert story.core.processes["worker-1"].stage is Stage.DYING
    ask(story, Restart(7, ("worker-1",), 60.0)).wait(300)
    story.feed(Reaped("worker-1", 2, -9))
    assert Spawn("worker-1", 3) in story.take(Spawn)
    story.ready("worker-1").acks(stop=5, seats=(0, 2)).acks(go=6)
    assert isinstance(answer(story), Restarted)
    assert not story.core.reasons()


def test_who_is_kept_out_of_the_group_can_be_replaced() -> None:
    """It has too little room, which its successor need not have."""
    story = running().dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.feed(BecameReady("worker-1", 2, "n", 1))
    story.acks(stop=5, seats=(0, 2)).acks(go=6, seats=(0, 2))
    assert story.core.reasons() == ["worker-1 has not joined yet"]
    story.actions.clear()
    ask(story, Restart(7, ("worker-1",), 60.0)).wait(100)
    assert [(k.name, k.signal) for k in story.take(Kill)] == [("worker-1", signal.SIGTERM)]
    ends(story, "worker-1").ready("worker-1").acks(stop=7, seats=(0, 2)).acks(go=8)
    assert isinstance(answer(story), Restarted)
    assert story.core.group.members == {0: 1, 1: 3, 2: 1} and not story.core.reasons()


def test_the_answers_of_several_changes_are_given_again() -> None:
    story = running()
    for call, name in ((7, "eplb"), (8, "kvstore")):
        ask(story, Restart(call, (name,), 60.0))
        done = answer(ends(story, name).ready(name))
        assert isinstance(done, Restarted) and done.call == call
    for call, name in ((7, "eplb"), (8, "kvstore"), (7, "eplb")):
        again = answer(ask(story, Restart(call, (name,), 60.0)))
        assert isinstance(again, Restarted) and again.call == call
        assert story.core.changes.told == "", "it was done once"


def test_a_worker_that_has_just_left_when_the_time_is_up_comes_back() -> None:
    """Its scheduler is told both: it says hello to it once more (`scheduler_svc/seat.py`)."""
    story = ask(running(), Restart(7, ("worker-1",), 0.2)).acks(stop=3, seats=(0, 1))
    story.now_ns += 300 * MS
    story.acks(stop=3, seats=(2,))
    assert not any(isinstance(action, Kill) for action in story.actions)
    (left,) = [a.topology.seats[1] for a in story.actions if isinstance(a, Publish)]
    assert left.state == "absent" and isinstance(answer(story), Error)
    story.acks(go=4, seats=(0, 2)).acks(stop=5, seats=(0, 2))
    (came,) = [publish.topology.seats[1] for publish in story.take(Publish)]
    assert (came.state, came.worker_incarnation) == ("member", left.worker_incarnation)
    story.acks(go=6)
    assert not story.core.reasons()


@pytest.mark.parametrize("ranks", ["0", "65", str(10**30)])
def test_a_number_of_ranks_that_cannot_be_is_refused_by_the_command(
    tmp_path: Path, ranks: str
) -> None:
    shown = CliRunner().invoke(scale, [ranks, "--run-dir", str(tmp_path)])
    assert shown.exit_code == 2 and f"{ranks} is not in the range 1<=x<=64" in shown.output
