"""The store's files on a real disk: aligned direct I/O where the file system has it, else buffered.

Every segment keeps one file descriptor open. All methods may be called from several threads, for
different segments or different places of one; they raise OSError and decide nothing.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from phalanx.kvstore_svc.layout import (
    PAGE,
    STORE_ID_BYTES,
    VERSION,
    Buffer,
    IndexEntry,
    SegmentHead,
    encode_index,
    encode_segment_head,
)
from phalanx.protocol import faults
from phalanx.protocol.rundir import write_whole

STORE_FILE = "store"
_CLEARED_FILE = "cleared"
_SEGMENT_NAME = re.compile(r"seg-([0-9a-f]{16})\.kv")
_STORE = struct.Struct("<8sI16s")
_STORE_MAGIC = b"PHLXKVST"
_IOV_MAX = 1024
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def write_cleared(directory: Path, now_ns: int) -> None:
    """Note when (CLOCK_MONOTONIC) everything was forgotten. Raises OSError."""
    write_whole(directory / _CLEARED_FILE, f"{now_ns}\n".encode())


def read_cleared(directory: Path, now_ns: int) -> int:
    """When everything was forgotten last; below zero: never, or before the machine was started."""
    try:
        cleared_ns = int((directory / _CLEARED_FILE).read_bytes())
    except (OSError, ValueError):
        return -1
    return cleared_ns if cleared_ns <= now_ns else -1


def remove_segments(directory: Path) -> None:
    """Their names; what is open stays readable to who has it open."""
    for path in directory.glob("seg-*.kv"):
        path.unlink(missing_ok=True)


def sync_names(directory: Path) -> None:
    """What was removed there does not come back when the machine loses power. Raises OSError."""
    names = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(names)
    finally:
        os.close(names)


class Disk:
    """The directory of one store, locked against a second one.

    Raises OSError when it cannot be used, BlockingIOError when another store has it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock = -1
        self._files: dict[int, int] = {}
        self.direct = True  # until an open says otherwise
        try:
            self._lock = os.open(
                directory / STORE_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.store_id = self._identify()
        except OSError:
            self.close()
            raise

    def _identify(self) -> bytes:
        """The store's id; a new one (which disowns all segments) when the file is not of this version."""
        page = os.pread(self._lock, PAGE, 0)
        if len(page) >= _STORE.size + 8:
            magic, version, store_id = _STORE.unpack_from(page)
            check = page[_STORE.size : _STORE.size + 8]
            ours = (magic, version) == (_STORE_MAGIC, VERSION)
            if ours and check == xxhash.xxh3_64_digest(page[: _STORE.size]):
                return bytes(store_id)
        store_id = secrets.token_bytes(STORE_ID_BYTES)
        body = _STORE.pack(_STORE_MAGIC, VERSION, store_id)
        os.pwrite(self._lock, body + xxhash.xxh3_64_digest(body), 0)
        os.fsync(self._lock)
        os.fsync(self._directory)
        return store_id

    # ---------------------------------------------------------------- whole segments

    def segments(self) -> list[int]:
        names = (_SEGMENT_NAME.fullmatch(name) for name in os.listdir(self._directory))
        return sorted(int(match[1], 16) for match in names if match)

    def create(self, head: SegmentHead, nbytes: int) -> None:
        """Make the segment's file, preallocated, with its head; its name is durable afterwards."""
        faults.check_disk("kvstore")
        descriptor = self._open(head.segment, os.O_CREAT | os.O_EXCL)
        try:
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.ftruncate(descriptor, nbytes)  # sparse: a full disk then shows at a write
            self.write(head.segment, 0, [encode_segment_head(head)])
            os.fsync(descriptor)
            os.fsync(self._directory)
        except OSError:
            self.delete(head.segment)
            raise

    def seal(self, head: SegmentHead, entries: Sequence[IndexEntry], offset: int) -> int:
        """Write index and tail at `offset`, cut the file behind them, sync; its new size."""
        index = encode_index(head, list(entries), offset)
        self.sync(head.segment)  # first: an index must not outlive a crash that its records did not
        self.write(head.segment, offset, [index])
        descriptor = self._descriptor(head.segment)
        os.ftruncate(descriptor, offset + len(index))
        os.fsync(descriptor)
        return offset + len(index)

    def delete(self, segment: int) -> None:
        """Remove the segment; no read or write of it may be in flight. Absent already: nothing to do."""
        if (descriptor := self._files.pop(segment, None)) is not None:
            os.close(descriptor)
        self._path(segment).unlink(missing_ok=True)

    def size(self, segment: int) -> int:
        return os.fstat(self._descriptor(segment)).st_size

    def written_ns(self, segment: int) -> int:
        return os.fstat(self._descriptor(segment)).st_mtime_ns

    def free_bytes(self) -> int:
        stat = os.fstatvfs(self._directory)
        return stat.f_bavail * stat.f_frsize

    # ---------------------------------------------------------------- bytes

    def write(self, segment: int, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write adjoining buffers, each a multiple of PAGE long; those in aligned memory without a copy."""
        faults.check_disk("kvstore")
        descriptor = self._descriptor(segment)
        views = [self._aligned_copy(b) if isinstance(b, bytes) else memoryview(b) for b in buffers]
        while views:
            written = os.pwritev(descriptor, views[:_IOV_MAX], offset)
            if written == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            offset += written
            _drop(views, written)

    def sync(self, segment: int) -> None:
        """Returns once every write that ended before the call is on stable storage."""
        os.fdatasync(self._descriptor(segment))

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """Fill buffers of page-aligned memory, one after the other, from adjoining bytes of the file;
        the number of bytes there were."""
        descriptor, views, done = self._descriptor(segment), list(into), 0
        while views:
            count = os.preadv(descriptor, views[:_IOV_MAX], offset + done)
            done += count
            if count == 0 or done % PAGE:  # the end of the file
                break
            _drop(views, count)
        return done

    def load(self, segment: int, offset: int, nbytes: int) -> Buffer:
        """A copy of part of the file in memory of its own; shorter at the end of the file."""
        if nbytes == 0:
            return b""
        room = memoryview(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE))
        return room[: min(nbytes, self.read(segment, offset, [room]))]

    def close(self) -> None:
        for descriptor in (*self._files.values(), self._directory, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._files.clear()

    # ---------------------------------------------------------------- descriptors

    def _path(self, segment: int) -> Path:
        return self.directory / f"seg-{segment:016x}.kv"

    def _descriptor(self, segment: int) -> int:
        found = self._files.get(segment)
        return self._open(segment, 0) if found is None else found

    def _open(self, segment: int, flags: int) -> int:
        path, flags = self._path(segment), flags | os.O_RDWR | os.O_CLOEXEC
        if self.direct:
            try:
                descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self.direct, flags = False, flags & ~os.O_EXCL  # the failed open made the file
        if not self.direct:
            descriptor = os.open(path, flags, 0o600)
        known = self._files.setdefault(segment, descriptor)
        if known != descriptor:  # two threads were first
            os.close(descriptor)
        return known

    def _aligned_copy(self, data: bytes) -> memoryview:
        """Direct I/O takes aligned memory only; Python's bytes are not."""
        room = memoryview(mmap.mmap(-1, len(data)))
        room[:] = data
        return room


def _drop(views: list[memoryview], done: int) -> None:
    """Take the first `done` bytes off the buffers."""
    while views and done >= len(views[0]):
        done -= len(views.pop(0))
    if done:
        views[0] = views[0][done:]
