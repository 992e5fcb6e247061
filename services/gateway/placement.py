"""Which rank runs which sequence: submission, moves, aborts, and the fencing of tokens. Pure.

A sequence is with at most one seat at a time, under an `attempt` that grows with every placement.
Tokens count only from the seat's present scheduler and for the present attempt, so whatever an
earlier place still says can do no harm. Commands are repeated until answered; a stream that is quiet
for long is asked after, so that no lost message makes anyone wait for ever.
"""

import heapq
from collections.abc import Callable, Iterator

import msgspec

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import (
    AbortSequence,
    FinalSeen,
    FinishReason,
    HandBack,
    ListSequences,
    Refusal,
    Resend,
    SeatLoad,
    SequenceList,
    Submit,
    Submitted,
    TokenRows,
    Tokens,
    TokensItem,
)
from phalanx.protocol.topology import Topology
from phalanx.services.gateway.entries import Placed
from phalanx.services.gateway.listing import Listing
from phalanx.services.gateway.moves import Moves
from phalanx.services.gateway.seats import Need, Seat, Seats, need_of
from phalanx.services.gateway.streams import SUSPECT_FALLS, End, Place, Stream
from phalanx.services.gateway.suspects import FALLS_MAX, Suspects

MS = 1_000_000
RETRY_NS = COMMAND_RETRY_MS * MS
QUIET_NS = 1_000 * MS  # a stream without news for this long is asked after ...
QUIET_NS_MAX = 32_000 * MS  # ... less and less often
RESEND_NS = 100 * MS
REFUSED_NS = 100 * MS  # a seat that said "not now" is left alone for this long
REFUSALS_MAX = 3
HELD_UP_MAX = 64  # sequences that others are placed before, because they can go nowhere now
LATER = (Code.OVERLOADED, Code.NOT_READY, Code.KV_PRESSURE, Code.SHUTDOWN)  # refusals to wait out
ANEW = (Code.INTERNAL, Code.UNKNOWN_REQUEST)  # a new attempt may do; a few times

BusCommand = Submit | AbortSequence | Resend | FinalSeen | HandBack | ListSequences


class Placement:
    """The seats, what waits for one, and what is to be said to their schedulers."""

    def __init__(
        self,
        send: Callable[[bytes, BusCommand], None],
        *,
        seat_capacity: int,
        first_attempt: int,
        first_call: int,
        eos_token_id: int,
    ) -> None:
        self._send = send
        self._first_attempt = first_attempt
        self._eos_token_id = eos_token_id
        self.seats = Seats(seat_capacity)
        self._moves = Moves(self.seats, send)
        # Heap: those that are resumed, then the oldest. Entries that no longer wait are dropped when
        # they surface.
        self._waiting: list[tuple[bool, int, int, Stream]] = []
        self._pushes = 0
        self._calls: dict[int, Stream] = {}  # Submits not answered
        # Seat, command, and when to repeat it (0: sent just now, the next tick decides).
        self._aborts: dict[int, tuple[int, AbortSequence, int]] = {}
        self._aborting: set[tuple[str, int, int]] = set()
        self._seen: dict[bytes, list[tuple[str, int, int]]] = {}
        self._pinned: list[Stream] = []  # wait for one certain seat
        self._ended: list[Stream] = []
        self._suspects = Suspects()
        self._fallen: list[Stream] = []
        self._placed: list[Placed] = []  # since they were taken last
        self._newest = ("", -1)  # (request id, seat) of the sequence placed last, and when
        self._newest_ns = 0
        self._last_call = first_call

    # --- the seats' comings and goings ---

    def hello(self, peer: bytes, number: int, incarnation: int, now_ns: int) -> None:
        seat = self.seats.get(number)
        known = incarnation == seat.incarnation and seat.peer
        # A late word of a dead scheduler brings it back to no seat: nobody would ever answer there.
        if known or incarnation < seat.incarnation or seat.vacant:
            return
        self._replace_scheduler(seat, peer, incarnation)
        self._list(seat, now_ns)

    def on_topology(self, topology: Topology) -> None:
        for told in topology.seats:
            seat = self.seats.get(told.seat)
            seat.member = told.state == "member"
            if seat.worker_incarnation not in (0, told.worker_incarnation) or not seat.member:
                self._move_all(seat, fell=told.state != "absent")
            seat.worker_incarnation = told.worker_incarnation
            seat.vacant = told.state == "absent" and told.scheduler_incarnation == 0
            if seat.vacant:
                seat.total_blocks = 0  # its pool bounds nobody any more
            newest = max(seat.incarnation, told.scheduler_incarnation)
            if seat.peer and seat.vacant or newest > seat.incarnation:
                self._replace_scheduler(seat, b"", newest, fell=not told.scheduler_left)

    def on_load(
        self, peer: bytes, load: SeatLoad, find: Callable[[str, int], Stream | None]
    ) -> None:
        seat = self.seats.of(peer)
        if seat is not None and load.incarnation == seat.incarnation:
            seat.load = load
            self._moves.heard(seat, load, find)
            seat.total_blocks = load.total_blocks or seat.total_blocks

    def _replace_scheduler(
        self, seat: Seat, peer: bytes, incarnation: int, fell: bool = True
    ) -> None:
        self._move_all(seat, fell)
        seat.peer, seat.incarnation, seat.load = peer, incarnation, None
        seat.next_seq, seat.listing, seat.not_before_ns = -1, Listing(), 0
        seat.handles.clear()
        for call, (number, abort, _) in list(self._aborts.items()):
            if number == seat.number:
                self._end_abort(call, abort)

    def _move_all(self, seat: Seat, fell: bool = True) -> None:
        """What ran there goes elsewhere, ahead of new arrivals. Without `fell` it was no fault."""
        streams = list(seat.streams.values())
        if fell and streams:
            self._suspects.fell(seat.number, any(stream.suspect for stream in streams))
        for stream in streams:
            self._unplace(stream)
            if stream.pin is not None:
                self._give_up(stream, _lost_seat(seat.number))
            elif fell and self._fell(stream) > FALLS_MAX:
                text = (
                    f"the rank that computed it fell {stream.falls} times in a row before a new token came, the last"
                    f" {stream.falls - SUSPECT_FALLS} times with no other request that had fallen as often: it is"
                    " given up, so that the others can go on"
                )
                self._give_up(stream, End("error", Code.INTERNAL, text))
            else:
                self.enqueue(stream, resumed=True)

    def _fell(self, stream: Stream) -> int:
        """With its seat. Returns how many times in a row it did before a new token came."""
        if stream.falls_in_vain() > 1:
            self._fallen.append(stream)
        return stream.falls

    def take_fallen(self) -> list[Stream]:
        """Those of which a next gateway is to know how often they fell in vain, since the last call."""
        taken, self._fallen = self._fallen, []
        return [stream for stream in taken if not stream.silent]

    def _give_up(self, stream: Stream, end: End) -> None:
        stream.end = end
        self._ended.append(stream)

    # --- placing ---

    def enqueue(self, stream: Stream, resumed: bool = False) -> None:
        """To be placed. `resumed`: a scheduler had it before, or may have had it; for good."""
        stream.resumed |= resumed
        if stream.final is not None or stream.end is not None:
            return
        if stream.pin is not None:
            self._pinned.append(stream)
            return
        if stream.tokens and (end := stream.implied_end(self._eos_token_id)) is not None:
            self._give_up(stream, end)
            return
        if stream.suspect:
            self._suspects.add(stream)
            return
        self._pushes += 1
        heapq.heappush(self._waiting, (not stream.resumed, stream.number, self._pushes, stream))

    def dispatch(self, now_ns: int) -> None:
        """Submit what waits, to the least loaded seats. Once a turn, after all events."""
        self.seats.pausing = self._suspects.pausing(now_ns)
        self.seats.trying = self._suspects.trying()
        # Who comes back, or lost its rank, goes before others are asked for because of the same room.
        self._place_waiting(now_ns, resumed=True)
        self._moves.ask(now_ns)
        pinned, self._pinned = self._pinned, []
        for stream in pinned:
            self._place_pinned(stream, now_ns)
        self._try_suspects(now_ns)
        self._place_waiting(now_ns)
        for peer, sequences in self._seen.items():
            self._send(peer, FinalSeen(tuple(sequences)))
        self._seen.clear()

    def _place_waiting(self, now_ns: int, resumed: bool = False) -> None:
        """In their order; but one whose only seats are busy does not hold up those that may go elsewhere.
        `resumed`: no arrivals, and those that can start at once before the others, behind which they would wait."""
        held_up: list[tuple[bool, int, int, Stream]] = []
        tight: list[tuple[bool, int, int, Stream]] = []
        while self._waiting and len(held_up) < HELD_UP_MAX:
            if resumed and self._waiting[0][0]:
                break
            entry = heapq.heappop(self._waiting)
            stream = entry[-1]
            if stream.final is not None or stream.place is not None or stream.end is not None:
                continue
            seat = self._seat_for(stream, now_ns)
            if seat is not None and resumed and not seat.has_room(self._need(stream, seat, now_ns)):
                tight.append(entry)
                continue
            if seat is not None:
                self._place(stream, seat, now_ns)
                continue
            held_up.append(entry)
            if not self.seats.any_open(now_ns, resumed=stream.resumed):
                break
        for entry in tight:
            seat = self._seat_for(entry[-1], now_ns)
            if seat is not None:
                self._place(entry[-1], seat, now_ns)
            else:
                held_up.append(entry)
        for entry in held_up:
            heapq.heappush(self._waiting, entry)

    def _place(self, stream: Stream, seat: Seat, now_ns: int) -> None:
        self._submit(stream, seat, now_ns)
        self._newest, self._newest_ns = (stream.request_id, seat.number), now_ns

    def _try_suspects(self, now_ns: int) -> None:
        while (stream := self._suspects.next()) is not None:
            tokens, need = stream.num_tokens_max, need_of(stream)
            closed = self.seats.closed_for(stream)
            seat = self.seats.least_loaded(now_ns, tokens, need, resumed=True, but=closed)
            if seat is None:
                return
            self._submit(stream, seat, now_ns)
            self._suspects.placed(stream, seat.number)
            self.seats.trying = self._suspects.trying()

    def _place_pinned(self, stream: Stream, now_ns: int) -> None:
        if stream.final is not None or stream.end is not None or stream.pin is None:
            return
        seat = self.seats.by_number.get(stream.pin)
        if seat is None or not (seat.peer and seat.member):
            self._give_up(stream, _lost_seat(stream.pin))
        elif seat.takes(now_ns):
            self._submit(stream, seat, now_ns)
        else:
            self._pinned.append(stream)

    def _seat_for(self, stream: Stream, now_ns: int) -> Seat | None:
        """The least loaded seat; but a new sequence goes where the one before it of the same request
        went, which computes their prompt once, if that saves more than the imbalance costs."""
        number = self._newest[1]
        return self.seats.least_loaded(
            now_ns,
            stream.num_tokens_max,
            need_of(stream),
            number if self._follows(stream, number, now_ns) else -1,
            stream.num_prompt_blocks,
            resumed=stream.resumed,
            but=self.seats.closed_for(stream),
        )

    def _follows(self, stream: Stream, number: int, now_ns: int) -> bool:
        """Whether the sequence placed last has the same prompt, and this seat computes it: one that ran may be
        through it soon."""
        newest = self._newest == (stream.request_id, number)
        return newest and (self._newest_ns == now_ns or not stream.resumed)

    def _need(self, stream: Stream, seat: Seat, now_ns: int) -> Need:
        """What it would take of this seat's blocks."""
        follows = self._follows(stream, seat.number, now_ns)
        return need_of(stream).beside(stream.num_prompt_blocks if follows else 0)

    def take_ended(self) -> list[Stream]:
        """Streams that need no seat any more: their tokens say that they have ended."""
        taken, self._ended = self._ended, []
        return taken

    def _submit(self, stream: Stream, seat: Seat, now_ns: int) -> None:
        stream.attempt = max(stream.attempt + 1, self._first_attempt)
        self._last_call += 1
        stream.place = Place(
            seat.number, seat.incarnation, stream.attempt, self._last_call, False, now_ns + RETRY_NS
        )
        seat.streams[stream.number] = stream
        stream.seat = seat.number
        need = self._need(stream, seat, now_ns)
        self._moves.placed(stream, stream.place, seat, need, now_ns)
        self._calls[self._last_call] = stream
        self._note_place(stream, seat)
        self._send_submit(stream, seat)

    def _send_submit(self, stream: Stream, seat: Seat) -> None:
        assert stream.place is not None
        message = Submit(
            stream.place.call,
            stream.request_id,
            stream.index,
            stream.place.attempt,
            stream.entry.prompt,
            stream.sampling,
            stream.outputs(),
            stream.priority,
            # What was acknowledged and is said again was forgotten there, or still waits or runs.
            stream.resumed or stream.place.acknowledged,
            stream.copies_as,
        )
        self._send(seat.peer, message)

    def adopt(self, stream: Stream, seat: Seat, attempt: int, now_ns: int) -> None:
        """The seat runs this stream already, since before this gateway started."""
        self._last_call += 1
        stream.attempt = attempt
        stream.place = Place(
            seat.number, seat.incarnation, attempt, self._last_call, True, now_ns + QUIET_NS
        )
        seat.streams[stream.number] = stream
        stream.seat = seat.number
        self._note_place(stream, seat)

    def _note_place(self, stream: Stream, seat: Seat) -> None:
        worker = seat.load.worker_incarnation if seat.load is not None else 0
        stream.placed = Placed(
            stream.request_id,
            stream.index,
            seat.number,
            seat.incarnation,
            worker or seat.worker_incarnation,
        )
        if not stream.silent:
            self._placed.append(stream.placed)

    def take_placed(self) -> list[Placed]:
        """Who was given what since the last call."""
        taken, self._placed = self._placed, []
        return taken

    def release(self, stream: Stream, reason: FinishReason | None = None) -> None:
        """The stream is over. With a `reason` its scheduler is told to end it as well."""
        place = stream.place
        if place is None:
            return
        seat = self.seats.by_number[place.seat]
        self._unplace(stream)
        if reason is None:
            self._final_seen(seat, stream.request_id, stream.index, place.attempt)
        else:
            self._abort(seat, stream.request_id, stream.index, place.attempt, reason)

    def _unplace(self, stream: Stream) -> None:
        place = stream.place
        if place is not None:
            self._calls.pop(place.call, None)
            seat = self.seats.by_number[place.seat]
            seat.streams.pop(stream.number, None)
            seat.handles.pop(place.handle, None)
            seat.withdraw(stream.number)
            self._moves.withdraw(stream, place)
            stream.place = None

    def _abort(
        self, seat: Seat, request_id: str, index: int, attempt: int, reason: FinishReason
    ) -> None:
        if not seat.peer or (request_id, index, attempt) in self._aborting:
            return
        self._last_call += 1
        message = AbortSequence(self._last_call, request_id, index, attempt, reason)
        self._aborts[self._last_call] = (seat.number, message, 0)
        self._aborting.add((request_id, index, attempt))
        self._send(seat.peer, message)

    def _end_abort(self, call: int, abort: AbortSequence) -> None:
        del self._aborts[call]
        self._aborting.discard((abort.request_id, abort.index, abort.attempt))

    def _final_seen(self, seat: Seat, request_id: str, index: int, attempt: int) -> None:
        if seat.peer:
            self._seen.setdefault(seat.peer, []).append((request_id, index, attempt))

    # --- answers ---

    def on_submitted(self, peer: bytes, message: Submitted, now_ns: int) -> None:
        stream = self._calls.get(message.call)
        if stream is None or stream.place is None:
            return
        seat = self.seats.by_number[stream.place.seat]
        if seat.peer == peer and message.incarnation == seat.incarnation:
            del self._calls[message.call]
            if not stream.place.acknowledged:
                stream.place.acknowledged = True
                stream.place.repeat_at_ns = now_ns + QUIET_NS

    def on_refusal(self, peer: bytes, message: Refusal, now_ns: int) -> tuple[Stream, End] | None:
        """A stream that no seat will take, and why; None while there is hope."""
        stream = self._calls.get(message.call)
        seat = self.seats.of(peer)
        if (
            stream is None
            or stream.place is None
            or seat is None
            or stream.place.seat != seat.number
        ):
            return None
        acknowledged = stream.place.acknowledged
        self._unplace(stream)
        if message.code in LATER:
            seat.not_before_ns = now_ns + REFUSED_NS
        else:
            stream.tries += 1
            if message.code not in ANEW or stream.tries >= REFUSALS_MAX:
                return stream, End("error", message.code, message.message)
        self.enqueue(stream, resumed=acknowledged)
        return None

    def on_done(self, peer: bytes, call: int) -> None:
        known = self._aborts.get(call)
        seat = self.seats.of(peer)
        if known is not None and seat is not None and seat.number == known[0]:
            abort = known[1]
            self._end_abort(call, abort)
            self._final_seen(seat, abort.request_id, abort.index, abort.attempt)

    # --- tokens ---

    def on_tokens(
        self, peer: bytes, message: Tokens, find: Callable[[str, int], Stream | None], now_ns: int
    ) -> Iterator[Stream]:
        """The streams that got something new."""
        seat = self.seats.of(peer)
        if seat is None or (message.seat, message.incarnation) != (seat.number, seat.incarnation):
            return
        if message.seq != seat.next_seq and seat.next_seq >= 0 and message.seq > seat.next_seq:
            self._ask_all(seat, now_ns)
        seat.next_seq = max(seat.next_seq, message.seq + 1)
        yield from self._on_rows(seat, message.rows, now_ns)
        for item in message.items:
            stream = find(item.request_id, item.index)
            place = stream.place if stream is not None else None
            here = (seat.number, item.attempt)
            if stream is None or place is None or (place.seat, place.attempt) != here:
                if not seat.listing.told:
                    continue  # perhaps it is adopted, by the list that is on its way
                self._disown(seat, item.request_id, item.index, item.attempt, item.finish_reason)
            elif self._take(stream, place, seat, item, now_ns):
                yield stream

    def _on_rows(self, seat: Seat, rows: TokenRows, now_ns: int) -> Iterator[Stream]:
        for handle, offset, token_ids in rows.each():
            stream = seat.handles.get(handle)
            if stream is None or stream.place is None:
                # Whose it is was told in a message that got lost, or to an earlier gateway; or it is
                # over, and its scheduler was told so.
                self._ask_nameless(seat, now_ns)
            elif not stream.extend(offset, token_ids):
                self._ask(stream, stream.place, seat, now_ns)
            else:
                self._heard(stream.place, now_ns)
                yield stream

    def _take(
        self, stream: Stream, place: Place, seat: Seat, item: TokensItem, now_ns: int
    ) -> bool:
        self._heard(place, now_ns)
        stream.tries = 0
        if item.handle and not place.handle:
            place.handle = item.handle
            seat.handles[item.handle] = stream
        before = (len(stream.tokens), stream.num_scores)
        if item.finish_reason == "abort" and item.code is None:
            # It was asked back (`moves.py`). Or an old word reached it late: this gateway is done with what
            # it aborts.
            if not stream.lacks_logprobs(item):
                stream.take(msgspec.structs.replace(item, finish_reason=None))
            self._final_seen(seat, stream.request_id, stream.index, place.attempt)
            self._unplace(stream)
            self._moves.handed_back(stream)
            self.enqueue(stream, resumed=True)
            return (len(stream.tokens), stream.num_scores) > before
        if stream.lacks_logprobs(item):
            # Of tokens that an earlier place made its scheduler never had any: they are made again.
            self.release(stream, None if item.finish_reason is not None else "abort")
            self.enqueue(stream, resumed=True)
            return False
        if not stream.take(item):
            self._ask(stream, place, seat, now_ns)
            return False
        if stream.end is not None:
            self.release(stream)
            return True
        return (len(stream.tokens), stream.num_scores) > before

    def _heard(self, place: Place, now_ns: int) -> None:
        """Tokens are as good as a Submitted."""
        self._calls.pop(place.call, None)
        place.acknowledged, place.quiet, place.repeat_at_ns = True, 0, now_ns + QUIET_NS

    def _ask_nameless(self, seat: Seat, now_ns: int) -> None:
        for stream in seat.streams.values():
            place = stream.place
            if place is not None and place.acknowledged and not place.handle:
                self._ask(stream, place, seat, now_ns)

    def _disown(
        self, seat: Seat, request_id: str, index: int, attempt: int, reason: FinishReason | None
    ) -> None:
        """A scheduler works on what is not its work (any more)."""
        if reason is not None:
            self._final_seen(seat, request_id, index, attempt)
        else:
            self._abort(seat, request_id, index, attempt, "abort")

    def _ask(self, stream: Stream, place: Place, seat: Seat, now_ns: int) -> None:
        if now_ns >= place.resend_at_ns:
            place.resend_at_ns = now_ns + RESEND_NS
            message = Resend(
                stream.request_id,
                stream.index,
                place.attempt,
                len(stream.tokens),
                stream.num_scores,
            )
            self._send(seat.peer, message)

    def _ask_all(self, seat: Seat, now_ns: int) -> None:
        for stream in seat.streams.values():
            if stream.place is not None and stream.place.acknowledged:
                self._ask(stream, stream.place, seat, now_ns)

    # --- what runs where, after a restart or a lost word ---

    def _list(self, seat: Seat, now_ns: int) -> None:
        self._last_call += 1
        seat.listing.ask(self._last_call, now_ns)
        self._send(seat.peer, ListSequences(self._last_call))

    def on_list(
        self,
        peer: bytes,
        message: SequenceList,
        find: Callable[[str, int], Stream | None],
        adoptable: Callable[[Stream], bool],
        now_ns: int,
    ) -> Iterator[Stream]:
        """Adopt what this seat runs of ours; the streams that got tokens by it."""
        seat = self.seats.of(peer)
        items = seat.listing.take(message, now_ns) if seat is not None else None
        if seat is None or items is None:
            return
        for info in items:
            stream = find(info.request_id, info.index)
            aborted = info.finish_reason == "abort"  # an earlier place of the stream, left behind
            ours = stream is not None and stream.place is None and adoptable(stream)
            if stream is not None and ours and not aborted and stream.fits(info.outputs):
                self.adopt(stream, seat, info.attempt, now_ns)
                if stream.sampling.logprobs is None:
                    stream.go_on(info.outputs)
                assert stream.place is not None
                self._ask(stream, stream.place, seat, now_ns)
                yield stream
            elif (
                stream is None
                or stream.place is None
                or (
                    stream.place.seat,
                    stream.place.attempt,
                )
                != (seat.number, info.attempt)
            ):
                self._disown(seat, info.request_id, info.index, info.attempt, info.finish_reason)

    # --- time ---

    def tick(self, now_ns: int) -> None:
        for call, (number, abort, at_ns) in list(self._aborts.items()):
            if at_ns <= now_ns:
                self._aborts[call] = (number, abort, now_ns + RETRY_NS)
                if at_ns:
                    self._send(self.seats.by_number[number].peer, abort)
        for seat in self.seats.by_number.values():
            if not seat.peer:
                continue
            if seat.listing.due(now_ns):
                self._list(seat, now_ns)
            for stream in list(seat.streams.values()):
                if stream.place is not None and stream.place.repeat_at_ns <= now_ns:
                    self._repeat(stream, stream.place, seat, now_ns)

    def _repeat(self, stream: Stream, place: Place, seat: Seat, now_ns: int) -> None:
        if not place.acknowledged:
            place.repeat_at_ns = now_ns + RETRY_NS
            self._send_submit(stream, seat)
            return
        # Quiet: ask for tokens; then say again what it shall run, in case it has forgotten it.
        if place.quiet % 2 == 0:
            self._ask(stream, place, seat, now_ns)
        else:
            self._calls[place.call] = stream
            self._send_submit(stream, seat)
        place.quiet += 1
        place.repeat_at_ns = now_ns + min(QUIET_NS << place.quiet, QUIET_NS_MAX)


def _lost_seat(number: int) -> End:
    return End("error", Code.NOT_READY, f"rank {number} is not in the group, or left it meanwhile")
