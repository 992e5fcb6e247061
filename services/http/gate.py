"""The door (`quotas.py`) for coroutines: wait for a place, give it back whatever happens."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from phalanx.services.http.quotas import Door, Ticket


class Gate:
    """One for the server. Used in one event loop."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Raises HttpError when there is no room to wait, or no more."""
        ticket = self.door.enter(key, time.monotonic_ns())
        try:
            if not ticket.running:
                future = asyncio.get_running_loop().create_future()
                self._waiting[ticket] = future
                await future
            yield
        finally:
            shed = self._waiting.pop(ticket, None) is None and not ticket.running
            if not shed:
                self._start(self.door.leave(ticket, time.monotonic_ns()))

    def set_capacity(self, part: float) -> None:
        """The part of its ranks that the node has now."""
        now_ns = time.monotonic_ns()
        started, shed = self.door.set_capacity(part, now_ns)
        self._start(started)
        for ticket in shed:
            future = self._waiting.pop(ticket)
            if not future.done():
                future.set_exception(self.door.shed_error(now_ns))

    def _start(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)
