"""The table of segments and records: who lies where, what may go, how many bytes all take. Pure.

Records of one kind and one lifetime share segments, so that a whole segment expires at once and a large
window state never sits between small blocks. Space is reclaimed by deleting whole segments.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto

from phalanx.kvstore_svc.events import Call
from phalanx.kvstore_svc.frames import Frame
from phalanx.kvstore_svc.layout import (
    PAGE,
    IndexEntry,
    Kind,
    Place,
    SegmentHead,
    index_bytes,
    record_bytes,
)


class EntryState(Enum):
    STAGED = auto()  # copied into a frame, waits to be written; visible from memory
    WRITING = auto()
    STORED = auto()  # readable from disk


class Entry:
    """A record that the store has. It leaves the index before anything of it is reused."""

    __slots__ = (
        "checksum",
        "durable",
        "expires_ns",
        "frame",
        "key",
        "kind",
        "length",
        "offset",
        "segment",
        "sequence",
        "state",
        "ttl_class",
        "waiters",
    )

    def __init__(
        self, key: bytes, kind: Kind, length: int, ttl_class: int, expires_ns: int
    ) -> None:
        self.key, self.kind, self.length = key, kind, length
        self.ttl_class, self.expires_ns = ttl_class, expires_ns
        self.state = EntryState.STAGED
        self.durable = False
        self.checksum = b""
        self.frame: Frame | None = None  # its copy in memory
        self.segment: Segment | None = None
        self.offset = self.sequence = 0
        self.waiters: list[Call] = []  # puts that are answered once the record is durable

    @property
    def place(self) -> Place:
        assert self.segment is not None
        return Place(self.segment.id, self.offset, self.length)

    def line(self) -> IndexEntry:
        return IndexEntry(self.key, self.offset, self.length, self.sequence, self.expires_ns)


class SegmentState(Enum):
    CREATING = auto()
    OPEN = auto()
    CLOSED = auto()  # takes no more records; waits for its writes, then is sealed
    SEALING = auto()
    SEALED = (
        auto()
    )  # or closed by an error: then without an index on disk, and scanned at the next start
    DOOMED = auto()  # out of the index; deleted once its reads are over


class Segment:
    def __init__(self, head: SegmentHead, nbytes: int, state: SegmentState, now_ns: int) -> None:
        self.head, self.nbytes, self.state = head, nbytes, state
        self.id = head.segment
        self.end = PAGE  # where the next record goes
        self.entries: list[Entry] = []  # every record it holds, also those no longer in the index
        self.expires_ns = 0  # when the last of its records does
        self.used_ns = now_ns  # last hit, or last record added
        self.writes = self.reads = 0  # in flight
        self.unsynced: list[Entry] = []  # written, not yet durable
        self.unsynced_since_ns = 0
        self.syncing: list[Entry] = []  # become durable when the sync in flight ends well
        self.sync_in_flight = self.sync_again = False
        self.failed = False  # after one error nothing that is not durable yet can be trusted

    def fits(self, length: int) -> bool:
        after = self.end + record_bytes(length) + index_bytes(len(self.entries) + 1)
        return after <= self.nbytes

    def append(self, entry: Entry, sequence: int) -> None:
        entry.segment, entry.offset, entry.sequence = self, self.end, sequence
        self.end += record_bytes(entry.length)
        self.entries.append(entry)
        self.expires_ns = max(self.expires_ns, entry.expires_ns)

    @property
    def busy(self) -> bool:
        """Its file is being written: it cannot go now."""
        writing = self.state in (SegmentState.CREATING, SegmentState.SEALING)
        return writing or self.writes > 0 or self.sync_in_flight


class Stream:
    """The records of one kind and lifetime on their way to disk, in order."""

    def __init__(self) -> None:
        self.pending: deque[Entry] = deque()
        self.active: Segment | None = None
        self.next: Segment | None = None  # being created, or ready for when the active one is full
        self.writes = 0


class SegmentTable:
    """All segments by id, and the bytes that their files take."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self.file_bytes = 0
        self.doomed_bytes = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, segment_id: int) -> Segment:
        return self._segments[segment_id]

    def add(self, segment: Segment) -> None:
        self._segments[segment.id] = segment
        self.file_bytes += segment.nbytes

    def resize(self, segment: Segment, nbytes: int) -> None:
        self.file_bytes += nbytes - segment.nbytes
        segment.nbytes = nbytes

    def doom(self, segment: Segment) -> None:
        segment.state = SegmentState.DOOMED
        self.doomed_bytes += segment.nbytes

    def remove(self, segment: Segment) -> None:
        del self._segments[segment.id]
        self.file_bytes -= segment.nbytes
        if segment.state is SegmentState.DOOMED:
            self.doomed_bytes -= segment.nbytes

    @property
    def kept_bytes(self) -> int:
        """Once all deletions on their way are done."""
        return self.file_bytes - self.doomed_bytes

    def victim(self, now_ns: int, spare: set[int]) -> Segment | None:
        """The segment to delete next: an expired one, else the least recently used, never one in `spare`."""
        candidates = [
            s
            for s in self._segments.values()
            if not s.busy and s.state is not SegmentState.DOOMED and s.id not in spare
        ]
        return min(candidates, key=lambda s: (s.expires_ns > now_ns, s.used_ns, s.id), default=None)
