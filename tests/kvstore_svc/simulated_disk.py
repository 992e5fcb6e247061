"""A disk in memory with a seed: it finishes work in any order, loses what was not synced, tears and flips.

A crash keeps each unsynced page of 4,096 bytes or not, one by one, in no order, and drops or keeps
unsynced file names and cuts. A failed sync loses the pages that it should have kept, as Linux does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    PAGE,
    STORE_ID_BYTES,
    IndexEntry,
    SegmentHead,
    check_record,
    encode_index,
    encode_record_header,
    encode_segment_head,
    record_bytes,
)

DiskAction = Create | Write | Sync | Seal | Read | Delete


@dataclass
class Faults:
    """Probabilities of one seed."""

    write_fails: float = 0.0
    sync_fails: float = 0.0
    read_fails: float = 0.0
    flip: float = 0.0  # of a bit somewhere on the disk, per finished action
    sparse: bool = False  # files are not preallocated: a full disk shows at a write


@dataclass
class File:
    durable: bytearray
    cached: bytearray  # what a read sees
    dirty: set[int] = field(default_factory=set)  # pages that differ perhaps


class SimulatedDisk:
    def __init__(self, rng: random.Random, faults: Faults, capacity: int) -> None:
        self.rng, self.faults, self.capacity = rng, faults, capacity
        self.store_id = rng.randbytes(STORE_ID_BYTES)
        self.files: dict[int, File] = {}
        self.flipped: set[int] = set()  # segments whose durable bytes a flip changed
        self.waiting: list[DiskAction] = []
        self.frames: dict[int, bytearray] = {}
        self.others_bytes = 0  # what the rest of the machine has on this disk

    # ---------------------------------------------------------------- the engine's side

    def frame(self, frame: int) -> bytearray:
        return self.frames.setdefault(frame, bytearray(self.rng.randbytes(16 * PAGE)))

    def start(self, action: DiskAction) -> None:
        self.waiting.append(action)

    def finish_one(self) -> Event:
        """Any action that waits, in any order."""
        action = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        event = self._finish(action)
        if self.files and self.rng.random() < self.faults.flip:
            self._flip()
        return event

    def _finish(self, action: DiskAction) -> Event:
        match action:
            case Create(head, nbytes):
                return Created(head.segment, self.free_bytes(), self._create(head, nbytes))
            case Write():
                return Written(action.write, self._write(action))
            case Sync(segment):
                return Synced(segment, self._sync(segment))
            case Seal(head, entries, offset):
                error = ""
                if not (error := self._sync(head.segment)):
                    self.seal(head, entries, offset)
                size = len(self.files[head.segment].cached)
                return Sealed(head.segment, size, self.free_bytes(), error)
            case Read():
                return ReadDone(action.read, self._read(action))
            case Delete(segment):
                del self.files[segment]
                self.flipped.discard(segment)
                return Deleted(segment, self.free_bytes())
        raise AssertionError(action)

    def _create(self, head: SegmentHead, nbytes: int) -> str:
        assert head.segment not in self.files, "a segment's number is used once"
        if nbytes > self.free_bytes() and not self.faults.sparse:
            return "disk full"
        data = bytearray(nbytes)
        data[:PAGE] = encode_segment_head(head)
        self.files[head.segment] = File(bytearray(data), data)
        return ""

    def _write(self, action: Write) -> str:
        if self.rng.random() < self.faults.write_fails:
            self._tear(action)
            return "disk failed"
        if self.faults.sparse and self.free_bytes() <= 0:
            return "disk full"
        file = self.files[action.segment]
        for offset, data in self._pages(action):
            assert offset + PAGE <= len(file.cached), "a write beyond the segment"
            file.cached[offset : offset + PAGE] = data
            file.dirty.add(offset)
        return self._sync(action.segment) if action.sync else ""

    def _sync(self, segment: int) -> str:
        file = self.files[segment]
        if self.rng.random() < self.faults.sync_fails:
            for offset in file.dirty:
                if self.rng.random() < 0.5:
                    file.cached[offset : offset + PAGE] = file.durable[offset : offset + PAGE]
            file.dirty.clear()
            return "disk failed"
        self._keep_all(file)
        return ""

    def _keep_all(self, file: File) -> None:
        for offset in file.dirty:
            file.durable[offset : offset + PAGE] = file.cached[offset : offset + PAGE]
        file.dirty.clear()

    def _read(self, action: Read) -> str:
        if self.rng.random() < self.faults.read_fails:
            return "disk failed"
        place = action.place
        size = record_bytes(place.length)
        data = self.files[place.segment].cached[place.offset : place.offset + size]
        self.frame(action.frame)[: len(data)] = data
        return check_record(data, store_id=self.store_id, key=action.key, place=place)

    def _pages(self, action: Write) -> list[tuple[int, bytes]]:
        data, start = bytearray(), action.records[0][1].place.offset
        for frame, header in action.records:
            assert header.place.offset == start + len(data), "records of a write adjoin"
            record = bytearray(record_bytes(header.place.length))
            record[:HEADER_BYTES] = encode_record_header(header)
            end = HEADER_BYTES + header.place.length
            record[HEADER_BYTES:end] = self.frame(frame)[HEADER_BYTES:end]
            data += record
        return [(start + i, bytes(data[i : i + PAGE])) for i in range(0, len(data), PAGE)]

    def _tear(self, action: Write) -> None:
        file = self.files[action.segment]
        for offset, data in self._pages(action):
            if self.rng.random() < 0.5:
                file.cached[offset : offset + PAGE] = data
                if self.rng.random() < 0.5:
                    file.durable[offset : offset + PAGE] = data

    def _flip(self) -> None:
        segment = self.rng.choice(sorted(self.files))
        file = self.files[segment]
        bit = 1 << self.rng.randrange(8)
        position = self.rng.randrange(len(file.durable))
        file.durable[position] ^= bit
        if position < len(file.cached):
            file.cached[position] ^= bit
        self.flipped.add(segment)

    def free_bytes(self) -> int:
        used = sum(len(file.cached) for file in self.files.values())
        return self.capacity - used - self.others_bytes

    # ---------------------------------------------------------------- crash and recovery

    def crash(self) -> None:
        """The power goes. Actions in flight happened partly or not at all, but for deleted names."""
        for action in self.waiting:
            if isinstance(action, Write):
                self._tear(action)
            elif isinstance(action, Seal) and self.rng.random() < 0.5:
                self._half_seal(action)
        self.waiting.clear()
        for file in self.files.values():
            for offset in sorted(file.dirty):
                if self.rng.random() < 0.5:
                    file.durable[offset : offset + PAGE] = file.cached[offset : offset + PAGE]
            file.dirty.clear()
            file.cached = bytearray(file.durable)

    def _half_seal(self, action: Seal) -> None:
        """The records are synced, the index is there in part, the cut behind it may have happened."""
        file = self.files[action.head.segment]
        self._keep_all(file)
        index = encode_index(action.head, list(action.entries), action.offset)
        for i in range(0, len(index), PAGE):
            if self.rng.random() < 0.7:
                at = action.offset + i
                file.durable[at : at + PAGE] = index[i : i + PAGE]
        if self.rng.random() < 0.5:
            del file.durable[action.offset + len(index) :]

    def segments(self) -> list[int]:
        return sorted(self.files)

    def size(self, segment: int) -> int:
        return len(self.files[segment].cached)

    def written_ns(self, segment: int) -> int:
        return segment  # older segments have smaller numbers

    def load(self, segment: int, offset: int, nbytes: int) -> bytes:
        return bytes(self.files[segment].cached[offset : offset + nbytes])

    def seal(self, head: SegmentHead, entries: Sequence[IndexEntry], offset: int) -> int:
        file = self.files[head.segment]
        index = encode_index(head, list(entries), offset)
        assert offset + len(index) <= len(file.cached), "the segment kept room for its index"
        file.cached[offset:] = index
        file.durable = bytearray(file.cached)
        file.dirty.clear()
        return len(file.cached)

    def delete(self, segment: int) -> None:
        del self.files[segment]
