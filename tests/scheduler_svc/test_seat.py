"""The rings of a seat: one link for each worker incarnation, and no word of another worker is believed."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.protocol.arena import names
from phalanx.protocol.board import Board
from phalanx.protocol.steps import Link, StepResult
from phalanx.protocol.topology import Seat
from phalanx.scheduler_svc.seat import SeatLink
from sim.hash_worker import HashWorker

RESULT = StepResult(1, aborted=True)


@pytest.fixture
def board() -> Iterator[Board]:
    node = f"seat{uuid.uuid4().hex[:8]}"
    made = Board.create(node)
    yield made
    for name in names(node):
        Path("/dev/shm", name).unlink()


@pytest.fixture
def link(board: Board) -> Iterator[SeatLink]:
    made = SeatLink(board.seats[4], node_of(board), 4, 3)
    yield made
    made.close()


def node_of(board: Board) -> str:
    return board.arena.name.split("-")[1]


def worker_end(board: Board) -> Link:
    seat = board.seats[4]
    return Link.attach(node_of(board), 4, seat.link, seat)


def hello(incarnation: int) -> object:
    return HashWorker(incarnation, 4, 2).hello()


def seat(incarnation: int, state: str = "member") -> Seat:
    return Seat(4, incarnation, 3, state)  # type: ignore[arg-type]


def test_a_hello_waits_for_the_topology(board: Board, link: SeatLink) -> None:
    assert board.seats[4].link == (3 << 32) | 1
    worker = worker_end(board)
    worker.send_result(HashWorker(1, 4, 2).hello())
    assert link.receive() == [] and link.expects_hello
    assert link.follow(seat(1)) is False
    assert link.receive() == [hello(1)] and not link.expects_hello
    worker.send_result(RESULT)
    assert link.receive() == [RESULT]
    worker.close()


def test_results_before_a_hello_are_of_a_stranger(board: Board, link: SeatLink) -> None:
    link.follow(seat(2))
    worker = worker_end(board)
    worker.send_result(RESULT)
    assert link.receive() == []
    worker.send_result(HashWorker(3, 4, 2).hello())  # of one that the topology does not name yet
    worker.send_result(RESULT)
    assert link.receive() == []
    worker.send_result(HashWorker(2, 4, 2).hello())
    assert link.receive() == [hello(2)]
    worker.close()


def test_a_link_that_a_dead_worker_took_is_replaced(board: Board, link: SeatLink) -> None:
    """A worker that finds a link taken leaves it alone, so there must be another one for it."""
    worker = worker_end(board)
    assert not worker.taken
    worker.send_result(HashWorker(1, 4, 2).hello())
    assert worker_end(board).taken
    link.follow(seat(2, "loading"))  # the first topology that we see is of its successor
    assert link.receive() == [] and link.expects_hello
    assert board.seats[4].link == (3 << 32) | 2
    successor = worker_end(board)
    assert not successor.taken
    successor.send_result(HashWorker(2, 4, 2).hello())
    assert link.receive() == [hello(2)]
    worker.close()
    successor.close()


def test_another_incarnation_gets_another_link(board: Board, link: SeatLink) -> None:
    link.follow(seat(1))
    worker = worker_end(board)
    worker.send_result(HashWorker(1, 4, 2).hello())
    assert len(link.receive()) == 1
    heard = board.seats[4].bell.value
    assert link.follow(seat(2, "loading")) is True
    assert board.seats[4].link == (3 << 32) | 2 and board.seats[4].bell.value != heard
    worker.send_result(RESULT)  # the old worker's last word
    assert link.receive() == [] and link.expects_hello
    worker.close()
    assert [name for name in names(node_of(board)) if "link4" in name] == [
        f"ph-{node_of(board)}-link4-3.2"
    ]


@pytest.mark.parametrize("state", ["lost", "absent"])
def test_a_lost_worker_is_said_once(board: Board, link: SeatLink, state: str) -> None:
    link.follow(seat(1))
    assert link.follow(seat(1, state)) is True
    assert link.follow(seat(1, state)) is False
    worker = worker_end(board)
    worker.send_result(HashWorker(1, 4, 2).hello())
    assert link.receive() == []
    worker.close()


@pytest.mark.parametrize("state", ["loading", "joining", "member"])
def test_one_that_was_to_leave_and_stays_says_hello_again(
    board: Board, link: SeatLink, state: str
) -> None:
    """It is given up once it is absent; and it says hello once on a link."""
    link.follow(seat(1))
    worker = worker_end(board)
    worker.send_result(HashWorker(1, 4, 2).hello())
    assert link.receive() == [hello(1)]
    link.follow(seat(1, "absent"))
    link.follow(seat(1, state))
    assert link.expects_hello and board.seats[4].link == (3 << 32) | 2
    worker.send_result(RESULT)
    assert link.receive() == []
    again = worker_end(board)
    again.send_result(HashWorker(1, 4, 2).hello())
    assert link.receive() == [hello(1)]
    assert link.follow(seat(1)) is False and not link.expects_hello
    worker.close()
    again.close()
