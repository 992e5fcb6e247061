"""The seats as the gateway knows them: their schedulers, what they said of themselves, who is next. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import SeatLoad
from phalanx.services.gateway.entries import Placed
from phalanx.services.gateway.listing import Listing
from phalanx.services.gateway.streams import Stream


@dataclass(frozen=True, slots=True)
class Need:
    """KV blocks of a sequence, or of several."""

    now: int
    in_the_end: int  # if it gets as far as it may

    def plus(self, other: "Need") -> "Need":
        return Need(self.now + other.now, self.in_the_end + other.in_the_end)

    def less(self, other: "Need") -> "Need":
        return Need(self.now - other.now, self.in_the_end - other.in_the_end)

    def beside(self, shared: int) -> "Need":
        """Where so many of them are there already."""
        return Need(max(1, self.now - shared), max(1, self.in_the_end - shared))


NOTHING = Need(0, 0)


def need_of(stream: Stream) -> Need:
    return Need(stream.num_blocks, stream.num_blocks_max)


@dataclass(eq=False)
class Seat:
    number: int
    peer: bytes = b""  # of its present scheduler; empty: none
    incarnation: int = 0  # the newest that was heard or told of
    vacant: bool = False  # the topology says that nobody is there
    load: SeatLoad | None = None
    reports: int = 0  # loads that were heard
    total_blocks: int = 0  # as some scheduler of it last said
    worker_incarnation: int = 0  # as the topology says
    member: bool = True  # until a topology says otherwise
    comes_until_ns: int = 0  # it has just come into the group: others leave it its share until then
    kept_out: bool = False  # it comes back when somebody does something about it, if at all
    streams: dict[int, Stream] = field(default_factory=dict)
    handles: dict[int, Stream] = field(default_factory=dict)  # of those, by its scheduler's handles
    next_seq: int = -1  # of its Tokens messages; -1: take the first as it comes
    listing: Listing = field(default_factory=Listing)  # what its present scheduler runs
    not_before_ns: int = 0
    promised: dict[int, Need] = field(default_factory=dict)  # see `promise`
    promised_blocks: Need = NOTHING
    stuck: list[Stream] = field(
        default_factory=list
    )  # wait there for want of room, as it last said

    def promise(self, number: int, need: Need) -> None:
        """The stream of this number will need so many blocks here, which its load does not show yet."""
        self.withdraw(number)
        self.promised[number] = need
        self.promised_blocks = self.promised_blocks.plus(need)

    def withdraw(self, number: int) -> None:
        self.promised_blocks = self.promised_blocks.less(self.promised.pop(number, NOTHING))

    def has_room(self, need: Need, ahead: bool = True) -> bool:
        """Whether one more sequence could start here at once: within the watermark, or, if it goes ahead of
        arrivals, because there are blocks for all of it and for all that everyone here may need in the end."""
        load = self.load
        if load is None or len(self.promised) >= load.room_sequences:
            return False
        spare = load.spare_blocks - self.promised_blocks.in_the_end
        return need.now <= self.room_blocks or (ahead and need.in_the_end <= spare)

    @property
    def room_blocks(self) -> int:
        """Blocks that one more sequence could have at once; below 0: so many are promised beyond."""
        load = self.load
        if load is None:
            return 0
        alone = not (
            load.running or load.waiting or self.promised
        )  # then it may have all there are
        return load.free_blocks if alone else load.room_blocks - self.promised_blocks.now

    @property
    def expects(self) -> bool:
        """Sequences are on their way back to the gateway because of the room here."""
        return any(number not in self.streams for number in self.promised)

    def holds(self, tokens: int) -> bool:
        """Whether its KV pool has room for a sequence of so many tokens."""
        return tokens <= self.total_blocks * BLOCK_SIZE

    def may_hold(self, tokens: int) -> bool:
        """Whether it has, or may come back with: nobody may have told this gateway how large its pool is."""
        comes = not (self.vacant or self.kept_out)
        return comes and (self.total_blocks == 0 or self.holds(tokens))

    @property
    def has_told(self) -> bool:
        """It said what it runs, or nobody is there to say."""
        return self.listing.told or not (self.peer or self.member)

    def takes(self, now_ns: int) -> bool:
        """Its scheduler and its worker are there and take sequences."""
        return (
            bool(self.peer)
            and self.member
            and self.load is not None
            and self.load.accepting
            and self.load.worker_incarnation in (0, self.worker_incarnation)
            and self.not_before_ns <= now_ns
        )


class Seats:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # sequences given to one seat at a time
        self.by_number: dict[int, Seat] = {}
        self.pausing: set[int] = set()  # get nothing now that may be what they fall over
        self.trying: set[int] = set()  # have a suspect, and get no second one
        self._share: int | None = (
            None  # what a seat is given at most, as others are about to take some
        )

    def closed_for(self, stream: Stream) -> set[int]:
        if stream.suspect:
            # Who has not told what it runs may have one, of the gateway before this one.
            untold = {seat.number for seat in self.by_number.values() if not seat.listing.told}
            return self.pausing | self.trying | untold
        return set() if stream.gets_on else self.pausing

    def get(self, number: int) -> Seat:
        """The seat, known so far or not."""
        return self.by_number.setdefault(number, Seat(number))

    def of(self, peer: bytes) -> Seat | None:
        """The seat whose present scheduler this is."""
        return next((s for s in self.by_number.values() if peer and s.peer == peer), None)

    def all_told(self) -> bool:
        return bool(self.by_number) and all(seat.has_told for seat in self.by_number.values())

    def may_have(self, placed: Placed) -> bool:
        """Whether the scheduler that was given a sequence may still have it, and has not told what it has."""
        if placed.seat < 0:
            return False
        seat = self.by_number.get(placed.seat)
        if seat is None:
            return True  # nobody has told of it yet
        other = seat.worker_incarnation not in (0, placed.worker) and placed.worker > 0
        gone = seat.incarnation > placed.scheduler or other or not seat.member or seat.vacant
        return not (gone or seat.listing.told)

    def unheard(self) -> list[Seat]:
        """The topology tells of their schedulers, which have not said a word to this gateway."""
        return [s for s in self.by_number.values() if s.incarnation and not s.peer and not s.vacant]

    def check_rank(self, number: int) -> None:
        """Raises Refused unless something can be run there now."""
        known = sorted(n for n, seat in self.by_number.items() if not seat.vacant)
        members = [n for n in known if self.by_number[n].member]
        if number in members:
            return
        if known and number not in known:
            there = ", ".join(map(str, known))
            raise Refused(Code.BAD_REQUEST, f"there is no rank {number}; there are: {there}")
        others = ", ".join(map(str, members)) or "none"
        text = f"rank {number} is not in the group now; in it are: {others}"
        raise Refused(Code.NOT_READY, text)

    def usable(self, now_ns: int) -> list[int]:
        """The numbers of those that take sequences."""
        return sorted(n for n, seat in self.by_number.items() if seat.takes(now_ns))

    def worker_incarnations(self) -> dict[int, int]:
        return {n: seat.worker_incarnation for n, seat in self.by_number.items()}

    def pool_tokens(self) -> int | None:
        """Tokens that every rank's KV pool can hold, so that any rank can take over from any other."""
        pools = [seat.total_blocks for seat in self.by_number.values() if seat.total_blocks > 0]
        return min(pools, default=0) * BLOCK_SIZE or None

    def loads(self) -> tuple[SeatLoad, ...]:
        """For anyone who asks, so without the names of requests."""
        seats = sorted(self.by_number.items())
        loads = [seat.load for _, seat in seats if seat.load and seat.peer]
        return tuple([msgspec.structs.replace(load, stuck=()) for load in loads])

    def with_room(self, now_ns: int, stream: Stream, here: Seat) -> Seat | None:
        """The least loaded seat that could start this sequence at once, and lets it grow as far as it may. It waits
        `here`; to any other one it would come ahead of arrivals."""
        tokens, need, closed = stream.num_tokens_max, need_of(stream), self.closed_for(stream)
        seats = [seat for seat in self.by_number.values() if seat.number not in closed]
        found = [
            seat
            for seat in seats
            if seat.takes(now_ns)
            and seat.holds(tokens)
            and seat.has_room(need, ahead=stream.resumed or seat is not here)
        ]
        return min(found, key=_load, default=None)

    def share_out(self, waiting: int, now_ns: int) -> None:
        """The ranks of a group come together, but their schedulers say so one after another. What waits for the group
        is not all for the first one: it would run there while the others do nothing."""
        members = [seat for seat in self.by_number.values() if seat.member]
        coming = any(now_ns < seat.comes_until_ns and not seat.takes(now_ns) for seat in members)
        count = waiting + sum(len(seat.streams) for seat in members)
        self._share = -(-count // len(members)) if coming else None

    def _open(self, now_ns: int, resumed: bool) -> list[Seat]:
        capacity = 2 * self._capacity if resumed else self._capacity
        capacity = capacity if self._share is None else min(capacity, self._share)
        seats = self.by_number.values()
        return [seat for seat in seats if seat.takes(now_ns) and len(seat.streams) < capacity]

    def only_away(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens waits for a seat to come back: none that is there, busy or not, has
        room for it."""
        seats = self.by_number.values()
        there = any(seat.peer and seat.member and seat.holds(tokens) for seat in seats)
        return not there and any(seat.may_hold(tokens) for seat in seats)

    def any_open(self, now_ns: int, *, resumed: bool, but: Collection[int] = ()) -> bool:
        """Whether some seat takes some sequence."""
        return any(seat.number not in but for seat in self._open(now_ns, resumed))

    def least_loaded(
        self,
        now_ns: int,
        tokens: int,
        need: Need,
        beside: int = -1,
        worth: int = 0,
        *,
        resumed: bool = False,
        but: Collection[int] = (),
    ) -> Seat | None:
        """Where the next sequence goes; None while no seat takes one.

        Args:
            tokens: A seat whose pool is too small for so many gets it only if no other has more room, nor may
                come back with it: ranks that join later may have smaller pools than what was accepted before.
                Its scheduler refuses it with the numbers, which is its end.
            need: Blocks. A seat that could start with so many at once goes before all that could not, and
                without one that which lacks the fewest.
            beside: A seat that is preferred as long as it runs at most `worth` sequences more; so many of the
                blocks are there already.
            resumed: It goes ahead of the arrivals that wait at a seat, so a seat that is full of them is
                given it all the same, up to as many again: its table has rows for that.
            but: Numbers of seats that are out of the question.
        """
        usable = [seat for seat in self._open(now_ns, resumed) if seat.number not in but]
        if not usable:
            return None
        roomy = [seat for seat in usable if seat.holds(tokens)]
        if not roomy and any(seat.may_hold(tokens) for seat in self.by_number.values()):
            return None  # one that holds it is there and busy, or comes back
        usable = roomy or usable
        fit = [seat for seat in usable if seat.has_room(need, resumed)]
        if not fit and not resumed:
            # Nor does an arrival take the room for which others are on their way back.
            usable = [seat for seat in usable if not seat.expects] or usable
        if fit:
            least = min(fit, key=_load)
        else:
            least = min(usable, key=lambda seat: (max(0, need.now - seat.room_blocks), _load(seat)))
        for seat in usable:
            near = seat.number == beside and len(seat.streams) <= len(least.streams) + worth
            if near and (not fit or seat.has_room(need.beside(worth), resumed)):
                return seat
        return least


def _load(seat: Seat) -> tuple[int, int]:
    return len(seat.streams), seat.number
