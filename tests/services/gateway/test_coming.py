"""What waits for a group that forms is shared out, though its ranks say one after another that they take sequences."""

from array import array
from collections import Counter

import pytest
from gateway_desk import MS, T0, Desk

from phalanx.protocol.messages import Final, Hello, Sampling, SeatLoad, SequenceList, Usage
from phalanx.protocol.topology import Seat, SeatState, Topology
from phalanx.services.gateway.entries import Entry, Recovered, taken_over
from phalanx.services.gateway.placement import COMES_NS

RANKS = 3


def recovered(number: int) -> Recovered:
    ids, sampling = array("i", [5]).tobytes(), Sampling(seed=1, max_tokens=9)
    return Recovered(Entry(f"{number:032x}", ids, sampling, 1, True, "", b"", "tiny", "f1"))


def seats(state: SeatState, ranks: int = RANKS) -> tuple[Seat, ...]:
    return tuple(Seat(seat, 1, 1, state) for seat in range(ranks))


def started(count: int, told: bool = False) -> Desk:
    """A node that starts with so many requests of its journal. Of a group that forms nothing is `told` before it is
    there; of one that had stopped it is."""
    desk = Desk(*(recovered(number) for number in range(count)), seats=0, capacity=64)
    if told:
        desk.core.on_topology(Topology(0, seats("loading"), b"", ""), desk.now)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    for seat in range(RANKS):
        peer = b"scheduler-%d#1" % seat
        desk.says(peer, Hello(peer.decode()[:-2], "scheduler", 1, seat))
        call = next(m.call for p, m in reversed(desk.bus) if p == peer and hasattr(m, "call"))
        desk.says(peer, SequenceList(call, seat, 1, ()))
        desk.says(peer, SeatLoad(seat, 1, False))
    desk.passes(5_000)
    assert not desk.submits()
    desk.core.on_topology(Topology(2, seats("member"), b"", "f1"), desk.now)
    desk.turn()
    return desk


def takes(desk: Desk, seat: int) -> int:
    """The rank says that it does; how many it is given."""
    peer = b"scheduler-%d#1" % seat
    room = {"total_blocks": 99, "free_blocks": 99, "room_blocks": 99, "room_sequences": 99}
    desk.says(peer, SeatLoad(seat, 1, True, worker_incarnation=1, **room))
    given = Counter(to for to, _ in desk.submits())
    assert not given or set(given) == {peer}
    return given[peer]


@pytest.mark.parametrize("count", [1, 2, 12, 13])
@pytest.mark.parametrize("told", [False, True])
def test_each_rank_has_its_share_whoever_is_first(count: int, told: bool) -> None:
    desk = started(count, told)
    given = []
    for seat in (1, 0, 2):
        given.append(takes(desk, seat))
        desk.passes(100)
    assert sum(given) == count and max(given) <= -(-count // RANKS), given


def test_a_rank_that_does_not_come_is_not_waited_for_long() -> None:
    desk = started(12)
    assert (takes(desk, 0), takes(desk, 1)) == (4, 4)
    desk.passes(COMES_NS // MS - 100)
    assert not desk.submits()
    desk.passes(100)  # and who has not answered is told again
    given = Counter({submit.request_id: to for to, submit in desk.submits()}.values())
    assert given == {b"scheduler-0#1": 6, b"scheduler-1#1": 6}


def test_what_runs_has_its_rank_when_another_one_joins() -> None:
    """New ones wait a moment for the rank with none, and no moment longer than until it takes them."""
    desk = Desk(seats=1, capacity=64)
    for _ in range(4):
        desk.start()
    assert len(desk.submits()) == 4
    desk.core.on_topology(Topology(4, (*seats("member", 1), Seat(1, 1, 1, "loading"))), desk.now)
    desk.start()
    assert len(desk.submits()) == 1, "it may take long"
    desk.core.on_topology(Topology(6, seats("member", 2)), desk.now)
    desk.start()
    assert not desk.submits()
    desk.scheduler(1)
    assert [to for to, _ in desk.submits()] == [b"scheduler-1#1"]


def test_a_gateway_that_finds_the_group_running_waits_for_nobody() -> None:
    """Not for a rank whose scheduler fell with the gateway before it."""
    desk = Desk(*(recovered(number) for number in range(4)), seats=0)
    desk.core.on_topology(Topology(2, seats("member", 2), b"", "f1"), desk.now)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    desk.scheduler(0)
    desk.passes(3_000)
    assert len(desk.submits()) == 4


def test_the_history_tells_those_that_are_open_from_those_that_had_ended() -> None:
    """After a clean stop all have ended: a word of so many requests taken over would frighten people."""
    final = Final(f"{2:032x}", 0, 9, "length", Usage(1, 9, 0))
    ended = Recovered(recovered(2).entry, {0: final})
    assert taken_over([]) == ""
    assert taken_over([recovered(1)]) == "1 request taken over from the journal"
    told = "0 requests taken over from the journal, 2 that had ended"
    assert taken_over([ended, ended]) == told
    both = "1 request taken over from the journal, 1 that had ended"
    assert taken_over([recovered(1), ended]) == both
