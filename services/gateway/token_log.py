"""What a gateway leaves to its successor: the tokens of every open stream, and who runs it.

Tokens of a stream can be made again, but one by one; so the gateway also writes them to a file in
/dev/shm, before it sends anything that follows from them. The file outlives all processes of the node,
killed together or not, and costs no disk. Nothing depends on it for being right: what it lacks is made again.

It is a sequence of frames (length, checksum, notes), one a turn. When it has grown to a multiple of what it began
with, the next one is made, and when that has all that is known then, it goes. Streams do not wait for this: it is done
a little a turn, and what is new meanwhile goes into both.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import msgspec

from phalanx.protocol.arena import KEEP_FREE_BYTES, SHM, TOKENS, arena_name, kind_of, names
from phalanx.protocol.log import Logger
from phalanx.services.gateway.entries import Note, Placed, Produced, Recovered, Scored, Stamp

MS = 1_000_000
MAGIC = b"PHXTOK1\n"
FIRST_BYTES_MAX = 64 << 20  # that a file begins with: streams beyond are made again after a death
GROWTH_BYTES = 4 << 20  # a file grows by this, or to twice what it began with, before the next one
AGAIN_NS = 1_000 * MS  # between two tries to make one, while /dev/shm is full
TURN_BYTES = 256 << 10  # of all that is known, in one turn: some milliseconds at most
_FRAME_BYTES = 64 << 10
_NOTE_BYTES = 64  # about what a note takes beside its tokens
_FRAME = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Note])


def frame(notes: Sequence[Note]) -> bytes:
    body = _encoder.encode(notes)
    return _FRAME.pack(len(body), crc32(body)) + body


def notes_in(data: bytes) -> Iterator[Note]:
    """All notes up to the first frame that is torn or damaged."""
    at = len(MAGIC) if data.startswith(MAGIC) else len(data)
    while at + _FRAME.size <= len(data):
        size, check = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(body) != size or crc32(body) != check:
            return
        try:
            yield from _decoder.decode(body)
        except msgspec.DecodeError:  # of another version
            return
        at += _FRAME.size + size


def beginning(notes: Iterable[Note], frame_bytes: int = _FRAME_BYTES) -> Iterator[bytes]:
    """A new file, in parts, with all that is known; oldest first, and no more than there is room for."""
    yield MAGIC
    size = 0
    some: list[Note] = []
    nbytes = 0
    for note in notes:
        some.append(note)
        nbytes += _NOTE_BYTES + _content_bytes(note)
        if nbytes >= frame_bytes:
            part = frame(some)
            yield part
            size += len(part)
            some, nbytes = [], 0
            if size >= FIRST_BYTES_MAX:
                return
    if some:
        yield frame(some)


def _content_bytes(note: Note) -> int:
    if isinstance(note, Produced):
        return len(note.token_ids) + len(note.logprobs)
    return len(note.records) if isinstance(note, Scored) else 0


def recall(recovered: Sequence[Recovered], notes: Iterable[Note]) -> list[Recovered]:
    """What the journal has, with what the token log adds to it."""
    produced: dict[str, list[Produced]] = {one.entry.request_id: [] for one in recovered}
    scored: dict[str, list[Scored]] = {rid: [] for rid in produced}
    placed: dict[str, dict[int, Placed]] = {rid: {} for rid in produced}
    fingerprint = ""
    for note in notes:
        if isinstance(note, Stamp):
            fingerprint = note.fingerprint or fingerprint
        elif note.request_id not in produced:
            continue  # it is forgotten
        elif isinstance(note, Produced):
            produced[note.request_id].append(note)
        elif isinstance(note, Scored):
            scored[note.request_id].append(note)
        else:
            placed[note.request_id][note.index] = note
    told: list[Recovered] = []
    for one in recovered:
        entry, rid = one.entry, one.entry.request_id
        if not entry.fingerprint:  # the journal was not told in time
            entry = msgspec.structs.replace(entry, fingerprint=fingerprint)
        pieces, scores = (*one.produced, *produced[rid]), (*one.scored, *scored[rid])
        told.append(replace(one, entry=entry, produced=pieces, scored=scores, placed=placed[rid]))
    return told


@dataclass
class _File:
    """One that is open for writing, with its lock."""

    path: Path
    fd: int
    size: int = 0

    def add(self, data: bytes) -> None:
        done = os.write(self.fd, data)
        self.size += done
        if done < len(data):
            raise OSError(f"{SHM} took {done} of {len(data)} bytes")

    def close(self, keep: bool) -> None:
        os.close(self.fd)
        if not keep:
            self.path.unlink(missing_ok=True)


class TokenLog:
    """The file of this gateway, the one that will follow it, and those of the gateways before it."""

    def __init__(self, node: str, log: Logger) -> None:
        self._node, self._log = node, log
        old = [SHM / name for name in names(node) if kind_of(name) == TOKENS]
        self._old = sorted(old, key=_number)
        self._last = _number(self._old[-1]) if self._old else 0
        self._file: _File | None = None  # has all there is
        self._size_max = 0  # of that one
        self._next: _File | None = None
        self._rest: Iterator[bytes] = iter(())  # of what the next one begins with
        self._again_ns = 0
        self._failing = False

    def read(self) -> list[Note] | None:
        """What the last gateways left; None: nothing."""
        if not self._old:
            return None
        return [note for path in self._old for note in notes_in(_content(path))]

    def write(
        self, notes: Sequence[Note], whole: Callable[[], Iterable[Note]], now_ns: int
    ) -> bool:
        """Add what is new; `whole` is asked for all there is, a little at a time, when a new file begins. Returns
        whether there is more of that to be written."""
        try:
            self._add(notes)
            if self._next is None and self._is_full and now_ns >= self._again_ns:
                self._begin(whole())
            if self._next is not None:
                self._go_on(self._next)
        except OSError as error:
            self.close(keep=False)  # half of it would help nobody, and others need the room
            self._again_ns = now_ns + AGAIN_NS
            if not self._failing:
                self._log.warning(
                    "no token log: after a death of the gateway more is made again",
                    error=str(error),
                )
            self._failing = True
        return self._next is not None

    def close(self, keep: bool) -> None:
        """`keep`: for the successor."""
        for file in (self._file, self._next):
            if file is not None:
                file.close(keep)
        self._file = self._next = None
        if not keep:
            self._forget_old()

    @property
    def _is_full(self) -> bool:
        return self._file is None or self._file.size >= self._size_max

    def _add(self, notes: Sequence[Note]) -> None:
        files = [file for file in (self._file, self._next) if file is not None]
        if notes and files:
            part = frame(notes)
            _check_room(len(files) * len(part))
            for file in files:
                file.add(part)

    def _begin(self, notes: Iterable[Note]) -> None:
        self._last += 1
        path = SHM / arena_name(self._node, TOKENS, self._last)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._next = _File(path, os.open(path, flags, 0o600))
        fcntl.flock(self._next.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._rest = beginning(notes)

    def _go_on(self, file: _File) -> None:
        """With what it begins with."""
        until = file.size + TURN_BYTES
        for part in self._rest:
            _check_room(len(part) + GROWTH_BYTES)
            file.add(part)
            if file.size >= until:
                return
        if self._file is not None:
            self._file.close(keep=False)
        self._file, self._next = file, None
        self._size_max = max(2 * file.size, file.size + GROWTH_BYTES)
        self._forget_old()
        self._failing = False

    def _forget_old(self) -> None:
        for path in self._old:
            with contextlib.suppress(OSError):
                path.unlink()
        self._old.clear()


def _check_room(nbytes: int) -> None:
    """What others need is not for the log."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    if nbytes + KEEP_FREE_BYTES > free:
        raise OSError(f"{SHM} has {free >> 20} MiB free")


def _content(path: Path) -> bytes:
    """Empty if it cannot be read: anybody may put anything here."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _number(path: Path) -> int:
    with contextlib.suppress(ValueError):
        return int(path.name.rpartition("-")[2])
    return 0
