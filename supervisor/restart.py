"""How soon a dead process is started again, and when to stop trying. Pure."""

from dataclasses import dataclass, field

from phalanx.protocol.limits import (
    RESTART_DELAY_MS,
    RESTART_DELAY_MS_MAX,
    RESTART_SERVED_MS,
    RESTART_WINDOW_MS,
    RESTARTS_MAX,
    ROOM_DELAY_MS,
    ROOM_DELAY_MS_MAX,
)

_MS = 1_000_000


@dataclass(slots=True)
class RestartPolicy:
    """The first restart in a while is immediate, and so is that of a process that has served for some seconds:
    recovery is a matter of milliseconds. Each further one within the window waits twice as long, and after
    RESTARTS_MAX of them an essential process is given up; one that the node can do without is tried for ever, at
    the longest delay, and so is one whose work others do (`lives.py`). A death after some seconds of service begins
    the count anew: streams got on, and who ends the node ends them all."""

    gives_up: bool = True
    deaths_ns: list[int] = field(default_factory=list[int])  # those that count
    ready_ns: int = 0  # since when it serves; 0: it does not
    roomless: int = 0  # starts in a row for which shared memory had no room

    def room_delay_ns(self) -> int:
        """Called once at each end for want of room, which is no failure of the process."""
        self.roomless += 1
        doublings = min(self.roomless - 1, 16)
        return min(ROOM_DELAY_MS << doublings, ROOM_DELAY_MS_MAX) * _MS

    def delay_ns(self, now_ns: int) -> int | None:
        """Called once at each death. How long to wait before the restart; None: give up."""
        served = self.ready_ns > 0 and now_ns - self.ready_ns >= RESTART_SERVED_MS * _MS
        self.ready_ns = 0
        since_ns = now_ns - RESTART_WINDOW_MS * _MS
        recent = [] if served else [at_ns for at_ns in self.deaths_ns if at_ns > since_ns]
        self.deaths_ns, earlier = [*recent, now_ns], len(recent)
        if earlier >= RESTARTS_MAX and self.gives_up:
            return None
        if earlier == 0:
            return 0
        doublings = min(earlier - 1, RESTARTS_MAX)
        return min(RESTART_DELAY_MS << doublings, RESTART_DELAY_MS_MAX) * _MS
