"""Bounds of the store, and what happens at each. Sizes in bytes, times in seconds or nanoseconds."""

import msgspec

from phalanx.kvstore_svc.layout import PAGE, Kind, index_bytes, record_bytes
from phalanx.protocol.errors import ConfigError

_SEGMENT_BYTES_MAX = 128 << 20
SEGMENTS_MAX = 512  # each keeps a file open
HOUR_S = 3600


class StoreConfig(msgspec.Struct, frozen=True):
    max_bytes: int  # of all segment files; beyond: the least recently used segment goes
    free_floor_bytes: int = 0  # of the file system; below: segments go, then nothing is cached
    block_bytes_max: int = 128 * 1024 - 128  # payload; a larger one is declined
    state_bytes_max: int = (4 << 20) - 128
    ram_bytes: int = 128 << 20  # memory frames: staging for writes, cache for reads
    segment_bytes: int = 0  # 0: chosen from max_bytes
    ttl_classes_s: tuple[int, ...] = (HOUR_S, 72 * HOUR_S, 7 * 24 * HOUR_S)
    ttl_default: int = 1  # index of the class of a put that names no time
    write_bytes_max: int = 4 << 20  # one write; larger ones do not get faster
    writes_in_flight: int = 2  # of one stream of records: one is synced while the next is written
    # The longest that a record answered from memory stays unsynced.
    sync_after_ns: int = 1_000_000_000
    retry_after_ns: int = 5_000_000_000  # caching stays off this long after a full or failing disk
    queue_max: int = 4096  # calls that wait for a memory frame; beyond: declined

    def payload_max(self, kind: Kind) -> int:
        return self.block_bytes_max if kind is Kind.BLOCK else self.state_bytes_max

    def frame_bytes(self, kind: Kind) -> int:
        return record_bytes(self.payload_max(kind))

    def num_frames(self, kind: Kind) -> int:
        """Half of the memory for each kind, and never so few that reads and writes starve each other."""
        return max(8, self.ram_bytes // 2 // self.frame_bytes(kind))

    @property
    def segment_size(self) -> int:
        if self.segment_bytes:
            return self.segment_bytes
        largest = PAGE + max(map(self.frame_bytes, Kind)) + index_bytes(1)
        wanted = min(self.max_bytes // 16, _SEGMENT_BYTES_MAX)
        return -(-max(wanted, largest, self.max_bytes // SEGMENTS_MAX) // PAGE) * PAGE

    def ttl_class(self, ttl_s: int) -> int:
        """The shortest class that keeps a record for `ttl_s`, or the longest there is."""
        if ttl_s <= 0:
            return self.ttl_default
        longer = (i for i, seconds in enumerate(self.ttl_classes_s) if seconds >= ttl_s)
        return next(longer, len(self.ttl_classes_s) - 1)

    def check(self) -> None:
        """Raises ConfigError when the store could not hold a segment being written and one to read."""
        size, largest = self.segment_size, PAGE + max(map(self.frame_bytes, Kind)) + index_bytes(1)
        if size % PAGE or size < largest:
            raise ConfigError(
                f"kvstore segments of {size} bytes cannot hold a record of"
                f" {self.state_bytes_max} bytes: at least {largest}, a multiple of {PAGE}"
            )
        if self.max_bytes < 3 * size:
            raise ConfigError(
                f"kvstore.max_bytes is {self.max_bytes}, allowed: at least three segments of {size}"
            )
