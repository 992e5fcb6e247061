"""A new gateway's open streams, until it is known whether some scheduler runs them. Pure.

A scheduler that lives tells what it runs (`ListSequences`), and those streams are adopted. The token log
says who was given each of them: nobody waits for a scheduler that is gone, or one that lost the worker
it had then. Without a log everybody waits until all have told, or for `RECOVER_NS`.
"""

from collections.abc import Iterator

from phalanx.services.gateway.entries import Placed
from phalanx.services.gateway.seats import Seats
from phalanx.services.gateway.streams import Stream

MS = 1_000_000
RECOVER_NS = 3_000 * MS


class Recovery:
    def __init__(self, seats: Seats, now_ns: int) -> None:
        self._seats = seats
        self._until_ns = now_ns + RECOVER_NS
        self._streams: dict[int, Stream] = {}
        self._news = True  # something came that may tell of some

    def __bool__(self) -> bool:
        return bool(self._streams)

    def __contains__(self, stream: Stream) -> bool:
        return stream.number in self._streams

    def add(self, stream: Stream) -> None:
        self._streams[stream.number] = stream
        self._news = True

    def add_unplaced(self, stream: Stream) -> None:
        """Nobody runs it, but the numerics may be others than it had."""
        stream.placed = nowhere(stream)
        self.add(stream)

    def discard(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)

    def heard(self) -> None:
        """A scheduler has told what it runs, or the topology has changed."""
        self._news = True

    def free(self, now_ns: int) -> Iterator[Stream]:
        """Those that no scheduler runs; `discard` what is taken care of."""
        over = now_ns >= self._until_ns or self._seats.all_told()
        if self._news or over:
            self._news = False
            for stream in list(self._streams.values()):
                if over or (stream.placed is not None and not self._seats.may_have(stream.placed)):
                    yield stream


def nowhere(stream: Stream) -> Placed:
    return Placed(stream.request_id, stream.index, -1, 0, 0)
