"""Which rank runs which sequence: what waits, and the choice of a seat. Pure.

The least loaded seat that takes a sequence gets it; what fell with its seat goes ahead of arrivals. How a stay at a
seat begins and ends is `attempts.py`.
"""

from collections.abc import Callable

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason, SeatLoad
from phalanx.protocol.topology import Topology
from phalanx.services.gateway.attempts import Attempts, BusCommand
from phalanx.services.gateway.listing import Listing
from phalanx.services.gateway.moves import Moves
from phalanx.services.gateway.seats import Need, Seat, Seats, need_of
from phalanx.services.gateway.streams import SUSPECT_FALLS, End, Stream
from phalanx.services.gateway.suspects import Suspects
from phalanx.services.gateway.waiting import Waiting

MS = 1_000_000
COMES_NS = (
    500 * MS
)  # so long others leave its share to a rank that has come into the group and takes nothing yet
HELD_UP_MAX = 64  # sequences that others are placed before, because they can go nowhere now


class Placement:
    """The seats, and what waits for one."""

    def __init__(
        self,
        send: Callable[[bytes, BusCommand], None],
        *,
        seat_capacity: int,
        first_attempt: int,
        first_call: int,
        eos_token_id: int,
    ) -> None:
        self._eos_token_id = eos_token_id
        self.seats = Seats(seat_capacity)
        self._moves = Moves(self.seats, send)
        self.attempts = Attempts(
            send,
            self.seats,
            self._moves,
            self.enqueue,
            first_attempt=first_attempt,
            first_call=first_call,
        )
        self._waiting = Waiting()
        self._pinned: list[Stream] = []  # wait for one certain seat
        self._ended: list[Stream] = []
        self._suspects = Suspects()
        self._grouped = False  # a topology with seats was heard
        self._was_alone = False  # before that; so the group is as new as it
        self._fallen: list[Stream] = []
        self._newest = ("", -1)  # (request id, seat) of the sequence placed last, and when
        self._newest_ns = 0

    # --- the seats' comings and goings ---

    def hello(self, peer: bytes, number: int, incarnation: int, now_ns: int) -> None:
        seat = self.seats.get(number)
        known = incarnation == seat.incarnation and seat.peer
        # A late word of a dead scheduler brings it back to no seat: nobody would ever answer there.
        if known or incarnation < seat.incarnation or seat.vacant:
            return
        self._replace_scheduler(seat, peer, incarnation)
        self._waiting.seats_changed()
        self.attempts.ask_list(seat, now_ns)

    def on_topology(self, topology: Topology, now_ns: int) -> None:
        forms, self._grouped = not self._grouped, self._grouped or bool(topology.seats)
        for told in topology.seats:
            seat = self.seats.get(told.seat)
            if told.state == "member" and (not seat.member or (forms and self._was_alone)):
                seat.comes_until_ns = now_ns + COMES_NS
            was_member, seat.member = seat.member, told.state == "member"
            seat.kept_out = told.kept_out
            if seat.worker_incarnation not in (0, told.worker_incarnation) or not seat.member:
                self._move_all(seat, fell=told.state != "absent", idle=was_member)
            seat.worker_incarnation = told.worker_incarnation
            seat.vacant = told.state == "absent" and told.scheduler_incarnation == 0
            if seat.vacant:
                seat.total_blocks = 0  # its pool bounds nobody any more
            newest = max(seat.incarnation, told.scheduler_incarnation)
            if seat.peer and seat.vacant or newest > seat.incarnation:
                self._replace_scheduler(seat, b"", newest, fell=not told.scheduler_left)
        self._waiting.seats_changed()

    def on_load(
        self, peer: bytes, load: SeatLoad, find: Callable[[str, int], Stream | None]
    ) -> None:
        seat = self.seats.of(peer)
        if seat is not None and load.incarnation == seat.incarnation:
            seat.load = load
            self._moves.heard(seat, load, find)
            total_blocks = load.total_blocks or seat.total_blocks
            if total_blocks != seat.total_blocks:
                seat.total_blocks = total_blocks
                self._waiting.seats_changed()

    def _replace_scheduler(
        self, seat: Seat, peer: bytes, incarnation: int, fell: bool = True
    ) -> None:
        self._move_all(seat, fell)
        seat.peer, seat.incarnation, seat.load = peer, incarnation, None
        seat.next_seq, seat.listing, seat.not_before_ns = -1, Listing(), 0
        seat.handles.clear()
        self.attempts.forget_scheduler(seat)

    def _move_all(self, seat: Seat, fell: bool = True, idle: bool = False) -> None:
        """What ran there goes elsewhere, ahead of new arrivals. Without `fell` it was no fault. `idle`: it is news
        even if nothing ran there."""
        streams = list(seat.streams.values())
        if fell and (streams or idle):
            self._suspects.fell(seat.number, streams)
        for stream in streams:
            self.attempts.unplace(stream)
            if stream.pin is not None:
                self._give_up(stream, _lost_seat(seat.number))
            elif fell and self._fell(stream):
                text = (
                    f"the rank that computed it fell {stream.falls} times in a row before a new token came, the last"
                    f" {stream.falls - SUSPECT_FALLS} times with no other request that had fallen as often: it is"
                    " given up, so that the others can go on"
                )
                self._give_up(stream, End("error", Code.INTERNAL, text))
            else:
                self.enqueue(stream, resumed=True)

    def _fell(self, stream: Stream) -> bool:
        """With its seat. Returns whether it did too often in a row before a new token came."""
        if stream.falls_in_vain() > 1:
            self._fallen.append(stream)
        return self._suspects.convicts(stream)

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
        self._waiting.add(stream)

    def dispatch(self, now_ns: int) -> None:
        """Submit what waits, to the least loaded seats. Once a turn, after all events."""
        self.seats.pausing = self._suspects.pausing(now_ns)
        self.seats.trying = self._suspects.trying()
        self._was_alone |= not self._grouped
        self.seats.share_out(len(self._waiting), now_ns)
        # Who comes back, or lost its rank, goes before others are asked for because of the same room.
        self._place_waiting(now_ns, resumed=True)
        self._moves.ask(now_ns)
        pinned, self._pinned = self._pinned, []
        for stream in pinned:
            self._place_pinned(stream, now_ns)
        self._try_suspects(now_ns)
        self._place_waiting(now_ns)
        self.attempts.flush()

    def _place_waiting(self, now_ns: int, resumed: bool = False) -> None:
        """In their order; but one whose only seats are busy does not hold up those that may go elsewhere.
        `resumed`: no arrivals, and those that can start at once before the others, behind which they would wait."""
        held_up: list[Stream] = []
        tight: list[Stream] = []
        while len(held_up) + len(tight) < HELD_UP_MAX:
            stream = self._waiting.pop(resumed)
            if stream is None:
                break
            seat = self._seat_for(stream, now_ns)
            if seat is not None and resumed and not seat.has_room(self._need(stream, seat, now_ns)):
                tight.append(stream)
                continue
            if seat is not None:
                self._place(stream, seat, now_ns)
                continue
            if self.seats.only_away(stream.num_tokens_max):
                self._waiting.put_away(stream)
            else:
                held_up.append(stream)
            if not self.seats.any_open(now_ns, resumed=stream.resumed):
                break
        for stream in tight:
            seat = self._seat_for(stream, now_ns)
            if seat is not None:
                self._place(stream, seat, now_ns)
            else:
                held_up.append(stream)
        for stream in held_up:
            self._waiting.add(stream)

    def _place(self, stream: Stream, seat: Seat, now_ns: int) -> None:
        self._submit(stream, seat, now_ns)
        self._newest, self._newest_ns = (stream.request_id, seat.number), now_ns

    def _try_suspects(self, now_ns: int) -> None:
        """One that can go nowhere now does not hold up those behind it."""
        for stream in self._suspects.waiting():
            tokens, need = stream.num_tokens_max, need_of(stream)
            closed = self.seats.closed_for(stream)
            if not self.seats.any_open(now_ns, resumed=True, but=closed):
                return
            seat = self.seats.least_loaded(now_ns, tokens, need, resumed=True, but=closed)
            if seat is None:
                continue
            self._submit(stream, seat, now_ns)
            self._suspects.placed(stream, seat.number)
            self.seats.trying = self._suspects.trying()

    def adopted(self, stream: Stream) -> None:
        """A seat runs it already. If it is tried there, no other suspect is."""
        if stream.suspect and stream.place is not None:
            self._suspects.placed(stream, stream.place.seat)

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

    def _submit(self, stream: Stream, seat: Seat, now_ns: int) -> None:
        self.attempts.submit(stream, seat, self._need(stream, seat, now_ns), now_ns)

    def release(self, stream: Stream, reason: FinishReason | None = None) -> None:
        """The stream is over. With a `reason` its scheduler is told to end it as well."""
        self.attempts.release(stream, reason)

    def take_ended(self) -> list[Stream]:
        """Streams that need no seat any more: their tokens say that they have ended."""
        taken, self._ended = self._ended, []
        return taken


def _lost_seat(number: int) -> End:
    return End("error", Code.NOT_READY, f"rank {number} is not in the group, or left it meanwhile")
