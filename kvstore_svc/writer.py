"""The way to disk: batches of staged records, segments opened, sealed, synced and deleted. Pure.

Group commit: while a stream's writes are in flight its records gather, and go out together as one
write and one sync. A record is durable only once a sync that began after its write ended came back; any
error makes everything in that segment that is not durable yet a miss, because the kernel
reports a lost page once and then forgets it. A full or failing disk turns caching off for a while.
"""

from collections.abc import Iterable
from itertools import count

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.events import (
    Action,
    Call,
    Create,
    Created,
    Delete,
    Deleted,
    PutReply,
    Seal,
    Sealed,
    Sync,
    Synced,
    Write,
    Written,
)
from phalanx.kvstore_svc.index import Index
from phalanx.kvstore_svc.layout import Kind, RecordHeader, SegmentHead
from phalanx.kvstore_svc.segments import (
    Entry,
    EntryState,
    Segment,
    SegmentState,
    SegmentTable,
    Stream,
)

_AHEAD_SEGMENTS_MIN = 8  # a store that holds fewer cannot spare one that is only prepared


class Writer:
    """Appends its actions to `out`; the core hands them on."""

    def __init__(
        self, config: StoreConfig, store_id: bytes, index: Index, out: list[Action]
    ) -> None:
        self._config, self._store_id, self._index, self._out = config, store_id, index, out
        self.table = SegmentTable()
        self._streams: dict[tuple[Kind, int], Stream] = {}
        self._writes: dict[int, tuple[Stream, Segment, list[Entry], bool]] = {}
        self._write_ids, self._next_segment, self._next_sequence = count(1), 1, 1
        self.free_bytes = 1 << 62  # until it is measured
        self.off = ""
        self._off_until_ns = 0
        self.closing = False
        self.evicted = self.dropped = 0
        self.staged = dict.fromkeys(Kind, 0)  # records with a frame that waits for a write

    # ---------------------------------------------------------------- records come in

    def adopt(self, segment: Segment) -> None:
        """A segment found at the start, with its entries in the index."""
        self.table.add(segment)
        self._next_segment = max(self._next_segment, segment.id + 1)
        last = max((entry.sequence for entry in segment.entries), default=0)
        self._next_sequence = max(self._next_sequence, last + 1)

    def is_off(self, now_ns: int) -> bool:
        """Whether puts are declined. After a while the next put tries the disk again."""
        if self.off and now_ns >= self._off_until_ns:
            self.off = ""
        return bool(self.off) or self.closing

    def stage(self, entry: Entry, now_ns: int) -> None:
        """Take a record whose pinned frame is filled; its frame is unpinned once it is written."""
        self.staged[entry.kind] += 1
        if self.is_off(now_ns):
            self._unstage(entry)
            self._lose(entry, self.off or "the store is stopping")
            return
        self._streams.setdefault((entry.kind, entry.ttl_class), Stream()).pending.append(entry)

    def when_durable(self, entry: Entry, call: Call) -> None:
        """Answer `call` once the record is durable, or lost."""
        entry.waiters.append(call)
        if entry.state is EntryState.STORED:
            assert entry.segment is not None
            self._request_sync(entry.segment)

    def pump(self, now_ns: int) -> None:
        """Start every write that can start now."""
        for (kind, ttl_class), stream in self._streams.items():
            while stream.pending and stream.writes < self._config.writes_in_flight:
                segment = self._writable(
                    stream, SegmentHead(self._store_id, 0, kind, ttl_class), now_ns
                )
                if segment is None:
                    break
                self._write_batch(stream, segment, now_ns)
            if self.closing and not stream.pending and not stream.writes:
                self._close_stream(stream)

    # ---------------------------------------------------------------- answers of the disk

    def created(self, event: Created, now_ns: int) -> None:
        segment = self.table[event.segment]
        self.free_bytes = event.free_bytes
        segment.state = SegmentState.OPEN
        if event.error:
            self._detach(segment)
            self.table.remove(segment)
            self._turn_off(event.error, now_ns)

    def written(self, event: Written, now_ns: int) -> None:
        stream, segment, batch, synced = self._writes.pop(event.write)
        stream.writes -= 1
        segment.writes -= 1
        segment.used_ns = now_ns
        for entry in batch:
            self._unstage(entry)
        if event.error or segment.failed:
            self._lose_all(batch, event.error or "an earlier write failed")
            self._fail(segment, event.error, now_ns)
        elif synced:
            self._settle(batch)
        else:
            segment.unsynced_since_ns = segment.unsynced_since_ns if segment.unsynced else now_ns
            segment.unsynced += batch
            for entry in batch:
                entry.state = EntryState.STORED
            if any(entry.waiters for entry in batch):
                self._request_sync(segment)
        self._seal_if_drained(segment)

    def synced(self, event: Synced, now_ns: int) -> None:
        segment = self.table[event.segment]
        self._sync_over(segment, event.error, now_ns)
        if segment.sync_again and segment.unsynced:
            self._request_sync(segment)
        self._seal_if_drained(segment)

    def sealed(self, event: Sealed, now_ns: int) -> None:
        segment = self.table[event.segment]
        self.free_bytes = event.free_bytes
        segment.state = SegmentState.SEALED
        self.table.resize(segment, event.file_bytes)
        self._sync_over(segment, event.error, now_ns)

    def deleted(self, event: Deleted) -> None:
        self.free_bytes = event.free_bytes
        self.table.remove(self.table[event.segment])

    def read_over(self, segment: Segment) -> None:
        segment.reads -= 1
        if segment.state is SegmentState.DOOMED and segment.reads == 0:
            self._out.append(Delete(segment.id))

    # ---------------------------------------------------------------- time passes

    def tick(self, now_ns: int) -> None:
        config = self._config
        for segment in self.table:
            if segment.state is SegmentState.DOOMED:
                continue
            late = now_ns - segment.unsynced_since_ns >= config.sync_after_ns
            if segment.unsynced and not segment.sync_in_flight and late:
                self._request_sync(segment)
            expired = segment.entries and segment.expires_ns <= now_ns
            if expired and not segment.busy:
                self._evict(segment)
        while self._missing_bytes(self.table.doomed_bytes) > 0:
            victim = self.table.victim(now_ns, set())
            if victim is None:
                break
            self._evict(victim)
        below = config.free_floor_bytes - self.free_bytes - self.table.doomed_bytes
        if below > 0 and not self.table.kept_bytes:
            self._turn_off(self._below_floor(), now_ns)

    @property
    def idle(self) -> bool:
        """Nothing waits to be written, synced or sealed."""
        streams = self._streams.values()
        return not (
            any(s.pending or s.writes for s in streams)
            or any(s.busy or s.unsynced for s in self.table)
        )

    # ---------------------------------------------------------------- writing

    def _writable(self, stream: Stream, head: SegmentHead, now_ns: int) -> Segment | None:
        """The segment that takes the stream's next record; None while one has to be made for it."""
        if stream.active is not None:
            if stream.active.fits(stream.pending[0].length):
                return stream.active
            self._close(stream)
        if stream.next is None:
            self._create(stream, head, now_ns)
        elif stream.next.state is SegmentState.OPEN:
            stream.active, stream.next = stream.next, None
        return stream.active

    def _write_batch(self, stream: Stream, segment: Segment, now_ns: int) -> None:
        records, batch, start = [], [], segment.end
        while stream.pending and segment.fits(stream.pending[0].length):
            if segment.end - start >= self._config.write_bytes_max:
                break
            entry = stream.pending.popleft()
            segment.append(entry, self._next_sequence)
            self._next_sequence += 1
            entry.state = EntryState.WRITING
            assert entry.frame is not None
            batch.append(entry)
            records.append((entry.frame.id, self._header(entry, segment.head, now_ns)))
        write, sync = next(self._write_ids), any(entry.waiters for entry in batch)
        self._writes[write] = (stream, segment, batch, sync)
        stream.writes += 1
        segment.writes += 1
        self._out.append(Write(write, segment.id, records, sync))
        ahead = self._config.max_bytes >= _AHEAD_SEGMENTS_MIN * self._config.segment_size
        if ahead and segment.end > segment.nbytes * 3 // 4 and stream.next is None:
            self._create(stream, segment.head, now_ns)

    def _header(self, entry: Entry, head: SegmentHead, now_ns: int) -> RecordHeader:
        return RecordHeader(
            self._store_id,
            head.kind,
            head.ttl_class,
            entry.place,
            entry.sequence,
            now_ns,
            entry.expires_ns,
            entry.key,
            entry.checksum,
        )

    def _create(self, stream: Stream, head: SegmentHead, now_ns: int) -> None:
        if self.closing and not stream.pending or not self._make_room(stream, now_ns):
            return
        size = self._config.segment_size
        head = head._replace(segment=self._next_segment)
        self._next_segment += 1
        stream.next = Segment(head, size, SegmentState.CREATING, now_ns)
        self.table.add(stream.next)
        self.free_bytes -= size
        self._out.append(Create(head, size))

    # ---------------------------------------------------------------- room

    def _missing_bytes(self, coming: int, needed: int = 0) -> int:
        """How many bytes cap and floor lack for `needed` more; `coming` are being freed already."""
        config = self._config
        over_cap = self.table.file_bytes - coming + needed - config.max_bytes
        below_floor = config.free_floor_bytes - (self.free_bytes + coming - needed)
        return max(over_cap, below_floor)

    def _make_room(self, stream: Stream, now_ns: int) -> bool:
        """Whether a segment can be made now. If not, either room is on its way or caching is off."""
        size = self._config.segment_size
        spare = {stream.active.id} if stream.active is not None else set()
        while self._missing_bytes(self.table.doomed_bytes, size) > 0:
            victim = self.table.victim(now_ns, spare)
            if victim is None:
                if not self.table.doomed_bytes and not any(s.busy for s in self.table):
                    self._turn_off(self._below_floor(), now_ns)
                return False
            self._evict(victim)
        return self._missing_bytes(0, size) <= 0

    def _below_floor(self) -> str:
        config = self._config
        return (
            f"disk full: {self.free_bytes} bytes free, a segment takes {config.segment_size} and"
            f" {config.free_floor_bytes} must stay free"
        )

    def _evict(self, segment: Segment) -> None:
        self._detach(segment)
        for entry in segment.entries:
            if self._index.has(entry):
                self._index.remove(entry)
                self.evicted += 1
        segment.unsynced.clear()
        self.table.doom(segment)
        if segment.reads == 0:
            self._out.append(Delete(segment.id))

    def _turn_off(self, reason: str, now_ns: int) -> None:
        self.off = reason
        self._off_until_ns = now_ns + self._config.retry_after_ns
        for stream in self._streams.values():
            while stream.pending:
                entry = stream.pending.popleft()
                self._unstage(entry)
                self._lose(entry, reason)

    # ---------------------------------------------------------------- closing and syncing

    def _detach(self, segment: Segment) -> None:
        for stream in self._streams.values():
            if stream.active is segment:
                stream.active = None
            if stream.next is segment:
                stream.next = None

    def _close(self, stream: Stream) -> None:
        segment, stream.active = stream.active, None
        assert segment is not None
        segment.state = SegmentState.CLOSED
        self._seal_if_drained(segment)

    def _close_stream(self, stream: Stream) -> None:
        for segment in (stream.active, stream.next):
            if segment is not None and not segment.entries and not segment.busy:
                self._evict(segment)
        if stream.active is not None:
            self._close(stream)

    def _seal_if_drained(self, segment: Segment) -> None:
        if segment.state is not SegmentState.CLOSED or segment.busy:
            return
        lines = [e.line() for e in segment.entries if self._index.has(e)]
        segment.state = SegmentState.SEALING
        segment.syncing, segment.unsynced = segment.unsynced, []
        self._out.append(Seal(segment.head, lines, segment.end))

    def _request_sync(self, segment: Segment) -> None:
        if segment.sync_in_flight or segment.state is SegmentState.SEALING:
            segment.sync_again = True
            return
        segment.sync_in_flight, segment.sync_again = True, False
        segment.syncing, segment.unsynced = segment.unsynced, []
        self._out.append(Sync(segment.id))

    def _sync_over(self, segment: Segment, error: str, now_ns: int) -> None:
        segment.sync_in_flight = False
        covered, segment.syncing = segment.syncing, []
        if error or segment.failed:
            self._lose_all(covered, error or "an earlier write failed")
            self._fail(segment, error, now_ns)
        else:
            self._settle(covered)

    def _fail(self, segment: Segment, error: str, now_ns: int) -> None:
        """What is durable stays readable; the rest of the segment is lost, and no more is added."""
        self._detach(segment)
        if segment.state is not SegmentState.SEALING:
            segment.state = SegmentState.SEALED
        segment.failed = True
        self._lose_all(segment.unsynced + segment.syncing, error)
        segment.unsynced, segment.syncing = [], []
        if error:
            self._turn_off(error, now_ns)

    # ---------------------------------------------------------------- what becomes of a record

    def _unstage(self, entry: Entry) -> None:
        self.staged[entry.kind] -= 1
        assert entry.frame is not None
        self._index.pools[entry.kind].unpin(entry.frame)

    def _settle(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.state, entry.durable = EntryState.STORED, True
            kept = self._index.has(entry)  # a read may have found it corrupt before the sync ended
            for call in entry.waiters:
                self._out.append(PutReply(call, kept, kept, "" if kept else "lost meanwhile"))
            entry.waiters.clear()

    def _lose_all(self, entries: Iterable[Entry], reason: str) -> None:
        for entry in entries:
            self._lose(entry, reason)

    def _lose(self, entry: Entry, reason: str) -> None:
        if self._index.has(entry):
            self._index.remove(entry)
            self.dropped += not entry.waiters
        for call in entry.waiters:
            self._out.append(PutReply(call, stored=False, reason=reason))
        entry.waiters.clear()
