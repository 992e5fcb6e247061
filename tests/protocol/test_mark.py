"""The kernel writes the holder's death into the mark, however the holder ends, and only then."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from phalanx.protocol.board import Board

HOLD = """
import os, sys, threading, time
from phalanx.protocol.board import Board
board = Board.attach(sys.argv[1])
held = board.processes[3].mark.hold()
threading.Thread(target=time.sleep, args=(1,)).start()
print(held, flush=True)
sys.stdin.readline()
os._exit(7)
"""


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(f"test{uuid.uuid4().hex[:8]}")
    yield board
    board.close()


def hold(board: Board) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-c", HOLD, board.arena.name.split("-")[1]]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"True\n"
    return holder


def end(holder: "subprocess.Popen[bytes]") -> None:
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.close()
    holder.stdout.close()
    holder.wait()


@pytest.mark.parametrize("how", ["killed", "exit", "killed while stopped"])
def test_it_shows_every_end_and_no_life(board: Board, how: str) -> None:
    row = board.processes[3]
    assert not row.mark.holder_died
    holder = hold(board)
    if how == "killed while stopped":
        os.kill(holder.pid, signal.SIGSTOP)
    assert not row.mark.holder_died
    if how != "exit":
        holder.kill()
        deadline = time.monotonic() + 10
        while not row.mark.holder_died:
            assert time.monotonic() < deadline
    end(holder)
    assert row.mark.holder_died
    assert not board.processes[2].mark.holder_died and not board.processes[4].mark.holder_died


def test_the_next_incarnation_begins_without_it(board: Board) -> None:
    for _ in range(2):
        board.processes[3].clear()
        assert not board.processes[3].mark.holder_died
        holder = hold(board)
        holder.kill()
        end(holder)
        assert board.processes[3].mark.holder_died
