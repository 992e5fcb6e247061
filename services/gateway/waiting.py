"""Sequences that wait for a rank, in the order in which they get one. Pure."""

import heapq

from phalanx.services.gateway.streams import Stream

SWEPT_MIN = 1024  # fewer are not looked through


class Waiting:
    """Those that are resumed go first, then the oldest. What ended meanwhile is dropped when it surfaces, or once it
    is half of all: nobody may take anything for long, and clients give up and ask again."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, Stream]] = []
        self._away: list[Stream] = []  # may go nowhere before the seats are others
        self._pushes = 0
        self._sweep_at = SWEPT_MIN

    def __len__(self) -> int:
        """Those for which the seats that are there may do."""
        return len(self._heap)

    @property
    def num_kept(self) -> int:
        return len(self._heap) + len(self._away)

    def add(self, stream: Stream) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (not stream.resumed, stream.number, self._pushes, stream))
        if self.num_kept >= self._sweep_at:
            self._sweep()

    def pop(self, resumed: bool = False) -> Stream | None:
        """The next one. `resumed`: none that is new."""
        while self._heap and not (resumed and self._heap[0][0]):
            *_, stream = heapq.heappop(self._heap)
            if _waits(stream):
                return stream
        return None

    def put_away(self, stream: Stream) -> None:
        """No seat that is there will do for it; one may come back that does."""
        self._away.append(stream)

    def seats_changed(self) -> None:
        away, self._away = self._away, []
        for stream in away:
            self.add(stream)

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if _waits(entry[-1])]
        heapq.heapify(self._heap)
        self._away = [stream for stream in self._away if _waits(stream)]
        self._sweep_at = max(SWEPT_MIN, 2 * self.num_kept)


def _waits(stream: Stream) -> bool:
    return stream.final is None and stream.end is None and stream.place is None
