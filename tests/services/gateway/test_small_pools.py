"""Ranks whose KV pools are too small for what was accepted before they joined."""

from array import array

import pytest
from gateway_desk import T0, Desk

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    Abort,
    Accepted,
    Attach,
    Error,
    Final,
    Generate,
    Hello,
    Refusal,
    Sampling,
    SeatLoad,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway.entries import Entry, Placed, Produced, Recovered
from phalanx.services.gateway.placement import HELD_UP_MAX


def ints(*ids: int) -> bytes:
    return array("i", ids).tobytes()


R = "r" * 32
LARGE = Entry(R, ints(5), Sampling(seed=1, max_tokens=300), 1, True, "k", b"", "tiny", "f1")
SMALL = Seat(1, 1, 1, "member")


def test_one_that_fits_only_a_busy_rank_does_not_hold_up_the_others() -> None:
    """Ranks that joined later have smaller pools than what was accepted before."""
    desk = Desk(seats=1, capacity=1)
    large = [desk.start(Sampling(max_tokens=300)) for _ in range(3)]
    assert [submit.request_id for _, submit in desk.submits()] == large[:1]
    desk.core.on_topology(Topology(4, (*desk.topology.seats, Seat(1, 1, 1, "member"))), desk.now)
    desk.says(b"scheduler-1#1", Hello("scheduler-1", "scheduler", 1, 1))
    desk.says(b"scheduler-1#1", SeatLoad(1, 1, True, total_blocks=1, worker_incarnation=1))
    small = desk.start(Sampling(max_tokens=9))
    assert [(p, s.request_id) for p, s in desk.submits()] == [(b"scheduler-1#1", small)]
    desk.asks(Abort(9, large[0]))
    assert [(p, s.request_id) for p, s in desk.submits()] == [(b"scheduler-0#1", large[1])]


def test_one_that_fits_only_the_rank_that_fell_waits_for_it() -> None:
    """The smaller one would refuse it, which would be its end."""
    desk = Desk(seats=1)
    large = desk.start(Sampling(max_tokens=300))
    ((peer, submit),) = desk.submits()
    desk.produces(peer, submit, 0, 8, 9)
    seats = (*desk.topology.seats, Seat(1, 1, 1, "member"))
    desk.core.on_topology(Topology(4, seats), desk.now)
    desk.scheduler(1)
    desk.says(b"scheduler-1#1", SeatLoad(1, 1, True, total_blocks=1, worker_incarnation=1))
    desk.core.on_topology(Topology(6, (Seat(0, 1, 1, "lost"), seats[1])), desk.now)
    desk.passes(5_000)
    assert not desk.submits()
    desk.core.on_topology(Topology(8, (Seat(0, 2, 1, "member"), seats[1])), desk.now)
    desk.says(b"scheduler-0#1", SeatLoad(0, 1, True, total_blocks=4, worker_incarnation=2))
    ((peer, submit),) = desk.submits()
    assert (peer, submit.request_id) == (b"scheduler-0#1", large)
    assert submit.outputs == ints(8, 9)


def test_many_that_fit_only_the_rank_that_fell_hold_up_nobody() -> None:
    """More than are looked at in a turn."""
    many = HELD_UP_MAX + 6
    desk = Desk(seats=1, capacity=many)
    large = [desk.start(Sampling(max_tokens=300)) for _ in range(many)]
    assert len(desk.submits()) == many
    desk.core.on_topology(Topology(4, (Seat(0, 1, 1, "lost"), SMALL), b"", "f1"), desk.now)
    small(desk)
    arrival = desk.start(Sampling(max_tokens=9))
    assert [(p, s.request_id) for p, s in desk.submits()] == [(b"scheduler-1#1", arrival)]
    seats = (Seat(0, 2, 1, "member"), SMALL)
    desk.core.on_topology(Topology(6, seats, b"", "f1"), desk.now)
    desk.says(b"scheduler-0#1", SeatLoad(0, 1, True, total_blocks=4, worker_incarnation=2))
    desk.passes(200)
    assert {s.request_id for p, s in desk.submits() if p == b"scheduler-0#1"} == {*large}


def test_the_pool_of_the_smallest_rank_bounds_a_request() -> None:
    desk = Desk()
    desk.says(b"scheduler-1#1", SeatLoad(1, 1, True, total_blocks=2, worker_incarnation=1))
    desk.asks(Generate(1, prompt_token_ids=(5,) * 10, sampling=Sampling(max_tokens=247)))
    (error,) = desk.told()
    assert isinstance(error, Error) and "257" in error.message and "256" in error.message
    desk.asks(Generate(2, prompt_token_ids=(5,) * 10, sampling=Sampling(max_tokens=246)))
    assert isinstance(desk.told()[0], Accepted)


def restarted(*seats: Seat) -> Desk:
    """A gateway that begins with the rank gone that had a stream, and of which it knows nothing else."""
    log = (Produced(R, 0, 0, ints(8, 9)),)
    desk = Desk(Recovered(LARGE, produced=log, placed={0: Placed(R, 0, 0, 1, 1)}), seats=0)
    desk.core.on_topology(Topology(6, seats, b"", "f1"), desk.now)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    return desk


def small(desk: Desk) -> None:
    desk.says(b"scheduler-1#1", Hello("scheduler-1", "scheduler", 1, 1))
    desk.says(b"scheduler-1#1", SeatLoad(1, 1, True, total_blocks=1, worker_incarnation=1))


def test_it_waits_though_the_gateway_fell_with_the_rank() -> None:
    """Nobody has told the new one how large the pool was."""
    desk = restarted(Seat(0, 1, 1, "lost"), SMALL)
    small(desk)
    desk.passes(10_000)
    assert not desk.submits()
    desk.core.on_topology(Topology(8, (Seat(0, 2, 1, "member"), SMALL), b"", "f1"), desk.now)
    desk.passes(1_000)
    assert not desk.submits(), "it has not said a word yet"
    desk.says(b"scheduler-0#1", Hello("scheduler-0", "scheduler", 1, 0))
    desk.says(b"scheduler-0#1", SeatLoad(0, 1, True, total_blocks=4, worker_incarnation=2))
    ((peer, submit),) = desk.submits()
    assert (peer, submit.request_id, submit.outputs) == (b"scheduler-0#1", R, ints(8, 9))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "gone",
    [
        Seat(0, 2, 1, "joining", kept_out=True),
        Seat(0, 2, 1, "lost", kept_out=True),
        Seat(0, 0, 0, "absent"),
    ],
)
def test_it_ends_with_the_numbers_when_the_rank_does_not_come_back(gone: Seat, known: bool) -> None:
    """It is kept out of the group, its numerics are others, or it was scaled away."""
    desk = restarted(Seat(0, 1, 1, "lost"), SMALL)
    if known:
        desk.says(b"scheduler-0#1", Hello("scheduler-0", "scheduler", 1, 0))
        desk.says(b"scheduler-0#1", SeatLoad(0, 1, False, total_blocks=4, worker_incarnation=1))
    small(desk)
    desk.asks(Attach(1, R, (2,)))
    desk.passes(10_000)
    assert not desk.submits()
    desk.core.on_topology(Topology(8, (gone, SMALL), b"", "f1"), desk.now)
    desk.passes(100)
    ((peer, submit),) = desk.submits()
    assert peer == b"scheduler-1#1"
    why = "need 3 KV blocks, the pool has 1"
    desk.says(peer, Refusal(submit.call, Code.BAD_REQUEST, why))
    final = desk.told()[-1]
    assert isinstance(final, Final) and (final.offset, final.error) == (2, why)
