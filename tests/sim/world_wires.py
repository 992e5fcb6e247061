"""Messages between simulated processes, as ZeroMQ carries them: in order on one link, queued for a
receiver that is away, and lost with the process in whose buffers they are. While there are faults, some
are lost or come twice all the same."""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

from sim.clock import Clock

MS = 1_000_000
RECONNECT_NS_MAX = 200 * MS
T = TypeVar("T")


class Weather:
    """How messages fare in a run, as long as there are faults."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        rough = rng.random() < 0.6
        self.lost = rng.choice((0.0, 0.01, 0.04)) * rough
        self.doubled = rng.choice((0.0, 0.02, 0.08)) * rough
        self.delayed = rng.choice((0.0, 0.02, 0.1)) * rough  # by up to LATE_NS instead of QUICK_NS
        self.bad = True

    def calm(self) -> None:
        self.bad = False

    def times(self) -> int:
        """How often a message that is sent arrives."""
        if not self.bad:
            return 1
        return 0 if self._rng.random() < self.lost else 1 + (self._rng.random() < self.doubled)


QUICK_NS, LATE_NS = MS, 150 * MS


class Wire(Generic[T]):
    """One direction of one link. `deliver` is called with each message that arrives."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        weather: Weather,
        deliver: Callable[[T], None],
        reliable: bool = False,
    ) -> None:
        self._clock, self._rng, self._weather = clock, rng, weather
        self._deliver, self._reliable = deliver, reliable
        self._under_way: deque[list[T]] = (
            deque()
        )  # each in a box of its own: equal ones are told apart
        self._last_ns = 0
        self._open = True

    def send(self, message: T) -> None:
        for _ in range(1 if self._reliable else self._weather.times()):
            box = [message]
            self._under_way.append(box)
            if self._open:
                self._schedule(box)

    def _schedule(self, box: list[T]) -> None:
        late = self._weather.bad and self._rng.random() < self._weather.delayed
        at = self._clock.now_ns + self._rng.randrange(20_000, LATE_NS if late else QUICK_NS)
        at = self._last_ns = max(at, self._last_ns)
        self._clock.after(at - self._clock.now_ns, lambda: self._arrive(box))

    def _arrive(self, box: list[T]) -> None:
        if self._open and self._under_way and self._under_way[0] is box:
            self._under_way.popleft()
            self._deliver(box[0])

    def sender_died(self) -> None:
        """Some of what it sent had left already; the rest is gone."""
        for _ in range(self._rng.randint(0, len(self._under_way))):
            self._under_way.pop()

    def receiver_died(self) -> None:
        """What had reached its buffers is gone; the rest waits for the next one."""
        for _ in range(self._rng.randint(0, len(self._under_way))):
            self._under_way.popleft()
        self._open = False

    def receiver_back(self) -> None:
        """Another one listens: the sender finds it within its reconnection time."""
        self._clock.after(self._rng.randrange(RECONNECT_NS_MAX), self._reopen)

    def _reopen(self) -> None:
        if not self._open:
            self._open = True
            for box in self._under_way:
                self._schedule(box)
