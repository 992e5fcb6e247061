"""When is a silent process hung? A stopped one is; a starved one is not. Pure."""

import math
from dataclasses import dataclass

from phalanx.protocol.limits import HANG_MS

_MS = 1_000_000
UNKNOWN = -1
# A silent process is looked at long before this share of its limit is over, so that its waiting is known.
# What was silent longer when it was first looked at was so because the looker had no CPU either.
_UNSEEN_SHARE = 0.4


@dataclass(slots=True)
class Patience:
    """The silence of one process, in the process's own time: waiting for a CPU does not count, nor for a disk.

    On a loaded machine a healthy process may get no CPU for seconds; killing it would add the cost of
    its restart to the load that silenced it.
    """

    since_ns: int  # its last sign of life
    state: str = ""  # as inspected last; empty: not inspected during this silence
    _waited_first_ns: int = UNKNOWN
    _waited_ns: int = UNKNOWN
    _first_ns: int = 0  # when it was inspected first
    _last_ns: int = 0
    _stopped_ns: int = 0  # when it was last seen before the state T that it is in
    _slept_ns: int = 0  # between looks that began in state D
    _asleep_ns: int = 0  # of the sleep in state D that it is in

    def inspected(self, state: str, waited_ns: int, asleep_ns: int, now_ns: int) -> None:
        if state == "T" and self.state != "T":
            # Not long ago: it is looked at again and again from the first third of this limit on.
            self._stopped_ns = max(self.since_ns, self._last_ns, now_ns - HANG_MS * _MS // 3)
        if self._waited_first_ns == UNKNOWN:
            self._waited_first_ns, self._first_ns = waited_ns, now_ns
        elif self.state == "D":
            self._slept_ns += now_ns - self._last_ns
        # Waits of a time that does not count are no credit for what follows it.
        credit_ns = waited_ns - self._waited_first_ns - (now_ns - self.since_ns)
        self._waited_first_ns += max(0, credit_ns)
        self.state, self._waited_ns, self._last_ns = state, waited_ns, now_ns
        self._asleep_ns = min(asleep_ns, now_ns - self.since_ns)  # nor are sleeps a reproach

    def skip(self, gap_ns: int, now_ns: int) -> None:
        """The time until now that does not count; what happened in it happened now."""
        self.since_ns = min(self.since_ns + gap_ns, now_ns)
        self._first_ns = min(self._first_ns + gap_ns, now_ns)
        self._last_ns = min(self._last_ns + gap_ns, now_ns)
        self._stopped_ns = min(self._stopped_ns + gap_ns, now_ns)

    def silent_ms(self, now_ns: int) -> float:
        return (now_ns - self.since_ns) / _MS

    def exhausted(
        self, now_ns: int, limit_ms: float, cap_ms: float, asleep_ms: float = math.inf
    ) -> bool:
        """Whether the process has been silent for longer than it may.

        Args:
            limit_ms: of silence in the process's own time.
            cap_ms: of silence in all: even a starved process is of no use by then.
            asleep_ms: of one sleep in state D.
        """
        silent_ms = self.silent_ms(now_ns)
        if (
            self.state == "T"
        ):  # stopped by a signal: nothing will come, even from one that still loads, and may be silent
            loads = limit_ms > HANG_MS
            stopped_ms = (now_ns - self._stopped_ns) / _MS if loads else silent_ms
            return stopped_ms > min(limit_ms, HANG_MS)
        if silent_ms > max(limit_ms, cap_ms):
            return True
        if self.state == "D":  # in the kernel, waiting for a disk
            return self._asleep_ns > asleep_ms * _MS
        if not self.state:
            return False  # not looked at yet
        return self._own_ms(now_ns, limit_ms) > limit_ms

    def _own_ms(self, now_ns: int, limit_ms: float) -> float:
        """Of its silence what it did not spend waiting for a CPU or a disk, as far as anybody knows."""
        unseen_ms = min(self.silent_ms(self._first_ns), _UNSEEN_SHARE * limit_ms)
        # One that was runnable when last seen has perhaps been waiting ever since.
        until_ns = self._last_ns if self.state == "R" else now_ns
        waited_ns = self._waited_ns - self._waited_first_ns
        own_ms = unseen_ms + (until_ns - self._first_ns - waited_ns - self._slept_ns) / _MS
        return min(own_ms, self.silent_ms(now_ns))
