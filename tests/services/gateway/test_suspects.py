"""A request over which its rank falls ends alone, with an error; who was beside it goes on."""

from array import array
from dataclasses import replace

from gateway_desk import MS, Desk

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import RESTART_WINDOW_MS, RESTARTS_MAX
from phalanx.protocol.messages import Final, Sampling, SeatLoad, SequenceInfo, Submit
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway.entries import Entry, Fell, Op, Placed, Recovered
from phalanx.services.gateway.streams import SUSPECT_FALLS
from phalanx.services.gateway.suspects import FALLS_MAX


def fells(desk: Desk, poison: str, limit: int = 50) -> list[set[str]]:
    """One rank, which falls whenever the poison is there, before anybody has a new token; else everybody gets
    one. Returns who was there at each fall, until nobody is placed any more."""
    falls: list[set[str]] = []
    there: dict[str, tuple[bytes, Submit]] = {}
    counts: dict[str, int] = {}
    for _ in range(limit):
        desk.passes(1000)
        there |= {submit.request_id: (seat, submit) for seat, submit in desk.submits()}
        if poison in there:
            falls.append(set(there))
            there = {}
            desk.scheduler(0, incarnation=len(falls) + 1)
            continue
        for name, (seat, submit) in there.items():
            count = counts[name] = counts.get(name, len(submit.outputs) // 4) + 1
            desk.produces(seat, submit, count - 1, 10, seq=count)
    return falls


def test_the_innocent_beside_a_poison_request_go_on_and_it_alone_is_given_up() -> None:
    """Nobody has a token between the falls: only apart can anyone show that it is not the cause."""
    desk = Desk(seats=1)
    good = [desk.start(Sampling(max_tokens=200)) for _ in range(3)]
    poison = desk.start(Sampling(max_tokens=200))
    good += [desk.start(Sampling(max_tokens=200)) for _ in range(3)]
    falls = fells(desk, poison)
    assert falls[:SUSPECT_FALLS] == [{*good, poison}] * SUSPECT_FALLS
    assert len(falls) == FALLS_MAX + 1 <= RESTARTS_MAX
    desk.decodes()
    finals = [message for message in desk.told() if isinstance(message, Final)]
    assert [(f.request_id, f.finish_reason, f.code) for f in finals] == [
        (poison, "error", Code.INTERNAL)
    ]
    assert f"fell {FALLS_MAX + 1} times" in finals[0].error


def test_however_many_are_poison_a_worker_dies_no_more_often_than_the_supervisor_bears() -> None:
    desk = Desk(seats=1, capacity=40)
    poisons = {desk.start(Sampling(max_tokens=200)) for _ in range(5)}
    good = desk.start(Sampling(max_tokens=200))
    falls: list[int] = []
    left = set(poisons)
    for _ in range(6000):
        desk.passes(100)
        there = {submit.request_id: (seat, submit) for seat, submit in desk.submits()}
        if left & there.keys():
            falls.append(desk.now)
            desk.scheduler(0, incarnation=len(falls) + 1)
        elif good in there:
            seat, submit = there[good]
            desk.produces(seat, submit, len(submit.outputs) // 4, 10)
        desk.decodes()
        left -= {m.request_id for m in desk.told() if isinstance(m, Final)}
    assert not left, "all are given up"
    assert len(falls) == SUSPECT_FALLS + 5 * (FALLS_MAX + 1 - SUSPECT_FALLS)
    window_ns = RESTART_WINDOW_MS * MS
    most = max(sum(0 <= at - since < window_ns for at in falls) for since in falls)
    assert most <= RESTARTS_MAX


def test_who_is_moved_because_somebody_asked_for_it_has_not_fallen() -> None:
    """`phalanx restart` of one scheduler after the other ended a request that waited, at the seventh."""
    desk = Desk(seats=1)
    request = desk.start(Sampling(max_tokens=200))
    stream = desk.core._find(request, 0)
    assert stream is not None
    for incarnation in range(2, FALLS_MAX + 4):
        seat = Seat(0, 1, incarnation, "member", scheduler_left=True)
        desk.core.on_topology(Topology(2, (seat,), b"", "f1"), desk.now)
        desk.scheduler(0, incarnation)
        *_, (peer, submit) = desk.submits()
        assert peer == b"scheduler-0#%d" % incarnation and submit.resumed
        assert stream.falls == 0 and not stream.suspect
    desk.core.on_topology(Topology(2, (Seat(0, 1, 99, "member"),), b"", "f1"), desk.now)
    assert stream.falls == 1, "that one was not asked for"


def test_how_often_a_request_fell_outlives_gateway_and_node() -> None:
    desk = Desk(seats=1)
    poison = desk.start(Sampling(max_tokens=40))
    ops: list[Op] = []
    for fall in range(FALLS_MAX - 1):
        while not (there := desk.submits()):
            desk.passes(1000)
        if fall == 0:
            desk.produces(*there[0], 0, 10, 11)  # then it falls over its third token
        desk.clear()
        desk.scheduler(0, incarnation=fall + 2)
        ops += desk.ops
    told = [op for op in ops if isinstance(op, Fell)]
    assert [(op.falls, op.tokens) for op in told] == [(n, 2) for n in range(2, FALLS_MAX)]
    entry = desk.core._lives.requests[poison].entry
    desk = Desk(Recovered(entry, falls=(told[-1],)), seats=1)
    for fall in range(2):
        while not (there := desk.submits()):
            desk.passes(1000)
        desk.produces(*there[0], 0, 10, 11)  # the same again: no new ones
        desk.scheduler(0, incarnation=fall + 2)
    desk.decodes()
    (stream,) = desk.core._lives.requests[poison].streams
    assert stream.end is not None and stream.end.reason == "error"


def falls_wherever_it_is(others_fall: bool) -> int:
    """Of two ranks. Returns how often, before it is given up. `others_fall`: each time the idle one does as well."""
    desk, workers, falls = Desk(seats=2), [1, 1], 0
    request = desk.start(Sampling(max_tokens=200))
    stream = desk.core._find(request, 0)
    assert stream is not None

    def falls_at(number: int) -> None:
        workers[number] += 1
        seats = [Seat(n, worker, 1, "member") for n, worker in enumerate(workers)]
        for _ in range(2):  # it may be told twice
            desk.core.on_topology(Topology(2 * sum(workers), tuple(seats), b"", "f1"), desk.now)
        load = SeatLoad(number, 1, True, total_blocks=4, worker_incarnation=workers[number])
        desk.says(b"scheduler-%d#1" % number, load)

    while stream.end is None:
        while stream.place is None:
            desk.passes(1000)
        seat = stream.place.seat
        if others_fall:
            falls_at(1 - seat)
        falls_at(seat)
        falls += 1
    assert f"fell {falls} times" in stream.end.error
    return falls


def test_the_innocent_may_fall_more_often_where_ranks_fall_that_have_no_suspect() -> None:
    """One of 27,000 requests of simulated nodes whose ranks died by the dozen was given up for nothing it did."""
    assert falls_wherever_it_is(others_fall=False) == FALLS_MAX + 1
    assert falls_wherever_it_is(others_fall=True) == 2 * FALLS_MAX + 1


def suspect(number: int, max_tokens: int) -> Recovered:
    request_id = f"{number:032x}"
    prompt, sampling = array("i", [5]).tobytes(), Sampling(seed=1, max_tokens=max_tokens)
    entry = Entry(request_id, prompt, sampling, 1, True, "", b"", "tiny", "f1")
    return Recovered(entry, falls=(Fell(request_id, 0, SUSPECT_FALLS, 0),), placed={})


def test_a_suspect_that_fits_only_a_rank_that_is_away_does_not_hold_up_the_others() -> None:
    """It is the first in turn. The others were not tried before that rank was back."""
    large, small, smaller = (suspect(n, tokens) for n, tokens in enumerate((300, 9, 8)))
    desk = Desk(large, small, smaller, seats=0)
    seats = Seat(0, 1, 1, "lost"), Seat(1, 1, 1, "member")
    desk.core.on_topology(Topology(6, seats, b"", "f1"), desk.now)
    desk.scheduler(1, blocks=1)
    desk.passes(1000)
    told = {(peer, submit.request_id) for peer, submit in desk.submits()}
    assert told == {(b"scheduler-1#1", small.entry.request_id)}, "and one at a time"


def test_where_a_suspect_was_tried_when_the_gateway_fell_no_other_one_is() -> None:
    """The innocent fell together with the guilty once more, for each fall of the gateway."""
    there, other = suspect(0, 9), suspect(1, 9)
    name = there.entry.request_id
    there = replace(there, placed={0: Placed(name, 0, 0, 1, 1)})
    desk = Desk(there, other, seats=0)
    desk.core.on_topology(Topology(6, (Seat(0, 1, 1, "member"),), b"", "f1"), desk.now)
    seat = b"scheduler-0#1"
    desk.says(seat, SeatLoad(0, 1, True, total_blocks=4, worker_incarnation=1))
    desk.passes(300)
    desk.scheduler(0, 1, SequenceInfo(name, 0, 33, b"", None))
    desk.passes(1000)
    assert not [submit for _, submit in desk.submits() if submit.request_id != name]
    desk.produces(seat, Submit(1, name, 0, 33, b"", Sampling()), 0, 10)
    assert [submit.request_id for _, submit in desk.submits()] == [other.entry.request_id]
