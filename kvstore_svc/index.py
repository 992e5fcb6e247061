"""The records by key, and the memory frames that hold some of them. Pure."""

from collections.abc import Iterator

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.frames import Frame, FramePool
from phalanx.kvstore_svc.layout import Kind
from phalanx.kvstore_svc.segments import Entry


class Index:
    def __init__(self, config: StoreConfig) -> None:
        self._entries: dict[bytes, Entry] = {}
        self.payload_bytes = 0
        self.pools: dict[Kind, FramePool] = {}
        first = 0
        for kind in Kind:
            number = config.num_frames(kind)
            self.pools[kind] = FramePool(kind, first, number)
            first += number

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        assert entry.key not in self._entries
        self._entries[entry.key] = entry
        self.payload_bytes += entry.length

    def has(self, entry: Entry) -> bool:
        return self._entries.get(entry.key) is entry

    def remove(self, entry: Entry) -> None:
        """The record is a miss from now on; its frame is free once nobody uses it."""
        assert self.has(entry)
        del self._entries[entry.key]
        self.payload_bytes -= entry.length
        if entry.frame is not None:
            self.pools[entry.kind].forget(entry.frame)
            entry.frame = None

    def take_frame(self, kind: Kind) -> Frame | None:
        """An empty pinned frame, if need be that of the record whose copy was used least recently."""
        taken = self.pools[kind].take()
        if taken is None:
            return None
        frame, evicted = taken
        if evicted is not None and (entry := self._entries.get(evicted)) is not None:
            assert entry.frame is frame
            entry.frame = None
        return frame

    def attach(self, entry: Entry, frame: Frame) -> None:
        """`frame` (pinned) holds the record: keep it as the memory copy."""
        frame.key, entry.frame = entry.key, frame
