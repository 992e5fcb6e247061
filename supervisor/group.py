"""The expert-parallel group: who is in it, and the two phases that change it. Pure.

The epoch word is even while the group runs and odd while it is stopped. A change of worker membership
is STOP (odd word; every live member leaves its waits and acknowledges), then GO (a topology is
published; every member-to-be gets ready and acknowledges), then the even word. A death during GO begins
again with the next odd number: the even number in between is never used.

When nobody fell (a rank joins, or shall leave) members finish the step under way before they acknowledge, so
that no stream notices. A death meanwhile, or a step that takes long, makes it an ordinary STOP, with the next odd
number.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from phalanx.protocol.limits import (
    GO_ACK_MS,
    REJOIN_MS_MAX,
    RESTART_SERVED_MS,
    STEP_END_MS,
    STOP_ACK_MS,
)
from phalanx.protocol.messages import EpochRecord
from phalanx.protocol.patience import Patience
from phalanx.protocol.placement import Placement
from phalanx.protocol.topology import Seat, SeatState, Topology
from phalanx.supervisor.events import AcksSeen, Action, CountStranded, Publish, SetEpoch, Tell

_MS = 1_000_000
RECORDS_MAX = 1000  # membership changes remembered for `phalanx epochs`


class Placements(Protocol):
    """Where experts lie. Remembers the placement settled last, so that few experts move."""

    current: Placement | None  # that the group runs, or ran last
    proposed: Placement | None  # to the running group
    adopted: int  # the version that was proposed, and is in force since

    def settle(self, rooms: Mapping[int, int], runs: Collection[int] = ()) -> bytes | None:
        """The placement for a group of these seats; None when there is a shortage.

        `rooms`: of each seat, the expert slots of a layer that it has room for; 0: any number. `runs`: the
        versions that survivors of the last group ran: one of them may be that of what was proposed.
        """

    def propose(self, placement: Placement) -> Placement:
        """Note what is proposed to the running group; returns it under a version of its own."""

    def adopt(self) -> bytes:
        """The group runs what was proposed."""

    def forget(self) -> None:
        """Nobody runs what was proposed, nor will."""

    def shortage(self, rooms: Mapping[int, int]) -> str:
        """Why there is no placement for a group of these seats, for people; empty when there is."""

    def resize(self, ranks: int) -> None:
        """The group shall have so many seats from now on."""


class GroupPhase(Enum):
    FORMING = auto()  # the word is odd; waiting for every first worker
    RUNNING = auto()  # even
    STOPPING = auto()  # odd; waiting for members to acknowledge STOP
    STOPPED = auto()  # odd; too few workers hold all experts: waiting for one to become ready
    GOING = auto()  # odd; topology published, waiting for members-to-be


@dataclass(slots=True)
class SeatRecord:
    seat: int
    state: SeatState = "absent"
    incarnation: int = 0  # of its worker
    scheduler_incarnation: int = 0
    scheduler_left: bool = False  # the one before that ended because it was told to
    fingerprint: str = ""
    expert_slots: int = 0  # of a layer, that its worker has room for at most; 0: any number
    leaving: bool = False  # is in no group from the next GO on
    # Is ready, and has room for so few experts that with it there is none for all; or its worker has other numerics
    # than the group.
    kept_out: bool = False
    note: str = ""  # why it comes late, for people
    # Since when its worker has been one of a group that runs; 0: it has not been yet.
    member_ns: int = 0
    # Of its workers in a row: how many fell while they joined, or hung in their first seconds as members, and how long
    # the group stood for them in all.
    fell_joining: int = 0
    stood_ns: int = 0
    last_fell_joining: bool = False  # the last of all

    @property
    def stood(self) -> str:
        fell = f"{self.fell_joining} of its workers in a row fell while they joined"
        return f"{fell}, for which the group stood {self.stood_ns / 1e9:.2f} s"

    @property
    def joins(self) -> str:
        return f"worker-{self.seat} joined{self.note}"


@dataclass(slots=True)
class Change:
    """The membership change in progress."""

    causes: list[str]
    detected_ms: float
    decided_ns: int
    moved_requests: int = 0
    published_ns: int = 0  # when the group that follows was published, the last time


@dataclass(slots=True)
class Group:
    seats: list[SeatRecord]
    placements: Placements
    epoch: int = 1  # the word; the shell writes it before any process starts
    phase: GroupPhase = GroupPhase.FORMING
    members: dict[int, int] = field(default_factory=dict[int, int])  # seat -> worker incarnation
    # Members that have not acknowledged the running phase yet.
    waiting: dict[int, Patience] = field(default_factory=dict[int, Patience])
    # Since when members may finish the step under way before they stop; 0: no more.
    finishing_ns: int = 0
    change: Change | None = None
    records: list[EpochRecord] = field(default_factory=list[EpochRecord])
    fingerprint: str = ""  # of the numerics: set by the first group, then fixed
    placement: bytes = b""
    published: Topology | None = None
    # Of each member that has stopped, the placement version that it ran.
    runs: dict[int, int] = field(default_factory=dict[int, int])

    # ------------------------------------------------------------ what happens to workers

    def loading(self, seat: int, incarnation: int) -> None:
        record = self.seats[seat]
        record.incarnation, record.state, record.leaving = incarnation, "loading", False
        record.note, record.kept_out, record.member_ns = "", False, 0

    def has_room(self, seat: int, expert_slots: int) -> None:
        """What the seat's worker said of itself."""
        self.seats[seat].expert_slots = expert_slots

    def shortage(self, seats: Collection[int] | None = None) -> str:
        """Why a group of these seats could not hold all experts, for people; empty when it could.

        None: of the members, and of those that are ready to become one.
        """
        if seats is None:
            joining = {seat.seat for seat in self.seats if seat.state == "joining"}
            seats = {*self.members, *joining} & self._staying()
        return self.placements.shortage(self._rooms(seats))

    def _rooms(self, seats: Collection[int]) -> dict[int, int]:
        return {seat: self.seats[seat].expert_slots for seat in seats}

    def ready(self, seat: int, fingerprint: str, now_ns: int) -> list[Action]:
        """The seat's worker has loaded: let it join, now or when the change in progress is over."""
        record = self.seats[seat]
        record.state, record.fingerprint = "joining", fingerprint
        if self.phase in (GroupPhase.FORMING, GroupPhase.STOPPED):
            return self._try_go(now_ns)
        if self.phase is GroupPhase.RUNNING:
            return self._stop(record.joins, 0.0, now_ns, ends_steps=False)
        if self.phase is GroupPhase.STOPPING and self.change is not None:
            self.change.causes.append(record.joins)
        return []  # STOPPING takes it along; after GOING comes its turn

    def lost(
        self, seat: int, cause: str, detected_ms: float, now_ns: int, stuck_ns: int = 0
    ) -> list[Action]:
        """The seat's worker is dead or will be killed: it is in no later group. `stuck_ns`: since when its peers
        waited for it in vain; 0: they did not."""
        record = self.seats[seat]
        record.last_fell_joining, record.state = record.state == "joining", "lost"
        joins = self.phase is GroupPhase.GOING and seat in self.members and not record.member_ns
        served_ns = (stuck_ns or now_ns) - record.member_ns if record.member_ns else 0
        if served_ns >= RESTART_SERVED_MS * _MS:
            self.forgive(seat)
        elif joins or (record.member_ns and stuck_ns):
            # Who falls later in the same change may fall with this one, and is not to blame.
            since_ns = self.change.published_ns if joins and self.change else stuck_ns
            record.last_fell_joining = True
            record.fell_joining += 1
            record.stood_ns += now_ns - since_ns
        if (
            self.members.pop(seat, None) is None
        ):  # it was not in the group yet; perhaps nobody waits for it any more
            return self._advance(now_ns) if self.phase is GroupPhase.STOPPED else []
        self.waiting.pop(seat, None)
        if self.phase in (GroupPhase.STOPPING, GroupPhase.STOPPED) and not self.finishing_ns:
            assert self.change is not None
            self.change.causes.append(cause)
            return self._advance(now_ns)
        return self._stop(cause, detected_ms, now_ns)  # its peers' steps will not come to an end

    def pause_ns(self, seat: int) -> int:
        """How long its next worker shall wait, since several in a row fell while they joined: whoever joins stops all
        streams for a moment, and one that hangs then for as long as it is waited for. Twice as long as the group has
        stood for them, then four times, and so on. 0: it comes at once."""
        record = self.seats[seat]
        again = record.last_fell_joining and record.fell_joining > 1
        if not again or self.phase is GroupPhase.STOPPED or not self.members:
            return 0
        doublings = min(record.fell_joining - 1, 16)
        return min(record.stood_ns << doublings, REJOIN_MS_MAX * _MS)

    def forgive(self, seat: int) -> None:
        """Its workers that fell while they joined do not count any more."""
        self.seats[seat].fell_joining = self.seats[seat].stood_ns = 0

    def refused(self, seat: int) -> list[Action]:
        """Its worker is lost, and the next one comes when somebody has done something about it, if at all."""
        self.seats[seat].kept_out = True
        return self.publish()

    def leave(self, seats: Collection[int], cause: str, now_ns: int) -> list[Action]:
        """The members among these seats shall be in no later group, although they live."""
        for seat in seats:
            self.seats[seat].leaving = True
        if not self.members.keys() & seats:
            return []
        if (
            self.phase is GroupPhase.GOING
        ):  # they were to be in it, and loading for it may take long
            return self._stop(cause, 0.0, now_ns)
        if self.phase is not GroupPhase.RUNNING:
            return []  # the change in progress is without them
        held = tuple(sorted(self.members.keys() & seats))
        return [CountStranded(held), *self._stop(cause, 0.0, now_ns, ends_steps=False)]

    def stay(self, seat: int, ready: str | None, now_ns: int) -> list[Action]:
        """It need not leave. If it has left already, or was ready only after it was told to, it joins.

        Args:
            ready: The fingerprint of its worker; None while that one loads, and is ready later.
        """
        record = self.seats[seat]
        was_leaving, record.leaving = record.leaving, False
        if seat in self.members or not was_leaving or ready is None:
            return []
        return self.ready(seat, ready, now_ns)

    def have(self, seat: int) -> None:
        """There is such a seat from now on; nobody sits there yet."""
        while seat >= len(self.seats):
            self.seats.append(SeatRecord(len(self.seats)))

    def vacate(self, seat: int) -> None:
        """Nobody sits there, nor will for now: the seat becomes a hole."""
        self.seats[seat] = SeatRecord(seat)

    def acks(self, seen: AcksSeen, now_ns: int) -> list[Action]:
        """Believe an acknowledgement only of this very phase, by the incarnation that is a member."""
        if self.members.get(seen.seat) != seen.incarnation or seen.seat not in self.waiting:
            return []
        acknowledged = seen.stop if self.phase is GroupPhase.STOPPING else seen.go - 1
        if acknowledged != self.epoch:
            return []
        del self.waiting[seen.seat]
        if self.phase is GroupPhase.STOPPING:
            self.runs[seen.seat] = seen.run
        return self._advance(now_ns)

    def gets_on(self, seat: int, now_ns: int) -> None:
        """Its worker has done something: perhaps loaded one more of many experts for the GO."""
        if self.phase is GroupPhase.GOING and seat in self.waiting:
            self.waiting[seat] = Patience(now_ns)

    def compiles(self, seat: int, now_ns: int) -> None:
        """Its worker compiles a kernel and cannot answer before that is done, which takes some seconds: less than
        the start of another one would."""
        if self.change is None or now_ns - self.change.decided_ns > GO_ACK_MS * _MS:
            return
        if self.phase is GroupPhase.STOPPING and seat in self.waiting:
            self.waiting[seat] = Patience(now_ns)

    def hurry(self, now_ns: int) -> list[Action]:
        """A step that nobody need have abandoned takes too long: now it is."""
        if not self.finishing_ns or now_ns - self.finishing_ns < STEP_END_MS * _MS:
            return []
        return self._stop("", 0.0, now_ns)

    def overdue(self, now_ns: int) -> list[tuple[int, str, int]]:
        """Members that did not acknowledge in time, why they count as lost, and since when they are silent."""
        stopping = self.phase is GroupPhase.STOPPING
        limit_ms, cap_ms = (
            (STOP_ACK_MS, 5 * STOP_ACK_MS) if stopping else (GO_ACK_MS, 2 * GO_ACK_MS)
        )
        name = "STOP" if stopping else "GO"
        return [
            (
                seat,
                f"did not acknowledge {name} within {patience.silent_ms(now_ns):.0f} ms",
                patience.since_ns,
            )
            for seat, patience in self.waiting.items()
            if patience.exhausted(now_ns, limit_ms, cap_ms)
        ]

    # ------------------------------------------------------------ the two phases

    def _stop(
        self, cause: str, detected_ms: float, now_ns: int, *, ends_steps: bool = True
    ) -> list[Action]:
        """`cause`: empty for the one that is known already."""
        if self.change is None:
            self.change = Change([], detected_ms, now_ns)
        self.change.causes += [cause] if cause else []
        self.finishing_ns = 0 if ends_steps else now_ns
        self.epoch += 1 if self.epoch % 2 == 0 else 2
        self.phase = GroupPhase.STOPPING
        self.runs.clear()
        self.waiting = {seat: Patience(now_ns) for seat in self.members}
        actions: list[Action] = [
            SetEpoch(self.epoch, self._awake(), ends_steps),
            Tell("stop", text=f"epoch {self.epoch}: {cause or 'a step takes long'}"),
        ]
        return actions + self._advance(now_ns)

    def _advance(self, now_ns: int) -> list[Action]:
        if self.waiting:
            return []
        self.finishing_ns = 0
        return self._run(now_ns) if self.phase is GroupPhase.GOING else self._try_go(now_ns)

    def _try_go(self, now_ns: int) -> list[Action]:
        forming = self.phase is GroupPhase.FORMING
        joiners = [seat.seat for seat in self.seats if seat.state == "joining"]
        if forming and len(joiners) < len(self.seats):
            return []
        for seat in [seat for seat in (*self.members, *joiners) if self.seats[seat].leaving]:
            self.members.pop(seat, None)
            self.seats[seat].state = "absent"
        chosen = tuple(sorted({*self.members, *joiners} & self._staying()))
        runs = {version for seat, version in self.runs.items() if seat in self.members}
        placement = self.placements.settle(self._rooms(chosen), runs)
        if (
            placement is None and self.members
        ):  # a newcomer with little room must not stop those who run
            chosen = tuple(sorted(self.members.keys() & self._staying()))
            placement = self.placements.settle(self._rooms(chosen), runs)
        for seat in joiners:
            self.seats[seat].kept_out = placement is not None and seat not in chosen
        if placement is None:
            if forming:
                return []
            self.phase = GroupPhase.STOPPED
            # The word is odd, so nobody takes this for a GO: it tells who is gone.
            return self.publish()
        if self.change is None:
            self.change = Change(["start"], 0.0, now_ns)
        self.change.published_ns = now_ns
        self.phase, self.placement = GroupPhase.GOING, placement
        self.members = {seat: self.seats[seat].incarnation for seat in chosen}
        self.waiting = {seat: Patience(now_ns) for seat in chosen}
        for seat in chosen:
            self.seats[seat].state = "member"
        self.fingerprint = self.fingerprint or self.seats[chosen[0]].fingerprint
        return self._publish(self.epoch + 1)

    def moved(self, count: int) -> None:
        """So many sequences were at a rank that fell: the gateway moves them."""
        if self.change is not None:
            self.change.moved_requests += count

    def _run(self, now_ns: int) -> list[Action]:
        assert self.change is not None
        change, self.change = self.change, None
        self.epoch += 1
        self.phase = GroupPhase.RUNNING
        resumed_ms = (now_ns - change.decided_ns) / _MS
        record = EpochRecord(
            self.epoch,
            "; ".join(change.causes),
            round(change.detected_ms, 3),
            round(resumed_ms, 3),
            change.moved_requests,
            tuple(self.members),
            round((change.published_ns - change.decided_ns) / _MS, 3),
            round((now_ns - change.published_ns) / _MS, 3),
        )
        self.records = [*self.records[-RECORDS_MAX + 1 :], record]
        for seat in self.members:
            self.seats[seat].member_ns = self.seats[seat].member_ns or now_ns
        actions: list[Action] = [
            SetEpoch(self.epoch, self._awake()),
            Tell("go", text=f"epoch {self.epoch}: seats {list(self.members)}, {resumed_ms:.1f} ms"),
        ]
        joining = [s for s in self.seats if s.state == "joining" and not s.leaving]
        causes = [seat.joins for seat in joining if not seat.kept_out]
        if causes:
            return actions + self._stop(" and ".join(causes), 0.0, now_ns, ends_steps=False)
        return actions + self.publish()

    def _staying(self) -> set[int]:
        return {seat.seat for seat in self.seats if not seat.leaving}

    # ------------------------------------------------------------ what others see

    def publish(self) -> list[Action]:
        """Publish what is known now, as information: it carries an epoch that runs or is over.

        While the group changes nothing is published but the GO itself: for one epoch, members see one
        topology. Whatever else changed meanwhile follows when the word is even.
        """
        if self.phase not in (GroupPhase.RUNNING, GroupPhase.STOPPED):
            return []
        return self._publish(self.epoch - self.epoch % 2)

    def _publish(self, epoch: int) -> list[Action]:
        seats = tuple(
            Seat(
                s.seat,
                s.incarnation,
                s.scheduler_incarnation,
                s.state,
                s.scheduler_left,
                s.kept_out,
            )
            for s in self.seats
        )
        topology = Topology(epoch, seats, self.placement, self.fingerprint)
        if topology == self.published:
            return []
        self.published = topology
        return [Publish(topology, self._awake())]

    def _awake(self) -> tuple[int, ...]:
        """Seats whose worker may sleep on its bell."""
        return tuple(seat.seat for seat in self.seats if seat.state not in ("absent", "lost"))
