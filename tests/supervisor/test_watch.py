"""A death shows by its mark, long before the pipe closes; and by the pipe of one that died too early to have a mark."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.protocol.board import Board, ProcessPhase
from phalanx.supervisor.events import PipeClosed
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
