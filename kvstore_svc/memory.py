"""The memory of the store's frames: page-aligned as direct I/O asks, real only where it was touched."""

import mmap

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.layout import HEADER_BYTES, Kind, record_bytes


class FrameMemory:
    """Frames are numbered as in `Index`: those of the first kind, then those of the next."""

    def __init__(self, config: StoreConfig) -> None:
        sizes = [config.frame_bytes(kind) for kind in Kind for _ in range(config.num_frames(kind))]
        memory = memoryview(mmap.mmap(-1, sum(sizes)))
        self._frames: list[memoryview] = []
        start = 0
        for size in sizes:
            self._frames.append(memory[start : start + size])
            start += size

    def record(self, frame: int, length: int) -> memoryview:
        """Room for the record with `length` bytes of payload, padding included."""
        return self._frames[frame][: record_bytes(length)]

    def payload(self, frame: int, length: int) -> memoryview:
        return self._frames[frame][HEADER_BYTES : HEADER_BYTES + length]
