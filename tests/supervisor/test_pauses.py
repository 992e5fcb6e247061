"""The supervisor itself did not run for a while: that time does not count, and what follows it does."""

from supervisor.test_core import MS, Story, hung, running

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.limits import BUSY_SILENCE_MS, HANG_MS, STOP_ACK_MS
from phalanx.supervisor.events import Inspect, Inspected, Observed, PipeClosed

PAUSE_MS = 60_000


def pause(story: Story) -> Story:
    """A minute later it sees fresh beats of whoever is not silent, then it looks at the clock."""
    story.now_ns += PAUSE_MS * MS
    for name, process in story.core.processes.items():
        if process.alive and name not in story.silent:
            beat_ns = story.now_ns - 5 * MS
            story.feed(Observed(name, process.incarnation, beat_ns, 0, ProcessPhase.READY))
    story.actions += story.core.tick(story.now_ns)
    return story


def found_ms(story: Story, name: str, state: str, limit_ms: int) -> int:
    """When it counts as lost to whom all who look at it see it in this state."""
    begun_ns = story.now_ns
    while not hung(story, name):
        assert story.now_ns - begun_ns < limit_ms * MS
        story.wait(100)
        for look in story.take(Inspect):
            found = state if look.name == name else "S"
            story.feed(Inspected(look.name, look.incarnation, found, 0))
    return (story.now_ns - begun_ns) // MS


def test_who_hangs_after_it_is_found_as_soon_as_ever() -> None:
    story = pause(running().wait(1000))
    story.silent.add("worker-1")
    assert found_ms(story, "worker-1", "T", HANG_MS + 200) > HANG_MS - 200


def test_who_does_not_answer_a_stop_that_followed_it_is_found_as_soon_as_ever() -> None:
    story = running().wait(1000)
    story.now_ns += PAUSE_MS * MS
    story.feed(PipeClosed("worker-1", 1, story.now_ns))
    story.actions += story.core.tick(story.now_ns)
    story.acks(stop=story.epoch, seats=(0,))
    assert found_ms(story, "worker-2", "S", STOP_ACK_MS + 300) > STOP_ACK_MS - 200


def test_who_gets_nowhere_after_it_too() -> None:
    story = pause(running().wait(1000))
    begun_ns = story.now_ns
    while not hung(story, "worker-1"):
        assert story.now_ns - begun_ns < (BUSY_SILENCE_MS + 300) * MS
        story.feed(Observed("worker-1", 1, story.now_ns, 0, ProcessPhase.BUSY))
        story.silent.add("worker-1")  # what `wait` says of it is that it is ready
        story.wait(100)
