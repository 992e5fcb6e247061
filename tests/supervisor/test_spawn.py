"""What one child is given, what it leaves behind in words, and what the kernel says of a silent one."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor.node import until

from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor.forks import FORK_NS
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.spawn import Child, Spawner, last_words


def child(run_dir: Path, out_start: int = 0) -> Child:
    (run_dir / LOG_DIR).mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    spec = ProcessSpec("worker-0", "worker", "m", 0, threads=3)
    return Child(spec, 2, process, -1, -1, run_dir / LOG_DIR / "worker-0.out", out_start)


def log(run_dir: Path, *entries: dict[str, object]) -> None:
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (run_dir / LOG_DIR / "worker-0.log").write_text('{"cut line\n' + lines)


def test_last_words_are_the_logged_error_of_that_incarnation(tmp_path: Path) -> None:
    dead = child(tmp_path)
    log(
        tmp_path,
        {"incarnation": 1, "level": "error", "event": "crashed", "error": "of another life"},
        {"incarnation": 2, "level": "error", "event": "cannot run as configured", "error": "why"},
        {"incarnation": 2, "level": "info", "event": "later"},
    )
    assert last_words(tmp_path, dead) == "cannot run as configured: why"


def test_of_a_crash_they_are_the_exception(tmp_path: Path) -> None:
    dead = child(tmp_path)
    trace = "Traceback (most recent call last):\n  File x\nValueError: wrong shape"
    log(tmp_path, {"incarnation": 2, "level": "error", "event": "crashed", "exception": trace})
    assert last_words(tmp_path, dead) == "crashed: ValueError: wrong shape"


def test_without_a_log_they_are_its_own_last_line_of_output(tmp_path: Path) -> None:
    dead = child(tmp_path, out_start=len("of another life\n"))
    dead.out.write_text("of another life\n")
    assert last_words(tmp_path, dead) == ""
    with dead.out.open("a") as out:
        out.write("ImportError: no module named x\n\n")
    assert last_words(tmp_path, dead) == "ImportError: no module named x"


def test_libraries_get_the_configured_threads() -> None:
    environment = ProcessSpec("worker-0", "worker", "m", 0, threads=3).environment()
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PYTHONSAFEPATH"] == "1"


def test_a_stopped_process_shows_as_stopped() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        until(lambda: (Looks(process.pid).inspect(0) or "?")[0] == "S")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: (Looks(process.pid).inspect(0) or "?")[0] == "T")
    finally:
        process.kill()
        process.wait()
    assert Looks(process.pid).inspect(0) is None


def test_waiting_for_a_cpu_shows_as_waiting() -> None:
    """Two busy processes pinned to one CPU: each waits about half of the time."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        until(lambda: all((Looks(p.pid).inspect(0) or ("", 0, 0))[1] > 200_000_000 for p in busy))
        assert all((Looks(p.pid).inspect(0) or "?")[0] == "R" for p in busy)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_process_in_the_kernel_shows_for_how_long(tmp_path: Path) -> None:
    """`posix_spawn` sleeps in state D until its child has opened its files: here one that nobody writes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(pipe)!r}, 0, 0)])"
    process = subprocess.Popen([sys.executable, "-c", code])
    looks = Looks(process.pid)
    until(lambda: (looks.inspect(0) or "?")[0] == "D")
    state, _, asleep_ns = looks.inspect(700) or ("", 0, 0)
    assert (state, asleep_ns) == ("D", 700)
    pipe.open("w").close()
    assert process.wait(20) == 0


def test_a_child_starts_without_a_place_for_its_output(tmp_path: Path) -> None:
    """A deleted folder of logs is made anew; where none can be, the child lives all the same."""
    with (tmp_path / "lock").open("w") as lock:
        spawner = Spawner(tmp_path, lock.fileno())
        spec = ProcessSpec("worker-0", "worker", "this", 0, threads=1)  # prints some lines
        first = spawner.spawn(spec, 1)
        assert first is not None
        assert first.process.wait(timeout=60) == 0
        assert "Zen" in first.out.read_text()
        first.out.unlink()
        (tmp_path / LOG_DIR).rmdir()
        (tmp_path / LOG_DIR).write_text("in the way")
        second = spawner.spawn(spec, 2)
        assert second is not None and second.process.wait(timeout=60) == 0
        spawner.close()


def test_what_a_thread_has_waited_remains_when_it_ends(tmp_path: Path) -> None:
    """The sum fell, and a process that got no CPU seemed to have had one for as long."""
    task = tmp_path / "7" / "task"
    for thread, state, waited_ns in ((7, "S", 40), (8, "S", 4000), (9, "R", 300)):
        (task / str(thread)).mkdir(parents=True)
        (task / str(thread) / "stat").write_text(f"{thread} (x) {state} 1")
        (task / str(thread) / "schedstat").write_text(f"9 {waited_ns} 1")
    looks, sums = Looks(7, tmp_path), list[int]()
    for now_ns, ends in ((1000, ""), (2000, "8"), (3000, "9"), (4000, "")):
        if ends:
            shutil.rmtree(task / ends)
        sums.append((looks.inspect(now_ns) or ("", 0, 0))[1])
    assert sums == [4340, 5340, 5340, 5340]


def test_a_wait_that_is_not_over_counts(tmp_path: Path) -> None:
    """The kernel counts it afterwards: one long wait looked like a hang."""

    def kernel(thread: int, state: str, ran_ns: int, waited_ns: int) -> None:
        task = tmp_path / "7" / "task" / str(thread)
        task.mkdir(parents=True, exist_ok=True)
        (task / "stat").write_text(f"{thread} (a ) b) {state} 1 7 7")
        (task / "schedstat").write_text(f"{ran_ns} {waited_ns} 5\n")

    looks = Looks(7, tmp_path)
    kernel(7, "R", 1000, 40)
    assert looks.inspect(100_000) == ("R", 40, 0)
    assert looks.inspect(600_000) == ("R", 500_040, 0)
    kernel(8, "S", 5, 0)  # another thread sleeps, and that is no wait
    assert looks.inspect(900_000) == ("R", 800_040, 0)
    kernel(7, "R", 1000 + 3, 850_040)  # it ran a little: the wait is over, and counted
    assert looks.inspect(1_000_000) == ("R", 850_040, 0)
    assert looks.inspect(1_200_000) == ("R", 1_050_040, 0)
    kernel(7, "S", 2000, 1_060_040)  # it ran and went to sleep
    assert looks.inspect(1_300_000) == ("S", 1_060_040, 0)
    assert looks.inspect(1_900_000) == ("S", 1_060_040, 0)
    kernel(8, "D", 5, 0)  # a thread of its pool waits for a page
    assert looks.inspect(2_000_000) == ("D", 1_060_040, 0)
    assert looks.inspect(2_400_000) == ("D", 1_060_040, 400_000)
    kernel(8, "D", 6, 0)  # it came; now it waits for the next one
    assert looks.inspect(2_500_000) == ("D", 1_060_040, 0)
    assert Looks(9, tmp_path).inspect(0) is None


WAITER = """
import os, sys
from pathlib import Path
from phalanx.protocol.standby import await_turn

print("waits", flush=True)
death_fd = int(sys.argv[sys.argv.index("--death-fd") + 1])
turn, death_fd = await_turn(Path(sys.argv[sys.argv.index("--run-dir") + 1]), death_fd)
sockets = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
shown = Path("/proc/self/cmdline").read_text().replace("\\0", " ").strip()
print(shown, "<", death_fd, flush=True)
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in sockets]
print(turn.name, turn.incarnation, turn.index, turn.seat,
      os.getpgid(0) == os.getpid(), sum(link.startswith("socket:") for link in links),
      os.readlink("/proc/self/fd/0"), flush=True)
sys.exit(sys.stdin.read() != "" or turn.incarnation)
"""


@pytest.fixture
def spawner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawner]:
    """Its standbys say that they wait; its forks tell about themselves, and exit with their incarnation."""
    (tmp_path / "waiter.py").write_text(WAITER)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    with (tmp_path / "lock").open("w") as lock:
        made = Spawner(tmp_path, lock.fileno())
        yield made
        made.close()


WORKERS = [
    ProcessSpec(f"worker-{seat}", "worker", "waiter", seat, seat, standby="worker-next")
    for seat in range(2)
]


def waiting(spawner: Spawner) -> int:
    spawner.prepare(WORKERS[0])
    until(lambda: spawner.take_forked(0) == ([], []) and spawner.forks(WORKERS[1]), 60)
    return spawner._standbys["worker-next"].child.pid


def fork(spawner: Spawner, spec: ProcessSpec, incarnation: int) -> Child:
    assert spawner.spawn(spec, incarnation) is None, "it is not waited for"
    return wait_forked(spawner)


def wait_forked(spawner: Spawner) -> Child:
    found: list[Child] = []
    until(lambda: found.extend(spawner.take_forked(time.monotonic_ns())[0]) or found)
    (child,) = found
    return child


def test_a_standby_forks_whoever_needs_it_again_and_again(tmp_path: Path, spawner: Spawner) -> None:
    assert not spawner.forks(WORKERS[0])
    standby = waiting(spawner)
    assert spawner.ready_standbys() == ["worker-next"] and spawner.ready_standbys() == []
    for incarnation, spec in ((4, WORKERS[1]), (5, WORKERS[1]), (6, WORKERS[0])):
        child = fork(spawner, spec, incarnation)
        assert child.pid != standby
        assert (child.spec, child.incarnation) == (spec, incarnation)
        assert child.process.wait() == incarnation, "its own exit code, though another forked it"
        told = last_words(tmp_path, child).split()
        assert told[:4] == [spec.name, str(incarnation), str(spec.index), str(spec.seat)]
        assert told[4:] == ["True", "0", "/dev/null"], (
            "a group of its own, no line to the supervisor"
        )
        title = (tmp_path / LOG_DIR / f"{spec.name}.out").read_text().splitlines()[-2]
        shown, _, death_fd = title.partition(" < ")
        mine = f"--name {spec.name} --incarnation {incarnation} --index {spec.index}"
        assert f" {mine} --seat {spec.seat} --death-fd {death_fd} " in shown, "by `ps`"
        assert "--standby" not in shown
        assert os.read(child.death_fd, 1) == b"", "closed, though the process that forked it lives"
    assert spawner._standbys["worker-next"].child.pid == standby
    assert (tmp_path / LOG_DIR / "worker-next.out").read_text() == "waits\n"
    assert spawner.ended_standbys() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_to_start_does_so_when_the_standby_does_not_fork(
    spawner: Spawner, number: signal.Signals
) -> None:
    standby = waiting(spawner)
    os.kill(standby, signal.SIGSTOP)
    assert spawner.spawn(WORKERS[0], 5) is None and spawner.spawn(WORKERS[1], 8) is None
    os.kill(standby, number)
    now_ns = time.monotonic_ns()
    if number == signal.SIGSTOP:
        assert spawner.take_forked(now_ns) == ([], []), "it may only be late"
        now_ns += FORK_NS
    vain: list[tuple[str, int]] = []
    until(lambda: vain.extend(spawner.take_forked(now_ns)[1]) or vain)
    assert vain == [("worker-0", 5), ("worker-1", 8)]
    assert not spawner.forks(WORKERS[0]), "no fork any more"
    child = spawner.spawn(WORKERS[0], 5)
    assert child is not None, "it starts as ever"
    child.kill(signal.SIGKILL)
    child.process.wait()
    ended: list[tuple[str, int, str]] = []
    until(lambda: ended.extend(spawner.ended_standbys()) or ended)
    assert [(name, code) for name, code, _ in ended] == [("worker-next", -signal.SIGKILL)]
    assert waiting(spawner) != standby
    assert fork(spawner, WORKERS[0], 7).process.wait() == 7


def test_a_standby_that_a_signal_has_stopped_is_not_waited_for(spawner: Spawner) -> None:
    """Whoever was to start, and all streams with it, waited for ten seconds."""
    standby = waiting(spawner)
    os.kill(standby, signal.SIGSTOP)
    until(lambda: state_of(standby) == "T")
    assert spawner.spawn(WORKERS[0], 5) is None
    began_ns = time.monotonic_ns()
    assert spawner.take_forked(began_ns) == ([], []), "it may go on at once"
    vain: list[tuple[str, int]] = []
    until(lambda: vain.extend(spawner.take_forked(time.monotonic_ns())[1]) or vain)
    assert vain == [("worker-0", 5)] and time.monotonic_ns() - began_ns < FORK_NS / 2
    until(lambda: spawner.ended_standbys() or state_of(standby) == "")


def test_one_that_is_slow_is(spawner: Spawner) -> None:
    spawner.prepare(WORKERS[0])
    assert spawner.spawn(WORKERS[0], 6) is None
    assert spawner.take_forked(time.monotonic_ns() + FORK_NS // 2) == ([], []), "it still imports"
    assert wait_forked(spawner).process.wait() == 6


def test_a_fork_that_is_not_wanted_any_more_ends(spawner: Spawner) -> None:
    standby = waiting(spawner)
    assert spawner.spawn(WORKERS[0], 9) is None and spawner.spawn(WORKERS[1], 3) is None
    assert not spawner.cancel("worker-0", 8) and spawner.cancel("worker-0", 9)
    assert not spawner.cancel("worker-0", 9)
    child = wait_forked(spawner)
    assert (child.spec.name, child.process.wait()) == ("worker-1", 3)

    def children() -> list[int]:
        out = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return sorted(map(int, out.split()))

    until(lambda: spawner.reap_orphans([]) or children() == [standby])


def test_a_turn_that_comes_before_the_standby_is_ready_waits_for_it(spawner: Spawner) -> None:
    spawner.prepare(WORKERS[0])
    assert not spawner.forks(WORKERS[0])
    assert fork(spawner, WORKERS[0], 6).process.wait() == 6


def test_orders_of_a_standby_that_is_renewed_are_not_lost(spawner: Spawner) -> None:
    standby = waiting(spawner)
    os.kill(standby, signal.SIGSTOP)
    assert spawner.spawn(WORKERS[0], 5) is None and spawner.spawn(WORKERS[1], 5) is None
    spawner.renew_standbys(["worker-next"])
    spawner.drop_outdated("worker-next")
    assert spawner.cancel("worker-1", 5), "as before"
    assert spawner.take_forked(0) == ([], [("worker-0", 5)])


def renewed(spawner: Spawner) -> None:
    found: list[str] = []
    until(
        lambda: (
            spawner.take_forked(0) == ([], []) and (found.extend(spawner.ready_standbys()) or found)
        ),
        60,
    )
    assert found == ["worker-next"]


def test_the_old_one_forks_until_the_new_one_is_ready(spawner: Spawner) -> None:
    """Somebody may fall in those seconds: streams would wait for all its imports."""
    old = waiting(spawner)
    assert spawner.ready_standbys() == ["worker-next"]
    assert spawner.renew_standbys(["worker-next", "gateway-next"]) == {"worker-next"}
    assert spawner.forks(WORKERS[0]) and spawner.ready_standbys() == []
    spawner.prepare(WORKERS[0])
    assert fork(spawner, WORKERS[0], 5).process.wait() == 5
    assert spawner._standbys["worker-next"].child.pid == old
    renewed(spawner)
    assert spawner._standbys["worker-next"].child.pid != old
    until(lambda: spawner.ended_standbys() or not Path(f"/proc/{old}").exists())
    assert fork(spawner, WORKERS[1], 6).process.wait() == 6
    assert spawner.ended_standbys() == []


@pytest.mark.parametrize("prepared", [False, True])
def test_an_old_one_that_dies_has_a_successor_anyway(spawner: Spawner, prepared: bool) -> None:
    os.kill(old := waiting(spawner), signal.SIGSTOP)
    spawner.ready_standbys()
    spawner.renew_standbys(["worker-next"])
    if prepared:
        spawner.prepare(WORKERS[0])
    os.kill(old, signal.SIGKILL)
    until(lambda: spawner.ended_standbys() or not spawner._outdated)
    spawner.prepare(WORKERS[0])
    renewed(spawner)
    assert fork(spawner, WORKERS[0], 7).process.wait() == 7


def test_a_successor_that_dies_leaves_the_old_one(spawner: Spawner) -> None:
    old = waiting(spawner)
    spawner.ready_standbys()
    spawner.renew_standbys(["worker-next"])
    spawner.prepare(WORKERS[0])
    os.kill(spawner._next["worker-next"].child.pid, signal.SIGKILL)
    ended: list[tuple[str, int, str]] = []
    until(lambda: ended.extend(spawner.ended_standbys()) or ended)
    assert [(name, code) for name, code, _ in ended] == [("worker-next", -signal.SIGKILL)]
    assert spawner._standbys["worker-next"].child.pid == old
    assert fork(spawner, WORKERS[0], 8).process.wait() == 8
    spawner.prepare(WORKERS[0])
    renewed(spawner)


def test_what_is_asked_for_anew_is_not_forked_by_the_old_one(spawner: Spawner) -> None:
    old = waiting(spawner)
    spawner.ready_standbys()
    spawner.renew_standbys(["worker-next"])
    spawner.drop_outdated("worker-next")
    child = spawner.spawn(WORKERS[0], 4)
    assert child is not None, "it starts as ever"
    child.kill(signal.SIGKILL)
    child.process.wait()
    until(lambda: spawner.ended_standbys() or not Path(f"/proc/{old}").exists())


def test_only_a_process_of_one_thread_forks(tmp_path: Path) -> None:
    code = """
import threading
from pathlib import Path
from phalanx.protocol.standby import await_turn
threading.Thread(target=threading.Event().wait, daemon=True).start()
await_turn(Path())
"""
    run = [sys.executable, "-P", "-c", code]
    tried = subprocess.run(run, check=False, stderr=subprocess.PIPE, text=True, timeout=60)
    assert tried.returncode == 1 and "2 threads run in a process that is to fork" in tried.stderr


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawner]:
    """What it starts reads nothing and does not end."""

    def sleep(self: Spawner, *arguments: object) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sleep", "300"], stdin=subprocess.DEVNULL)

    monkeypatch.setattr(Spawner, "_popen", sleep)
    read, write = os.pipe()
    made = Spawner(tmp_path, read)
    yield made
    made.close()
    os.close(read)
    os.close(write)


def sleeper(standby: str = "") -> ProcessSpec:
    return ProcessSpec("kvstore", "kvstore", "m", 0, standby=standby)


def test_a_child_that_cannot_be_watched_is_not_left_running(
    sleeping: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is left for its pidfd: it would live untracked, beside the next incarnation."""
    pids: list[int] = []

    def no_more_files(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_more_files)
    before = open_files()
    with pytest.raises(OSError, match="Too many open files"):
        sleeping.spawn(sleeper(), 1)
    assert open_files() == before
    (pid,) = pids
    until(lambda: state_of(pid) in ("Z", ""))
    sleeping.ended_standbys()
    assert state_of(pid) == "", "reaped"


def test_who_got_the_pid_of_a_dead_process_is_left_alone(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    first = subprocess.Popen(sleep)
    pidfd = os.pidfd_open(first.pid)
    first.kill()
    first.wait()
    another = subprocess.Popen(sleep)
    try:  # as if the kernel had given it the same number, which a test cannot ask for
        found = Child(sleeper(), 1, another, -1, pidfd, tmp_path / "out", 0)
        found.kill(signal.SIGKILL)
        time.sleep(0.2)
        assert another.poll() is None
    finally:
        another.kill()
        another.wait()
        os.close(pidfd)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def test_a_standby_that_does_not_end_at_once_is_not_waited_for(
    sleeping: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps in the kernel: the supervisor would look at nothing else meanwhile."""
    sleeping.prepare(sleeper("kvstore-next"))
    (standby,) = sleeping._standbys.values()
    monkeypatch.setattr(
        standby.child.process, "kill", lambda: None
    )  # as long as the kernel keeps it
    before = time.monotonic()
    sleeping.renew_standbys(["kvstore-next"])
    sleeping.drop_outdated("kvstore-next")
    assert time.monotonic() - before < 1
    assert sleeping.ended_standbys() == [] and state_of(standby.child.pid) not in ("Z", "")
    os.kill(standby.child.pid, signal.SIGKILL)
    until(lambda: state_of(standby.child.pid) == "Z")
    sleeping.ended_standbys()
    assert state_of(standby.child.pid) == ""
