"""The supervisor over real processes (trivial children): deaths are noticed within milliseconds, nothing
outlives its node, and every way to end leaves nothing behind."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from lateness import Lateness
from supervisor.node import TestNode, pids_of, until

from phalanx.protocol import arena
from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import load_config, node_name
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import HANG_MS, MAX_SEATS
from phalanx.protocol.messages import (
    Error,
    ExpertFinding,
    ExpertReport,
    ExpertsScrubbed,
    FromSupervisor,
    Ready,
    Restart,
    Restarted,
    Scale,
    Scaled,
    Shutdown,
)
from phalanx.protocol.rundir import is_running
from phalanx.supervisor.lock import FAILED_FILE, holders
from phalanx.supervisor.main import TICK_MS
from phalanx.supervisor.watch import LOOK_MS

pytestmark = pytest.mark.process


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The names of a node's sockets must fit into 107 bytes, and `tmp_path` holds the test's."""
    with tempfile.TemporaryDirectory(prefix="ph") as path:
        yield Path(path)


@pytest.fixture
def node(short_path: Path) -> Iterator[TestNode]:
    made = TestNode(short_path / f"sup{os.getpid()}-{time.monotonic_ns() % 10**9}")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    """A node that several tests hurt and none ends."""
    made = TestNode(tmp_path_factory.mktemp("live") / f"sup{os.getpid()}-live")
    made.start()
    yield made
    made.stop()


def wait_end(node: TestNode, timeout_s: float = 20) -> int:
    assert node.supervisor is not None
    return node.supervisor.wait(timeout_s)


def assert_nothing_left(node: TestNode) -> None:
    assert arena.names(node_name(node.run_dir)) == []
    assert node.children() == []
    assert list(node.run_dir.glob("*.sock")) == []
    assert not is_running(node.run_dir)


@contextlib.contextmanager
def holding(run_dir: Path) -> Iterator[int]:
    """A process that was left over by a killed supervisor; its pid."""
    run_dir.mkdir(exist_ok=True)
    holder = subprocess.Popen(
        ["flock", str(run_dir), "sleep", "60"], stdin=subprocess.DEVNULL, process_group=0
    )
    try:
        until(lambda: holders(run_dir))
        yield holder.pid
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()


def test_start_and_stop_leave_nothing(node: TestNode) -> None:
    node.start()
    status = node.wait_healthy()
    assert status.ready_s > 0 and status.epoch == 2
    assert {p.state for p in status.processes} == {"ready"}
    assert {(p.process, p.name) for p in status.phases} >= {("worker-0", "load")}
    forked = {p.name for p in status.processes if was_forked(p.pid)}
    assert forked == {"worker-0", "worker-1", "worker-2"}, "what they import is imported once"
    node.socket.send(encode(Shutdown(2, 1.0)))  # `ask` says it again and again
    assert node.shut_down().left == ()
    assert wait_end(node) == ExitCode.OK
    assert not node.socket.poll(100), "it is answered once"
    assert_nothing_left(node)


@pytest.mark.timed
def test_death_is_noticed_within_milliseconds(living: TestNode) -> None:
    living.wait_healthy()
    board = living.board()
    with Lateness() as lateness:
        noticed_ms = [_notice(living, board, f"worker-{round_ % 3}") for round_ in range(6)]
    board.close()
    # A look at the ticks alone would take 50 ms at the median, on a machine without load.
    assert median(noticed_ms) < lateness.bound_ms(LOOK_MS), noticed_ms
    assert [r.cause for r in living.status().epochs[-2:]] == ["worker-2 died", "worker-2 joined"]


def _notice(living: TestNode, board: Board, name: str) -> float:
    """Milliseconds from the death of a worker to the odd epoch; waits until the node is whole again."""
    victim, epoch = living.process(name), board.epoch
    killed_ns = time.perf_counter_ns()
    os.kill(victim.pid, signal.SIGKILL)
    while board.epoch == epoch:
        assert time.perf_counter_ns() - killed_ns < 5e9, "never noticed"
        time.sleep(0.0005)
    noticed_ms = (time.perf_counter_ns() - killed_ns) / 1e6
    until(lambda: victim.pid not in [p.pid for p in living.status().processes])
    living.wait_healthy()
    return noticed_ms


def test_no_zombie_is_left(living: TestNode) -> None:
    living.wait_healthy()
    for name in ("tokenizer-0", "scheduler-1", "worker-1"):
        victim = living.process(name)
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda pid=victim.pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
        living.wait_healthy()
        replacement = living.process(name)
        assert replacement.incarnation == victim.incarnation + 1
        assert replacement.restarts == victim.restarts + 1


@pytest.mark.soak  # a hole among the supervisor's descriptors is room for one
def test_room_for_a_process_is_waited_for(living: TestNode) -> None:
    """The node serves on with who is there: what the machine lacks is no fault of who cannot start."""
    living.wait_healthy()
    victim, supervisor = living.process("worker-1"), living.supervisor_pid
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    few = len(list(Path(f"/proc/{supervisor}/fd").iterdir())) - 2
    told: list[str] = []

    def tried_twice() -> bool:
        told.append(living.process("supervisor").detail)
        return re.search(r"tried ([2-9]|\d\d) times", told[-1]) is not None

    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        os.kill(victim.pid, signal.SIGKILL)
        until(tried_twice)
        lacks = (
            f"Too many open files; the supervisor may have {few} files open (ulimit -n), and has"
        )
        assert f"worker-1 is down: no room for another process: {lacks} (tried" in told[-1]
    finally:
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
    living.wait_healthy()
    assert living.process("worker-1").incarnation > victim.incarnation + 1


def test_a_stopped_worker_is_replaced(living: TestNode) -> None:
    living.wait_healthy()
    victim = living.process("worker-1")
    os.kill(victim.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    told: list[str] = []

    def replaced() -> bool:
        status = living.status()
        told.append(next(p.detail for p in status.processes if p.name == "supervisor"))
        return any(
            p.name == "worker-1" and p.incarnation > victim.incarnation for p in status.processes
        )

    with Lateness() as lateness:
        until(replaced, 20, 0.02)
    assert any("worker-1 gives no sign of life for" in reasons for reasons in told)
    assert HANG_MS / 1000 - 0.5 < time.monotonic() - stopped
    living.wait_healthy()
    assert living.process("worker-1").incarnation == victim.incarnation + 1
    record = next(r for r in living.status().epochs if "hung" in r.cause)
    assert "state T" in record.cause
    assert HANG_MS <= record.detected_ms < HANG_MS + lateness.bound_ms(TICK_MS)


def test_a_worker_that_does_not_answer_stop_is_lost_too(node: TestNode) -> None:
    node.behave("worker-2", "deaf")
    node.start()
    node.wait_healthy()
    (node.run_dir / "behave" / "worker-2").write_text("")  # its replacement is well
    os.kill(node.process("worker-0").pid, signal.SIGKILL)
    until(lambda: any(p.incarnation == 2 for p in node.status().processes))
    node.wait_healthy()
    causes = "; ".join(r.cause for r in node.status().epochs)
    # The replacement of worker-0 may be ready before the patience with worker-2 ends.
    assert causes.index("worker-0 died") < causes.index("worker-2 did not acknowledge STOP")


def test_scale_and_restart_real_processes(node: TestNode) -> None:
    node.start()
    before = {p.name: p.pid for p in node.wait_healthy(90).processes}
    down = node.ask(Scale(3, 1, 60.0), 90)
    assert isinstance(down, Scaled) and (down.before, down.seats) == (3, (0,))
    status = node.status()
    assert status.healthy and [rank.slot for rank in status.ranks] == [0]
    assert {p.name: p.pid for p in status.processes}.items() <= before.items()
    assert load_config(node.run_dir).ranks == 1, "who starts from now on reads it"

    node.behave("worker-3", "stop")
    failed = node.ask(Scale(4, 4, 2.0), 60)
    assert isinstance(failed, Error) and "worker-3" in failed.message  # late, or found hung
    assert node.wait_healthy(90).change == "" and load_config(node.run_dir).ranks == 1
    node.behave("worker-3", "crash")
    failed = node.ask(Scale(5, 4, 60.0), 90)
    assert isinstance(failed, Error) and "planted crash" in failed.message
    node.behave("worker-3", "")
    up = node.ask(Scale(6, 4, 60.0), 90)
    assert isinstance(up, Scaled) and up.seats == (0, 1, 2, 3)
    assert [rank.state for rank in node.status().ranks] == ["member"] * 4

    replaced = node.ask(Restart(7, ("all",), 240.0), 260)
    assert isinstance(replaced, Restarted) and len(replaced.restarted) == 12
    status = node.wait_healthy(90)
    now = {p.name: p.pid for p in status.processes}
    assert not {now[name] for name in now if name != "supervisor"} & set(before.values())
    # Once more, where the one that was stopped was found to hang before its scale was over.
    tried_again = {p.name: p.restarts for p in status.processes if p.restarts}
    assert tried_again in ({"worker-3": 2}, {"worker-3": 3}), "what crashed while it started"
    assert node.shut_down().left == ()
    wait_end(node)
    assert_nothing_left(node)


def standby_of(node: TestNode, name: str) -> int:
    """The pid of the process that forks successors of this one; 0: none."""
    for pid in sorted(node.children()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"{name}-next":
                return pid
    return 0


def wait_standby(node: TestNode, name: str, beside: int = 0) -> int:
    """The pid of one that is ready, and another one than `beside`."""
    log = node.run_dir / "logs" / "supervisor.log"

    def ready() -> bool:
        # Its start, and that it is ready, are told in this order.
        told = [
            e
            for e in map(json.loads, log.read_text().splitlines())
            if e["event"] == "standby ready"
        ]
        return sum(e["about"] == f"{name}-next" for e in told) > before

    before = 0
    if beside:
        told = log.read_text().splitlines()
        before = sum("standby ready" in line and f"{name}-next" in line for line in told)
        os.kill(beside, signal.SIGKILL)
    until(ready, 60)
    return standby_of(node, name)


def was_forked(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has just died
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        # What it shows in the end is shorter than what the process that forked it was started with.
        return b"--standby" in words or words[-2:] == [b"", b""]
    return False


def test_a_standby_that_dies_is_replaced_and_nobody_counts_it(living: TestNode) -> None:
    living.wait_healthy()
    restarts = {p.name: p.restarts for p in living.status().processes}
    first = wait_standby(living, "gateway")
    second = wait_standby(living, "gateway", beside=first)
    assert second not in (0, first)
    status = living.status()
    assert status.healthy and {p.name: p.restarts for p in status.processes} == restarts
    assert "another one follows in 3 s" in (living.run_dir / "logs" / "supervisor.log").read_text()


def test_deaths_that_follow_each_other_at_once_all_find_a_successor(living: TestNode) -> None:
    """Of two ranks, of one rank twice, and of the gateway twice."""
    living.wait_healthy()
    standbys = [wait_standby(living, name) for name in ("worker", "gateway")]
    for name in ("worker-1", "worker-0", "worker-1", "gateway", "gateway"):
        before = living.process(name)
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: living.process(name).pid not in (0, before.pid))  # noqa: B023
        after = living.process(name)
        assert after.incarnation == before.incarnation + 1
        assert was_forked(after.pid) and after.pid not in standbys
        until(lambda: Path(f"/proc/{after.pid}/comm").read_text().strip() == name)  # noqa: B023
    status = living.wait_healthy()
    assert {p.name: p.state for p in status.processes}["worker-1"] == "ready"
    assert standbys == [standby_of(living, name) for name in ("worker", "gateway")]


def test_a_fork_dies_with_the_supervisor_even_when_it_is_stopped(node: TestNode) -> None:
    node.ranks = 2
    node.start()
    node.wait_healthy()
    wait_standby(node, "worker")
    os.kill(node.process("worker-1").pid, signal.SIGKILL)
    until(lambda: was_forked(node.process("worker-1").pid))
    node.wait_healthy()
    os.kill(node.process("worker-1").pid, signal.SIGSTOP)
    os.kill(node.supervisor_pid, signal.SIGKILL)
    wait_end(node)
    until(lambda: not node.children(), 2)


def test_what_a_dead_process_leaves_behind_is_reaped(node: TestNode) -> None:
    """The supervisor adopts orphans, so nobody else would."""
    node.ranks = 2
    node.behave("worker-1", "outlive")
    node.start()
    node.wait_healthy()
    node.behave("worker-1", "")
    worker = node.process("worker-1").pid
    (orphan,) = map(int, Path(f"/proc/{worker}/task/{worker}/children").read_text().split())
    os.kill(worker, signal.SIGKILL)
    status = Path(f"/proc/{orphan}/status")
    until(lambda: int(status.read_text().split("PPid:")[1].split()[0]) == node.supervisor_pid)
    node.wait_healthy()
    os.kill(orphan, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{orphan}").exists())
    assert node.status().healthy


def test_a_restart_that_is_said_again_does_not_keep_successors_away(living: TestNode) -> None:
    living.wait_healthy()
    until(lambda: standby_of(living, "gateway"))
    before = standby_of(living, "gateway")
    refused = living.ask(Restart(20, ("nobody",), 5.0))
    assert isinstance(refused, Error) and standby_of(living, "gateway") == before
    living.behave("worker-2", "slow")
    repeated = time.monotonic() + 7
    seen: set[int] = set()
    while time.monotonic() < repeated or not seen - {0, before}:
        assert time.monotonic() < repeated + 60, "no successor"
        living.socket.send(encode(Restart(21, ("worker-2",), 60.0)))
        seen.add(standby_of(living, "gateway"))
        time.sleep(0.4)
    living.behave("worker-2", "")
    assert len(seen - {0, before}) == 1, "one renewal, and it is there while the restart lasts"
    answers: list[FromSupervisor] = []
    while living.socket.poll(2000 if answers else 60_000):
        answers.append(Decoder[FromSupervisor](FromSupervisor).decode(living.socket.recv()))
    assert {type(answer) for answer in answers} == {Restarted}


def test_a_configuration_that_somebody_breaks_costs_no_later_start(living: TestNode) -> None:
    config = living.run_dir / "config.json"
    living.wait_healthy()
    right = config.read_text()
    config.write_text(right.replace('"ranks"', '"ranks": "many", "x"'))
    os.kill(living.process("worker-0").pid, signal.SIGKILL)
    until(lambda: config.read_text() == right)
    living.wait_healthy()


def test_bad_input_ends_the_node_and_says_why(node: TestNode) -> None:
    node.ranks = 1
    node.behave("kvstore", "bad input")
    node.start()
    assert wait_end(node) == ExitCode.BAD_INPUT
    failure = (node.run_dir / FAILED_FILE).read_text()
    assert "kvstore: exit code 2 BAD_INPUT" in failure
    assert "the directory /nowhere does not exist" in failure
    assert_nothing_left(node)


def token_log(node: TestNode) -> Path:
    """One that the gateway of this node has left, or of the one before it."""
    path = arena.SHM / arena.arena_name(node_name(node.run_dir), arena.TOKENS, 1)
    path.write_bytes(b"tokens")
    return path


def logged_left(node: TestNode) -> list[str]:
    lines = (node.run_dir / "logs" / "supervisor.log").read_text().splitlines()
    stopped = [entry for entry in map(json.loads, lines) if entry["event"] == "stopped"]
    left = stopped[-1]["left"]
    assert isinstance(left, list)
    return left


def test_the_token_log_of_a_node_that_failed_is_the_next_ones(node: TestNode) -> None:
    """What ran there goes on from it; a stop in good order leaves none."""
    kept, node.ranks = token_log(node), 1
    node.behave("kvstore", "bad input")
    node.start()
    assert wait_end(node, 60) == ExitCode.BAD_INPUT
    assert kept.read_bytes() == b"tokens" and logged_left(node) == []
    node.behave("kvstore", "")
    node.start()
    node.wait_healthy()
    assert node.shut_down().left == (f"{kept.name} (swept)",)
    assert wait_end(node) == ExitCode.OK
    assert_nothing_left(node)


def test_a_node_that_cannot_write_why_it_ends_ends_as_it_should(node: TestNode) -> None:
    """On a full disk, say: it has its exit code all the same, and leaves nothing."""
    node.ranks = 1
    node.behave("kvstore", "bad input")
    node.start()
    until(node.children)
    (node.run_dir / FAILED_FILE).mkdir()
    assert wait_end(node, 60) == ExitCode.BAD_INPUT
    assert_nothing_left(node)


@pytest.mark.slow  # the delays between the restarts add up to 11 s
def test_a_process_that_keeps_crashing_ends_the_node(node: TestNode) -> None:
    node.ranks = 1
    node.behave("tokenizer-0", "crash")
    node.start()
    until(lambda: node.process("scheduler-0").state == "ready")
    assert wait_end(node, 90) == ExitCode.GAVE_UP
    failure = (node.run_dir / FAILED_FILE).read_text()
    assert "tokenizer-0 died 9 times" in failure and "planted crash" in failure
    assert_nothing_left(node)


def test_who_ignores_term_is_killed_and_reported(node: TestNode) -> None:
    node.ranks = 1
    node.behave("eplb", "ignore TERM")
    node.start()
    node.wait_healthy()
    kept = token_log(node)
    assert node.shut_down().left == ("eplb (killed)",)
    assert wait_end(node) == ExitCode.OK
    kept.unlink()  # who was killed may have been the gateway, and somebody's stream go on from it
    assert_nothing_left(node)


def test_a_supervisor_whose_disk_hangs_sees_deaths_and_heals(node: TestNode) -> None:
    """Its log takes nothing: a pipe that nobody reads."""
    node.ranks = 2
    (node.run_dir / "logs").mkdir(parents=True)
    os.mkfifo(node.run_dir / "logs" / "supervisor.log")
    node.start()
    node.wait_healthy()
    before = node.process("worker-1").pid
    os.kill(before, signal.SIGKILL)
    until(lambda: node.process("worker-1").pid != before)
    node.wait_healthy()
    assert node.shut_down().left == ()
    assert wait_end(node) == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_graceful_stop(node: TestNode, number: signal.Signals) -> None:
    node.ranks = 1
    node.start()
    node.wait_healthy()
    os.kill(node.supervisor_pid, number)
    assert wait_end(node) == ExitCode.OK
    assert_nothing_left(node)


def test_the_second_interrupt_stops_at_once(node: TestNode) -> None:
    node.ranks = 1
    node.behave("gateway", "ignore TERM")
    node.start()
    node.wait_healthy()
    os.kill(node.supervisor_pid, signal.SIGINT)
    until(lambda: node.process("supervisor").state == "draining")
    os.kill(node.supervisor_pid, signal.SIGINT)
    asked = time.monotonic()
    wait_end(node)
    assert time.monotonic() - asked < 3, "the drain would have taken 10 s"
    assert_nothing_left(node)


def test_children_of_a_killed_supervisor_are_gone_within_two_seconds(node: TestNode) -> None:
    node.start()
    node.wait_healthy()
    assert len(node.children()) >= 10
    os.kill(node.supervisor_pid, signal.SIGKILL)
    wait_end(node)
    until(lambda: not node.children(), 2)
    assert arena.names(node_name(node.run_dir)), "the sweep below has something to do"

    node.start()
    node.wait_healthy()
    assert node.shut_down().left == ()
    wait_end(node)
    assert_nothing_left(node)


def test_children_die_with_the_supervisor_even_while_they_import(node: TestNode) -> None:
    node.environment = {"NODE_CHILD_SLOW_START": "30"}
    node.start()
    until(lambda: len(node.children()) >= 8)  # one of them imports for the workers
    os.kill(node.supervisor_pid, signal.SIGKILL)
    wait_end(node)
    until(lambda: not node.children(), 2)


def test_start_right_after_the_kill_of_everything(node: TestNode) -> None:
    node.ranks = 1
    node.start()
    node.wait_healthy()
    for _ in range(2):
        os.kill(node.supervisor_pid, signal.SIGKILL)
        wait_end(node)
        node.start()
        node.wait_healthy()


def test_start_fails_clearly_when_something_of_the_old_node_stays(node: TestNode) -> None:
    node.ranks = 1
    node.environment = {"NODE_OLD_MS": "1200"}
    with holding(node.run_dir) as holder:
        node.start()
        assert wait_end(node) == ExitCode.UNHEALTHY
    assert "processes of an earlier node (pids " in node.said() and str(holder) in node.said()
    assert "are still there after 1.2 s" in node.said()


def test_a_start_waits_for_an_old_process_as_long_as_the_kernel_may_take(node: TestNode) -> None:
    """One with tens of GiB on a GPU takes seconds from its SIGKILL to its end. Files may be tidied meanwhile."""
    node.ranks = 2
    node.behave("worker-1", "outlive")
    node.start()
    node.wait_healthy()
    node.behave("worker-1", "")
    os.kill(node.supervisor_pid, signal.SIGKILL)
    wait_end(node)
    until(lambda: len(node.children()) == 1)
    (late,) = node.children()
    try:
        assert holders(node.run_dir) == [late]
        for path in node.run_dir.iterdir():
            if path.is_file():
                path.unlink()
        node.start()
        time.sleep(4)
        until(lambda: f"waiting for processes of an earlier node (pids {late}) in" in node.said())
        assert node.supervisor is not None and node.supervisor.poll() is None, node.said()
    finally:
        os.kill(late, signal.SIGKILL)
    node.wait_healthy()


def test_a_second_start_is_refused_and_harms_nothing(living: TestNode) -> None:
    epoch = living.wait_healthy().epoch
    second = TestNode(living.run_dir)
    second.start()
    assert wait_end(second) == ExitCode.UNHEALTHY
    second.close()
    assert f"a node is already running in {living.run_dir}" in living.said()
    assert f"supervisor pid {living.supervisor_pid}" in living.said()
    assert living.wait_healthy().epoch == epoch


def test_two_nodes_live_beside_each_other(node: TestNode, short_path: Path) -> None:
    node.ranks = 1
    other = TestNode(short_path / f"{node.run_dir.name}-b", ranks=1)
    try:
        node.start()
        other.start()
        node.wait_healthy()
        other.wait_healthy()
        node.shut_down()
        wait_end(node)
        assert other.wait_healthy().epoch == 2
        assert len(pids_of(other.run_dir)) >= 7
    finally:
        other.stop()


def test_a_node_lives_beside_one_of_the_same_name_elsewhere(
    living: TestNode, short_path: Path
) -> None:
    living.wait_healthy()
    twin = TestNode(short_path / living.run_dir.name, ranks=1)
    try:
        twin.start()
        twin.wait_healthy()
        twin.shut_down()
        wait_end(twin)
        assert_nothing_left(twin)
    finally:
        twin.stop()
    assert living.status().healthy


def test_shared_memory_that_somebody_uses_refuses_the_start(node: TestNode) -> None:
    node.ranks = 1
    with arena.Arena.create(arena.arena_name(node_name(node.run_dir), "kv0", 1), 4096):
        node.start()
        assert wait_end(node) == ExitCode.UNHEALTHY
    assert "choose another --run-dir" in node.said()
    assert "another --run-dir" in (node.run_dir / FAILED_FILE).read_text()


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1.0, 1e9])
def test_nonsense_from_outside_is_answered(living: TestNode, timeout_s: float) -> None:
    living.wait_healthy()
    reply = living.ask(Shutdown(9, timeout_s))
    assert isinstance(reply, Error) and reply.call == 9 and "allowed: 0 to" in reply.message
    living.socket.send(b"\xff not a message")
    reply = Decoder[FromSupervisor](FromSupervisor).decode(living.socket.recv())
    assert isinstance(reply, Error) and reply.code == "bad_request"
    assert living.status().healthy


@pytest.mark.parametrize("incarnation", [-1, 99, 2**63 - 1])
def test_who_was_never_started_is_not_ready(living: TestNode, incarnation: int) -> None:
    """Nor does it keep the one that runs from being heard, or the node from going on."""
    living.wait_healthy()
    living.socket.send(encode(Ready("worker-1", incarnation)))
    finding = ExpertFinding((0, MAX_SEATS), (1, 1), 3, 5)
    living.socket.send(encode(ExpertReport(0, 1, ExpertsScrubbed(1, 1, (finding,)))))
    assert living.status().healthy
    board, victim = living.board(), living.process("worker-1")
    heard = [row.ready_heard for row in board.processes]
    board.close()
    assert incarnation not in heard and victim.incarnation in heard


@pytest.mark.timed
def test_idle_costs_next_to_nothing(living: TestNode) -> None:
    living.wait_healthy()
    stat = Path(f"/proc/{living.supervisor_pid}/schedstat")
    shares = []
    for _ in range(8):  # whatever else the machine does costs caches and clock: the best counts
        started, used_ns = time.monotonic(), int(stat.read_text().split()[0])
        time.sleep(1)
        used_ns = int(stat.read_text().split()[0]) - used_ns
        shares.append(used_ns / 1e9 / (time.monotonic() - started))
    # 0.3% on a fast machine, 1.3% on the slowest seen.
    assert min(shares) < 0.025, f"{min(shares):.2%} of a core"
