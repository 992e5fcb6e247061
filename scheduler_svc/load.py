"""When the gateway hears of a seat's load: at once if it may place sequences here or not any more, soon
after every other change, and now and then all the same. Pure."""

from phalanx.protocol.messages import SeatLoad

PERIOD_NS = 50 * 10**6  # between two reports of ordinary changes
REPEAT_NS = 10**9  # one that was lost must not idle the seat


class LoadReport:
    def __init__(self) -> None:
        self._said: SeatLoad | None = None
        self._said_ns = 0
        self._now: SeatLoad | None = None

    def forget(self) -> None:
        """Another gateway, which has heard nothing yet."""
        self._said = None

    def update(self, load: SeatLoad, now_ns: int) -> bool:
        """Whether `load`, which is what holds now, is to be said."""
        self._now = load
        said = self._said
        urgent = said is None or (load.accepting, load.worker_incarnation) != (
            said.accepting,
            said.worker_incarnation,
        )
        if not urgent and now_ns < self.due_ns:
            return False
        self._said, self._said_ns = load, now_ns
        return True

    @property
    def due_ns(self) -> int:
        """When the load, if it stays as it is, will be said next."""
        return self._said_ns + (REPEAT_NS if self._now == self._said else PERIOD_NS)
