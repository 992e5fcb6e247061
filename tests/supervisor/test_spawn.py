"""What one child is given, what it leaves behind in words, and what the kernel says of a silent one."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from supervisor.node import until

from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import LOG_DIR
from phalanx.protocol.service import Turn
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
        assert first.process.wait(timeout=60) == 0
        assert "Zen" in first.out.read_text()
        first.out.unlink()
        (tmp_path / LOG_DIR).rmdir()
        (tmp_path / LOG_DIR).write_text("in the way")
        assert spawner.spawn(spec, 2).process.wait(timeout=60) == 0
        spawner.close()


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


def test_a_standby_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes over at once, as whichever process needs it, if it has not died while it waited."""
    code = "import sys\nprint('waits', flush=True)\nprint(sys.stdin.read())\n"
    (tmp_path / "waiter.py").write_text(code)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    one, other = (
        ProcessSpec(f"worker-{seat}", "worker", "waiter", seat, seat, standby="worker-next")
        for seat in range(2)
    )
    out = tmp_path / LOG_DIR / "worker-next.out"

    def prepared() -> int:
        spawner.prepare(one)
        until(lambda: out.exists() and "waits\n" in out.read_text())
        os.truncate(out, 0)
        return spawner._standbys["worker-next"].pid

    with (tmp_path / "lock").open("w") as lock:
        spawner = Spawner(tmp_path, lock.fileno())
        waiting = prepared()
        child = spawner.spawn(other, 4)
        assert (child.pid, child.spec, child.incarnation) == (waiting, other, 4)
        assert child.process.wait(timeout=60) == 0
        assert msgspec.json.decode(out.read_text(), type=Turn) == Turn("worker-1", 4, 1, 1)
        assert (
            child.out == tmp_path / LOG_DIR / "worker-1.out"
        )  # where `Turn`'s reader writes from then on

        waiting = prepared()
        os.kill(waiting, signal.SIGKILL)
        os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
        child = spawner.spawn(one, 5)
        assert child.pid != waiting and not Path(f"/proc/{waiting}").exists()
        assert child.process.wait(timeout=60) == 0 and last_words(tmp_path, child) == "waits"

        waiting = prepared()
        spawner.close()
        assert not Path(f"/proc/{waiting}").exists()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def spawner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawner]:
    """What it starts reads nothing and does not end."""

    def sleep(self: Spawner, *arguments: object) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sleep", "300"], stdin=subprocess.PIPE)

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
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is left for its pidfd: it would live untracked, beside the next incarnation."""
    pids: list[int] = []

    def no_more_files(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_more_files)
    before = open_files()
    with pytest.raises(OSError, match="Too many open files"):
        spawner.spawn(sleeper(), 1)
    assert open_files() == before
    (pid,) = pids
    until(lambda: state_of(pid) in ("Z", ""))
    spawner.ended_standbys()
    assert state_of(pid) == "", "reaped"


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def test_a_standby_that_does_not_end_at_once_is_not_waited_for(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps in the kernel: the supervisor would look at nothing else meanwhile."""
    spawner.prepare(sleeper("kvstore-next"))
    (standby,) = spawner._standbys.values()
    monkeypatch.setattr(standby.process, "kill", lambda: None)  # as long as the kernel keeps it
    before = time.monotonic()
    spawner.forget_standbys()
    assert time.monotonic() - before < 1
    assert spawner.ended_standbys() == [] and state_of(standby.pid) not in ("Z", "")
    os.kill(standby.pid, signal.SIGKILL)
    until(lambda: state_of(standby.pid) == "Z")
    spawner.ended_standbys()
    assert state_of(standby.pid) == ""
