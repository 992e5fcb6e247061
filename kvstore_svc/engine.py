"""Carries out what the core decides: copies on the calling thread, disk work on others.

One thread owns the core and calls `turn`. A lone read is done on that thread too: that spares its caller two
thread switches, which cost half as much as the read itself.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.core import Core
from phalanx.kvstore_svc.disk import Disk
from phalanx.kvstore_svc.disk_threads import DiskThreads
from phalanx.kvstore_svc.events import (
    Action,
    Call,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    Create,
    Delete,
    Event,
    GetReply,
    PutReply,
    Read,
    Seal,
    SpaceMeasured,
    Sync,
    Write,
)
from phalanx.kvstore_svc.layout import payload_checksum
from phalanx.kvstore_svc.memory import FrameMemory
from phalanx.kvstore_svc.recovery import Recovery, recover

TICK_NS = 200_000_000
_INLINE_BYTES_MAX = 256 * 1024  # a longer read is never done on the core's thread

Reply = PutReply | GetReply


class Copier(Protocol):
    """The callers' memory. Both return an empty string, or why the copy cannot be trusted."""

    def copy_in(self, call: Call, into: memoryview) -> str: ...
    def copy_out(self, call: Call, data: memoryview) -> str: ...


class Engine:
    """A running store in `directory`. `wake` is its event counter, if the caller has one already.

    Raises ConfigError when the bounds contradict each other, OSError when the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        config: StoreConfig,
        copier: Copier,
        now_ns: Callable[[], int] = time.time_ns,
        progress: Callable[[float], None] = lambda fraction: None,
        wake: int | None = None,
    ) -> None:
        config.check()
        self._copier, self.now_ns = copier, now_ns
        self.disk = Disk(directory)
        try:
            self.recovery: Recovery = recover(self.disk, progress)
        except OSError:
            self.disk.close()
            raise
        self.core = Core(config, self.disk.store_id, self.recovery.found, now_ns())
        self._memory = FrameMemory(config)
        self.wake = new_wake() if wake is None else wake  # readable: a turn is due
        self._threads = DiskThreads(self.disk, self._memory, self.wake)
        self._next_tick_ns = 0

    def turn(self, events: Iterable[Event] = ()) -> list[Reply]:
        """Take these events and all disk work that is done; returns the answers for callers."""
        queue, replies = deque(events), list[Reply]()
        self._clear_wake()
        while True:
            queue += self._threads.take()
            now_ns = self.now_ns()
            actions: list[Action] = []
            while queue:
                actions += self.core.handle(queue.popleft(), now_ns)
            actions += self._tick(now_ns)
            actions += self.core.flush(now_ns)
            if not actions:
                return replies
            self._perform(actions, queue, replies)

    def wait(self, timeout_s: float) -> None:
        """Sleep until disk work is done or the time is over: for callers without a poller."""
        select.select([self.wake], [], [], timeout_s)

    @property
    def idle(self) -> bool:
        return self.core.idle and self._threads.in_flight == 0

    def close(self, timeout_s: float = 10.0) -> list[Reply]:
        """Write and seal what is there, then stop. Answers that were still due are returned."""
        self.core.close()
        deadline = time.monotonic() + timeout_s
        replies = self.turn()
        while not self.idle and time.monotonic() < deadline:
            self.wait(0.1)
            replies += self.turn()
        self._threads.stop()
        self.disk.close()
        return replies

    def _tick(self, now_ns: int) -> list[Action]:
        if now_ns < self._next_tick_ns <= now_ns + TICK_NS:  # else it is due, or the clock jumped
            return []
        self._next_tick_ns = now_ns + TICK_NS
        measured = SpaceMeasured(self.disk.free_bytes())
        return self.core.handle(measured, now_ns) + self.core.tick(now_ns)

    def _perform(self, actions: list[Action], queue: deque[Event], replies: list[Reply]) -> None:
        """Copy and answer at once, hand disk work over; what is done at once goes into `queue`."""
        reads = []
        for action in actions:
            match action:
                case PutReply() | GetReply():
                    replies.append(action)
                case CopyIn(call, frame, length):
                    queue.append(self._copy_in(call, self._memory.payload(frame, length)))
                case CopyOut(call, frame, length):
                    payload = self._memory.payload(frame, length)
                    queue.append(CopiedOut(call, self._copier.copy_out(call, payload)))
                case Read():
                    reads.append(action)
                case Create() | Write() | Sync() | Seal() | Delete():
                    self._threads.change(action)
        lone = len(reads) == 1 and self._threads.reads_in_flight == 0
        if lone and reads[0].place.length <= _INLINE_BYTES_MAX:
            queue += self._threads.read_now(reads)
        else:
            self._threads.read(reads)

    def _copy_in(self, call: Call, into: memoryview) -> CopiedIn:
        reason = self._copier.copy_in(call, into)
        return CopiedIn(call, b"" if reason else payload_checksum(into), reason)

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            pass


def new_wake() -> int:
    """An event counter for a poller: readable when disk work is done. The caller closes it."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
