"""What a gateway leaves to its successor: the tokens of every open stream, and who runs it.

Tokens of a stream can be made again, but one by one; so the gateway also writes them to a file in
/dev/shm, before it sends anything that follows from them. The file outlives all processes of the node,
killed together or not, and costs no disk. Nothing depends on it for being right: what it lacks is made again.

It is a sequence of frames (length, checksum, notes), one a turn, and begins with all that was known
when it was made. When it has grown to a multiple of that, the next one is made and it goes.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
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
_NOTES_PER_FRAME = 1024
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


def beginning(notes: Iterable[Note]) -> Iterator[bytes]:
    """A new file, in parts, with all that is known; oldest first, and no more than there is room for."""
    yield MAGIC
    size = 0
    rest = iter(notes)
    while size <= FIRST_BYTES_MAX and (some := list(islice(rest, _NOTES_PER_FRAME))):
        part = frame(some)
        size += len(part)
        yield part


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


class TokenLog:
    """The file of this gateway, and those of the gateways before it."""

    def __init__(self, node: str, log: Logger) -> None:
        self._node, self._log = node, log
        old = [SHM / name for name in names(node) if kind_of(name) == TOKENS]
        self._old = sorted(old, key=_number)
        self._last = _number(self._old[-1]) if self._old else 0
        self._fd, self._path = -1, Path()
        self._size = self._size_max = 0
        self._again_ns = 0
        self._failing = False

    def read(self) -> list[Note] | None:
        """What the last gateways left; None: nothing."""
        if not self._old:
            return None
        return [note for path in self._old for note in notes_in(_content(path))]

    def write(
        self, notes: Sequence[Note], whole: Callable[[], Iterable[Note]], now_ns: int
    ) -> None:
        """Add what is new; `whole` is asked for all there is when a new file begins."""
        if self._fd >= 0 and self._size < self._size_max:
            if notes:
                self._try(lambda: self._add(frame(notes)), now_ns)
        elif now_ns >= self._again_ns:
            self._try(lambda: self._begin(whole()), now_ns)

    def close(self, keep: bool) -> None:
        """`keep`: for the successor."""
        if self._fd >= 0:
            os.close(self._fd)
            if not keep:
                self._path.unlink(missing_ok=True)
        self._fd = -1

    def _try(self, act: Callable[[], None], now_ns: int) -> None:
        try:
            act()
        except OSError as error:
            self.close(keep=False)  # half of it would help nobody, and others need the room
            self._forget_old()
            self._again_ns = now_ns + AGAIN_NS
            if not self._failing:
                self._log.warning(
                    "no token log: after a death of the gateway more is made again",
                    error=str(error),
                )
            self._failing = True
        else:
            self._failing = False

    def _begin(self, notes: Iterable[Note]) -> None:
        self._last += 1
        if self._fd >= 0:
            self._old.append(self._path)
            self.close(keep=True)
        self._path = SHM / arena_name(self._node, TOKENS, self._last)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._fd, self._size = os.open(self._path, flags, 0o600), 0
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in beginning(notes):
            _check_room(len(part))
            self._add(part)
        self._size_max = max(2 * self._size, self._size + GROWTH_BYTES)
        self._forget_old()

    def _forget_old(self) -> None:
        for path in self._old:
            with contextlib.suppress(OSError):
                path.unlink()
        self._old.clear()

    def _add(self, data: bytes) -> None:
        done = os.write(self._fd, data)
        self._size += done
        if done < len(data):
            raise OSError(f"{SHM} took {done} of {len(data)} bytes")


def _check_room(nbytes: int) -> None:
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    if nbytes + GROWTH_BYTES + KEEP_FREE_BYTES > free:
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
