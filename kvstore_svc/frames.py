"""Memory frames, each with room for one record: staging for writes and the memory tier for reads. Pure.

A frame is pinned while a copy, a read or a write uses it. Unpinned, it is either empty or the cached
copy of a record, and then the least recently used one is taken first.
"""

from collections import OrderedDict

from phalanx.kvstore_svc.layout import Kind


class Frame:
    """`key` names the intact record it caches; None: its content means nothing to anybody."""

    __slots__ = ("id", "key", "kind", "pins")

    def __init__(self, frame_id: int, kind: Kind) -> None:
        self.id, self.kind = frame_id, kind
        self.key: bytes | None = None
        self.pins = 0


class FramePool:
    """The frames of one kind, with ids from `first` on."""

    def __init__(self, kind: Kind, first: int, number: int) -> None:
        self.number = number
        self._free = [Frame(first + i, kind) for i in reversed(range(number))]
        self._cached: OrderedDict[int, Frame] = OrderedDict()  # oldest first

    @property
    def available(self) -> bool:
        return bool(self._free or self._cached)

    @property
    def idle(self) -> int:
        """Frames that nobody has pinned."""
        return len(self._free) + len(self._cached)

    def take(self) -> tuple[Frame, bytes | None] | None:
        """A pinned frame and the key that it cached until now; None when all are pinned."""
        if self._free:
            frame = self._free.pop()
        elif self._cached:
            _, frame = self._cached.popitem(last=False)
        else:
            return None
        assert frame.pins == 0
        evicted, frame.key = frame.key, None
        frame.pins = 1
        return frame, evicted

    def pin(self, frame: Frame) -> None:
        if frame.pins == 0:
            del self._cached[frame.id]  # only a cached frame is ever pinned again
        frame.pins += 1

    def unpin(self, frame: Frame) -> None:
        assert frame.pins > 0
        frame.pins -= 1
        if frame.pins == 0:
            if frame.key is None:
                self._free.append(frame)
            else:
                self._cached[frame.id] = frame

    def forget(self, frame: Frame) -> None:
        """Its record is no longer wanted; the frame is free at once or when its last user lets go."""
        frame.key = None
        if frame.pins == 0:
            del self._cached[frame.id]
            self._free.append(frame)
