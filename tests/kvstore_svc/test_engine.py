"""Core, threads and a real disk together: bytes come back across restarts and cuts at any byte, errors
of the system become misses, and the directory has one owner."""

import errno
import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.disk import STORE_FILE, Disk
from phalanx.kvstore_svc.engine import Engine, Reply
from phalanx.kvstore_svc.events import Call, Event, Get, GetReply, Put, PutReply
from phalanx.kvstore_svc.layout import PAGE, Kind
from phalanx.kvstore_svc.main import Store

CONFIG = StoreConfig(max_bytes=64 << 20, ram_bytes=1 << 20)


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def payload(number: int) -> bytes:
    rng = random.Random(number)
    return rng.randbytes(rng.choice((1, 4000, 114_048)))


class Memory:
    """Callers' regions, by call."""

    def __init__(self) -> None:
        self.regions: dict[Call, bytearray] = {}

    def copy_in(self, call: Call, into: memoryview) -> str:
        into[:] = self.regions[call]
        return ""

    def copy_out(self, call: Call, data: memoryview) -> str:
        self.regions[call][: len(data)] = data
        return ""


class Session:
    def __init__(self, directory: Path) -> None:
        self.memory = Memory()
        self.engine = Engine(directory, CONFIG, self.memory)
        self.calls = 0

    def ask(self, events: list[Event]) -> dict[Call, Reply]:
        replies = {reply.call: reply for reply in self.engine.turn(events)}
        while len(replies) < len(events):
            self.engine.wait(1)
            replies |= {reply.call: reply for reply in self.engine.turn()}
        return replies

    def put(self, numbers: range, *, durable: bool = True) -> list[PutReply]:
        puts: list[Event] = []
        for number in numbers:
            call = (b"put", number)
            self.memory.regions[call] = bytearray(payload(number))
            puts.append(Put(call, key_of(number), Kind.BLOCK, len(payload(number)), durable))
        replies = self.ask(puts)
        found = [replies[(b"put", number)] for number in numbers]
        return [reply for reply in found if isinstance(reply, PutReply)]

    def get(self, number: int) -> bytes | None:
        self.calls += 1
        call = (b"get", self.calls)
        self.memory.regions[call] = region = bytearray(114_048)
        reply = self.ask([Get(call, key_of(number), len(region))])[call]
        assert isinstance(reply, GetReply)
        return bytes(region[: reply.nbytes]) if reply.found else None


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    one = Session(tmp_path / "kv")
    yield one
    one.engine.close(timeout_s=0.5)


def test_records_come_back_in_this_run_and_in_the_next(tmp_path: Path) -> None:
    first = Session(tmp_path)
    assert all(reply.durable for reply in first.put(range(100)))
    assert [first.get(n) for n in range(101)] == [payload(n) for n in range(100)] + [None]
    first.engine.close()
    second = Session(tmp_path)
    assert second.engine.recovery.scanned == 0
    assert [second.get(n) for n in range(101)] == [payload(n) for n in range(100)] + [None]
    second.engine.close()


def test_an_unsealed_segment_cut_or_overwritten_anywhere_gives_whole_records_only(
    tmp_path: Path,
) -> None:
    """The file as a crash might leave it, at many points; what comes back is right or a miss."""
    session = Session(tmp_path / "kv")
    session.put(range(40))
    (path,) = [p for p in (tmp_path / "kv").glob("seg-*") if _records(p)]
    whole, store = path.read_bytes(), (tmp_path / "kv" / STORE_FILE).read_bytes()
    session.engine.close()
    rng = random.Random(5)
    for attempt in range(12):
        damaged = bytearray(whole)
        at = rng.randrange(PAGE, len(whole) // 4)
        if attempt % 2:
            del damaged[at:]
        else:
            damaged[at : at + 5000] = rng.randbytes(5000)
        copy = tmp_path / f"copy-{attempt}"
        copy.mkdir()
        (copy / path.name).write_bytes(damaged)
        (copy / STORE_FILE).write_bytes(store)
        again = Session(copy)
        assert again.engine.recovery.scanned == 1
        got = [again.get(n) for n in range(40)]
        assert all(data in (None, payload(n)) for n, data in enumerate(got))
        if not attempt % 2:
            assert got.count(None) <= 8  # only what the damage touched
        again.engine.close()
        third = Session(copy)  # the first start sealed it
        assert third.engine.recovery.scanned == 0
        third.engine.close()


def _records(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(PAGE)
        return any(file.read(PAGE))


def test_files_of_another_store_are_discarded_and_strangers_left_alone(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.put(range(3))
    session.engine.close()
    (tmp_path / STORE_FILE).unlink()
    (tmp_path / "notes.txt").write_text("mine")
    again = Session(tmp_path)
    assert again.engine.recovery.discarded == 1
    assert again.get(0) is None
    assert (tmp_path / "notes.txt").read_text() == "mine"
    again.engine.close()


def test_a_directory_has_one_owner(session: Session) -> None:
    with pytest.raises(BlockingIOError):
        Disk(session.engine.disk.directory)


def test_a_directory_that_is_a_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(OSError):
        Session(tmp_path / "kv")


def test_adjoining_records_are_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them is flipped on the disk, and only that one is a miss."""
    session = Session(tmp_path)
    session.put(range(200))
    session.engine.close()
    again = Session(tmp_path)
    lengths = []
    read = again.engine.disk.read

    def counted(segment: int, offset: int, into: Sequence[memoryview]) -> int:
        lengths.append(len(into))
        return read(segment, offset, into)

    monkeypatch.setattr(again.engine.disk, "read", counted)
    entries = sorted(again.engine.core.index, key=lambda entry: entry.place)[:8]
    path = tmp_path / f"seg-{entries[3].place.segment:016x}.kv"
    with path.open("r+b") as file:
        file.seek(entries[3].offset + 128)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    by_key = {key_of(n): payload(n) for n in range(200)}
    gets: list[Event] = []
    for number, entry in enumerate(reversed(entries)):
        again.memory.regions[b"many", number] = bytearray(entry.length)
        gets.append(Get((b"many", number), entry.key, entry.length))
    replies = again.ask(gets)
    for number, entry in enumerate(reversed(entries)):
        reply = replies[b"many", number]
        assert isinstance(reply, GetReply) and reply.found == (entry is not entries[3])
        if reply.found:
            assert bytes(again.memory.regions[b"many", number]) == by_key[entry.key]
    assert sum(lengths) == 8 and len(lengths) <= 3
    again.engine.close()


def test_a_read_that_fails_is_a_miss_once_and_not_said_to_be_there(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.put(range(30))  # more than the memory tier holds

    def fail(segment: int, offset: int, into: Sequence[memoryview]) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(session.engine.disk, "read", fail)
        assert session.get(0) is None
    assert session.engine.core.prefix([key_of(0)], 0) == (0, 0)
    assert session.get(0) is None
    assert session.engine.core.stats(0).corrupt == 1
    assert session.put(range(1))[0].durable
    assert session.get(0) == payload(0)


def test_a_bug_on_a_disk_thread_ends_the_process_instead_of_hanging(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(segment: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(session.engine.disk, "sync", bug)
    with pytest.raises(ZeroDivisionError):
        session.put(range(1))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, calls = os.pwritev, 0

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return pwritev(descriptor, [buffers[0][:PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    session = Session(tmp_path)
    assert all(reply.durable for reply in session.put(range(10)))
    assert calls > 28
    assert [session.get(n) for n in range(10)] == [payload(n) for n in range(10)]
    session.engine.close()
    again = Session(tmp_path)
    assert [again.get(n) for n in range(10)] == [payload(n) for n in range(10)]
    again.engine.close()


def test_records_are_on_the_disk_before_the_index_that_tells_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may keep what was written last and lose what was written before."""
    calls: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def noted(*arguments: object) -> object:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)

    for name in ("pwritev", "fdatasync", "ftruncate", "fsync"):
        note(name)
    session = Session(tmp_path)
    session.put(range(3), durable=False)
    session.engine.close()
    assert calls[-4:] == ["fdatasync", "pwritev", "ftruncate", "fsync"]
    assert "pwritev" in calls[:-4]


def test_nothing_of_another_record_is_written_behind_one(tmp_path: Path) -> None:
    """Frames are used again, and are longer than most records."""
    session = Session(tmp_path)
    frames = CONFIG.num_frames(Kind.BLOCK)
    for number in range(2 * frames):
        call, length = (b"put", number), 114_048 if number < frames else 10
        session.memory.regions[call] = bytearray(b"\xaa" * length)
        session.ask([Put(call, key_of(number), Kind.BLOCK, length, True)])
    session.engine.close()
    written = b"".join(path.read_bytes() for path in tmp_path.glob("seg-*.kv"))
    assert written.count(b"\xaa" * 16) == frames * (114_048 // 16)


def test_a_file_system_without_direct_io_is_used_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, mode))  # as Linux: made, then refused
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    session = Session(tmp_path)
    assert session.put(range(5))[4].durable and session.get(4) == payload(4)
    assert not session.engine.disk.direct
    session.engine.close()


def test_what_is_cleared_is_so_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are only removed in memory come back, and with them what a rank computed wrong."""
    session = Session(tmp_path)
    session.put(range(3))
    synced: list[tuple[int, list[str]]] = []

    def sync(fd: int) -> None:
        names = sorted(path.name for path in tmp_path.iterdir())
        synced.append((os.fstat(fd).st_ino, names))

    store: Any = Store.__new__(Store)
    store._service, store._log = SimpleNamespace(beat=lambda: None), structlog.get_logger()
    store._open = lambda progress: None
    monkeypatch.setattr(os, "fsync", sync)
    store._clear(session.engine)
    assert synced[-1] == (tmp_path.stat().st_ino, ["cleared", STORE_FILE])
