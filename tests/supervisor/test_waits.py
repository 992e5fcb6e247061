"""Who keeps the group waiting is found, and nobody else: stories of the core, and one with real processes."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor.node import TestNode, until
from supervisor.test_core import MS, Story, hung, running

from phalanx.protocol import limits
from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.limits import (
    BUSY_SILENCE_MS,
    EXCHANGE_DEADLINE_MS,
    GO_ACK_MS,
    HANG_MS,
    SPIN_MS,
    STALLED_MS,
    START_DEADLINE_MS,
    STARVED_MS_MAX,
    STOP_ACK_MS,
)
from phalanx.supervisor.blame import awaited
from phalanx.supervisor.events import Inspect, Inspected, Observed


def test_who_waits_is_not_to_blame() -> None:
    assert awaited({0: 0b010, 1: 0, 2: 0b011}) == {1}
    assert awaited({0: 0b110, 1: 0, 2: 0}) == {1, 2}
    assert awaited({0: 0b010, 1: 0b001, 2: 0b001}) == {0, 1}, "a circle"
    assert awaited({0: 0, 1: 0}) == awaited({}) == awaited({0: 0b100}) == frozenset()


def test_who_waits_outlasts_whatever_the_supervisor_gives_to_a_rank() -> None:
    given = (STARVED_MS_MAX, BUSY_SILENCE_MS, START_DEADLINE_MS, 2 * GO_ACK_MS, 5 * STOP_ACK_MS)
    assert 2 * max(given) < EXCHANGE_DEADLINE_MS


def let_wait(story: Story, ms: int, late: str, waiting: tuple[str, ...], **found: int | str) -> int:
    """The others wait in a step for `late`, which is silent, as `found` says. Returns ms until it is gone."""
    story.silent |= {late, *waiting}
    seat = story.core.processes[late].spec.seat
    since_ns, ran_ns = story.now_ns, 0
    while story.now_ns - since_ns < ms * MS and not hung(story, late):
        for name in waiting:
            beat = (story.now_ns, 5, ProcessPhase.WAITING, 1 << seat)
            story.feed(Observed(name, 1, *beat))
        story.wait(100)
        ran_ns = story.now_ns - since_ns
        for look in story.take(Inspect):
            state = str(found.get("state", "D"))
            waited = ran_ns if found.get("starved") else 0
            asleep = min(ran_ns, int(found.get("asleep_ms", 10**9)) * MS) if state == "D" else 0
            story.feed(Inspected(look.name, 1, state, waited, asleep))
    return (story.now_ns - since_ns) // MS


OTHERS = ("worker-0", "worker-2")


@pytest.mark.parametrize("how", [{"state": "D"}, {"state": "R", "starved": 1}])
def test_one_stuck_rank_is_lost_alone(how: dict[str, int | str]) -> None:
    story = running()
    let_wait(story, STARVED_MS_MAX + 1000, "worker-1", OTHERS, **how)
    assert hung(story, "worker-1")
    story.silent = {"worker-1"}
    story.acks(stop=3, seats=(0, 2)).wait(1000)
    assert not any(hung(story, name) for name in OTHERS)
    assert story.core.group.members.keys() == {0, 2}


def test_a_rank_that_the_kernel_keeps_is_lost_when_no_disk_takes_as_long() -> None:
    lost_ms = let_wait(running(), 60_000, "worker-1", OTHERS, state="D")
    assert STALLED_MS < lost_ms < STALLED_MS + 1000


def test_one_that_reads_page_after_page_is_given_the_time() -> None:
    story = running()
    paged_ms = let_wait(story, 2 * STALLED_MS, "worker-1", OTHERS, state="D", asleep_ms=900)
    assert paged_ms >= 2 * STALLED_MS and not hung(story, "worker-1")
    assert any("worker-1 gives no sign of life" in why for why in story.core.reasons())


def test_pages_that_come_now_and_then_are_no_hang() -> None:
    """Between two pages it runs for a moment: what it slept before is not its own time."""
    story = running()
    story.silent.add("worker-1")
    for look in range(2 * HANG_MS // 100):
        state = "R" if look % 9 == 8 else "D"
        story.wait(100).feed(Inspected("worker-1", 1, state, 0, 0))
    assert not hung(story, "worker-1")


def test_health_names_a_rank_in_the_kernel_soon() -> None:
    story = running()
    let_wait(story, 1800, "worker-1", OTHERS, state="D")
    (told,) = story.core.reasons()
    assert told.startswith("worker-1 gives no sign of life for 1") and told.endswith("state D")


def test_health_names_a_starved_rank_before_it_is_given_up() -> None:
    story = running()
    let_wait(story, 6_000, "worker-1", OTHERS, state="R", starved=1)
    assert any("worker-1 gives no sign of life" in why for why in story.core.reasons())
    assert not hung(story, "worker-1")


def test_a_rank_that_lives_and_does_not_come_is_lost() -> None:
    """It beats, so it is not silent; and it may be any of its kind: an epoch entered in vain, a lost vote."""
    story = running()
    story.silent = {"worker-0", "worker-2"}
    for _ in range(BUSY_SILENCE_MS // 100 + 5):
        for name in story.silent:
            story.feed(Observed(name, 1, story.now_ns, 5, ProcessPhase.WAITING, 0b010))
        story.wait(100)
    assert hung(story, "worker-1") and not any(hung(story, name) for name in OTHERS)
    assert "its peers have waited for it" in story.core.processes["worker-1"].detail


def test_of_a_circle_one_is_lost() -> None:
    story = running()
    story.silent = {"worker-0", "worker-1", "worker-2"}
    for _ in range(BUSY_SILENCE_MS // 100 + 5):
        for seat, name in enumerate(sorted(story.silent)):
            awaits = 0b111 & ~(1 << seat)
            story.feed(Observed(name, 1, story.now_ns, 5, ProcessPhase.WAITING, awaits))
        story.wait(100)
        story.acks(stop=3)
    assert sum(hung(story, f"worker-{seat}") for seat in range(3)) == 1


def test_a_rank_that_compiles_may_keep_its_peers_waiting() -> None:
    story = running()
    story.silent = {"worker-0", "worker-1", "worker-2"}
    since_ns = story.now_ns
    for _ in range(600):
        story.feed(Observed("worker-1", 1, since_ns, 5, ProcessPhase.COMPILING))
        for name in OTHERS:
            story.feed(Observed(name, 1, story.now_ns, 5, ProcessPhase.WAITING, 0b010))
        story.wait(100).feed(Inspected("worker-1", 1, "R", 0))
    assert not any(hung(story, f"worker-{seat}") for seat in range(3))


def compile_during_stop(story: Story, ms: int) -> None:
    story.dies("worker-1").acks(stop=3, seats=(0,))
    story.silent.add("worker-2")
    since_ns = story.now_ns
    while story.now_ns - since_ns < ms * MS:
        story.feed(Observed("worker-2", 1, since_ns, 5, ProcessPhase.COMPILING))
        story.wait(100).feed(Inspected("worker-2", 1, "R", 0))


def test_a_survivor_that_compiles_answers_stop_when_it_is_done() -> None:
    story = running()
    compile_during_stop(story, 5 * STOP_ACK_MS)
    assert not hung(story, "worker-2")
    story.feed(Observed("worker-2", 1, story.now_ns, 6, ProcessPhase.BUSY)).wait(STOP_ACK_MS // 2)
    story.acks(stop=3, seats=(2,)).acks(go=4, seats=(0, 2))
    assert story.epoch == 4 and not hung(story, "worker-2")


def test_a_survivor_that_compiles_for_ever_or_does_not_answer_afterwards_is_lost() -> None:
    story = running()
    compile_during_stop(story, GO_ACK_MS + 3 * STOP_ACK_MS)
    assert hung(story, "worker-2") and not hung(story, "worker-0")
    story = running()
    compile_during_stop(story, 3 * STOP_ACK_MS)
    story.feed(Observed("worker-2", 1, story.now_ns, 6, ProcessPhase.BUSY)).wait(600)
    story.feed(Inspected("worker-2", 1, "S", 0)).wait(STOP_ACK_MS)
    assert hung(story, "worker-2") and not hung(story, "worker-0")


def test_a_survivor_that_loads_many_experts_is_waited_for() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0,))
    story.silent.add("worker-2")
    for expert in range(4 * GO_ACK_MS // 1000):
        story.feed(Observed("worker-2", 1, story.now_ns, expert, ProcessPhase.LOADING)).wait(1000)
    assert not hung(story, "worker-2") and story.epoch == 3
    story.silent.clear()  # it lives, and does nothing more
    story.wait(1000).feed(Inspected("worker-2", 1, "S", 0, 0)).wait(GO_ACK_MS - 2000)
    assert not hung(story, "worker-2")
    story.wait(2000)
    assert hung(story, "worker-2")


def spin(story: Story, name: str, ms: int, share: int = 1) -> None:
    """It computes and gives no sign of life; of the wall time it gets one part in so many."""
    story.silent.add(name)
    since_ns = story.now_ns
    end_ns = since_ns + ms * MS
    while story.now_ns < end_ns:
        waited_ns = (story.now_ns - since_ns) * (share - 1) // share
        story.wait(100).feed(Inspected(name, 1, "R", waited_ns))


def test_a_spinning_service_is_named_within_about_a_second_and_killed_later() -> None:
    story = running()
    spin(story, "scheduler-1", 1200)
    assert any("scheduler-1 gives no sign of life" in why for why in story.core.reasons())
    assert not hung(story, "scheduler-1")
    spin(story, "scheduler-1", SPIN_MS - 2000)
    assert not hung(story, "scheduler-1")
    spin(story, "scheduler-1", 2000)
    assert hung(story, "scheduler-1")


def test_what_counts_of_a_busy_service_is_its_cpu_time() -> None:
    """Eight times as many processes as CPUs: half a second of work takes four."""
    story = running()
    spin(story, "scheduler-1", 4000, share=8)
    assert story.core.reasons() == []
    story = running()
    spin(story, "scheduler-1", 20_000, share=8)
    assert not hung(story, "scheduler-1")


def test_a_plan_may_take_long() -> None:
    """Of the expert placement: nobody waits for it."""
    story = running()
    spin(story, "eplb", SPIN_MS - 500)
    assert story.core.reasons() == []
    spin(story, "eplb", 20_000 - SPIN_MS)
    assert not hung(story, "eplb")
    spin(story, "eplb", BUSY_SILENCE_MS - 19_000)
    assert hung(story, "eplb")


# ---------------------------------------------------------------- real processes


@pytest.fixture
def node() -> Iterator[TestNode]:
    # The names of a node's sockets must fit into 107 bytes, and `tmp_path` holds the test's.
    with tempfile.TemporaryDirectory(prefix="ph") as path:
        made = TestNode(Path(path) / f"wait{os.getpid()}-{time.monotonic_ns() % 10**9}")
        yield made
        if (pipe := made.run_dir / "never").exists():  # its reader was left behind
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        made.stop()


@pytest.mark.process
def test_the_rank_that_the_kernel_keeps_is_replaced_and_its_peers_are_not(node: TestNode) -> None:
    """worker-1 sleeps in state D in the middle of a step, the others wait for it in the group's own wait."""
    node.behave("worker-1", "kernel")
    node.behave("worker-0", "step with worker-1")
    node.behave("worker-2", "step with worker-1")
    node.start()
    until(lambda: node.status().epoch >= 2, 60)
    before = {p.name: p.pid for p in node.status().processes}
    told: list[str] = []

    def replaced() -> bool:
        status = node.status()
        told.append(next(p.detail for p in status.processes if p.name == "supervisor"))
        return any(p.name == "worker-1" and p.incarnation == 2 for p in status.processes)

    (node.run_dir / "behave" / "worker-1").write_text("")  # its successor is well
    until(replaced, 2 * (STALLED_MS + limits.KILL_GRACE_MS) / 1000, 0.05)
    node.wait_healthy(60)
    now = {p.name: p.pid for p in node.status().processes}
    assert {name for name in now if now[name] != before[name]} == {"worker-1"}
    assert any("worker-1 gives no sign of life" in reasons for reasons in told)
    (record,) = (r for r in node.status().epochs if "worker-1 hung" in r.cause)
    assert "state D, and its peers wait for it" in record.cause


@pytest.mark.process
def test_a_paused_node_goes_on(node: TestNode) -> None:
    """A paused container: every process stops for longer than any of them may be silent."""
    node.behave("worker-0", "step with worker-1")
    node.start()
    until(lambda: node.status().epoch >= 2, 60)
    assert node.supervisor is not None
    before = {p.name: p.pid for p in node.status().processes}
    pids = [node.supervisor.pid, *node.children()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * HANG_MS / 1000)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)
    assert {p.name: p.pid for p in node.status().processes} == before
