"""Does a start get on? A long one may (kernels are compiled, a terabyte is read); a stuck one does not. Pure."""

from collections.abc import Sequence

from phalanx.protocol.messages import ProcessStatus

# A process that was started this often gets nowhere, whatever it reports: it would report it again for ever.
_STARTS_MAX = 3
SAY_AFTER_S = 10.0  # of waiting for the same


class Headway:
    """Of the processes of a node, from one look at them to the next. Times in seconds of any one clock."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s  # the last sign that something got on
        self._seen: set[tuple[str, str, str, float]] = set()

    def looked(self, processes: Sequence[ProcessStatus], now_s: float) -> None:
        """Take note of what a supervisor tells of its processes."""
        for process in processes:
            if process.still_ms >= 0 and process.incarnation <= _STARTS_MAX:
                self._since_s = max(self._since_s, now_s - process.still_ms / 1000)
            # What was seen before, of an earlier incarnation, is no step forward.
            step = (process.name, process.state, process.detail, process.fraction)
            if process.name != "supervisor" and step not in self._seen:
                self._seen.add(step)
                self._since_s = now_s

    def still_s(self, now_s: float) -> float:
        """For how long nothing has got on."""
        return now_s - self._since_s


class Waits:
    """What is waited for, as far as it is worth a line of its own: when it has not changed for a while, once."""

    def __init__(self) -> None:
        self._text, self._since_s, self._said = "", 0.0, ""

    def news(self, text: str, now_s: float) -> str:
        """`text`, if it is to be said now; else empty."""
        if text != self._text:
            self._text, self._since_s = text, now_s
        if text == self._said or now_s - self._since_s < SAY_AFTER_S:
            return ""
        self._said = text
        return text


def waiting_for(processes: Sequence[ProcessStatus]) -> list[str]:
    """What is not ready yet, and where it stands, for people: "worker-0 (compile kernels, 45%)"."""
    return [
        f"{process.name} ({process.detail or process.state}{share(process.fraction)})"
        for process in processes
        if process.name != "supervisor" and process.state != "ready"
    ]


def share(fraction: float) -> str:
    """For people, after what is being done: `, 45%`; nothing where it is not known."""
    return f", {fraction:.0%}" if fraction >= 0 else ""
