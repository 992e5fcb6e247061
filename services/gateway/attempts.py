"""Each stay of a sequence at a rank: what its scheduler is told, and which of its words count. Pure.

A sequence is with at most one seat at a time, under an `attempt` that grows with every placement.
Tokens count only from the seat's present scheduler and for the present attempt, so whatever an
earlier place still says can do no harm. Commands are repeated until answered; a stream that is quiet
for long is asked after, so that no lost message makes anyone wait for ever.
"""

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
    SequenceList,
    Submit,
    Submitted,
    TokenRows,
    Tokens,
    TokensItem,
)
from phalanx.services.gateway.entries import Placed
from phalanx.services.gateway.moves import Moves
from phalanx.services.gateway.seats import Need, Seat, Seats
from phalanx.services.gateway.streams import End, Place, Stream

MS = 1_000_000
RETRY_NS = COMMAND_RETRY_MS * MS
QUIET_NS = 1_000 * MS  # a stream without news for this long is asked after ...
QUIET_NS_MAX = 32_000 * MS  # ... less and less often
RESEND_NS = 100 * MS
REFUSED_NS = 100 * MS  # a seat that said "not now" is left alone for this long
REFUSALS_MAX = 3
LATER = (Code.OVERLOADED, Code.NOT_READY, Code.KV_PRESSURE, Code.SHUTDOWN)  # refusals to wait out
ANEW = (Code.INTERNAL, Code.UNKNOWN_REQUEST)  # a new attempt may do; a few times

BusCommand = Submit | AbortSequence | Resend | FinalSeen | HandBack | ListSequences


class Attempts:
    """
    Args:
        again: hears of streams that their seat does not have any more, to be placed anew; and whether they are
            resumed then.
    """

    def __init__(
        self,
        send: Callable[[bytes, BusCommand], None],
        seats: Seats,
        moves: Moves,
        again: Callable[[Stream, bool], None],
        *,
        first_attempt: int,
        first_call: int,
    ) -> None:
        self._send, self._seats, self._moves, self._again = send, seats, moves, again
        self._first_attempt = first_attempt
        self._first_call = self._last_call = first_call
        self.num_stale = 0  # answers to what the last gateway asked, or what is over
        self._calls: dict[int, Stream] = {}  # Submits not answered
        # Seat, command, and when to repeat it (0: sent just now, the next tick decides).
        self._aborts: dict[int, tuple[int, AbortSequence, int]] = {}
        self._aborting: set[tuple[str, int, int]] = set()
        self._seen: dict[bytes, list[tuple[str, int, int]]] = {}
        self._placed: list[Placed] = []  # since they were taken last

    def submit(self, stream: Stream, seat: Seat, need: Need, now_ns: int) -> None:
        """Begin one, which needs so many blocks there."""
        stream.attempt = max(stream.attempt + 1, self._first_attempt)
        self._last_call += 1
        stream.place = Place(
            seat.number, seat.incarnation, stream.attempt, self._last_call, False, now_ns + RETRY_NS
        )
        seat.streams[stream.number] = stream
        stream.seat = seat.number
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
            stream.sampling_left(),
            stream.outputs(),
            stream.priority,
            # What was acknowledged and is said again was forgotten there, or still waits or runs.
            stream.resumed or stream.place.acknowledged,
            stream.copies_as,
            stream.afresh,
            stream.num_scores,
        )
        self._send(seat.peer, message)

    def _adopt(self, stream: Stream, seat: Seat, attempt: int, now_ns: int) -> None:
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
        seat = self._seats.by_number[place.seat]
        self.unplace(stream)
        if reason is None:
            self._final_seen(seat, stream.request_id, stream.index, place.attempt)
        else:
            self._abort(seat, stream.request_id, stream.index, place.attempt, reason)

    def unplace(self, stream: Stream) -> None:
        place = stream.place
        if place is not None:
            self._calls.pop(place.call, None)
            seat = self._seats.by_number[place.seat]
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

    def forget_scheduler(self, seat: Seat) -> None:
        """It is another one from here on: what the last one was told to end is no matter any more."""
        for call, (number, abort, _) in list(self._aborts.items()):
            if number == seat.number:
                self._end_abort(call, abort)

    def flush(self) -> None:
        """What is told once a turn."""
        for peer, sequences in self._seen.items():
            self._send(peer, FinalSeen(tuple(sequences)))
        self._seen.clear()

    # --- answers ---

    def on_submitted(self, peer: bytes, message: Submitted, now_ns: int) -> None:
        stream = self._calls.get(message.call)
        if stream is None or stream.place is None:
            # Not stale: tokens that came first were as good.
            self.num_stale += not self._first_call < message.call <= self._last_call
            return
        seat = self._seats.by_number[stream.place.seat]
        if seat.peer == peer and message.incarnation == seat.incarnation:
            del self._calls[message.call]
            if not stream.place.acknowledged:
                stream.place.acknowledged = True
                stream.place.repeat_at_ns = now_ns + QUIET_NS

    def on_refusal(self, peer: bytes, message: Refusal, now_ns: int) -> tuple[Stream, End] | None:
        """A stream that no seat will take, and why; None while there is hope."""
        stream = self._calls.get(message.call)
        seat = self._seats.of(peer)
        if (
            stream is None
            or stream.place is None
            or seat is None
            or stream.place.seat != seat.number
        ):
            self.num_stale += 1
            return None
        acknowledged = stream.place.acknowledged
        self.unplace(stream)
        if message.code in LATER:
            seat.not_before_ns = now_ns + REFUSED_NS
        else:
            stream.tries += 1
            if message.code not in ANEW or stream.tries >= REFUSALS_MAX:
                return stream, End("error", message.code, message.message)
        self._again(stream, acknowledged)
        return None

    def on_done(self, peer: bytes, call: int) -> None:
        known = self._aborts.get(call)
        seat = self._seats.of(peer)
        if known is not None and seat is not None and seat.number == known[0]:
            abort = known[1]
            self._end_abort(call, abort)
            self._final_seen(seat, abort.request_id, abort.index, abort.attempt)
        else:
            self.num_stale += 1

    # --- tokens ---

    def on_tokens(
        self, peer: bytes, message: Tokens, find: Callable[[str, int], Stream | None], now_ns: int
    ) -> Iterator[Stream]:
        """The streams that got something new."""
        seat = self._seats.of(peer)
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
            self.unplace(stream)
            self._moves.handed_back(stream)
            self._again(stream, True)
            return (len(stream.tokens), stream.num_scores) > before
        if stream.lacks_logprobs(item):
            # Of tokens that an earlier place made its scheduler never had any: they are made again.
            self.release(stream, None if item.finish_reason is not None else "abort")
            self._again(stream, True)
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

    def ask_list(self, seat: Seat, now_ns: int) -> None:
        self._last_call += 1
        seat.listing.ask(self._last_call, now_ns)
        self._send(seat.peer, ListSequences(self._last_call, outputs=not seat.listing.told))

    def on_list(
        self,
        peer: bytes,
        message: SequenceList,
        find: Callable[[str, int], Stream | None],
        adoptable: Callable[[Stream], bool],
        now_ns: int,
    ) -> Iterator[Stream]:
        """Adopt what this seat runs of ours; the streams that got tokens by it."""
        seat = self._seats.of(peer)
        items = seat.listing.take(message, now_ns) if seat is not None else None
        if seat is None or items is None:
            return
        for info in items:
            stream = find(info.request_id, info.index)
            aborted = info.finish_reason == "abort"  # an earlier place of the stream, left behind
            ours = (
                stream is not None
                and stream.place is None
                and adoptable(stream)
                # What the last gateway had of its prompt's log-probabilities is not told again there.
                and stream.num_scores >= info.first_score
                # Told before its worker fell, which is known since: nothing moves it from there any more.
                and (seat.member or info.finish_reason is not None)
            )
            if stream is not None and ours and not aborted and stream.fits(info.outputs):
                self._adopt(stream, seat, info.attempt, now_ns)
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
                    self._send(self._seats.by_number[number].peer, abort)
        for seat in self._seats.by_number.values():
            if not seat.peer:
                continue
            if seat.listing.due(now_ns):
                self.ask_list(seat, now_ns)
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
