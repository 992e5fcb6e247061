"""A death shows by its mark, long before the pipe closes; and by the pipe of one that died too early to have a mark."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.protocol.board import Board, ProcessPhase
from phalanx.supervisor.events import PipeClosed
from phalanx.supervisor.forks import Forked, adopt_orphans
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.spawn import Child
from phalanx.supervisor.watch import Watch

HOLD = """
import sys
from phalanx.protocol.board import Board
board = Board.attach(sys.argv[1])
board.processes[5].mark.hold()
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(f"watch{os.getpid()}")
    yield board
    board.close()


def test_a_death_is_seen_although_the_pipe_stays_open(board: Board, tmp_path: Path) -> None:
    watch = Watch(f"ipc://{tmp_path}/s", board, 1 << 20)
    command = [sys.executable, "-P", "-c", HOLD, f"watch{os.getpid()}"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    read_end, write_end = os.pipe()
    spec = ProcessSpec("worker-0", "worker", "m", 5, seat=0)
    watch.add(Child(spec, 3, holder, read_end, os.pidfd_open(holder.pid), tmp_path / "out", 0))
    assert holder.stdout is not None and holder.stdout.readline()
    board.processes[5].phase = ProcessPhase.BUSY
    watch.observe()
    assert watch.wait(10) == ([], [], False)
    holder.kill()
    deaths, ended, _ = watch.wait(10_000)  # both may show at once, but not the end alone
    found = [(death.name, death.incarnation, death.by) for death in deaths]
    assert found == [("worker-0", 3, "death mark")]
    deadline = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < deadline
        deaths, ended, _ = watch.wait(100)
        assert not deaths, "it is told once"
    assert watch.remove(ended[0]) == -9
    os.close(write_end)
    watch.close()
    for pipe in (holder.stdin, holder.stdout):
        assert pipe is not None
        pipe.close()


def test_without_a_mark_the_pipe_tells(board: Board, tmp_path: Path) -> None:
    watch = Watch(f"ipc://{tmp_path}/s", board, 1 << 20)
    read_end, write_end = os.pipe()
    process = subprocess.Popen(["sleep", "60"], pass_fds=[write_end])
    os.close(write_end)
    spec = ProcessSpec("eplb", "eplb", "m", 5)
    watch.add(Child(spec, 1, process, read_end, os.pidfd_open(process.pid), tmp_path / "out", 0))
    assert watch.wait(10) == ([], [], False)
    process.kill()
    deaths: list[PipeClosed] = []
    ended: list[Child] = []
    while not (deaths and ended):
        more, gone, _ = watch.wait(10_000)
        deaths, ended = deaths + [*more], ended + gone
    assert [death.by for death in deaths] == ["death pipe"]
    assert watch.remove(ended[0]) == -9
    watch.close()


FORKS = """
import os, sys, time
if pid := os.fork():
    print(pid, flush=True)
    sys.stdin.readline()
else:
    time.sleep(600)
"""


def test_a_fork_that_is_not_ours_yet_holds_nobody_up(board: Board, tmp_path: Path) -> None:
    """Its parent should have ended, and is stopped or gets no CPU: the supervisor waited for it, then crashed."""
    watch = Watch(f"ipc://{tmp_path}/s", board, 1 << 20)
    assert adopt_orphans(True)
    command = [sys.executable, "-P", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as between:
        assert between.stdin is not None and between.stdout is not None
        fork = Forked(int(between.stdout.readline()))
        read_end, write_end = os.pipe()
        pidfd = os.pidfd_open(fork.pid)
        spec = ProcessSpec("worker-0", "worker", "m", 5, seat=0)
        watch.add(Child(spec, 2, fork, read_end, pidfd, tmp_path / "out", 0))
        os.kill(fork.pid, signal.SIGKILL)
        select.select([pidfd], [], [], 20)
        assert watch.wait(10) == ([], [], False)
        between.stdin.close()  # it ends
    deadline, ended = time.monotonic() + 20, list[Child]()
    while not ended:
        assert time.monotonic() < deadline
        _, ended, _ = watch.wait(10)
    assert watch.remove(ended[0]) == -9
    assert Forked(fork.pid).poll() == -9, "who is nowhere is not waited for"
    adopt_orphans(False)
    os.close(write_end)
    watch.close()
