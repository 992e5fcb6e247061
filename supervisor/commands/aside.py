"""Telling a terminal what happens, beside the loop: one that takes nothing, or is gone, keeps nobody else."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
EVENTS_MAX = 1024  # on their way to the terminal; beyond, they are lost to it (the log has them)
END_S = 1.0  # that whoever ends waits until the last of them is told


class Aside(Generic[T]):
    """Calls `tell` with each event, in a thread of its own.

    Args:
        fd: what `tell` writes to. Once that fails nothing is told any more, and what else is written there is lost:
            the last flush of a process, too, would fail.
        end: called in the same thread when there is nothing more to tell.
    """

    def __init__(self, tell: Callable[[T], None], end: Callable[[], None], fd: int) -> None:
        self._tell, self._end, self._fd = tell, end, fd
        self._events: queue.Queue[T | None] = queue.Queue(EVENTS_MAX)
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def __call__(self, event: T) -> None:
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(event)

    def close(self, limit_s: float = END_S) -> bool:
        """Wait until all is told, but not for ever. Returns whether it is: else the thread hangs in a write."""
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                with contextlib.suppress(UnicodeError):  # what this terminal has no letters for
                    self._tell(event)
            self._end()
        except (OSError, SystemExit):  # rich says so when a pipe is closed
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._fd)
            self._end()
