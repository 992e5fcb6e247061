"""Carries out what the core decides: copies on the calling thread, disk work on a few others.

One thread owns the core and calls `turn`. Reads and writes have threads of their own, so that a sync never
holds up a read; they spend their time in system calls and checksums, outside the interpreter lock.
A lone read is done on the calling thread: that spares its caller two thread switches, which cost half as
much as the read itself.
"""

import errno
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, assert_never

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.core import Core
from phalanx.kvstore_svc.disk import Disk
from phalanx.kvstore_svc.events import (
    Action,
    Call,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    Create,
    Created,
    Delete,
    Deleted,
    Event,
    GetReply,
    PutReply,
    Read,
    ReadDone,
    Seal,
    Sealed,
    SpaceMeasured,
    Sync,
    Synced,
    Write,
    Written,
)
from phalanx.kvstore_svc.layout import (
    HEADER_BYTES,
    Kind,
    check_record,
    encode_record_header,
    payload_checksum,
    record_bytes,
)
from phalanx.kvstore_svc.recovery import Recovery, recover

READERS = 8  # the disk's bandwidth needs a queue of several random reads
WRITERS = 2  # one writes while another syncs
TICK_NS = 200_000_000
_INLINE_BYTES_MAX = 256 * 1024  # a longer read is never done on the core's thread

Reply = PutReply | GetReply
DiskAction = Create | Write | Sync | Seal | Read | Delete


class Copier(Protocol):
    """The callers' memory. Both return an empty string, or why the copy cannot be trusted."""

    def copy_in(self, call: Call, into: memoryview) -> str: ...
    def copy_out(self, call: Call, data: memoryview) -> str: ...


class Engine:
    """A running store in `directory`.

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
        self._frames = _Frames(config)
        self._done: SimpleQueue[Event | Exception] = SimpleQueue()
        self.wake = new_wake() if wake is None else wake  # readable: a turn is due
        self._reads: SimpleQueue[DiskAction | None] = SimpleQueue()
        self._writes: SimpleQueue[DiskAction | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._work, args=(jobs,), daemon=True, name=f"kvstore-{name}-{i}")
            for name, jobs, number in (
                ("read", self._reads, READERS),
                ("write", self._writes, WRITERS),
            )
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()
        self._in_flight = self._reads_in_flight = 0
        self._next_tick_ns = 0

    def turn(self, events: Iterable[Event] = ()) -> list[Reply]:
        """Take these events and all disk work that is done; returns the answers for callers."""
        queue, replies = deque(events), list[Reply]()
        self._clear_wake()
        while True:
            while not self._done.empty():
                queue.append(self._take_done())
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
        return self.core.idle and self._in_flight == 0

    def close(self, timeout_s: float = 10.0) -> list[Reply]:
        """Write and seal what is there, then stop. Answers that were still due are returned."""
        self.core.close()
        deadline = time.monotonic() + timeout_s
        replies = self.turn()
        while not self.idle and time.monotonic() < deadline:
            self.wait(0.1)
            replies += self.turn()
        for thread in self._threads:
            (self._reads if "read" in thread.name else self._writes).put(None)
        for thread in self._threads:
            thread.join()
        self.disk.close()
        return replies

    # ---------------------------------------------------------------- the core's thread

    def _tick(self, now_ns: int) -> list[Action]:
        if now_ns < self._next_tick_ns <= now_ns + TICK_NS:  # else it is due, or the clock jumped
            return []
        self._next_tick_ns = now_ns + TICK_NS
        measured = SpaceMeasured(self.disk.free_bytes())
        return self.core.handle(measured, now_ns) + self.core.tick(now_ns)

    def _perform(self, actions: list[Action], queue: deque[Event], replies: list[Reply]) -> None:
        """Copy and answer at once, hand disk work over; what the copies say goes into `queue`."""
        reads = []
        for action in actions:
            match action:
                case PutReply() | GetReply():
                    replies.append(action)
                case CopyIn(call, frame, length):
                    queue.append(self._copy_in(call, self._frames.payload(frame, length)))
                case CopyOut(call, frame, length):
                    payload = self._frames.payload(frame, length)
                    queue.append(CopiedOut(call, self._copier.copy_out(call, payload)))
                case Read():
                    reads.append(action)
                case Create() | Write() | Sync() | Seal() | Delete():
                    self._hand_over(self._writes, action)
        lone = len(reads) == 1 and self._reads_in_flight == 0
        if lone and reads[0].place.length <= _INLINE_BYTES_MAX:
            queue.append(self._do(reads[0]))
            return
        self._reads_in_flight += len(reads)
        for read in reads:
            self._hand_over(self._reads, read)

    def _copy_in(self, call: Call, into: memoryview) -> CopiedIn:
        reason = self._copier.copy_in(call, into)
        return CopiedIn(call, b"" if reason else payload_checksum(into), reason)

    def _hand_over(self, jobs: "SimpleQueue[DiskAction | None]", action: DiskAction) -> None:
        self._in_flight += 1
        jobs.put(action)

    def _take_done(self) -> Event:
        self._in_flight -= 1
        done = self._done.get()
        if isinstance(done, Exception):
            raise done
        self._reads_in_flight -= isinstance(done, ReadDone)
        return done

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            pass

    # ---------------------------------------------------------------- any thread

    def _work(self, jobs: "SimpleQueue[DiskAction | None]") -> None:
        while (action := jobs.get()) is not None:
            try:
                done: Event | Exception = self._do(action)
            except Exception as error:  # noqa: BLE001 - a bug: raised on the core's thread, which ends
                done = error
            self._done.put(done)
            os.eventfd_write(self.wake, 1)

    def _do(self, action: DiskAction) -> Event:
        disk = self.disk
        match action:
            case Read():
                return ReadDone(action.read, _attempt(lambda: self._read(action)))
            case Write():
                return Written(action.write, _attempt(lambda: self._write(action)))
            case Sync(segment):
                return Synced(segment, _attempt(lambda: disk.sync(segment)))
            case Create(head, nbytes):
                error = _attempt(lambda: disk.create(head, nbytes))
                return Created(head.segment, disk.free_bytes(), error)
            case Seal(head, entries, offset):
                error = _attempt(lambda: disk.seal(head, entries, offset))
                return Sealed(head.segment, disk.size(head.segment), disk.free_bytes(), error)
            case Delete(segment):
                disk.delete(segment)
                return Deleted(segment, disk.free_bytes())
        assert_never(action)

    def _read(self, action: Read) -> str:
        place = action.place
        record = self._frames.record(action.frame, place.length)
        count = self.disk.read(place.segment, place.offset, record)
        return check_record(
            record[:count], store_id=self.disk.store_id, key=action.key, place=place
        )

    def _write(self, action: Write) -> None:
        buffers = []
        for frame, header in action.records:
            record = self._frames.record(frame, header.place.length)
            record[:HEADER_BYTES] = encode_record_header(header)
            end = HEADER_BYTES + header.place.length
            record[end:] = bytes(len(record) - end)  # what another record left there stays here
            buffers.append(record)
        self.disk.write(action.segment, action.records[0][1].place.offset, buffers)
        if action.sync:
            self.disk.sync(action.segment)


def new_wake() -> int:
    """An event counter for a poller: readable when disk work is done. The caller closes it."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class _Frames:
    """The memory of all frames, page-aligned as direct I/O asks; touched only where it is used."""

    def __init__(self, config: StoreConfig) -> None:
        sizes = [size for kind in Kind for size in self._sizes(config, kind)]
        self._memory = memoryview(mmap.mmap(-1, sum(sizes)))
        self._views: list[memoryview] = []
        start = 0
        for size in sizes:
            self._views.append(self._memory[start : start + size])
            start += size

    @staticmethod
    def _sizes(config: StoreConfig, kind: Kind) -> list[int]:
        return [config.frame_bytes(kind)] * config.num_frames(kind)

    def record(self, frame: int, length: int) -> memoryview:
        return self._views[frame][: record_bytes(length)]

    def payload(self, frame: int, length: int) -> memoryview:
        return self._views[frame][HEADER_BYTES : HEADER_BYTES + length]


def _attempt(work: Callable[[], object]) -> str:
    """Why the work failed, in words for an operator; empty when it did not. A returned text is a reason."""
    try:
        result = work()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{'disk full' if full else 'disk failed'}: {error.strerror or error}"
    return result if isinstance(result, str) else ""
