"""Sequences that wait at a full rank go where there is room. Pure.

A sequence is placed once, by what was known then: a rank is lost and its sequences crowd the others, and a second
later it is back and empty; or long prompts happened to meet at one rank. So each scheduler's load report names the
first sequences that wait there for want of room (`stuck`), and how much could start at once (`room_blocks`,
`room_sequences`). Where both are at hand, the gateway asks for the sequences back (`HandBack`): those that ran before,
then arrivals, of either first those that need the fewest blocks. So most streams go on soonest; the large ones are
still first in turn where they wait, and nobody overtakes them there. The scheduler ends with `abort` those that hold
nothing at that moment, and leaves alone what has begun: only it knows. An abort that this gateway did not ask for has
always meant "place it anew"; so a sequence is never at two ranks, a final that gets lost is repeated, and whoever
dies in the middle, the next one needs to know nothing of it.

What keeps it from going to and fro:

* Room is what is left once a pool is as full as new sequences may find it (`scheduler.prefill_watermark`), less what
  waits there already, less all that was promised to others since the report (`Seat.promised`): sequences on their way
  there, and those that are asked for because of it. A full rank, or one with a queue that is full, has none. Nor has
  a rank where a suspect is tried (`suspects.py`), for another suspect.
* Or it is what is left once everyone there has got as far as it may: then a sequence needs the blocks of its end at
  once.
* Sequences of one request that wait at one rank come back in one message, are placed together, and are promised the
  blocks of their prompt once: the next rank computes it for both (`scheduler_svc/prefill.py`).
* Who is asked back from a rank that says nothing for 100 ms has room kept for no longer: its scheduler may sleep, and
  others wait as well. When it speaks again the sequence is asked for again, if it still waits.
* A sequence that came back stays at its next rank for 200 ms at least, after the second time for 400 ms, and so on up
  to 3.2 s, whatever is reported meanwhile.

Nothing is lost by a move: who waits holds no block (a preempted sequence would be computed again here as well), and
what the KV store has of it is there for every rank. Sequences that wait for a prompt which another one of their
request is computing are not named.
"""

from collections.abc import Callable, Iterable, Mapping

from phalanx.protocol.messages import HandBack, SeatLoad
from phalanx.services.gateway.seats import Need, Seat, Seats, need_of
from phalanx.services.gateway.streams import Place, Stream

MS = 1_000_000
AGAIN_NS = 100 * MS  # a sequence that goes on waiting is asked for again
STAY_NS = 100 * MS  # doubled with each time that it was handed back ...
DOUBLINGS_MAX = 5  # ... up to so often


class Moves:
    def __init__(self, seats: Seats, send: Callable[[bytes, HandBack], None]) -> None:
        self._seats, self._send = seats, send
        self._news = False  # of some seat's load since `ask`

    def heard(self, seat: Seat, load: SeatLoad, find: Callable[[str, int], Stream | None]) -> None:
        """A seat says what it holds, what waits there, and how much room it has."""
        self._news = True
        seat.reports += 1
        for number in list(seat.promised):
            stream = seat.streams.get(number)
            # It was here before the report was written: one connection, in order.
            if stream is not None and stream.place is not None and stream.place.acknowledged:
                seat.withdraw(number)
        before, seat.stuck = seat.stuck, list(_here(seat, load, find))
        for stream in before:
            if stream not in seat.stuck and stream.place is not None:
                self.withdraw(stream, stream.place)  # it runs by now, or is on its way back

    def ask(self, now_ns: int) -> None:
        """Ask back what could start elsewhere at once."""
        if not self._news:
            return
        self._news = False
        waiting = [
            (_is_new(stream), stream.num_blocks, stream.number, stream, stream.place, seat)
            for seat in self._seats.by_number.values()
            for stream in seat.stuck
            if stream.place is not None and stream.place.seat == seat.number
        ]
        asked: dict[bytes, list[tuple[str, int, int]]] = {}
        leaders: dict[tuple[int, str], Seat] = {}
        for _, _, _, stream, place, seat in sorted(waiting, key=lambda one: one[:3]):
            if stream.pin is not None or now_ns < place.stays_until_ns:
                continue
            self.withdraw(stream, place)
            if place.asked_at_report == seat.reports:
                continue  # its seat is silent since: no room is kept for what may not come
            target, need = self._target(stream, seat, leaders, now_ns)
            if target is not None and target is not seat:
                target.promise(stream.number, need)
                leaders.setdefault((seat.number, stream.request_id), target)
                place.bound_for, place.stays_until_ns = target.number, now_ns + AGAIN_NS
                place.asked_at_report = seat.reports
                name = (stream.request_id, stream.index, place.attempt)
                asked.setdefault(seat.peer, []).append(name)
        for peer, sequences in asked.items():
            self._send(peer, HandBack(tuple(sequences)))

    def _target(
        self, stream: Stream, seat: Seat, leaders: Mapping[tuple[int, str], Seat], now_ns: int
    ) -> tuple[Seat | None, Need]:
        """Where it could start at once, and what it would take there: beside another one of its request, which comes
        back from the same seat with it, less by the prompt."""
        need = need_of(stream)
        target = leaders.get((seat.number, stream.request_id))
        if target is not None and target.has_room(beside := need.beside(stream.num_prompt_blocks)):
            return target, beside
        return self._seats.with_room(now_ns, stream, seat), need

    def withdraw(self, stream: Stream, place: Place) -> None:
        """What it was asked back for may be had by others."""
        if place.bound_for >= 0:
            self._seats.by_number[place.bound_for].withdraw(stream.number)
            place.bound_for = -1

    def handed_back(self, stream: Stream) -> None:
        stream.handed_back += 1

    def placed(self, stream: Stream, place: Place, seat: Seat, need: Need, now_ns: int) -> None:
        """A stream that needs so many blocks was given to `seat`, whose load will not show it before it is there."""
        seat.promise(stream.number, need)
        if stream.handed_back:
            stay_ns = STAY_NS << min(stream.handed_back, DOUBLINGS_MAX)
            place.stays_until_ns = now_ns + stay_ns


def _is_new(stream: Stream) -> bool:
    """It is an arrival: it never ran, and was not accepted before the others."""
    return not (stream.resumed or stream.tokens)


def _here(
    seat: Seat, load: SeatLoad, find: Callable[[str, int], Stream | None]
) -> Iterable[Stream]:
    """The streams that are stuck at this seat, in its words and in ours."""
    for request_id, index, attempt in load.stuck:
        stream = find(request_id, index)
        place = stream.place if stream is not None else None
        here = (seat.number, attempt)
        if stream is not None and place is not None and (place.seat, place.attempt) == here:
            yield stream
