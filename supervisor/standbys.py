"""When the processes that fork others in time of need (`spawn.py`) are started. Pure.

One that dies was no part of the node: nothing counts it, another one follows later.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

_MS = 1_000_000
# One is started that long after the node was whole: it is not to take a CPU from those who start. (One that starts
# several of them is there before: `starts.py`.)
DELAY_MS = 3_000
DELAY_MS_MAX = 60_000  # for one whose predecessors died; doubled with each of them
_SOUND_MS = 60_000  # one that waited for so long shows that nothing is wrong with it


@dataclass(slots=True)
class Standbys:
    """Names of those that are due, wait, or ended in vain."""

    _due_ns: dict[str, int] = field(default_factory=dict[str, int])
    _since_ns: dict[str, int] = field(default_factory=dict[str, int])  # of those that wait
    _vain: dict[str, int] = field(default_factory=dict[str, int])  # ends in a row

    def want(self, names: Iterable[str], now_ns: int, delay_ms: int = DELAY_MS) -> None:
        """Each of these is to be there, and is not now."""
        for name in names:
            self._vain[name] = 0
            self._due_ns[name] = now_ns + delay_ms * _MS

    def take_due(self, now_ns: int) -> list[str]:
        """Those to be started now. They count as started; `ended` follows if they are not."""
        names = [name for name, at_ns in self._due_ns.items() if at_ns <= now_ns]
        for name in names:
            del self._due_ns[name]
            self._since_ns[name] = now_ns
        return names

    def ended(self, name: str, now_ns: int) -> int:
        """It is gone, or could not be started. Returns the ms until the next."""
        if now_ns - self._since_ns[name] >= _SOUND_MS * _MS:
            self._vain[name] = 0
        doublings = min(self._vain[name], 16)
        self._vain[name] += 1
        delay_ms = min(DELAY_MS << doublings, DELAY_MS_MAX)
        self._due_ns[name] = now_ns + delay_ms * _MS
        return delay_ms
