"""The end of a node as stories: who is told what, who is waited for, and for how long."""

import signal

import pytest
from supervisor.test_core import Story, running

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import (
    DRAIN_GRACE_MS,
    HAND_OVER_MS,
    KILL_GRACE_MS,
    RESTARTS_MAX,
    TERM_GRACE_MS,
)
from phalanx.protocol.messages import Drain, HandOver, Restart
from phalanx.supervisor.ending import NodeStage
from phalanx.supervisor.events import (
    ChangeAsked,
    Finished,
    Kill,
    KillAsked,
    PipeClosed,
    Reaped,
    Send,
    ShutdownAsked,
    Spawn,
    Tell,
)


def end(story: Story, *names: str, code: int = 0) -> None:
    for name in names:
        story.feed(Reaped(name, story.core.processes[name].incarnation, code))
    story.actions += story.core.tick(story.now_ns)


def others(story: Story) -> list[str]:
    return [name for name in story.core.processes if name != "gateway"]


def test_shutdown_drains_the_gateway_then_ends_the_rest() -> None:
    story = running().feed(ShutdownAsked(3000))
    kills = [a for a in story.actions if isinstance(a, Kill)]
    assert kills == [Kill("gateway", 1, signal.SIGTERM)]
    assert Send("gateway", 1, Drain(3000)) in story.actions
    story.wait(2000)
    story.actions.clear()
    end(story, "gateway")
    assert {a.name for a in story.take(Kill)} == set(others(story))
    end(story, *others(story))
    assert story.take(Finished) == [Finished(ExitCode.OK, "", ())]


def test_nobody_is_lost_and_nothing_unhealthy_when_all_end_as_they_shall() -> None:
    story = running().feed(ShutdownAsked(3000))
    assert [t.text for t in story.take(Tell) if t.kind == "unhealthy"] == ["the node is stopping"]
    end(story, "gateway")
    story.actions.clear()
    for name in others(story):
        story.feed(PipeClosed(name, 1, story.now_ns, "death mark"))
    end(story, *others(story))
    kinds = {tell.kind for tell in story.take(Tell)}
    assert "gone" in kinds and not {"lost", "unhealthy"} & kinds


def test_a_worker_that_dies_during_the_drain_is_replaced() -> None:
    story = running().feed(ShutdownAsked(60_000))
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    assert story.epoch == 4
    assert story.core.processes["worker-1"].incarnation == 2
    story.dies("gateway", code=ExitCode.OK)
    assert story.core.stage is NodeStage.TERMINATING


@pytest.mark.parametrize("when", ["before", "meanwhile", "after its end"])
def test_a_gateway_that_dies_has_a_successor_that_drains(when: str) -> None:
    """Its streams go on, and whatever happens their ends are told."""
    story = running()
    if when == "before":
        story.dies("gateway")
    story.feed(ShutdownAsked(3000)).wait(1000)
    if when == "meanwhile":
        story.dies("gateway")
    elif when == "after its end":
        story.wait(2500).dies("gateway")
    assert story.core.stage is NodeStage.DRAINING
    assert [s.incarnation for s in story.take(Spawn) if s.name == "gateway"] == [2]
    story.ready("gateway")
    left_ms = 0 if when == "after its end" else 2000
    told = [a for a in story.actions if isinstance(a, Send) and isinstance(a.message, Drain)]
    assert told == [Send("gateway", 2, Drain(left_ms))]
    assert [(k.name, k.signal) for k in story.take(Kill)] == [("gateway", signal.SIGTERM)]
    end(story, "gateway")
    end(story, *others(story))
    assert story.take(Finished) == [Finished(ExitCode.OK, "", ())]


def test_how_long_a_gateway_may_drain_is_said_again() -> None:
    """The word may be lost: else it would take the ten seconds of a signal alone, and be killed over its streams."""
    story = running().feed(ShutdownAsked(3000)).wait(1200)
    told = [a.message for a in story.take(Send) if isinstance(a.message, Drain)]
    assert told == [Drain(3000), Drain(2500), Drain(2000)]


def test_a_gateway_that_was_to_hand_over_when_the_node_stops_has_not_drained() -> None:
    story = running()
    story.core.standbys.clear()
    story.feed(ChangeAsked(b"me", Restart(7, ("gateway",), 60.0)))
    assert [a.message for a in story.take(Send)] == [HandOver(HAND_OVER_MS)]
    story.feed(ShutdownAsked(3000)).dies("gateway", code=ExitCode.OK)
    assert story.core.stage is NodeStage.DRAINING
    assert Spawn("gateway", 2) in story.actions


def test_a_node_whose_gateway_cannot_be_started_stops_all_the_same() -> None:
    story = running().feed(ShutdownAsked(3000)).dies("gateway")
    story.wait(3000 + DRAIN_GRACE_MS - 200)
    assert story.core.stage is NodeStage.DRAINING
    story.wait(300)
    assert Kill("gateway", 2, signal.SIGKILL) in story.actions
    end(story, "gateway", code=-9)
    end(story, *others(story))
    assert story.take(Finished) == [Finished(ExitCode.OK, "", ("gateway (killed)",))]


def test_a_gateway_that_dies_over_and_over_while_it_drains_is_given_up() -> None:
    story = running().feed(ShutdownAsked(50_000))
    for _ in range(RESTARTS_MAX):
        story.dies("gateway").wait(6000)
    story.dies("gateway").wait(100)
    assert story.core.stage is NodeStage.TERMINATING
    end(story, *others(story))
    (finished,) = story.take(Finished)
    assert finished.code == ExitCode.GAVE_UP and "gateway died" in finished.reason


def test_a_node_that_fails_leaves_its_streams_to_the_next_one() -> None:
    story = running().dies("tokenizer-0", code=ExitCode.BAD_INPUT)
    assert story.core.failed
    assert [s.message for s in story.take(Send) if isinstance(s.message, Drain | HandOver)] == [
        HandOver(HAND_OVER_MS)
    ]
    story.dies("gateway", code=ExitCode.OK)
    assert story.core.stage is NodeStage.TERMINATING
    end(story, *others(story))
    (finished,) = story.take(Finished)
    assert finished.code == ExitCode.BAD_INPUT


def test_a_node_that_fails_while_it_drains_leaves_what_still_runs_to_the_next_one() -> None:
    story = running().feed(ShutdownAsked(50_000))
    story.take(Send)
    story.dies("tokenizer-0", code=ExitCode.BAD_INPUT)
    told = [s.message for s in story.take(Send) if s.name == "gateway"]
    assert HandOver(HAND_OVER_MS) in told and not [m for m in told if isinstance(m, Drain)]


def test_http_that_drains_for_a_restart_is_not_killed_by_a_stop() -> None:
    story = running(http=True).feed(ChangeAsked(b"operator", Restart(7, ("http",), 60.0)))
    story.wait(100).feed(ShutdownAsked(20_000)).wait(2000)
    assert [kill for kill in story.take(Kill) if kill.name == "http"] == []


def test_a_gateway_that_does_not_end_is_killed_and_reported() -> None:
    story = running().feed(ShutdownAsked(1000)).wait(1000 + DRAIN_GRACE_MS - 100)
    assert Kill("gateway", 1, signal.SIGKILL) not in story.actions
    story.wait(200)
    assert Kill("gateway", 1, signal.SIGKILL) in story.actions
    end(story, "gateway", code=-9)
    end(story, *others(story))
    assert story.take(Finished) == [Finished(ExitCode.OK, "", ("gateway (killed)",))]


def test_leftovers_are_killed_after_their_grace() -> None:
    story = running().feed(ShutdownAsked(0))
    end(story, "gateway")
    end(story, *others(story)[1:])
    story.wait(TERM_GRACE_MS + 100)
    assert Kill("worker-0", 1, signal.SIGKILL) in story.actions
    end(story, "worker-0", code=-9)
    assert story.take(Finished) == [Finished(ExitCode.OK, "", ("worker-0 (killed)",))]


def test_shutdown_ends_even_if_the_kernel_holds_a_process() -> None:
    story = running().feed(KillAsked())
    assert len(story.take(Kill)) == len(story.core.processes)
    end(story, *others(story), code=-9)
    story.wait(KILL_GRACE_MS + 100)
    (finished,) = story.take(Finished)
    assert "gateway (does not die)" in finished.left


def test_shutdown_during_the_start() -> None:
    story = Story().feed(ShutdownAsked(1000))
    story.feed(Reaped("gateway", 1, -15))
    end(story, *others(story), code=-15)
    assert story.take(Finished) == [Finished(ExitCode.OK, "", ())]


def test_the_second_request_shortens_the_drain() -> None:
    story = running().feed(ShutdownAsked(60_000)).wait(500)
    story.actions.clear()
    story.feed(ShutdownAsked(0), ShutdownAsked(1000))
    assert story.take(Send) == [Send("gateway", 1, Drain(0))], (
        "it tells the ends before it is killed"
    )
    story.wait(DRAIN_GRACE_MS + 100)
    assert story.core.stage is NodeStage.TERMINATING


def test_who_was_killed_is_told_once() -> None:
    """Its time to drain was over, and so was everybody's time to end."""
    story = running().feed(ShutdownAsked(100)).wait(100 + DRAIN_GRACE_MS + TERM_GRACE_MS + 300)
    assert story.core.stage is NodeStage.KILLING
    end(story, *story.core.processes, code=-9)
    (finished,) = story.take(Finished)
    assert sorted(finished.left) == sorted(f"{name} (killed)" for name in story.core.processes)
