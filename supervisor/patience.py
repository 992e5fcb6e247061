"""When is a silent process hung? A stopped one is; a starved one is not. Pure."""

from dataclasses import dataclass

from phalanx.protocol.limits import HANG_MS

_MS = 1_000_000
UNKNOWN = -1


@dataclass(slots=True)
class Patience:
    """The silence of one process, in the process's own time: waiting for a CPU does not count.

    On a loaded machine a healthy process may get no CPU for seconds; killing it would add the cost of
    its restart to the load that silenced it.
    """

    since_ns: int  # its last sign of life
    state: str = ""  # as inspected last; empty: not inspected during this silence
    _waited_first_ns: int = UNKNOWN
    _waited_ns: int = UNKNOWN

    def inspected(self, state: str, waited_ns: int) -> None:
        if self._waited_first_ns == UNKNOWN:
            self._waited_first_ns = waited_ns
        self.state, self._waited_ns = state, waited_ns

    def silent_ms(self, now_ns: int) -> float:
        return (now_ns - self.since_ns) / _MS

    def exhausted(self, now_ns: int, limit_ms: float, cap_ms: float) -> bool:
        """Whether the process has been silent for longer than it may.

        Args:
            limit_ms: of silence in the process's own time.
            cap_ms: of silence in all: even a starved process is of no use by then.
        """
        silent_ms = self.silent_ms(now_ns)
        if (
            self.state == "T"
        ):  # stopped by a signal: nothing will come, even from one that still loads
            return silent_ms > min(limit_ms, HANG_MS)
        if silent_ms > max(limit_ms, cap_ms):
            return True
        if not self.state or self.state == "D":
            return False  # not looked at yet; or in the kernel, waiting for a disk
        return silent_ms - (self._waited_ns - self._waited_first_ns) / _MS > limit_ms
