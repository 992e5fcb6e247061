"""How a gateway ends: with what runs, within a limit, or by handing over to the next one. Pure."""

from phalanx.protocol.limits import DRAIN_MS
from phalanx.services.gateway.core import Core

MS = 1_000_000
LAST_WORDS_NS = 1_000 * MS  # after the drain's end, for clients to take their finals


class Ending:
    """What it was told; of several times the shortest counts."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._drain_until_ns: int | None = None
        self._signal_until_ns: int | None = None  # until somebody says how long
        self._hand_over_until_ns: int | None = None
        self._end_ns: int | None = None  # set when what still ran was ended

    def drain(self, until_ns: int) -> None:
        self._core.drain()
        known = self._drain_until_ns
        self._drain_until_ns = until_ns if known is None else min(known, until_ns)

    def signal(self, now_ns: int) -> None:
        """Told to end by a signal alone. Its word may be on its way, or lost and said again."""
        if self._drain_until_ns is None and self._signal_until_ns is None:
            self._core.drain()
            self._signal_until_ns = now_ns + DRAIN_MS * MS

    def hand_over(self, until_ns: int) -> None:
        self._core.hand_over()
        self._hand_over_until_ns = until_ns

    @property
    def begun(self) -> bool:
        return self._until_ns is not None or self.hands_over

    @property
    def hands_over(self) -> bool:
        return self._hand_over_until_ns is not None

    @property
    def _until_ns(self) -> int | None:
        return self._signal_until_ns if self._drain_until_ns is None else self._drain_until_ns

    def ends_all(self, now_ns: int) -> bool:
        """Whether it is now that what still runs was ended: take a turn, so that it is told."""
        if self.hands_over or self._end_ns is not None:
            return False
        self.signal(now_ns)
        assert self._until_ns is not None
        if now_ns < self._until_ns:
            return False
        self._end_ns = max(now_ns + LAST_WORDS_NS, self._core.readers_until_ns)
        self._core.finish_all(now_ns)
        return True

    def over(self, now_ns: int) -> bool:
        """Whether everyone has got what is due to him, or has had his time."""
        if self._hand_over_until_ns is not None:
            return self._core.on_disk or now_ns >= self._hand_over_until_ns
        return self._core.drained(now_ns) or (self._end_ns is not None and now_ns >= self._end_ns)
