"""What a change that was asked for does to one process: has it in hand, ends it, lets go of it. Pure."""

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

from phalanx.protocol.limits import COMMAND_RETRY_MS, HAND_OVER_MS, HTTP_DRAIN_MS, TERM_GRACE_MS
from phalanx.protocol.messages import Drain, HandOver
from phalanx.supervisor.events import Action, Kill, Send
from phalanx.supervisor.process import Process, Stage

if TYPE_CHECKING:
    from phalanx.supervisor.core import SupervisorCore

_MS = 1_000_000
# What one that serves is asked to do before it ends, and within which time; all others get SIGTERM.
_LAST_WORDS: dict[str, tuple[type[HandOver | Drain], int]] = {
    "gateway": (HandOver, HAND_OVER_MS),
    "http": (Drain, HTTP_DRAIN_MS),
}


class Hands:
    """Calls into the core."""

    def __init__(self, core: "SupervisorCore") -> None:
        self._core = core

    def hold(self, names: Iterable[str]) -> None:
        for name in names:
            process = self._core.processes[name]
            process.in_hand = True
            if process.stage is Stage.WAITING:  # it shall not be started again
                process.stage = Stage.DOWN

    def let_go(self, process: Process, now_ns: int) -> list[Action]:
        """From here on its deaths are handled, and count, as usual."""
        process.in_hand = False
        if process.alive and process.kill_ns and process.spec.kind == "http":
            process.kill_ns = 0  # it drains by its own clock, and then has a successor
        if process.alive and process.kill_ns:  # told to end: there is no way back
            return self._overdue(process, min(process.kill_ns, now_ns), now_ns)
        if process.stage is Stage.DOWN and not process.leaving:
            process.start_anew(now_ns)
        if process.spec.kind == "worker" and process.alive:
            ready = process.fingerprint if process.stage is Stage.READY else None
            return self._core.group.stay(process.spec.seat, ready, now_ns)
        return []

    def finish_off(self, process: Process, now_ns: int) -> list[Action]:
        """SIGTERM (the gateway is asked to hand over, HTTP to drain), then SIGKILL when its time is over."""
        name, incarnation = process.spec.name, process.incarnation
        if not process.alive:
            process.kill_ns = process.kill_ns or now_ns
            return []
        if not process.kill_ns:
            asked = _LAST_WORDS.get(process.spec.kind) if process.stage is Stage.READY else None
            process.ends_ns = now_ns + (asked[1] * _MS if asked else 0)
            process.kill_ns = process.ends_ns + TERM_GRACE_MS * _MS
            if not asked:
                return [Kill(name, incarnation, signal.SIGTERM)]
            return self._last_words(process, now_ns)
        if process.say_again_ns <= now_ns < process.ends_ns:
            return self._last_words(process, now_ns)
        if now_ns < process.kill_ns:
            return []
        told_ns, process.kill_ns = process.kill_ns, now_ns
        return self._overdue(process, told_ns, now_ns)

    def _last_words(self, process: Process, now_ns: int) -> list[Action]:
        """What it has to do, and in which time. Said again every so often: a word may be lost."""
        process.say_again_ns = now_ns + COMMAND_RETRY_MS * _MS
        word, _ = _LAST_WORDS[process.spec.kind]
        left_ms = (process.ends_ns - now_ns) // _MS
        return [Send(process.spec.name, process.incarnation, word(left_ms))]

    def _overdue(self, process: Process, told_ns: int, now_ns: int) -> list[Action]:
        why = "did not end when told to"
        return self._core.lives.lose(process, why, "asked", told_ns, now_ns)
