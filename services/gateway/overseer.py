"""Whether the supervisor, which watches everybody, gives signs of life itself. Pure."""

from collections.abc import Callable

from phalanx.protocol.limits import (
    HANG_MS,
    SPIN_SUSPECT_MS,
    STALL_TOLD_MS,
    SUSPECT_MS,
    TOLD_MS,
)
from phalanx.protocol.patience import Patience

_MS = 1_000_000
_INSPECT_AFTER_MS = SUSPECT_MS / 3
LOOK_NS = 50 * _MS  # between two looks

Inspect = Callable[[], tuple[str, int, int] | None]  # see `Looks.inspect`


class Overseer:
    """Judges the supervisor by the rules that it judges others by: one that gets no CPU does not hang."""

    def __init__(self, now_ns: int) -> None:
        self._life = Patience(now_ns)
        self._looked_ns = now_ns
        self._beat_ns = 0
        self._hangs = False  # until it gives another sign of life

    def look(self, beat_ns: int, now_ns: int, inspect: Inspect) -> str:
        """What health is to say of it; empty: nothing.

        Args:
            beat_ns: its last sign of life; 0: there never was one.
            inspect: what the kernel says of it, asked only when it has been silent for a while.
        """
        if now_ns - self._looked_ns > HANG_MS / 3 * _MS:  # it is we who did not run
            self._life = Patience(now_ns)
        self._looked_ns = now_ns
        if beat_ns != self._beat_ns:
            self._life = Patience(max(beat_ns, self._life.since_ns))
            self._beat_ns, self._hangs = beat_ns, False
        life = self._life
        if not beat_ns or life.silent_ms(now_ns) < _INSPECT_AFTER_MS:
            return ""
        if (found := inspect()) is not None:
            life.inspected(*found, now_ns)
        limit_ms = SPIN_SUSPECT_MS if life.state == "R" else SUSPECT_MS
        self._hangs |= life.exhausted(now_ns, limit_ms, TOLD_MS, STALL_TOLD_MS)
        if not self._hangs:
            return ""
        return (
            f"the supervisor gives no sign of life for {life.silent_ms(now_ns):.0f} ms, state {life.state or '?'}:"
            " what dies now is not replaced"
        )
