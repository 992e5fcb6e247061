"""Virtual time: what happens when, in an order that depends on nothing but the calls made."""

import heapq
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns
        self._queue: list[tuple[int, int, Act]] = []
        self._count = 0  # breaks ties, so that the heap never compares functions

    def after(self, delay_ns: int, act: Act) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._count, act))

    def advance(self, end_ns: int, done: Callable[[], bool] = lambda: False) -> None:
        """Until that time, or until it is done, which is asked before each event."""
        while self._queue and not done():
            due_ns, _, act = self._queue[0]
            if due_ns > end_ns:
                break
            heapq.heappop(self._queue)
            self.now_ns = due_ns
            act()
        if not done():
            self.now_ns = max(self.now_ns, end_ns)
