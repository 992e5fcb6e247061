"""Arenas: named files in /dev/shm that carry bulk data between processes, and handles into them.

One writer per region; the creator owns the file and holds a lock on it, so that a sweep removes only
arenas whose owner is gone (a pid proves nothing across containers). A message never carries bulk
bytes: it carries a `Handle`, whose generation is checked before and after a copy.
Plain mmap, not multiprocessing.shared_memory: its tracker unlinks segments that others still use.
"""

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import re
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from phalanx.protocol.errors import ArenaError, NoRoom, StaleHandle

SHM = Path("/dev/shm")
MAGIC = 0x50484C58  # "PHLX"
VERSION = 1
HEADER_BYTES = 4096  # one page, so that the payload is page-aligned
_HEADER = struct.Struct(
    "<IIQII64s"
)  # magic, version, payload bytes, generation slots, reserved, owner
_MAGIC = struct.Struct("<I")
_GENERATIONS_AT = 128
GENERATIONS_MAX = (HEADER_BYTES - _GENERATIONS_AT) // 4
TOKENS = "tokens"  # kind of the gateway's token log: what a dead one left is for its successor
KEEP_FREE_BYTES = 16 << 20  # for arenas without which a rank that lives could not go on
_TO_OWNER = re.compile(r"/proc/\d+/fd/\d+")
_owned: "weakref.WeakSet[Arena]" = weakref.WeakSet()  # of this process
_IN_USE = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in shared memory.

    `generation` is that of the arena's region `region` when the handle was made: the owner adds one
    when it frees or reuses the region, and every later copy through the handle raises StaleHandle.
    """

    arena: str  # file name in /dev/shm
    offset: int  # bytes from the start of the payload
    nbytes: int
    shape: tuple[int, ...] = ()
    dtype: str = "u1"
    region: int = 0
    generation: int = 0


def arena_name(node: str, kind: str, incarnation: int | str) -> str:
    """`ph-NODE-KIND-INCARNATION`: the sweep and the acceptance checks find a node's names by prefix.

    `kind` and `incarnation` hold no "-".
    """
    return f"ph-{node}-{kind}-{incarnation}"


def _taken(path: Path) -> str:
    whose = "a live process" if _is_ours(path) else "another user"
    return f"shared memory {path} belongs to {whose}"


def _no_room(name: str, total: int, free: int, keep_free: int) -> NoRoom:
    leaves = f" and leaves {math.ceil(keep_free / 2**20)} MiB to others" if keep_free else ""
    return NoRoom(
        f"{SHM} has {free >> 20} MiB free, arena {name} needs {math.ceil(total / 2**20)} MiB{leaves}:"
        " free some space, give the container a larger --shm-size, or lower worker.kv_bytes"
    )


class Arena:
    """A mapped arena. Make one with `Arena.create` (the owner) or `Arena.attach` (everybody else)."""

    def __init__(self, name: str, fd: int, mapping: mmap.mmap, owned: bool) -> None:
        self.name, self._fd, self._mapping, self.owned = name, fd, mapping, owned
        self._writes = False  # see `attach`
        self._whole = memoryview(mapping)
        self.data = self._whole[HEADER_BYTES:]  # the payload, writable
        self._generations = self._whole[_GENERATIONS_AT:HEADER_BYTES].cast("I")

    @classmethod
    def create(
        cls, name: str, nbytes: int, owner: str = "", *, keep_free: int = KEEP_FREE_BYTES
    ) -> "Arena":
        """Create and lock an arena of `nbytes` zero bytes.

        Its memory is taken at once: a /dev/shm that others fill later must not turn a first write
        into a SIGBUS. Raises NoRoom when fewer than `keep_free` bytes would be left, ArenaError when
        the name is taken by a live owner.
        """
        total = HEADER_BYTES + nbytes
        stat = os.statvfs(SHM)
        free = stat.f_bavail * stat.f_frsize
        if total + keep_free > free:
            raise _no_room(name, total, free, keep_free)
        path = SHM / name
        if os.path.lexists(path) and not _remove_if_abandoned(path):
            raise ArenaError(_taken(path))
        # It gets its name when it is whole: whoever dies before leaves nothing, not even the memory.
        fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            os.posix_fallocate(fd, 0, total)
        except OSError as error:  # others took the room since we looked
            os.close(fd)
            raise _no_room(name, total, 0, keep_free) from error
        mapping = mmap.mmap(fd, total)
        write_header(mapping, nbytes, owner)
        try:
            # `src_dir_fd` says nothing here, but without one the link itself would be linked.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except FileExistsError as error:
            mapping.close()
            os.close(fd)
            raise ArenaError(_taken(path)) from error
        made = cls(name, fd, mapping, owned=True)
        _owned.add(made)
        return made

    @classmethod
    def attach(cls, name: str, *, writes: bool = False) -> "Arena":
        """Map an existing arena. Raises ArenaError when it is absent or not one of ours.

        With `writes` the owner's `written_by_others` says so until this is closed or the process, all
        its threads, is gone.
        """
        if "/" in name or not name.startswith("ph-"):
            raise ArenaError(f"{name!r} is not the name of an arena")
        path = SHM / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot attach {path}: {error.strerror}") from error
        try:
            cls.check_header(fd, str(path))
            if writes:
                _lock_use(fd, fcntl.F_RDLCK)
                if not _is_at(fd, path):
                    raise ArenaError(f"cannot attach {path}: its owner took it back")
            mapping = mmap.mmap(fd, 0)
        except OSError as error:  # `mmap` opens the file once more, and address space may be short
            os.close(fd)
            raise ArenaError(f"cannot attach {path}: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        arena = cls(name, fd, mapping, owned=False)
        arena._writes = writes
        return arena

    @staticmethod
    def check_header(fd: int, shown: str = "the file") -> None:
        """Raises ArenaError unless the file is a whole arena of this version."""
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise ArenaError(f"{shown} has {size} bytes, less than an arena's header")
        magic, version, nbytes, *_ = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if (magic, version, nbytes) != (MAGIC, VERSION, size - HEADER_BYTES):
            raise ArenaError(
                f"{shown} is not an arena of this version: magic {magic:#x}, version {version},"
                f" {nbytes} bytes for a file of {size}"
            )

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def address(self) -> int:
        """Address of the payload in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping, HEADER_BYTES))

    def written_by_others(self) -> bool:
        """Whether somebody who attached with `writes` may still store into it. The kernel knows: it lets
        go of a process's locks after its memory."""
        asked = _IN_USE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind, *_ = _IN_USE.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))
        return bool(kind != fcntl.F_UNLCK)

    def rename(self, name: str) -> None:
        """Owner only: whoever attaches from now on asks for the new name."""
        assert self.owned, "only the owner of an arena names it"
        before, self.name = SHM / self.name, name
        try:
            os.rename(before, SHM / name)
        except FileNotFoundError:
            self.restore_name()

    def restore_name(self) -> bool:
        """Owner only: give it a name again when somebody has removed that. Returns whether that was so; raises
        OSError when it cannot be done."""
        return restore_name(SHM / self.name, self._fd)

    def generation(self, region: int) -> int:
        return self._generations[region]

    def bump(self, region: int) -> int:
        """Owner only: make every handle to `region` stale. Returns the new generation."""
        assert self.owned, "only the owner of an arena frees its regions"
        self._generations[region] = (self._generations[region] + 1) & 0xFFFFFFFF
        return self._generations[region]

    def handle(
        self,
        offset: int,
        nbytes: int,
        *,
        shape: tuple[int, ...] = (),
        dtype: str = "u1",
        region: int = 0,
    ) -> Handle:
        assert 0 <= offset and offset + nbytes <= self.nbytes
        return Handle(self.name, offset, nbytes, shape, dtype, region, self.generation(region))

    def view(self, handle: Handle) -> memoryview:
        """The bytes of `handle`, checked against bounds and generation. Raises StaleHandle."""
        self.check(handle)
        return self.data[handle.offset : handle.offset + handle.nbytes]

    def check(self, handle: Handle) -> None:
        inside = 0 <= handle.offset and 0 <= handle.nbytes <= self.nbytes - handle.offset
        if not inside or not 0 <= handle.region < GENERATIONS_MAX:
            raise StaleHandle(
                f"handle to bytes {handle.offset}+{handle.nbytes} of {self.name},"
                f" which has {self.nbytes}"
            )
        if (now := self.generation(handle.region)) != handle.generation:
            raise StaleHandle(
                f"{self.name} region {handle.region} is at generation {now},"
                f" the handle was made at {handle.generation}"
            )

    def copy_out(self, handle: Handle) -> bytes:
        """The bytes of `handle`; raises StaleHandle when the region was reused before or during the copy."""
        copied = bytes(self.view(handle))
        self.check(handle)
        return copied

    def close(self) -> None:
        """Unmap; the owner also removes the name. Views handed out keep the mapping alive."""
        if self.owned:
            _owned.discard(self)
            (SHM / self.name).unlink(missing_ok=True)
        if self._writes:
            _lock_use(self._fd, fcntl.F_UNLCK)  # a view that is still there keeps the file open
        for close in (*self._views(), self._mapping.close):
            try:
                close()
            except BufferError:
                pass  # a word, numpy or torch view still points into it: it goes with the last one
        os.close(self._fd)

    def _views(self) -> tuple[Callable[[], None], ...]:
        return self._generations.release, self.data.release, self._whole.release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def restore_name(path: Path, fd: int) -> bool:
    """Have the path lead to the open file again when somebody has removed it. Returns whether that was so.
    Raises OSError.

    A file without any name gets none again (the kernel refuses), but a link that leads to our descriptor
    serves: whoever opens the path follows it.
    """
    if _is_at(fd, path):
        return False
    if os.path.lexists(path):
        path.unlink()  # of somebody who is gone, or a link to a descriptor that is
    path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    return True


def restore_names() -> list[tuple[str, str]]:
    """Give the arenas that this process owns their names again, if somebody has removed them: a cleaner, or
    systemd-logind at the end of a user's last session.

    Returns:
        (name, empty, or why it could not be done) of each whose name was gone.
    """
    gone: list[tuple[str, str]] = []
    for owned in sorted(_owned, key=lambda arena: arena.name):
        try:
            if owned.restore_name():
                gone.append((owned.name, ""))
        except OSError as error:
            gone.append((owned.name, str(error)))
    return gone


def close_owned() -> None:
    """Remove the arenas that this process made and nobody has closed: it is cut off before the one who would."""
    for owned in list(_owned):
        owned.close()


def _lock_use(fd: int, kind: int) -> None:
    """Take or give back a share of the lock that `written_by_others` looks at."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _IN_USE.pack(kind, os.SEEK_SET, 0, 1, 0))


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def write_header(mapping: mmap.mmap, nbytes: int, owner: str) -> None:
    """Make a file with `nbytes` of payload an arena. The magic goes last: no half-made one is attached."""
    _HEADER.pack_into(mapping, 0, 0, VERSION, nbytes, GENERATIONS_MAX, 0, owner.encode()[:64])
    struct.pack_into("<I", mapping, 0, MAGIC)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove the arena unless somebody holds its owner lock, or it is not ours to remove. Returns whether
    it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError as error:  # of another user, or no file at all: anybody may put anything here
        return error.errno == errno.ELOOP and _remove_if_it_leads_nowhere(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _remove_if_it_leads_nowhere(path: Path) -> bool:
    """The same for a name that was restored: it led to a descriptor of its owner."""
    if not _is_ours(path) or not _TO_OWNER.fullmatch(os.readlink(path)):
        return False
    with contextlib.suppress(OSError):
        if path.stat().st_dev == SHM.stat().st_dev:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
    path.unlink(missing_ok=True)
    return True


def sweep(node: str, keep: str = "") -> list[str]:
    """Remove the node's arenas whose owner is gone, but none of the kind `keep`. Returns their names."""
    return [
        path.name
        for path in _paths(node)
        if kind_of(path.name) != keep and _remove_if_abandoned(path)
    ]


def sweep_if_dead(node: str) -> list[str]:
    """Remove the node's arenas if none of them has an owner, which a live node's supervisor is. Returns their names.

    For a name that several run directories may have: earlier versions used the last part alone.
    """
    with contextlib.ExitStack() as opened:
        found: list[Path] = []
        for path in _paths(node):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            opened.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _MAGIC.unpack(os.pread(fd, _MAGIC.size, 0)) == (MAGIC,):
                    found.append(path)
            except BlockingIOError:
                return []
            except (OSError, struct.error):  # no file, or too short for one of ours
                continue
        for path in found:
            path.unlink(missing_ok=True)
        return [path.name for path in found]


def owner_lives(name: str) -> bool:
    """Whether somebody holds the owner's lock of that arena; one that nobody owns is left behind."""
    try:
        fd = os.open(SHM / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def names(node: str) -> list[str]:
    """Every arena name of the node that exists now."""
    return [path.name for path in _paths(node)]


def kind_of(name: str) -> str:
    """KIND of `arena_name`."""
    return name.split("-")[-2]


def _paths(node: str) -> list[Path]:
    # Kinds and incarnations hold no "-", so that the arenas of node "a-b" are not taken for those of "a".
    found = SHM.glob(f"ph-{node}-*")
    alike = (path for path in found if path.name.rsplit("-", 2)[0] == f"ph-{node}")
    return sorted(path for path in alike if _is_ours(path))


def _is_ours(path: Path) -> bool:
    """Whether it belongs to this user: of what others put here nothing is believed."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False
