"""Which request does its rank fall over? Pure.

A request can be poison: some bug ends whatever rank computes it. Those beside it fall with it, each time, and
the node ends when one worker has died `RESTARTS_MAX` + 1 times within a minute. So who has fallen `SUSPECT_FALLS`
times in a row without a new token is tried apart from the others that have: one at a time at each rank, those
with the fewest falls first. Who is innocent has its next token soon, and is no suspect any more. Who falls
again and again is given up after `FALLS_MAX` + 1 falls, with an error that says so.

A rank that falls with no suspect says that ranks fall for other reasons as well. For each such fall since its own third
a suspect may fall once more, up to twice as often: who is innocent must not pay for a bad hour of the node.

After a rank fell with a suspect nobody is placed there for a while, which grows with each fall that follows, but who
had tokens when it fell last: however many requests are poison, the deaths of a worker stay within the supervisor's
bounds.
"""

from bisect import insort
from collections.abc import Collection

from phalanx.services.gateway.streams import SUSPECT_FALLS, Stream

SECOND = 1_000_000_000
FALLS_MAX = 6  # without a new token, while no other rank falls
# After the first fall of that kind within a minute, the second, ... With those that made them suspects it is eight
# falls of a worker within a minute at most.
PAUSES_NS = (1 * SECOND, 3 * SECOND, 12 * SECOND, 26 * SECOND)
MEMORY_NS = 60 * SECOND


class Suspects:
    """Those that wait to be tried, and those that are."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, Stream]] = []  # by falls, then age
        self._pushes = 0
        self._tried: dict[int, Stream] = {}  # by seat
        self._fallen: list[tuple[int, bool]] = []  # since the last look
        self._others = 0  # falls that no suspect can have caused
        # When a seat fell with a suspect, and after that with anybody. Not of those that never did.
        self._falls_ns: dict[int, list[int]] = {}

    def add(self, stream: Stream) -> None:
        self._pushes += 1
        insort(self._waiting, (stream.falls, stream.number, self._pushes, stream))

    def fell(self, seat: int, streams: Collection[Stream]) -> None:
        """A rank did, with what it computed."""
        tried = any(stream.suspect for stream in streams)
        if streams:
            self._fallen.append((seat, tried))
        self._others += not tried

    def convicts(self, stream: Stream) -> bool:
        """Whether this fall in vain is one too many."""
        if stream.falls <= SUSPECT_FALLS:
            stream.others_fell = self._others
        return stream.falls > FALLS_MAX + min(FALLS_MAX, self._others - stream.others_fell)

    def waiting(self) -> list[Stream]:
        """Who is to be tried, in this order."""
        self._waiting = [entry for entry in self._waiting if _waits(entry[-1])]
        return [stream for *_, stream in self._waiting]

    def pausing(self, now_ns: int) -> set[int]:
        """The seats that nobody is to be placed at now."""
        for seat, tried in self._fallen:
            before = [at_ns for at_ns in self._falls_ns.get(seat, ()) if now_ns - at_ns < MEMORY_NS]
            if tried or before:
                self._falls_ns[seat] = [*before, now_ns]
        self._fallen.clear()
        return {seat for seat, falls_ns in self._falls_ns.items() if _pauses(falls_ns, now_ns)}

    def trying(self) -> set[int]:
        """The seats that have a suspect."""
        self._tried = {
            seat: stream
            for seat, stream in self._tried.items()
            if stream.suspect and stream.place is not None and stream.place.seat == seat
        }
        return set(self._tried)

    def placed(self, stream: Stream, seat: int) -> None:
        self._tried[seat] = stream


def _waits(stream: Stream) -> bool:
    return stream.final is None and stream.end is None and stream.place is None


def _pauses(falls_ns: list[int], now_ns: int) -> bool:
    return now_ns - falls_ns[-1] < PAUSES_NS[min(len(falls_ns), len(PAUSES_NS)) - 1]
