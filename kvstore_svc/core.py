"""The decisions of the KV store. Pure: events and the wall clock go in, actions come out.

A put is copied into a memory frame, verified there, and visible from then on: answered at once
(`memory`) or after the write and its sync (`disk`). A get is served from its frame or read into one. Nothing is
ever visible before its bytes are complete; a record that fails to read or to verify is taken out
and is a miss. When no frame is free, calls wait in a bounded queue; reads always find frames that staged
writes may not take. The clock is the wall clock, because lifetimes outlast a boot.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.events import (
    Action,
    Call,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    Created,
    Deleted,
    Event,
    Get,
    GetReply,
    HolderGone,
    Put,
    PutReply,
    Read,
    ReadDone,
    Sealed,
    SpaceMeasured,
    Stats,
    Synced,
    Written,
)
from phalanx.kvstore_svc.frames import Frame
from phalanx.kvstore_svc.index import Index
from phalanx.kvstore_svc.layout import Kind
from phalanx.kvstore_svc.recovery import Found
from phalanx.kvstore_svc.segments import Entry, EntryState, Segment, SegmentState
from phalanx.kvstore_svc.writer import Writer
from phalanx.protocol.kvkeys import KEY_BYTES, state_key


class _Fill:
    """A put whose bytes are being copied into its frame; the same key waits for the outcome."""

    def __init__(self, put: Put, frame: Frame) -> None:
        self.put, self.frame = put, frame
        self.followers: list[Put] = []


class _Read:
    """A record being read from disk, and everybody who wants it."""

    def __init__(self, entry: Entry, segment: Segment, frame: Frame, call: Call) -> None:
        self.entry, self.segment, self.frame = entry, segment, frame
        self.calls = [call]


class Core:
    def __init__(
        self, config: StoreConfig, store_id: bytes, found: Iterable[Found], now_ns: int
    ) -> None:
        """`found` is what the recovery read from the disk."""
        config.check()
        self._config = config
        self._out: list[Action] = []
        self.index = Index(config)
        self.writer = Writer(config, store_id, self.index, self._out)
        self._open: set[Call] = set()  # calls not answered yet: a repeated one is the same call
        self._fills: dict[bytes, _Fill] = {}  # by key
        self._filling: dict[Call, _Fill] = {}
        self._reads: dict[int, _Read] = {}
        self._reading: dict[bytes, int] = {}  # key to read
        self._sending: dict[Call, tuple[Frame, int]] = {}
        self._read_ids = count(1)
        self._waiting: dict[tuple[type[Event], Kind], deque[Put | Get]] = {
            (call, kind): deque() for call in (Get, Put) for kind in Kind
        }
        self._hits = self._misses = self._corrupt = self._memory_hits = 0
        self._puts = self._declined = 0
        self._handlers: dict[type[Event], Callable[[Any, int], None]] = {
            Put: self._on_put,
            CopiedIn: self._on_copied_in,
            Get: self._on_get,
            CopiedOut: self._on_copied_out,
            ReadDone: self._on_read_done,
            HolderGone: self._on_holder_gone,
            Created: self.writer.created,
            Written: self.writer.written,
            Synced: self.writer.synced,
            Sealed: self.writer.sealed,
            Deleted: lambda event, now_ns: self.writer.deleted(event),
            SpaceMeasured: self._on_space,
        }
        for segment in found:
            self._adopt(segment, now_ns)

    # ---------------------------------------------------------------- the outside

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event. Its writes are held back until `flush`, so that many puts share one."""
        self._handlers[type(event)](event, now_ns)
        return self._taken()

    def flush(self, now_ns: int) -> list[Action]:
        """After a batch of events: start writes, and serve calls that waited for a frame."""
        self.writer.pump(now_ns)
        for queue in self._waiting.values():
            for _ in range(len(queue)):
                if not self._can_serve(queue[0]):
                    break
                self._retry(queue.popleft(), now_ns)
        return self._taken()

    def tick(self, now_ns: int) -> list[Action]:
        """Now and then: lifetimes, late syncs, cap and floor."""
        self.writer.tick(now_ns)
        return self._taken()

    def close(self) -> None:
        """Decline puts from now on; `flush` seals what is open. The store may stop once `idle`."""
        self.writer.closing = True

    @property
    def idle(self) -> bool:
        return self.writer.idle and not self._filling

    def prefix(self, keys: Sequence[bytes], now_ns: int) -> tuple[int, int]:
        """How many of these block keys, from the first on, are stored without a gap, and the most of
        them that end where a state is stored (0: none). Counts as a use of their segments: whoever asks is
        about to get them."""
        stored = 0
        while stored < len(keys) and self._use(keys[stored], now_ns):
            stored += 1
        ends = range(stored, 0, -1)
        return stored, next((n for n in ends if self._use(state_key(keys[n - 1]), now_ns)), 0)

    def _use(self, key: bytes, now_ns: int) -> bool:
        """Whether it is stored; then its segment is in use."""
        entry = self.index.get(key)
        if entry is None or entry.expires_ns <= now_ns:
            return False
        if entry.segment is not None:
            entry.segment.used_ns = now_ns
        return True

    def stats(self, now_ns: int) -> Stats:
        writer = self.writer
        return Stats(
            records=len(self.index),
            bytes=self.index.payload_bytes,
            hits=self._hits,
            misses=self._misses,
            corrupt=self._corrupt,
            evicted=writer.evicted,
            puts=self._puts,
            declined=self._declined,
            dropped=writer.dropped,
            segments=len(writer.table),
            file_bytes=writer.table.file_bytes,
            memory_hits=self._memory_hits,
            off=writer.off if writer.is_off(now_ns) else "",
        )

    def _taken(self) -> list[Action]:
        taken = list(self._out)
        self._out.clear()
        for action in taken:
            if isinstance(action, PutReply | GetReply):
                self._open.discard(action.call)
        return taken

    def _adopt(self, found: Found, now_ns: int) -> None:
        segment = Segment(found.head, found.nbytes, SegmentState.SEALED, now_ns)
        segment.used_ns = found.written_ns
        for line in found.entries:
            entry = Entry(
                line.key, found.head.kind, line.length, found.head.ttl_class, line.expires_ns
            )
            entry.state, entry.durable = EntryState.STORED, found.synced
            entry.segment, entry.offset, entry.sequence = segment, line.offset, line.sequence
            segment.entries.append(entry)
            segment.expires_ns = max(segment.expires_ns, line.expires_ns)
            older = self.index.get(line.key)
            if older is None or older.sequence < line.sequence:
                if older is not None:
                    self.index.remove(older)
                self.index.add(entry)
        segment.unsynced = [] if found.synced else list(segment.entries)
        self.writer.adopt(segment)

    # ---------------------------------------------------------------- puts

    def _on_put(self, put: Put, now_ns: int) -> None:
        if put.call in self._open:
            return
        self._open.add(put.call)
        limit = self._config.payload_max(put.kind)
        if len(put.key) != KEY_BYTES:
            self._decline(put, f"a key has {KEY_BYTES} bytes, this one has {len(put.key)}")
        elif not 0 < put.length <= limit:
            name = put.kind.name.lower()
            self._decline(put, f"a {name} of {put.length} bytes, allowed: 1 to {limit}")
        else:
            self._place(put, now_ns)

    def _place(self, put: Put, now_ns: int) -> None:
        """Answer from what is there, or start to copy, or wait for a frame."""
        entry = self.index.get(put.key)
        if entry is not None and self._gone_stale(entry, now_ns):
            self.index.remove(entry)
            entry = None
        if entry is not None:
            self._answer_stored(put, entry)
        elif put.key in self._fills:
            self._fills[put.key].followers.append(put)
        elif self.writer.is_off(now_ns):
            self._decline(put, self.writer.off or "the store is stopping")
        elif not self._can_serve(put) or (frame := self.index.take_frame(put.kind)) is None:
            self._wait(put)
        else:
            fill = self._fills[put.key] = self._filling[put.call] = _Fill(put, frame)
            self._out.append(CopyIn(fill.put.call, frame.id, put.length))

    def _gone_stale(self, entry: Entry, now_ns: int) -> bool:
        return entry.state is EntryState.STORED and entry.expires_ns <= now_ns

    def _answer_stored(self, put: Put, entry: Entry) -> None:
        if put.durable and not entry.durable:
            self.writer.when_durable(entry, put.call)
        else:
            self._out.append(PutReply(put.call, stored=True, durable=entry.durable))

    def _on_copied_in(self, event: CopiedIn, now_ns: int) -> None:
        fill = self._filling.pop(event.call)
        put = fill.put
        del self._fills[put.key]
        if event.reason:
            self.index.pools[put.kind].unpin(fill.frame)
            self._decline(put, event.reason)
        else:
            self._commit(put, fill.frame, event.checksum, now_ns)
        for follower in fill.followers:
            self._place(follower, now_ns)

    def _commit(self, put: Put, frame: Frame, checksum: bytes, now_ns: int) -> None:
        ttl_class = self._config.ttl_class(put.ttl_s)
        expires_ns = now_ns + self._config.ttl_classes_s[ttl_class] * 1_000_000_000
        entry = Entry(put.key, put.kind, put.length, ttl_class, expires_ns)
        entry.checksum = checksum
        self.index.add(entry)
        self.index.attach(entry, frame)
        self._puts += 1
        if put.durable:
            entry.waiters.append(put.call)
        else:
            self._out.append(PutReply(put.call, stored=True))
        self.writer.stage(entry, now_ns)

    def _decline(self, put: Put, reason: str) -> None:
        self._declined += 1
        self._out.append(PutReply(put.call, stored=False, reason=reason))

    # ---------------------------------------------------------------- gets

    def _on_get(self, get: Get, now_ns: int) -> None:
        if get.call in self._open:
            return
        self._open.add(get.call)
        self._fetch(get, now_ns)

    def _fetch(self, get: Get, now_ns: int) -> None:
        entry = self.index.get(get.key)
        if entry is None or entry.expires_ns <= now_ns:
            self._miss(get.call, "")
        elif entry.length > get.capacity:
            self._miss(get.call, f"the record has {entry.length} bytes, the region {get.capacity}")
        elif entry.frame is not None:
            self._memory_hits += 1
            self._send(get.call, entry, entry.frame, now_ns)
        elif (read := self._reading.get(get.key)) is not None:
            self._reads[read].calls.append(get.call)
        elif (frame := self.index.take_frame(entry.kind)) is None:
            self._wait(get)
        else:
            self._start_read(entry, frame, get.call)

    def _start_read(self, entry: Entry, frame: Frame, call: Call) -> None:
        segment = entry.segment
        assert segment is not None and entry.state is EntryState.STORED
        segment.reads += 1
        read = self._reading[entry.key] = next(self._read_ids)
        self._reads[read] = _Read(entry, segment, frame, call)
        self._out.append(Read(read, entry.key, entry.place, frame.id))

    def _on_read_done(self, event: ReadDone, now_ns: int) -> None:
        read = self._reads.pop(event.read)
        entry, frame, pool = read.entry, read.frame, self.index.pools[read.entry.kind]
        del self._reading[entry.key]
        if event.error:
            self._corrupt += 1
            if self.index.has(entry):
                self.index.remove(entry)
            for call in read.calls:
                self._miss(call, event.error)
        else:
            # The record was evicted meanwhile, or even stored anew: these bytes are still its own.
            if self.index.has(entry):
                self.index.attach(entry, frame)
            for call in read.calls:
                self._send(call, entry, frame, now_ns)
        self.writer.read_over(read.segment)
        pool.unpin(frame)

    def _send(self, call: Call, entry: Entry, frame: Frame, now_ns: int) -> None:
        self.index.pools[entry.kind].pin(frame)
        self._sending[call] = (frame, entry.length)
        if entry.segment is not None:
            entry.segment.used_ns = now_ns
        self._out.append(CopyOut(call, frame.id, entry.length))

    def _on_copied_out(self, event: CopiedOut, now_ns: int) -> None:
        frame, length = self._sending.pop(event.call)
        self.index.pools[frame.kind].unpin(frame)
        if event.reason:
            self._miss(event.call, event.reason)
        else:
            self._hits += 1
            self._out.append(GetReply(event.call, found=True, nbytes=length))

    def _miss(self, call: Call, reason: str) -> None:
        self._misses += 1
        self._out.append(GetReply(call, found=False, reason=reason))

    # ---------------------------------------------------------------- calls that wait

    def _can_serve(self, call: Put | Get) -> bool:
        kind = self._kind_of(call)
        pool = self.index.pools[kind]
        if isinstance(call, Get):
            return pool.available
        staged = self.writer.staged[kind] + len(self._filling)
        return pool.available and staged < pool.number * 3 // 4

    def _kind_of(self, call: Put | Get) -> Kind:
        if isinstance(call, Put):
            return call.kind
        entry = self.index.get(call.key)
        return entry.kind if entry is not None else Kind.BLOCK

    def _wait(self, call: Put | Get) -> None:
        queue = self._waiting[type(call), self._kind_of(call)]
        busy = f"busy: {len(queue)} calls wait for memory"
        if len(queue) < self._config.queue_max:
            queue.append(call)
        elif isinstance(call, Put):
            self._decline(call, busy)
        else:
            self._miss(call.call, busy)

    def _retry(self, call: Put | Get, now_ns: int) -> None:
        if isinstance(call, Put):
            self._place(call, now_ns)
        else:
            self._fetch(call, now_ns)

    def _on_holder_gone(self, event: HolderGone, now_ns: int) -> None:
        for queue in self._waiting.values():
            calls = list(queue)
            queue.clear()
            for call in calls:
                if call.holder != event.holder:
                    queue.append(call)
                elif isinstance(call, Put):
                    self._decline(call, "the arena's owner is gone")
                else:
                    self._miss(call.call, "the arena's owner is gone")

    def _on_space(self, event: SpaceMeasured, now_ns: int) -> None:
        self.writer.free_bytes = event.free_bytes
