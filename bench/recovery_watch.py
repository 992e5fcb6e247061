"""When the group stopped and ran again, read from the board by a thread of the benchmark."""

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from phalanx.protocol.board import Board

_POLL_S = 0.00025


@dataclass(frozen=True)
class Change:
    """One change of membership, CLOCK_MONOTONIC ns: the epoch word odd, topology published, word even."""

    odd_ns: int
    published_ns: int
    even_ns: int


@dataclass(frozen=True)
class Mark:
    """What the board said from `at_ns` on."""

    at_ns: int
    epoch: int
    version: int


class EpochWatch:
    """Notes every change of the epoch word and of the topology while it is entered."""

    def __init__(self, node: str) -> None:
        self._board = Board.attach(node)
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
        epoch, version = -1, -1
        while not self._end.is_set():
            if (now := (self._board.epoch, self._board.topology_version)) != (epoch, version):
                epoch, version = now
                self._marks.append(Mark(time.monotonic_ns(), epoch, version))
            time.sleep(_POLL_S)

    def change(self, since_ns: int) -> Change | None:
        """The first change that began after `since_ns`, once it is complete."""
        return change_in(self._marks[:], since_ns)

    def members(self) -> int:
        topology = self._board.topology()
        seats = topology.seats if topology is not None else ()
        return sum(seat.state == "member" for seat in seats)


def change_in(marks: list[Mark], since_ns: int) -> Change | None:
    """The first stop after `since_ns` and the first even word after it, if there is one.

    When a death during the change makes it begin again, it counts as one change.
    """
    moved = [mark for i, mark in enumerate(marks) if i and mark.epoch != marks[i - 1].epoch]
    odd = next((m for m in moved if m.at_ns > since_ns and m.epoch % 2), None)
    if odd is None:
        return None
    even = next((m for m in moved if m.at_ns > odd.at_ns and m.epoch % 2 == 0), None)
    if even is None:
        return None
    published_ns, version = odd.at_ns, odd.version
    for mark in marks:
        if odd.at_ns < mark.at_ns <= even.at_ns and mark.version != version:
            published_ns, version = mark.at_ns, mark.version
    return Change(odd.at_ns, published_ns, even.at_ns)
