"""What becomes an entry of the history, from a core's events alone: each process, how its end was noticed, what was
decided, and how long each part took."""

from typing import Any

import pytest
from msgspec import structs
from supervisor.test_core import MS, Story, running

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import BUSY_SILENCE_MS, HANG_MS, STOP_ACK_MS
from phalanx.protocol.messages import HistoryEntry, Restart, Scale
from phalanx.supervisor.events import (
    BecameReady,
    Began,
    ChangeAsked,
    Finished,
    Inspected,
    Observed,
    PipeClosed,
    Progressed,
    Reaped,
    Record,
    ShutdownAsked,
    Spawned,
    StandbyEnded,
    StandbySeen,
    Stranded,
)
from phalanx.supervisor.history import UNDER_WAY, how_it_ended


def told(story: Story, **fields: Any) -> list[HistoryEntry]:
    """The entries with these fields, as they are now, as they began."""
    latest = {a.entry.id: a.entry for a in story.actions if isinstance(a, Record)}
    return [e for e in latest.values() if all(getattr(e, k) == v for k, v in fields.items())]


def phases(entry: HistoryEntry) -> dict[str, float]:
    return {phase.name: phase.s for phase in entry.phases}


def test_a_scheduler_that_is_killed() -> None:
    story = running()
    at = story.now_ns
    story.feed(PipeClosed("scheduler-1", 1, at - 2 * MS, "death mark"))
    (entry,) = told(story, process="scheduler-1")
    assert (entry.kind, entry.epoch, entry.outcome, entry.resumed_ms) == (
        "process",
        2,
        UNDER_WAY,
        -1,
    )
    story.feed(Stranded(5, "scheduler-1"))
    story.now_ns += 20 * MS
    story.feed(Reaped("scheduler-1", 1, -9), Spawned("scheduler-1", 2, 77))
    story.now_ns += 100 * MS
    story.feed(Progressed("scheduler-1", 2, "load"))
    story.now_ns += 50 * MS
    story.ready("scheduler-1")
    (entry,) = told(story, process="scheduler-1")
    assert (entry.cause, entry.noticed, entry.detected_ms) == (
        "scheduler-1 died",
        "death mark",
        2.0,
    )
    assert (entry.incarnation, entry.ended) == (1, "ended by SIGKILL")
    assert (entry.decided, entry.moved_requests) == ("restart at once", 5)
    assert phases(entry) == {"end": 0.02, "start": 0.1, "load": 0.05}
    assert (entry.outcome, entry.resumed_ms, entry.survivors) == ("ready", 170.0, (0, 1, 2))
    (record,) = [a for a in story.take(Record) if a.entry == entry]
    assert record.noticed_ns == at
    assert story.core.group.records[-1].moved_requests == 0, "the group did not change"


def test_a_worker_is_back_when_it_is_in_the_group() -> None:
    story = running()
    story.feed(PipeClosed("worker-1", 1, story.now_ns, "death mark"), Stranded(3, "worker-1"))
    story.feed(Reaped("worker-1", 1, -11, "last words"), Spawned("worker-1", 2, 77, "worker-next"))
    story.acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.now_ns += 100 * MS
    story.ready("worker-1")
    (entry,) = told(story, process="worker-1")
    assert entry.outcome == UNDER_WAY, "it is ready, and has not joined"
    story.now_ns += 7 * MS
    story.acks(stop=5).acks(go=6)
    entry, lost, joined = told(story)[-3:]
    assert entry.ended == "ended by SIGSEGV: last words"
    went_on = "the group goes on without it (epoch 4)"
    assert entry.decided == f"{went_on}; restart at once; forked from worker-next"
    assert phases(entry) == {"end": 0.0, "start": 0.1, "join": 0.007}
    assert (entry.outcome, entry.moved_requests, entry.survivors) == ("joined", 3, (0, 2))
    assert (lost.kind, lost.epoch, lost.cause) == ("group", 4, "worker-1 died")
    assert (lost.moved_requests, lost.survivors, lost.decided) == (3, (0, 2), "ranks 0, 2 run")
    assert (joined.kind, joined.epoch, joined.cause) == ("group", 6, "worker-1 joined")
    for entry, record in zip((lost, joined), story.core.group.records[-2:], strict=True):
        assert {n: getattr(entry, n) for n in record.__struct_fields__} == structs.asdict(record)


def test_a_hung_process_is_told_with_the_time_that_it_was_silent() -> None:
    story = running()
    story.silent = {"tokenizer-0"}
    story.wait(600).feed(Inspected("tokenizer-0", 1, "S", 0)).wait(HANG_MS - 400)
    (entry,) = told(story, process="tokenizer-0")
    assert entry.noticed == "heartbeat" and entry.cause.startswith(
        "tokenizer-0 hung: no sign of life"
    )
    assert HANG_MS <= entry.detected_ms <= HANG_MS + 200


def test_who_is_busy_without_progress_is_told_with_the_time_since_it_got_on() -> None:
    story = running()
    story.silent = {"worker-1"}  # what `wait` says of it is that it is idle
    for _ in range(BUSY_SILENCE_MS // 100 + 1):
        story.feed(Observed("worker-1", 1, story.now_ns, 0, ProcessPhase.BUSY)).wait(100)
    (entry,) = told(story, process="worker-1")
    assert entry.noticed == "progress" and entry.cause.startswith("worker-1 stuck: busy")
    assert BUSY_SILENCE_MS <= entry.detected_ms <= BUSY_SILENCE_MS + 200


def test_who_does_not_acknowledge_is_told_with_the_time_that_it_was_awaited() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0,)).wait(STOP_ACK_MS // 2)
    story.feed(Inspected("worker-2", 1, "S", 0)).wait(STOP_ACK_MS // 2 + 300)
    (entry,) = told(story, process="worker-2")
    assert entry.noticed == "acknowledgement" and "did not acknowledge STOP" in entry.cause
    assert STOP_ACK_MS <= entry.detected_ms <= STOP_ACK_MS + 300


def test_successors_that_fall_before_they_serve_are_one_entry() -> None:
    story = running()
    for incarnation in range(1, 7):
        story.dies("kvstore", 70 if incarnation > 1 else -9).wait(5_100)
    assert story.core.processes["kvstore"].incarnation == 7
    (entry,) = told(story, process="kvstore")
    assert (entry.deaths, entry.outcome) == (4, UNDER_WAY), "later ones are told less often"
    story.ready("kvstore")
    (entry,) = told(story, process="kvstore")
    assert (entry.deaths, entry.ended) == (6, "ended by SIGKILL, then exit code 70 INTERNAL")
    assert entry.cause == "kvstore died" and phases(entry).keys() >= {
        "starts in vain",
        "end",
        "start",
    }
    assert entry.resumed_ms == pytest.approx(1000 * sum(phases(entry).values()))
    story.dies("kvstore")
    assert len(told(story, process="kvstore")) == 2, "it had served"


def test_a_start_without_room() -> None:
    story = running()
    story.dies("scheduler-0").dies("scheduler-0", ExitCode.NO_ROOM)
    (entry,) = told(story, process="scheduler-0")
    assert entry.decided.startswith(
        "no room to start: exit code 9 NO_ROOM (tried 1 times, the next"
    )
    assert entry.ended == "ended by SIGKILL, then exit code 9 NO_ROOM"


def test_a_planned_restart_is_told_as_such() -> None:
    story = running()
    story.feed(ChangeAsked(b"operator", Restart(1, ("tokenizer-0",), 60.0)))
    story.wait(100).dies("tokenizer-0", 0).wait(100).ready("tokenizer-0").wait(100)
    (change,) = told(story, kind="change")
    assert (change.cause, change.outcome) == ("asked for: restart tokenizer-0", "done")
    assert [(p.name, p.process) for p in change.phases] == [("restart", "tokenizer-0")]
    (entry,) = told(story, process="tokenizer-0")
    assert (entry.noticed, entry.cause) == ("asked", "tokenizer-0 ended as asked")
    assert (entry.decided, entry.outcome) == ("asked for: restart tokenizer-0", "ready")


def test_a_scale_and_who_leaves_for_it() -> None:
    story = running()
    story.feed(ChangeAsked(b"operator", Scale(1, 2, 60.0)))
    story.acks(stop=3).acks(go=4, seats=(0, 1)).wait(100)
    story.dies("worker-2", 0).dies("scheduler-2", 0).wait(100)
    (change,) = told(story, kind="change")
    assert (change.cause, change.outcome) == ("asked for: scale from 3 to 2 ranks", "done")
    assert phases(change).keys() == {"leave", "end"}
    (entry,) = told(story, process="worker-2")
    assert (entry.noticed, entry.outcome) == ("asked", "not started again")


def test_a_worker_with_other_numbers_is_not_started_again() -> None:
    story = running()
    story.dies("worker-2").acks(stop=3, seats=(0, 1)).acks(go=4, seats=(0, 1))
    story.ready("worker-2", fingerprint="other").feed(Reaped("worker-2", 2, -9))
    (entry,) = told(story, process="worker-2")
    assert entry.deaths == 2 and "not started again" in entry.decided


def test_a_standby_that_died() -> None:
    story = running()
    story.feed(StandbyEnded("gateway-next", "ended by SIGKILL", 3000)).wait(3000)
    story.feed(StandbySeen("gateway-next", ready=True))
    (entry,) = told(story, kind="standby")
    assert (entry.process, entry.ended, entry.outcome) == (
        "gateway-next",
        "ended by SIGKILL",
        "ready",
    )
    assert entry.decided == "another one follows in 3 s" and entry.resumed_ms == 3000


def started(before: str, silent_ms: float = 0.0) -> Story:
    story = Story()
    story.feed(Began(before, silent_ms), BecameReady("gateway", 1, note="4 requests taken over"))
    others = [name for name in story.core.processes if name != "gateway"]
    return story.ready(*others).acks(go=2)


def test_the_start_after_a_supervisor_that_died() -> None:
    (entry,) = told(started("died", 812.0), kind="start")
    assert (entry.process, entry.cause) == ("supervisor", "supervisor died")
    assert (entry.noticed, entry.detected_ms, entry.outcome) == ("next start", 812.0, "ready")
    assert "the node ended with it" in entry.decided and "4 requests taken over" in entry.decided
    assert entry.resumed_ms >= 0 and {phase.process for phase in entry.phases} >= {"worker-2"}


@pytest.mark.parametrize("before, cause", [("", "started"), ("stopped", "started again")])
def test_another_start(before: str, cause: str) -> None:
    (entry,) = told(started(before), kind="start")
    assert (entry.cause, entry.noticed, entry.detected_ms) == (cause, "", 0.0)


def test_the_end_of_the_node_ends_what_is_under_way() -> None:
    story = running()
    story.dies("scheduler-0").feed(ShutdownAsked(500))
    (entry,) = told(story, process="scheduler-0")
    assert entry.outcome == UNDER_WAY, "while the node drains its successor is of use"
    story.now_ns += 30 * MS
    for name in ["gateway", *[name for name in story.core.processes if name != "gateway"]]:
        story.dies(name, 0)
    (entry,) = told(story, process="scheduler-0")
    assert (entry.outcome, entry.deaths) == ("the node stopped", 1)
    (stop,) = told(story, kind="stop")
    assert (stop.cause, stop.outcome) == ("told to stop", "exit code 0 OK")
    assert phases(stop) == {"drain": 0.03, "stop": 0.0}
    assert {e.kind for e in told(story)} == {"process", "stop"}, "who was told to end is no loss"
    order = [type(action) for action in story.actions if isinstance(action, Record | Finished)]
    assert order.index(Finished) == len(order) - 1, "nobody listens after that"


def test_a_gateway_that_falls_while_it_drains() -> None:
    story = running()
    story.feed(ShutdownAsked(5000)).dies("gateway")
    (entry,) = told(story, process="gateway")
    assert (entry.decided, entry.outcome) == ("restart at once", UNDER_WAY)
    story.ready("gateway")
    (entry,) = told(story, process="gateway")
    assert entry.outcome == "ready"
    story.dies("gateway", 0)
    assert told(story, process="gateway") == [entry], "it has drained"


def test_how_the_last_start_ended() -> None:
    def entry(kind: Any, run: int, outcome: str = "ready") -> HistoryEntry:
        return HistoryEntry(kind=kind, id=1, epoch=0, cause="", run=run, outcome=outcome)

    clean = [entry("start", 1), entry("stop", 1, "exit code 0 OK")]
    assert how_it_ended([]) == ""
    assert how_it_ended(clean) == "stopped"
    assert how_it_ended([*clean, entry("start", 2)]) == "died"
    assert how_it_ended([*clean, entry("stop", 2, UNDER_WAY)]) == "died", "while it stopped"
