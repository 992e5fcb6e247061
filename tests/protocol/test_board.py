"""The board's words do not overlap, and a topology is read whole or not at all."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from phalanx.protocol.board import Board, ProcessPhase, Vote
from phalanx.protocol.errors import ArenaError
from phalanx.protocol.limits import MAX_PROCESSES, MAX_SEATS, TOPOLOGY_BYTES_MAX
from phalanx.protocol.topology import Proposal, Seat, Topology


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(f"test{uuid.uuid4().hex[:8]}")
    yield board
    board.close()


def test_every_word_is_its_own(board: Board) -> None:
    """Write a different value everywhere, then read all back."""
    board.set_epoch(77, [])
    for n, seat in enumerate(board.seats):
        seat.post(1000 + n, 1999 + n, Vote.PLAN, 2999 + n)
        seat.post(1000 + n, 2000 + n, Vote.WANTS_PROMPT, 3000 + n)
        seat.stop_ack, seat.go_ack, seat.worker_incarnation = 4000 + n, 5000 + n, 6000 + n
        seat.steps_run, seat.link = 7000 + n, (8000 + n) << 32 | n
        seat.bell.value, seat.scheduler_bell.value = 9000 + n, 10000 + n
        seat.placement_ready, seat.placement_run = 12000 + n, 13000 + n
        seat.placement_slots, seat.placement_copied = 14000 + n, 15000 + n
        seat.doubt(16000 + n, n)
    for n, row in enumerate(board.processes):
        row.beat(11000 + n)
        row.phase = ProcessPhase(n % 6)
        row.advance()
    board.publish(Topology(2, (Seat(0, 1, 1, "member"),)))
    board.propose(Proposal(2, b"experts"))

    assert board.topology() == Topology(2, (Seat(0, 1, 1, "member"),))
    assert board.proposal() == Proposal(2, b"experts")
    assert board.epoch == 77 and MAX_SEATS == len(board.seats)
    for n, seat in enumerate(board.seats):
        assert seat.posted == (1000 + n, 2000 + n)
        assert seat.vote(2000 + n) == (Vote.WANTS_PROMPT, 3000 + n)
        assert seat.vote(1999 + n) == (Vote.PLAN, 2999 + n)  # of the round before, still there
        assert (seat.stop_ack, seat.go_ack, seat.worker_incarnation) == (
            4000 + n,
            5000 + n,
            6000 + n,
        )
        assert (seat.steps_run, seat.link) == (7000 + n, (8000 + n) << 32 | n)
        assert (seat.bell.value, seat.scheduler_bell.value) == (9000 + n, 10000 + n)
        assert (seat.placement_ready, seat.placement_run) == (12000 + n, 13000 + n)
        assert (seat.placement_slots, seat.placement_copied) == (14000 + n, 15000 + n)
        assert seat.doubted == (16000 + n, n)
    for n, row in enumerate(board.processes):
        assert (row.beat_ns, row.phase, row.progress) == (11000 + n, ProcessPhase(n % 6), 1)
    assert len(board.processes) == MAX_PROCESSES
    board.processes[3].clear()
    assert board.processes[3].beat_ns == 0 and board.processes[4].beat_ns == 11004


def test_a_step_of_an_old_epoch_is_never_paired_with_the_new_one(board: Board) -> None:
    """(epoch, step) compare as one number: a large old step is below the first new one."""
    board.seats[0].post(4, 1_000_000, Vote.PLAN, 1)
    assert board.seats[0].posted < (6, 1)


def propose(board: Board, epoch: int, placement: bytes) -> None:
    board.propose(Proposal(epoch, placement))


def publish(board: Board, epoch: int, placement: bytes) -> None:
    board.publish(Topology(epoch, (), placement))


@pytest.mark.parametrize(
    ("write", "read"), [(publish, Board.topology), (propose, Board.proposal)], ids=["topology", "proposal"]
)  # fmt: skip
def test_it_is_read_whole_while_it_is_rewritten(
    board: Board,
    write: Callable[[Board, int, bytes], None],
    read: Callable[[Board], Topology | Proposal | None],
) -> None:
    assert read(board) is None
    stop = threading.Event()

    def reader(wrong: list[object]) -> None:
        other = Board.attach(board.arena.name.split("-")[1])
        while not stop.is_set():
            found = read(other)
            if found is not None and len(found.placement) != 100 * found.epoch:
                wrong.append(found)
        other.close()

    wrong: list[object] = []
    write(board, 2, bytes(200))
    thread = threading.Thread(target=reader, args=(wrong,))
    thread.start()
    for epoch in range(4, 2000, 2):
        write(board, epoch, bytes(100 * epoch))
    stop.set()
    thread.join()
    assert wrong == []
    last = read(board)
    assert last is not None and (last.epoch, last.placement) == (1998, bytes(199_800))


class _StandsStill(Exception):
    pass


def stands_still(write: Callable[[], None], step: int) -> bool:
    """The writer gets so far, by lines of `write`, and no further. Whether it had so far to go."""
    steps, traced = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal steps
        if frame.f_code.co_qualname != "_Published.write":
            return None
        steps += event == "line"
        if steps == step:
            raise _StandsStill
        return trace

    sys.settrace(trace)
    try:
        write()
    except _StandsStill:
        return True
    finally:
        sys.settrace(traced)
    return False


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_writer_that_stands_still_in_the_middle_keeps_nobody_from_what_was_whole(
    board: Board, written: int
) -> None:
    for epoch in range(written):
        publish(board, epoch, bytes(100 * epoch))
    found, step = board.topology(), 1
    while stands_still(lambda: publish(board, 9, b"n" * 900), step):
        assert board.topology() == found and board.topology_version == written
        step += 1
    assert step > 4, "nowhere did it stand still"
    assert board.topology() == Topology(9, (), b"n" * 900)


def test_a_proposal_is_withdrawn_and_another_one_made(board: Board) -> None:
    """Each is noticed by one word; the topology beside it stays what it is."""
    board.publish(Topology(2, (), b"runs"))
    assert board.proposal() is None and board.proposal_version == 0
    seen = [board.proposal_version]
    for placement in (b"one", b"", b"two", b"three"):
        if placement:
            board.propose(Proposal(2, placement))
        else:
            board.withdraw()
        assert board.proposal() == (Proposal(2, placement) if placement else None)
        assert board.proposal_version not in seen
        seen.append(board.proposal_version)
    assert board.topology() == Topology(2, (), b"runs") and board.topology_version == 1


def test_what_is_too_large_leaves_what_was_there(board: Board) -> None:
    board.propose(Proposal(2, b"fits"))
    with pytest.raises(ArenaError, match=f"the board has {TOPOLOGY_BYTES_MAX}"):
        board.propose(Proposal(2, bytes(TOPOLOGY_BYTES_MAX)))
    assert board.proposal() == Proposal(2, b"fits")


def test_set_epoch_wakes_the_worker(board: Board) -> None:
    bell = board.seats[2].bell
    heard, woken = bell.value, threading.Event()

    def sleeper() -> None:
        while board.epoch == 0:
            bell.wait(heard, 10_000)
        woken.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    board.set_epoch(1, [2])
    assert woken.wait(5)
    thread.join()
