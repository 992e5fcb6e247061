"""Requests that nobody waits for any more: each is aborted, though the gateway that reads that may die over it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.protocol.messages import Abort

ABANDONED_MAX = 10_000
REPEAT_NS_MIN = 1_000_000_000  # of an Abort without an answer; doubled each time
REPEAT_NS_MAX = 16 * REPEAT_NS_MIN  # it is given up after the time after that


@dataclass(slots=True)
class _Said:
    abort: Abort
    repeat_at_ns: int
    repeat_ns: int = REPEAT_NS_MIN


class Abandoned:
    def __init__(self) -> None:
        # Calls of Generates that were given up before they were accepted: aborted when they are.
        self._generates: dict[int, None] = {}
        self._aborts: dict[int, _Said] = {}  # by call, until they are answered

    def __bool__(self) -> bool:
        """There is something to `repeat`."""
        return bool(self._aborts)

    def generate(self, call: int) -> None:
        self._generates[call] = None
        if len(self._generates) > ABANDONED_MAX:
            del self._generates[next(iter(self._generates))]

    def accepted(self, call: int) -> bool:
        """Whether it is one of them, to be aborted now."""
        if call not in self._generates:
            return False
        del self._generates[call]
        return True

    def abort(self, abort: Abort, now_ns: int) -> None:
        """It was sent."""
        self._aborts[abort.call] = _Said(abort, now_ns + REPEAT_NS_MIN)
        if len(self._aborts) > ABANDONED_MAX:
            del self._aborts[next(iter(self._aborts))]

    def answered(self, call: int) -> None:
        self._aborts.pop(call, None)

    def repeat(self, now_ns: int) -> Iterator[Abort]:
        """Those to be sent once more."""
        for call, said in list(self._aborts.items()):
            if now_ns < said.repeat_at_ns:
                continue
            yield said.abort
            if said.repeat_ns >= REPEAT_NS_MAX:
                del self._aborts[call]
            said.repeat_ns *= 2
            said.repeat_at_ns = now_ns + said.repeat_ns
