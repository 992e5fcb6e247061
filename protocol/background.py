"""What may hang in the kernel, done beside the loop: a look at a disk that is frozen, or behind a network that is
gone, takes as long as that is so. Threads are started when they are needed, so a fork has none."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """One call at a time in a thread of its own; what it finds is picked up later, or never."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._asked: SimpleQueue[Callable[[], T]] = SimpleQueue()
        self._found: list[T] = []
        self._idle = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and not self._idle.is_set()

    def ask(self, look: Callable[[], T]) -> list[T]:
        """Begin `look` if the call before is over; returns what that one found. Nothing, and `look` is not
        begun, as long as it is under way."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            if not _starts(self._thread):
                return []
            self._idle.set()
        if not self._idle.is_set():
            return []
        found, self._found = self._found, []
        self._idle.clear()
        self._asked.put(look)
        return found

    def _run(self) -> None:
        while True:
            look = self._asked.get()
            self._found.append(look())
            self._idle.set()

    def end(self, limit_s: float) -> None:
        """Wait for a call that is under way, but not for ever."""
        if self._thread is not None:
            self._idle.wait(limit_s)


def within(limit_s: float, look: Callable[[], T], otherwise: T) -> T:
    """The result of `look`, if it comes in time; it may go on for as long as the kernel keeps it."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(look()), daemon=True)
    if _starts(thread):
        thread.join(limit_s)
    return found[0] if found else otherwise


def _starts(thread: threading.Thread) -> bool:
    """The machine may have no room for another one."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
