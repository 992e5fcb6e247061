"""The threads that do the disk's work, so that the core's thread never waits for it.

Reads and writes have threads of their own: a sync never holds up a read. They spend their time in system
calls and checksums, outside the interpreter lock. Reads of adjoining records, as the blocks of one prompt
are, go to the disk as one.
"""

import errno
import os
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import assert_never

from phalanx.kvstore_svc.disk import Disk
from phalanx.kvstore_svc.events import (
    Create,
    Created,
    Delete,
    Deleted,
    Event,
    Read,
    ReadDone,
    Seal,
    Sealed,
    Sync,
    Synced,
    Write,
    Written,
)
from phalanx.kvstore_svc.layout import (
    HEADER_BYTES,
    check_record,
    encode_record_header,
    record_bytes,
)
from phalanx.kvstore_svc.memory import FrameMemory
from phalanx.protocol.failpoints import failpoint

READERS = 8  # the disk's bandwidth needs a queue of several random reads
WRITERS = 2  # one writes while another syncs
_READ_BYTES_MAX = 1 << 20  # of adjoining records read as one; the rest go to other threads

Change = Create | Write | Sync | Seal | Delete
_Job = Callable[[], list[Event]]
_Jobs = SimpleQueue[_Job | None]


class DiskThreads:
    """Takes actions, gives their events. One thread calls all methods; `wake` becomes readable when
    there are events to take."""

    def __init__(self, disk: Disk, memory: FrameMemory, wake: int) -> None:
        self._disk, self._memory, self._wake = disk, memory, wake
        self._reads: _Jobs = SimpleQueue()
        self._changes: _Jobs = SimpleQueue()
        self._done: SimpleQueue[list[Event] | Exception] = SimpleQueue()
        self.in_flight = self.reads_in_flight = 0  # actions
        self._threads = [
            Thread(target=self._work, args=(jobs,), daemon=True, name=f"kvstore-{name}")
            for name, jobs, number in (
                ("read", self._reads, READERS),
                ("write", self._changes, WRITERS),
            )
            for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def change(self, action: Change) -> None:
        self.in_flight += 1
        self._changes.put(lambda: [self._change(action)])

    def read(self, reads: list[Read]) -> None:
        self.in_flight += len(reads)
        self.reads_in_flight += len(reads)
        for run in _adjoining(reads):
            self._reads.put(lambda run=run: self.read_now(run))  # type: ignore[misc]

    def read_now(self, reads: list[Read]) -> list[Event]:
        """Read adjoining records on the calling thread."""
        views = [self._memory.record(read.frame, read.place.length) for read in reads]
        place, count = reads[0].place, 0
        try:
            count = self._disk.read(place.segment, place.offset, views)
        except OSError as error:
            return [ReadDone(read.read, _words(error)) for read in reads]
        done: list[Event] = []
        for read, view in zip(reads, views, strict=True):
            there, count = view[: max(count, 0)], count - len(view)
            wrong = check_record(
                there, store_id=self._disk.store_id, key=read.key, place=read.place
            )
            done.append(ReadDone(read.read, wrong))
        return done

    def take(self) -> list[Event]:
        """What is done by now. Raises what a bug on one of the threads raised."""
        events: list[Event] = []
        while not self._done.empty():
            done = self._done.get()
            if isinstance(done, Exception):
                raise done
            self.in_flight -= len(done)
            self.reads_in_flight -= sum(isinstance(event, ReadDone) for event in done)
            events += done
        return events

    def stop(self) -> None:
        """End the threads after what they have been given."""
        for jobs, number in ((self._reads, READERS), (self._changes, WRITERS)):
            for _ in range(number):
                jobs.put(None)
        for thread in self._threads:
            thread.join()

    # ---------------------------------------------------------------- on the threads

    def _work(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None:
            try:
                self._done.put(job())
            except Exception as error:  # noqa: BLE001 - a bug: `take` raises it, the process ends
                self._done.put(error)
            os.eventfd_write(self._wake, 1)

    def _change(self, action: Change) -> Event:
        disk, error = self._disk, ""
        try:
            self._carry_out(action)
        except OSError as failure:
            error = _words(failure)
        match action:
            case Write():
                return Written(action.write, error)
            case Sync(segment):
                return Synced(segment, error)
            case Create(head):
                return Created(head.segment, disk.free_bytes(), error)
            case Seal(head):
                return Sealed(head.segment, disk.size(head.segment), disk.free_bytes(), error)
            case Delete(segment):
                return Deleted(segment, disk.free_bytes())
        assert_never(action)

    def _carry_out(self, action: Change) -> None:
        match action:
            case Write():
                self._write(action)
            case Sync(segment):
                self._disk.sync(segment)
            case Create(head, nbytes):
                failpoint("kvstore.create.before")
                self._disk.create(head, nbytes)
            case Seal(head, entries, offset):
                failpoint("kvstore.seal.before")
                self._disk.seal(head, entries, offset)
            case Delete(segment):
                self._disk.delete(segment)
            case _:
                assert_never(action)

    def _write(self, action: Write) -> None:
        records = []
        for frame, header in action.records:
            record = self._memory.record(frame, header.place.length)
            record[:HEADER_BYTES] = encode_record_header(header)
            end = HEADER_BYTES + header.place.length
            record[end:] = bytes(len(record) - end)  # what another record left there stays here
            records.append(record)
        failpoint("kvstore.write.before")
        self._disk.write(action.segment, action.records[0][1].place.offset, records)
        if action.sync:
            failpoint("kvstore.write.before_sync")
            self._disk.sync(action.segment)
        failpoint("kvstore.write.after")


def _adjoining(reads: list[Read]) -> Iterator[list[Read]]:
    """The reads in runs of adjoining records, each within the bound."""
    run: list[Read] = []
    nbytes = end = 0
    for read in sorted(reads, key=lambda read: read.place):
        segment, offset, length = read.place
        adjoins = bool(run) and (segment, offset) == (run[0].place.segment, end)
        size = record_bytes(length)
        if run and not (adjoins and nbytes + size <= _READ_BYTES_MAX):
            yield run
            run, nbytes = [], 0
        run.append(read)
        nbytes, end = nbytes + size, offset + size
    if run:
        yield run


def _words(error: OSError) -> str:
    """For an operator."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{'disk full' if full else 'disk failed'}: {error.strerror or error}"
