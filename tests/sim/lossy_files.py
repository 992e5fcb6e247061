"""A file layer that loses and reorders what was not synced, under SQLite: every call is recorded, and what a disk may
hold after a crash at any moment can be made from the record.

The rules are those of a POSIX file system on a disk with a cache. A sync of a file makes its bytes and its
length durable. Bytes that are not synced survive sector by sector, each as it was after any of the writes to it,
so writes are torn, dropped and reordered. A new file's name is durable once its directory was synced: SQLite
does that with the first sync of a journal or a log, and after deletions that must last.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import apsw

SECTOR = 512


@dataclass(frozen=True)
class Write:
    name: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    name: str
    size: int


@dataclass(frozen=True)
class Sync:
    name: str


@dataclass(frozen=True)
class Create:
    name: str


@dataclass(frozen=True)
class Delete:
    name: str
    durable: bool


@dataclass(frozen=True)
class Mark:
    """Said by the test: everything up to here was acknowledged."""

    number: int


Event = Write | Truncate | Sync | Create | Delete | Mark


@dataclass
class Disk:
    """One file, as it is and as it may be after a crash."""

    durable: bytearray = field(default_factory=bytearray)
    now: bytearray = field(default_factory=bytearray)
    pending: list[Write | Truncate] = field(default_factory=list)
    named: bool = False  # its name is durable

    def change(self, event: Write | Truncate) -> None:
        self.pending.append(event)
        _apply(self.now, event)

    def sync(self) -> None:
        self.durable, self.pending = bytearray(self.now), []

    def survivor(self, rng: random.Random) -> bytes:
        """What may be left of it: each sector, and the length, as of some moment since the last sync."""
        versions = [bytearray(self.durable)]
        for event in self.pending:
            versions.append(bytearray(versions[-1]))
            _apply(versions[-1], event)
        size = len(rng.choice(versions))
        # Often nearly all or nearly nothing was written: those are the interesting disks.
        weight = rng.choice([0.02, 0.5, 0.98])
        out = bytearray(size)
        for at in range(0, size, SECTOR):
            late = rng.random() < weight
            version = versions[-1] if late else rng.choice(versions)
            piece = version[at : at + SECTOR]
            out[at : at + len(piece)] = piece
        return bytes(out[:size])


def _apply(content: bytearray, event: Write | Truncate) -> None:
    if isinstance(event, Truncate):
        del content[event.size :]
        content.extend(bytes(event.size - len(content)))
        return
    content.extend(bytes(max(0, event.offset - len(content))))
    content[event.offset : event.offset + len(event.data)] = event.data


def crash(events: Sequence[Event], rng: random.Random) -> dict[str, bytes]:
    """Name -> content of the files that a disk may hold when everything stops after these events."""
    disks: dict[str, Disk] = {}
    gone: dict[str, Disk] = {}  # deleted, but perhaps not on the disk
    for event in events:
        match event:
            case Create(name):
                disks[name] = Disk()
                gone.pop(name, None)
            case Write() | Truncate():
                disks[event.name].change(event)
            case Sync(name):
                disks[name].sync()
                if name.endswith(("-wal", "-journal")):
                    _name_all(disks, gone)
            case Delete(name, durable):
                gone[name] = disks.pop(name)
                if durable:
                    _name_all(disks, gone)
            case Mark():
                pass
    left = {name: disk for name, disk in disks.items() if disk.named or rng.random() < 0.5}
    left |= {name: disk for name, disk in gone.items() if disk.named and rng.random() < 0.5}
    return {name: disk.survivor(rng) for name, disk in left.items()}


def _name_all(disks: dict[str, Disk], gone: dict[str, Disk]) -> None:
    for disk in disks.values():
        disk.named = True
    gone.clear()


class RecordingVFS(apsw.VFS):
    """Files as the system has them, and a record of what was done to them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        super().__init__("recording", "")

    def xOpen(self, name: Any, flags: list[int]) -> "RecordingFile":
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name)
        known = {event.name for event in self.events if isinstance(event, Create)}
        deleted = [e for e in self.events if isinstance(e, Create | Delete) and e.name == path.name]
        if path.name not in known or isinstance(deleted[-1], Delete):
            self.events.append(Create(path.name))
        return RecordingFile(self.events, path.name, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.events.append(Delete(Path(filename).name, syncdir))


class RecordingFile(apsw.VFSFile):
    def __init__(self, events: list[Event], own: str, name: Any, flags: list[int]) -> None:
        self._events, self._own = events, own
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._events.append(Write(self._own, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        self._events.append(Truncate(self._own, newsize))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._events.append(Sync(self._own))


class Connection:
    """What `sqlite3.connect` returns, as far as the journal uses it, on a recording file layer."""

    def __init__(self, path: Path, *statements: str) -> None:
        self._db = apsw.Connection(str(path), vfs="recording")
        # Without shared memory between processes, which has no part in what is durable.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._after = statements

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")) and not self._db.in_transaction:
            self._db.execute("BEGIN")
        cursor = self._db.execute(statement, values)
        if statement.startswith("PRAGMA synchronous"):
            for more in self._after:
                self._db.execute(more)
        return cursor

    def executescript(self, script: str) -> None:
        self._db.execute(script)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def acknowledged(events: Sequence[Event]) -> int:
    """The number of the last mark among the events."""
    return max((event.number for event in events if isinstance(event, Mark)), default=0)


def moments(events: Sequence[Event], count: int, rng: random.Random) -> Iterator[Sequence[Event]]:
    """The story up to `count` random moments."""
    for _ in range(count):
        yield events[: rng.randrange(len(events) + 1)]
