"""What goes into the store's core and what comes out: events (past tense, and callers' requests) and
actions (imperative). Plain values; the shells in `engine.py` and the simulator carry the actions out.
"""

from collections.abc import Sequence

import msgspec

from phalanx.kvstore_svc.layout import IndexEntry, Kind, Place, RecordHeader, SegmentHead

Call = tuple[bytes, int]  # who asks (socket identity) and the number of the question


class Event(msgspec.Struct, frozen=True):
    pass


class Put(Event, frozen=True):
    """A caller wants `length` bytes stored under `key`; the bytes wait in the arena `holder`."""

    call: Call
    key: bytes
    kind: Kind
    length: int
    durable: bool = False  # answer after the bytes are synced, else once they are copied
    ttl_s: int = 0  # 0: the default class; else the shortest class that lasts as long
    holder: str = ""


class Get(Event, frozen=True):
    call: Call
    key: bytes
    capacity: int  # bytes of the caller's region
    holder: str = ""


class CopiedIn(Event, frozen=True):
    """Answer to CopyIn. `reason` is empty, or why the bytes cannot be trusted (a stale handle)."""

    call: Call
    checksum: bytes
    reason: str = ""


class CopiedOut(Event, frozen=True):
    call: Call
    reason: str = ""


class Created(Event, frozen=True):
    segment: int
    free_bytes: int  # of the file system, afterwards
    error: str = ""


class Written(Event, frozen=True):
    write: int
    error: str = ""


class Synced(Event, frozen=True):
    segment: int
    error: str = ""


class Sealed(Event, frozen=True):
    segment: int
    file_bytes: int
    free_bytes: int
    error: str = ""


class ReadDone(Event, frozen=True):
    """Answer to Read. `error` is empty only for the whole, intact record of the key at its place."""

    read: int
    error: str = ""


class Deleted(Event, frozen=True):
    segment: int
    free_bytes: int


class SpaceMeasured(Event, frozen=True):
    free_bytes: int


class HolderGone(Event, frozen=True):
    """The arena's name is gone: its owner ended. Calls that wait with it are answered so."""

    holder: str


class Action(msgspec.Struct, frozen=True):
    pass


class CopyIn(Action, frozen=True):
    """Copy the call's bytes into the frame behind the header's room, checksum them, say CopiedIn."""

    call: Call
    frame: int
    length: int


class CopyOut(Action, frozen=True):
    call: Call
    frame: int
    length: int


class Create(Action, frozen=True):
    """Make the segment's file, preallocated, with its head page; durable, name included."""

    head: SegmentHead
    nbytes: int


class Write(Action, frozen=True):
    """Write adjoining records from their frames, the first at its header's place; then sync if asked."""

    write: int
    segment: int
    records: Sequence[tuple[int, RecordHeader]]
    sync: bool


class Sync(Action, frozen=True):
    segment: int


class Seal(Action, frozen=True):
    """Write index and tail at `offset`, cut the file there, sync."""

    head: SegmentHead
    entries: Sequence[IndexEntry]
    offset: int


class Read(Action, frozen=True):
    """Read the record into the frame and check it."""

    read: int
    key: bytes
    place: Place
    frame: int


class Delete(Action, frozen=True):
    segment: int


class PutReply(Action, frozen=True):
    call: Call
    stored: bool
    durable: bool = False
    reason: str = ""


class GetReply(Action, frozen=True):
    call: Call
    found: bool
    nbytes: int = 0
    reason: str = ""


class Stats(msgspec.Struct, frozen=True):
    records: int
    bytes: int  # payload bytes of these records
    hits: int
    misses: int
    corrupt: int  # reads that failed or did not verify; each is a miss too
    evicted: int  # records that gave way to others, or whose time was over
    puts: int  # records taken in
    declined: int  # puts refused: caching off, busy, stale handle
    dropped: int  # records answered as stored in memory whose write failed later
    segments: int
    file_bytes: int
    memory_hits: int
    off: str  # why nothing is cached now; empty: caching is on
