"""The scrubber of routed experts: bits that are wrong at one rank, in a slot or in a computation. No torch.

Every `worker.scrub_every_s` one thing, in turn:

* A slot is compared, bit for bit, with the checkpoint, of which another thread has read the expert anew:
  a matrix at a time, between two rounds. First those that a row gave reason to doubt or that were filled
  while the node ran, then the others one after the other.
* A row that a peer computed in a step, with an expert that is here as well, is computed again.

A change of the group drops what is under way: it proves nothing then, and its turn comes again.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from phalanx.protocol.background import Background
from phalanx.protocol.limits import EXPERT_FINDINGS_MAX, HEALTH_REPEAT_MS
from phalanx.protocol.messages import ExpertFinding, ExpertReport, ExpertsScrubbed

_MS = 1_000_000
_REPORT_NS = 500 * _MS  # between two that tell of nothing but more checks
_READ_S = 1.0  # that the end of the process waits for a read

Stored = TypeVar("Stored")


class Slot(NamedTuple):
    layer: int
    slot: int
    expert: int


class Recomputed(NamedTuple):
    """A row that `seat` had computed with this expert."""

    seat: int
    layer: int
    expert: int
    same: bool


class Bits(Protocol[Stored]):
    """The part of a backend that holds experts."""

    def held(self) -> list[Slot]:
        """All that there are."""

    def holds(self, held: Slot) -> bool:
        """Whether that expert is still there."""

    def take_fresh(self) -> list[Slot]:
        """Those that were filled since the last call."""

    def read(self, held: Slot) -> Stored:
        """The expert as the checkpoint has it. In another thread, for as long as the disk takes."""

    def compare(self, held: Slot, stored: Stored) -> Iterator[bool | None]:
        """Piece by piece, whether the slot is the same; None: that cannot be told now."""

    def want_row(self) -> None:
        """Take a row of the next step, if it has one that may be computed again."""

    def forget_row(self) -> None:
        """That was taken, or is wanted."""

    def compute_again(self) -> Recomputed | None:
        """The row that was taken, if any."""


class Scrub(Generic[Stored]):
    """`turn` between rounds, `begin_epoch` and `leave` with the group's."""

    def __init__(
        self,
        bits: Bits[Stored],
        every_s: float,
        seat: int,
        incarnation: int,
        say: Callable[[ExpertReport], object],
        doubted: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        """`doubted`: (layer, expert) with which some other rank computed otherwise last."""
        self._bits, self._every_ns, self._say = bits, int(every_s * 1e9), say
        self._seat, self._incarnation = seat, incarnation
        self._incarnations: dict[int, int] = {}  # of all members' workers
        self._due_ns = 0
        self._rows_turn = False
        self._doubted, self._heeded = doubted, doubted()
        self._fresh: list[Slot] = []
        self._sweep: list[Slot] = []  # what is left of it, the next one last
        self._reader = Background[tuple[int, Slot, Stored]]("expert")
        self._epochs = 0  # what was begun in an earlier one is dropped
        self._work: Iterator[None] | None = None
        self._slot: Slot | None = None  # that the work is about
        self._slots = self._rows = 0
        # Of slots by (layer, expert), of rows by (layer, expert, who computed it).
        self._findings: dict[tuple[int, ...], ExpertFinding] = {}
        self._news, self._told_ns = False, 0

    def begin_epoch(self, incarnations: dict[int, int]) -> None:
        """Of all members' workers. What was found of others that are gone is forgotten."""
        self._incarnations = incarnations
        for at, finding in list(self._findings.items()):
            if tuple(map(incarnations.get, finding.seats)) != finding.incarnations:
                self._forget(at)

    def leave(self) -> None:
        self._epochs += 1
        if self._work is not None and self._slot is not None:
            self._fresh.insert(0, self._slot)
        self._work = None
        self._bits.forget_row()

    def wait_ms(self, now_ns: int, most: float) -> float:
        """How long to sleep at most until the next turn."""
        return min(most, max(1.0, (self._due_ns - now_ns) / _MS)) if self._every_ns else most

    def turn(self, now_ns: int) -> bool:
        """A piece of what there is to do. False when there is nothing now."""
        if not self._every_ns:
            return False
        self._tell(now_ns)
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None
            return True
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + self._every_ns
        self._rows_turn = not self._rows_turn
        if self._rows_turn and (row := self._bits.compute_again()) is not None:
            self._judge(row)
            return True
        self._bits.want_row()
        if self._reader.busy or (target := self._next()) is None:
            return False
        for epochs, slot, stored in self._reader.ask(partial(self._read, self._epochs, target)):
            if epochs == self._epochs:
                self._slot, self._work = slot, self._compare(slot, stored)
            else:
                self._fresh.insert(0, slot)
        return self._work is not None

    # ------------------------------------------------------------ slots

    def _next(self) -> Slot | None:
        self._fresh += self._bits.take_fresh()
        doubt = self._doubted()
        if doubt is not None and doubt != self._heeded:
            self._heeded = doubt
            self._look_first(*doubt)
        while self._fresh:
            if self._bits.holds(slot := self._fresh.pop(0)):
                return slot
        if not self._sweep:
            self._sweep = self._bits.held()[::-1]
            experts = {(slot.layer, slot.expert) for slot in self._sweep}
            gone = [at for at in self._findings if len(at) == 2 and at not in experts]
            for at in gone:
                self._forget(at)
        return self._sweep.pop() if self._sweep else None

    def _look_first(self, layer: int, expert: int) -> None:
        wanted = [s for s in self._bits.held() if (s.layer, s.expert) == (layer, expert)]
        self._fresh = wanted + self._fresh

    def _read(self, epochs: int, slot: Slot) -> tuple[int, Slot, Stored]:
        return epochs, slot, self._bits.read(slot)

    def _compare(self, slot: Slot, stored: Stored) -> Iterator[None]:
        """One piece a turn; the slot may be given to another expert between them."""
        if not self._bits.holds(slot):
            return
        at, wrong = (slot.layer, slot.expert), False
        for same in self._bits.compare(slot, stored):
            if same is None:
                return
            wrong |= not same
            yield
            if not self._bits.holds(slot):
                return
        self._slots += 1
        self._news = True
        if wrong:
            self._find(at, (self._seat,))
        else:
            self._forget(at)

    # ------------------------------------------------------------ rows

    def _judge(self, row: Recomputed) -> None:
        self._rows += 1
        self._news = True
        if not row.same:
            self._find((row.layer, row.expert, row.seat), (self._seat, row.seat))
            self._look_first(row.layer, row.expert)  # it may be ours that is wrong

    # ------------------------------------------------------------ what was found

    def _find(self, at: tuple[int, ...], seats: tuple[int, ...]) -> None:
        self._news, self._told_ns = True, 0
        workers = tuple(self._incarnations[seat] for seat in seats)
        if at in self._findings or len(self._findings) < EXPERT_FINDINGS_MAX:
            self._findings[at] = ExpertFinding(seats, workers, at[0], at[1])

    def _forget(self, at: tuple[int, ...]) -> None:
        self._news |= self._findings.pop(at, None) is not None

    def _tell(self, now_ns: int) -> None:
        since_ns = now_ns - self._told_ns
        again = bool(self._findings) and since_ns >= HEALTH_REPEAT_MS * _MS
        if not again and not (self._news and since_ns >= _REPORT_NS):
            return
        self._news, self._told_ns = False, now_ns
        found = ExpertsScrubbed(self._slots, self._rows, tuple(self._findings.values()))
        self._say(ExpertReport(self._seat, self._incarnation, found))

    def close(self) -> None:
        self._reader.end(_READ_S)
