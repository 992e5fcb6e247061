"""What the journal calls durable survives kill -9; a bad or full disk never stops the gateway."""

import errno
import os
import re
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import structlog
from gateway_node import GatewayNode, wait_for

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Final, HandOver, Sampling, Usage
from phalanx.protocol.rundir import JOURNAL_FILE
from phalanx.services.gateway import journal_rows as rows
from phalanx.services.gateway.entries import (
    Accept,
    Again,
    Alive,
    Entry,
    Finish,
    Forget,
    Op,
    Produced,
    Scored,
    Stamp,
)
from phalanx.services.gateway.journal import Journal, JournalWriter, Written, told_failure

LOG = structlog.get_logger()
TTL_S = 100.0


def entry(number: int, fingerprint: str = "") -> Entry:
    return Entry(
        request_id=f"{number:032x}",
        prompt=bytes([number % 256, 0, 0, 0]) * (1 + number % 50),
        sampling=Sampling(seed=number, max_tokens=9, logit_bias={3: 0.5}, stop=("ä",)),
        n=2,
        stream=number % 2 == 0,
        key=f"key-{number}",
        digest=b"d" * 16,
        model="tiny",
        fingerprint=fingerprint,
    )


def final(number: int, index: int) -> Final:
    return Final(f"{number:032x}", index, 4, "abort", Usage(3, 4), "tail", Code.SHUTDOWN, "why")


def open_journal(path: Path) -> Journal:
    return Journal(path, TTL_S, LOG)


def test_what_is_written_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    assert journal.load(1000.0) == []
    journal.write([Accept(entry(1)), Accept(entry(2)), Finish(final(1, 1))], 1000.0)
    journal.write([Accept(entry(3)), Forget(entry(2).request_id)], 1001.0)
    journal.close()
    first, third = open_journal(path).load(1002.0)
    assert (first.entry, first.finals) == (entry(1), {1: final(1, 1)})
    assert (third.entry, third.finals) == (entry(3), {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_log_comes_back_in_order_and_goes_with_its_request(tmp_path: Path) -> None:
    def piece(number: int, index: int, offset: int, ids: bytes) -> Produced:
        return Produced(f"{number:032x}", index, offset, ids, b"logprobs")

    path = tmp_path / "j.sqlite"
    pieces = [piece(1, 1, 0, b"ffff"), piece(1, 0, 2, b"aaaa"), piece(1, 0, 0, b"bbbb")]
    journal = open_journal(path)
    scores = [Scored(entry(1).request_id, first, b"s%d" % first) for first in (30, 4, 0)]
    journal.write([Accept(entry(1)), Accept(entry(2)), *pieces, piece(2, 0, 0, b"cccc")], 1000.0)
    journal.write([*scores, Scored(entry(2).request_id, 0, b"other")], 1000.0)
    journal.write([piece(1, 0, 0, b"bbbbdddd"), Forget(entry(2).request_id)], 1001.0)
    journal.close()
    journal = open_journal(path)
    (one,) = journal.load(1002.0)
    assert one.produced == (piece(1, 0, 0, b"bbbbdddd"), pieces[1], pieces[0])
    assert one.scored == (scores[2], scores[1], scores[0])
    journal.write([Finish(final(1, 0)), Finish(final(1, 1))], 1002.0)
    assert journal.load(1003.0 + TTL_S) == []
    journal.close()
    with sqlite3.connect(path) as db:
        for table in ("tokens", "scores"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    db.close()


def test_a_journal_of_the_version_before_is_read_and_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(1))], 1000.0)
    journal.close()
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE tokens; DROP TABLE scores; PRAGMA user_version=1")
        for table in ("requests", "finals"):
            db.executescript(f"ALTER TABLE {table} DROP COLUMN sum")
    db.close()
    journal = open_journal(path)
    assert [one.entry for one in journal.load(1001.0)] == [entry(1)]
    rid = entry(1).request_id
    journal.write([Produced(rid, 0, 0, b"aaaa"), Scored(rid, 0, b"s")], 1001.0)
    (one,) = journal.load(1001.0)
    assert len(one.produced) == len(one.scored) == 1
    journal.close()


def test_old_entries_are_deleted(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j.sqlite")
    journal.write([Accept(entry(1)), Finish(final(1, 0)), Finish(final(1, 1))], 1000.0)
    journal.write([Accept(entry(2)), Finish(final(2, 0)), Finish(final(2, 1))], 1050.0)
    journal.close()
    journal = open_journal(tmp_path / "j.sqlite")
    assert [one.entry.request_id for one in journal.load(1000.0 + TTL_S + 1)] == [
        entry(2).request_id
    ]
    journal.close()
    with sqlite3.connect(tmp_path / "j.sqlite") as db:
        assert db.execute("SELECT count(*) FROM finals").fetchone() == (2,)
    db.close()


def test_what_has_not_ended_is_never_too_old(tmp_path: Path) -> None:
    """A clock that jumps, or a node that was down for long, takes no accepted stream away."""
    journal = open_journal(tmp_path / "j.sqlite")
    journal.write([Accept(entry(1)), Finish(final(1, 0)), Accept(entry(2))], 1000.0)
    journal.close()
    for years in (1, 2):  # the first look must not delete it either
        with structlog.testing.capture_logs() as told:
            journal = Journal(tmp_path / "j.sqlite", TTL_S, structlog.get_logger())
            found = journal.load(1000.0 + years * 365 * 86400)
        assert [one.entry for one in found] == [entry(1), entry(2)]
        assert [line["requests"] for line in told] == [2], "the operator is told"
        journal.close()


def test_what_a_gateway_still_works_on_is_not_old(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j.sqlite")
    ends: list[Op] = [Finish(final(1, 0)), Finish(final(1, 1)), Finish(final(2, 0))]
    journal.write([Accept(entry(i)) for i in range(1, 4)] + ends, 1000.0)
    journal.write([Alive()], 1090.0)
    journal.close()
    with sqlite3.connect(tmp_path / "j.sqlite") as db:
        touched = dict(db.execute("SELECT id, touched FROM requests"))
    db.close()
    assert [touched[entry(i).request_id] for i in range(1, 4)] == [1000.0, 1090.0, 1090.0]
    kept = open_journal(tmp_path / "j.sqlite").load(1000.0 + TTL_S + 1)
    assert [one.entry.key for one in kept] == ["key-2", "key-3"]


def test_a_fingerprint_known_later_is_that_of_earlier_entries(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j.sqlite")
    journal.write([Accept(entry(1)), Accept(entry(2, "old")), Stamp("new")], 1000.0)
    journal.close()
    recovered = open_journal(tmp_path / "j.sqlite").load(1000.0)
    assert [one.entry.fingerprint for one in recovered] == ["new", "old"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"not a database, not at all" * 500),
        lambda path: path.write_bytes(path.read_bytes()[:3000]),
        lambda path: _write_at(path, 100, b"\xff" * 3000),
        lambda path: _sql(path, "PRAGMA user_version=99"),
        lambda path: _sql(path, "DROP TABLE requests; CREATE TABLE requests (other)"),
    ],
    ids=["text", "cut", "overwritten", "newer", "schema"],
)
def test_an_unreadable_journal_is_moved_aside(tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(i)) for i in range(20)], 1000.0)
    journal.close()
    spoil(path)  # type: ignore[operator]
    journal = open_journal(path)
    assert journal.load(1000.0) == []
    (aside,) = [p for p in tmp_path.glob("*unreadable*") if not p.name.endswith(("-wal", "-shm"))]
    assert aside.stat().st_size > 0
    journal.write([Accept(entry(1))], 1000.0)
    journal.close()
    assert len(open_journal(path).load(1000.0)) == 1


SPOILT = {
    "entry": "UPDATE requests SET entry = x'00ff' WHERE id LIKE '%7'",
    "entry of another": "UPDATE requests SET entry = (SELECT entry FROM requests WHERE id LIKE '%3')"
    " WHERE id LIKE '%7'",
    "no entry": "UPDATE requests SET entry = NULL WHERE id LIKE '%7'",
    "letters": "UPDATE requests SET id = CAST(x'ff30' AS TEXT) WHERE id LIKE '%7'",
    "fingerprint": "UPDATE requests SET fingerprint = CAST(x'ff' AS TEXT) WHERE id LIKE '%7'",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_row_that_cannot_be_read_costs_no_other(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(i)) for i in range(10)], 1000.0)
    journal.write([Finish(final(i, 1)) for i in range(10)], 1000.0)
    journal.close()
    _sql(path, SPOILT[spoil])
    others = [entry(i) for i in range(10) if i != 7]
    for _ in range(2):
        journal = open_journal(path)
        found = journal.load(1000.0)
        assert [one.entry for one in found] == others
        assert all(len(one.finals) == 1 for one in found)
        journal.close()
    with sqlite3.connect(path) as db:
        asides = db.execute("SELECT source, why <> '' FROM unreadable").fetchall()
    db.close()
    assert asides == [("requests", 1)], "kept for people, once"
    assert not list(tmp_path.glob("*unreadable*"))


def test_no_flipped_bit_of_a_row_runs_another_prompt(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(1)), Stamp("f1"), Finish(final(1, 0))], 1000.0)
    journal.close()
    (whole,) = open_journal(path).load(1000.0)
    db = sqlite3.connect(path)
    rows.prepare(db)
    columns = {"requests": ("entry", "fingerprint"), "finals": ("final",)}
    stored = {
        (table, column): db.execute(f"SELECT CAST({column} AS BLOB) FROM {table}").fetchone()[0]
        for table, names in columns.items()
        for column in names
    }
    decodes = 0
    for (table, column), value in stored.items():
        kind = "TEXT" if column == "fingerprint" else "BLOB"
        for bit in range(8 * len(value)):
            flipped = bytearray(value)
            flipped[bit // 8] ^= 1 << bit % 8
            db.execute(f"UPDATE {table} SET {column} = CAST(? AS {kind})", (bytes(flipped),))
            found = rows.read(db, 0.0)
            assert [bad.table for bad in found.unreadable] == [table]
            assert not found.requests if table == "requests" else found.requests[0].finals == {}
            decodes += found.unreadable[0].why == "its checksum is wrong"
        db.execute(f"UPDATE {table} SET {column} = CAST(? AS {kind})", (value,))
    assert rows.read(db, 0.0).requests == [whole]
    assert decodes > 100, "only the checksum tells"
    db.close()


def test_an_end_that_cannot_be_read_is_made_again_and_tokens_behind_a_gap_are_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j.sqlite"
    rid = entry(1).request_id
    journal = open_journal(path)
    pieces = [Produced(rid, 0, at, b"abcd" * 2) for at in (0, 2, 4, 6)]
    journal.write([Accept(entry(1)), Finish(final(1, 0)), Finish(final(1, 1)), *pieces], 1000.0)
    journal.close()
    _sql(path, "UPDATE finals SET final = x'00' WHERE i = 1; DELETE FROM tokens WHERE offset = 2")
    for _ in range(2):
        journal = open_journal(path)
        (one,) = journal.load(1000.0)
        assert one.finals == {0: final(1, 0)} and one.produced == (pieces[0],)
        journal.close()
    db = sqlite3.connect(path)
    assert db.execute("SELECT source FROM unreadable ORDER BY 1").fetchall() == [
        ("finals",),
        ("tokens",),
        ("tokens",),
    ]
    db.close()


def _write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _sql(path: Path, script: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()


class Writer:
    """A JournalWriter whose results are waited for."""

    def __init__(self, journal: Journal) -> None:
        self.lost = 0  # how often the file was replaced
        self._woken = threading.Event()
        self.writer = JournalWriter(journal, self._woken.set)

    def write(self, number: int, ops: list[Op]) -> str:
        self.writer.submit(number, ops)
        while True:
            assert self._woken.wait(10)
            self._woken.clear()
            for written in self.writer.results():
                self.lost += written.lost
                if written.number >= number:
                    return written.failure


def test_a_full_disk_fails_new_requests_and_keeps_ends_for_later(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(i)) for i in range(5)], 1000.0)
    db = journal._open()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages}")
    writer = Writer(journal)
    big = msgspec.structs.replace(entry(7), prompt=b"\0" * 400_000)
    assert "full" in writer.write(1, [Accept(big), Finish(final(1, 0))])
    db.execute("PRAGMA max_page_count=1000000")
    assert writer.write(2, [Accept(entry(8))]) == ""
    writer.writer.close()
    recovered = {one.entry.request_id: one for one in open_journal(path).load(1000.0)}
    assert big.request_id not in recovered and entry(8).request_id in recovered
    assert recovered[entry(1).request_id].finals == {0: final(1, 0)}


def test_more_than_can_be_kept_for_a_full_disk_is_lost_and_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream has tokens behind a gap, nor an end behind one, and what nobody would write again is kept."""
    monkeypatch.setattr("phalanx.services.gateway.journal._KEPT_ON_FAILURE", 10)

    def piece(offset: int) -> Produced:
        return Produced(entry(1).request_id, 0, offset, b"abcd")

    journal = open_journal(tmp_path / "j.sqlite")
    woken = threading.Event()
    writer = JournalWriter(journal, woken.set)

    def write(number: int, *ops: Op) -> list[Written]:
        woken.clear()
        writer.submit(number, list(ops))
        assert woken.wait(10)
        return writer.results()

    assert write(3, Accept(entry(1)), Accept(entry(2)), piece(0)) == [Written(3)]
    with monkeypatch.context() as patch:
        patch.setattr(journal, "write", _full)
        patch.setattr(journal, "probe", _full)
        (failed,) = write(4, Forget(entry(2).request_id))
        assert failed.failure
        for number in range(5, 25):
            (failed,) = write(number, piece(number - 4))
            assert failed.failure and not failed.lost and len(writer._late) <= 10
    assert write(26, piece(21), Finish(final(1, 0))) == [Written(0, lost=True), Written(26)]
    again = [Again(entry(1)), piece(0), piece(1), Finish(final(1, 0))]
    assert write(30, piece(22)) == [Written(30)]
    (one,) = open_journal(tmp_path / "j.sqlite").load(1000.0)
    assert (one.entry, one.produced, one.finals) == (entry(1), (piece(0),), {})
    assert write(34, *again) == [Written(34)]
    writer.close()
    (one,) = open_journal(tmp_path / "j.sqlite").load(1000.0)
    assert one.produced == (piece(0), piece(1)) and one.finals == {0: final(1, 0)}


def test_a_journal_that_failed_is_tried_again_though_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has room for a small change while its disk has none for a request: that is not enough."""
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(i)) for i in range(5)], 1000.0)
    writer = Writer(journal)
    assert writer.write(1, []) == ""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left" in writer.write(2, [])
    monkeypatch.undo()
    assert writer.write(3, []) == ""
    writer.writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["j.sqlite"], "nothing else stays"
    assert len(open_journal(path).load(1000.0)) == 5


def test_the_log_of_a_file_that_was_replaced_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    path, other = tmp_path / "j.sqlite", tmp_path / "other.sqlite"
    before = open_journal(other)
    before.write([Accept(entry(7))], 1000.0)
    before.close()
    writer = Writer(open_journal(path))
    assert writer.write(1, [Accept(entry(i)) for i in range(5)]) == ""
    other.replace(path)
    assert writer.write(2, [Accept(entry(8))]) == "" and writer.lost == 1
    writer.writer.close()
    kept = {one.entry.request_id for one in open_journal(path).load(1000.0)}
    assert kept == {entry(7).request_id, entry(8).request_id}


@pytest.mark.parametrize(
    "failure", ["database or disk is full", "No space left on device", "disk I/O error"]
)
def test_a_failure_is_told_with_numbers_and_advice(tmp_path: Path, failure: str) -> None:
    path = tmp_path / "j.sqlite"
    told = told_failure(path, failure)
    assert f"the journal {path} cannot be written ({failure}; " in told
    assert re.search(r"; \d+ bytes are free there\)", told)
    assert ("make room" in told) == (failure != "disk I/O error")


def test_what_is_told_of_a_failure_is_found_out_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk that fails may hang the next moment."""
    asked: list[str] = []
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(threading.current_thread().name)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    journal, woken = open_journal(tmp_path / "j.sqlite"), threading.Event()
    monkeypatch.setattr(journal, "write", _full)
    writer = JournalWriter(journal, woken.set)
    writer.submit(1, [Accept(entry(1))])
    assert woken.wait(10)
    (written,) = writer.results()
    assert "bytes are free there" in written.told and asked == ["journal"]
    writer.close()


def _full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's request was accepted, and health told that all is well."""
    journal, woken = open_journal(tmp_path / "j.sqlite"), threading.Event()
    gate, begun = threading.Event(), threading.Event()
    right = journal.write

    def slow(ops: Sequence[Op], now_s: float) -> None:
        begun.set()
        assert gate.wait(20)
        right(ops, now_s)

    monkeypatch.setattr(journal, "write", slow)
    writer = JournalWriter(journal, woken.set)
    later_ns = time.monotonic_ns() + 10**12
    assert writer.late(later_ns) == "", "nothing is to be written"
    writer.submit(1, [Accept(entry(1))])
    assert begun.wait(10)
    assert writer.late(time.monotonic_ns()) == "", "it may come back at once"
    assert f"{tmp_path / 'j.sqlite'} is being written since" in writer.late(later_ns)
    gate.set()
    assert woken.wait(10)
    writer.close()
    assert writer.late(later_ns) == ""


@pytest.mark.parametrize("gone", [("",), ("-wal",), ("", "-wal", "-shm")])
def test_a_journal_that_is_deleted_is_written_anew(tmp_path: Path, gone: tuple[str, ...]) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    writer = Writer(journal)
    assert writer.write(1, [Accept(entry(1)), Accept(entry(2))]) == "" and not journal.deleted()
    for suffix in gone:
        path.with_name(path.name + suffix).unlink()
    assert journal.deleted() and writer.lost == 0
    assert writer.write(0, []) == "" and not journal.deleted() and writer.lost == 1
    assert writer.write(3, [Accept(entry(3))]) == "" and writer.lost == 1
    # What was written before is the core's to write again, unless only the log was gone.
    kept = {one.entry.request_id for one in open_journal(path).load(1000.0)}
    assert kept == {entry(i).request_id for i in ((1, 2, 3) if gone == ("-wal",) else (3,))}
    writer.writer.close()


def test_a_try_does_not_hide_that_a_request_is_written(tmp_path: Path) -> None:
    """Both may be taken at once, and the number told is that of the request."""
    woken = threading.Event()
    journal = open_journal(tmp_path / "j.sqlite")
    gate = threading.Event()
    right = journal.probe

    def slow() -> None:
        assert gate.wait(10)
        right()

    journal.probe = slow  # type: ignore[method-assign]
    writer = JournalWriter(journal, woken.set)
    writer.submit(0, [])
    writer.submit(4, [Accept(entry(4))])
    writer.submit(0, [])
    gate.set()
    writer.close()
    assert writer.results()[-1] == Written(4)


def test_a_journal_that_breaks_while_open_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = open_journal(path)
    journal.write([Accept(entry(i)) for i in range(200)], 1000.0)
    db = journal._open()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("PRAGMA cache_size=0")
    _write_at(path, 4096, b"\xff" * 4096 * 8)
    writer = Writer(journal)
    failures = [writer.write(i, [Accept(entry(1000 + i))]) for i in range(1, 30)]
    assert writer.lost == 1
    writer.writer.close()
    kept = {one.entry.request_id for one in open_journal(path).load(1000.0)}
    told = {entry(1000 + i).request_id for i, why in enumerate(failures, 1) if not why}
    assert told and told <= kept  # whatever was confirmed after the break is there


def test_what_is_written_again_into_a_new_file_is_tried_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path / "j.sqlite")
    writer = Writer(journal)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "write", _raise(sqlite3.OperationalError("disk full")))
        assert writer.write(1, [Again(entry(1)), Accept(entry(2))]) == "disk full"
    assert writer.write(2, [Alive()]) == ""
    writer.writer.close()
    assert [one.entry for one in open_journal(tmp_path / "j.sqlite").load(1000.0)] == [entry(1)]


def test_a_broken_file_that_cannot_be_moved_aside_is_not_called_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path / "j.sqlite")
    writer = Writer(journal)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "write", _raise(sqlite3.DatabaseError("malformed")))
        patch.setattr(journal, "move_aside", _raise(OSError(5, "Input/output error")))
        assert writer.write(1, [Accept(entry(1))]) == "malformed: Input/output error"
    assert writer.lost == 0
    assert writer.write(2, [Accept(entry(2))]) == ""
    writer.writer.close()


def test_what_a_bug_raises_in_the_thread_is_raised_where_results_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path / "j.sqlite")
    writer = Writer(journal)
    monkeypatch.setattr(journal, "write", _raise(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        writer.write(1, [Accept(entry(1))])
    writer.writer.close()


def _raise(error: Exception) -> Callable[..., None]:
    def raises(*_: object) -> None:
        raise error

    return raises


CHILD = """
import sys, threading
sys.path[:0] = {paths!r}
from test_journal import Writer, entry, open_journal
from phalanx.services.gateway.entries import Accept
from pathlib import Path
journal = open_journal(Path(sys.argv[1]))
journal.load(1000.0)
writer = Writer(journal)
number = int(sys.argv[2])
while True:
    number += 1
    assert writer.write(number, [Accept(entry(number))]) == ""
    sys.stdout.write(f"{{number}}\\n")
    sys.stdout.flush()
"""


@pytest.mark.process
def test_what_was_confirmed_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    here = Path(__file__).parent
    script = CHILD.format(paths=[str(here), str(here.parents[1])])
    confirmed = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", script, str(path), str(confirmed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            confirmed = int(line)
            if confirmed % 40 == 0:
                child.send_signal(signal.SIGKILL)
                break
        rest = child.stdout.read().split()
        confirmed = int(rest[-1]) if rest else confirmed
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        journal = Journal(path, 10**12, LOG)
        kept = {one.entry.request_id: one.entry for one in journal.load(1000.0)}
        journal.close()
        for number in range(1, confirmed + 1):
            assert kept[entry(number).request_id] == entry(number)
        assert len(kept) <= confirmed + 1
        confirmed = len(kept)


@pytest.mark.process
def test_a_node_without_disk_refuses_new_requests_and_goes_on() -> None:
    with GatewayNode(step_s=0.02) as node, node.client() as client:
        running = client.generate([1], seed=1, max_tokens=100, ignore_eos=True, timeout=60)
        running.accepted()
        assert node.process is not None
        wal = node.run_dir / "journal.sqlite-wal"
        limit = (wal.stat().st_size, resource.RLIM_INFINITY)
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, limit)
        with pytest.raises(Refused, match="journal") as refused:
            client.generate([2], timeout=20).results()
        assert refused.value.code is Code.OVERLOADED and refused.value.retry_after_ms > 0
        (result,) = running.results()
        assert len(result.token_ids) == 100
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, unlimited)
        (after,) = client.generate([2], seed=1, max_tokens=3, timeout=20).results()
        assert after.token_ids
        wait_for(lambda: "cannot be written" in node.log(), "the log tells")
        assert os.path.exists(wal)


_ON_A_FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
import structlog
from phalanx.services.gateway.journal import Journal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))  # no write succeeds
journal = Journal(Path(sys.argv[1]), 60.0, structlog.get_logger())
print([one.entry.request_id for one in journal.load(time.time())])
"""


def test_on_a_full_disk_a_new_gateway_still_reads_what_was_accepted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = open_journal(path)
    journal.load(time.time())
    # It stays open, as after kill -9: the files beside the database are there.
    journal.write([Accept(entry(1)), Accept(entry(2))], time.time())
    command = [sys.executable, "-P", "-c", _ON_A_FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([entry(1).request_id, entry(2).request_id])
    assert not list(tmp_path.glob("*unreadable*"))
    journal.close()


@pytest.mark.parametrize("end", ["clean", "log", "empty log", "none"])
def test_a_new_gateway_reads_what_was_accepted_though_it_can_make_no_file(
    tmp_path: Path, end: str
) -> None:
    """After a clean end the files that SQLite keeps beside the database are gone, and cannot be made again."""
    path = tmp_path / "journal.sqlite"
    journal = open_journal(path)
    if end != "none":
        journal.write([Accept(entry(1)), Accept(entry(2))], time.time())
    if end == "log":  # as after a crash of the machine
        log = path.with_name(path.name + "-wal").read_bytes()
    journal.close()
    if end == "log":
        path.with_name(path.name + "-wal").write_bytes(log)
    if end == "empty log":
        path.with_name(path.name + "-wal").touch()
    command = [sys.executable, "-P", "-c", _ON_A_FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = [entry(1).request_id, entry(2).request_id] if end != "none" else []
    assert done.stdout.splitlines()[-1] == str(wanted)
    assert not list(tmp_path.glob("*unreadable*"))


@pytest.mark.process
def test_after_a_hand_over_on_a_full_disk_accepted_streams_go_on() -> None:
    with GatewayNode(step_s=0.02) as node, node.client() as client:
        running = client.generate([1], seed=1, max_tokens=100, ignore_eos=True, timeout=60)
        running.accepted()
        assert node.process is not None
        node.tell(HandOver(1000))
        assert node.process.wait(20) == 0
        assert not (node.run_dir / "journal.sqlite-wal").exists()
        node.start(file_bytes_max=16 << 10)  # the files beside the database take more
        with pytest.raises(Refused, match="journal") as refused:
            client.generate([2], timeout=20).results()
        assert refused.value.code is Code.OVERLOADED
        (result,) = running.results()
        assert len(result.token_ids) == 100
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, unlimited)
        wait_for(lambda: "the journal can be written again" in node.log(), "it is tried again")
        (after,) = client.generate([2], seed=1, max_tokens=3, timeout=20).results()
        assert after.token_ids


@pytest.mark.process
def test_a_journal_that_cannot_be_read_now_is_waited_for() -> None:
    with GatewayNode() as node, node.client() as client:
        client.generate([1], seed=1, max_tokens=3, timeout=20).results()
        node.kill()
        path = node.run_dir / JOURNAL_FILE
        path.rename(path.with_suffix(".away"))
        path.mkdir()  # to open it is an error of the disk

        def mend() -> None:
            wait_for(
                lambda: any("cannot read the journal" in text for text in node.phases), "it says so"
            )
            path.rmdir()
            path.with_suffix(".away").rename(path)

        thread = threading.Thread(target=mend)
        thread.start()
        node.start()
        thread.join()
        assert len(client.generate([1], seed=1, max_tokens=3, timeout=30).results()) == 1
