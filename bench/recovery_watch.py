"""When the group stopped and ran again, and when each rank did its part, read from the board by a thread of the
benchmark."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from phalanx.protocol.board import Board
from phalanx.protocol.topology import Topology

_POLL_S = 0.00025


@dataclass(frozen=True)
class Change:
    """One change of membership, CLOCK_MONOTONIC ns: the epoch word odd, topology published, word even."""

    odd_ns: int
    published_ns: int
    even_ns: int
    # Seat -> when it acknowledged STOP, GO, and came to its first round.
    stopped: Mapping[int, int] = field(default_factory=dict[int, int])
    ready: Mapping[int, int] = field(default_factory=dict[int, int])
    entered: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def seen(self) -> bool:
        """Otherwise the watch slept through it (it had no CPU), and its times are of the moment when it woke."""
        return self.odd_ns < self.even_ns


@dataclass(frozen=True)
class Mark:
    """What the board said from `at_ns` on."""

    at_ns: int
    epoch: int
    version: int
    # Of each seat: the epochs of its answers to STOP and GO, and that of the round that it posted last.
    seats: tuple[tuple[int, int, int], ...] = ()


class EpochWatch:
    """Notes every change of the epoch word and of the topology while it is entered."""

    def __init__(self, node: str, ranks: int) -> None:
        self._board = Board.attach(node)
        self._seats = self._board.seats[:ranks]
        self._marks: list[Mark] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._board.close()

    def _watch(self) -> None:
        last: tuple[object, ...] = ()
        board, rows = self._board, self._seats
        while not self._end.is_set():
            seats = tuple([(row.stop_ack, row.go_ack, row.posted[0]) for row in rows])
            if (now := (board.epoch, board.topology_version, seats)) != last:
                last = now
                self._marks.append(Mark(time.monotonic_ns(), *now))
            time.sleep(_POLL_S)

    def changes(self, since_ns: int) -> list[Change]:
        """Those that began after `since_ns` and are complete, up to now."""
        return changes_in(self._marks[:], since_ns)

    def ready(self, index: int) -> int:
        """The incarnation of this row's process that is ready; 0: none."""
        return self._board.processes[index].ready_heard

    def gone(self, index: int, incarnation: int) -> bool:
        """Whether this incarnation of the row's process, which was ready, is dead."""
        row = self._board.processes[index]
        return row.mark.holder_died or row.ready_heard != incarnation

    def members(self) -> int:
        """How many ranks run now; 0 while the group is stopped."""
        return members_of(self._board.topology(), self._board.epoch)


def members_of(topology: Topology | None, epoch: int) -> int:
    """Of a topology that was read before the epoch word. The next group's is there before it runs."""
    if topology is None or topology.epoch != epoch:
        return 0
    return sum(seat.state == "member" for seat in topology.seats)


def changes_in(marks: list[Mark], since_ns: int) -> list[Change]:
    """Each stop after `since_ns` with the first even word after it.

    When a death during the change makes it begin again, it counts as one change. One that the watch slept
    through is told too (`Change.seen`).
    """
    found: list[Change] = []
    odd: Mark | None = None
    published_ns, before = 0, marks[0] if marks else None
    for mark in marks[1:]:
        assert before is not None
        begun = mark.epoch % 2 or not before.epoch % 2
        if odd is None and mark.epoch != before.epoch and begun and mark.at_ns > since_ns:
            odd, published_ns = mark, mark.at_ns
        elif odd is not None and mark.version != before.version:
            published_ns = mark.at_ns
        if odd is not None and mark.epoch % 2 == 0:
            firsts = _firsts(marks[marks.index(odd) :], mark.epoch)
            found.append(Change(odd.at_ns, published_ns, mark.at_ns, *firsts))
            odd = None
        before = mark
    return found


def _firsts(marks: list[Mark], epoch: int) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Seat -> when it first said that it has stopped for this epoch, that it is ready for it, that it runs it."""
    stopped, ready, entered = dict[int, int](), dict[int, int](), dict[int, int]()
    for mark in marks:
        for seat, (stop, go, posted) in enumerate(mark.seats):
            for first, said in (
                (stopped, stop == epoch - 1),
                (ready, go == epoch),
                (entered, posted == epoch),
            ):
                if said:
                    first.setdefault(seat, mark.at_ns)
    return stopped, ready, entered
