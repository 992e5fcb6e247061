"""The journal: accepted requests and their ends, in SQLite, synced before a client is told.

Written by one thread of its own, because a sync may take as long as the disk likes and the gateway
answers health questions meanwhile. Each commit takes all that has gathered during the last one.
"""

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.protocol import faults
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import TOLD_MS
from phalanx.protocol.log import Logger
from phalanx.services.gateway import journal_rows as rows
from phalanx.services.gateway.entries import Accept, Forget, Op, Recovered, Stamp

_KEPT_ON_FAILURE = 100_000  # changes that wait for a disk that takes nothing
_NEVER_WRITTEN_AGAIN = Accept | Forget | Stamp  # all else is, once something was lost
_ROOM_BYTES = 1 << 20  # must be free for a journal that failed to count as well again


class NotNow(Exception):
    """What was accepted is perhaps there, and cannot be read now. Try again."""


class Journal:
    """The file. Not thread-safe: it belongs to whoever opened it."""

    def __init__(self, path: Path, ttl_s: float, log: Logger) -> None:
        self.path, self._ttl_s, self._log = path, ttl_s, log
        self._db: sqlite3.Connection | None = None
        self._opened = (0, 0)  # device and inode of what is open
        self.failure = ""  # why it could not be opened for writing when it was loaded

    def load(self, now_s: float) -> list[Recovered]:
        """What the last gateway left, oldest first; what has ended and outlived its time is deleted.

        A row that cannot be read is set aside, and so is a whole file, with a line in the log: no reason not to
        start. Nor is a disk that takes nothing; `failure` says so then. Raises NotNow when nothing can be read.
        """
        try:
            try:
                return self._load(now_s)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_ERROR:
                    raise  # it has not our tables
                self.failure = str(error)
            return self._load_from_full_disk(now_s)
        except sqlite3.DatabaseError as error:
            if self.failure:  # the file is perhaps sound
                raise NotNow(f"{self.failure}; {error}") from error
            self.move_aside(str(error))
        except OSError as error:
            if self.path.exists():
                raise NotNow(str(error)) from error
            self.failure = str(error)  # it could not be made, so there is nothing to read
        return []

    def _load(self, now_s: float) -> list[Recovered]:
        db = self._open()
        old_s = now_s - self._ttl_s
        found = self._read(db, old_s)
        try:
            rows.set_aside(db, found.unreadable, now_s)
            rows.drop_old(db, old_s)
        except sqlite3.OperationalError as error:  # a full disk: what is there was read
            self._log.error("the journal cannot be tidied", error=str(error))
        return found.requests

    def _load_from_full_disk(self, now_s: float) -> list[Recovered]:
        """SQLite wants to make two files beside the database. After a clean end there is nothing in them."""
        log = self._part("-wal")
        closed = not log.exists() or log.stat().st_size == 0
        if closed and self.path.stat().st_size == 0:
            return []  # it was never written
        mode = "mode=ro&immutable=1" if closed else "mode=rw"
        with contextlib.closing(sqlite3.connect(f"{self.path.as_uri()}?{mode}", uri=True)) as db:
            if not closed:
                db.execute("PRAGMA locking_mode=EXCLUSIVE")  # its index is in memory then
            rows.check_version(db)
            return self._read(db, now_s - self._ttl_s).requests

    def _read(self, db: sqlite3.Connection, old_s: float) -> rows.Found:
        found = rows.read(db, old_s)
        for bad in found.unreadable:
            told = {"table": bad.table, "request_id": bad.id.decode(errors="replace")}
            self._log.error("a row of the journal cannot be read", **told, why=bad.why)
        if found.old:
            text = (
                "not touched for longer than the time to live, but not ended: taken up all the same"
            )
            self._log.warning(text, requests=found.old)
        return found

    def write(self, ops: Sequence[Op], now_s: float) -> None:
        """All of them or none, synced on return. Raises sqlite3.Error."""
        faults.check_disk("journal")
        db = self._open()
        with db:
            for op in ops:
                rows.apply(db, op, now_s)
            failpoint("gateway.journal.before_commit")
        failpoint("gateway.journal.after_sync")

    def probe(self) -> None:
        """Find out whether something could be written. Raises sqlite3.Error or OSError.

        The file may have room of its own for a small change while its disk has none for a request.
        """
        faults.check_disk("journal")
        room = self.path.with_name(f"{self.path.name}.room")
        fd = os.open(room, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _ROOM_BYTES)
        finally:
            os.close(fd)
            room.unlink(missing_ok=True)
        self._open().execute(f"PRAGMA user_version={rows.VERSION}")

    def deleted(self) -> bool:
        """Whether somebody has deleted or replaced what is open, or its log: the next gateway would not find
        what is written there. May be asked from another thread."""
        return self._db is not None and not (self._in_place() and self._part("-wal").exists())

    def _in_place(self) -> bool:
        """Whether the file at the path is the one that is open."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._opened

    def leave(self) -> None:
        """Close what was deleted; the next write begins with what lies there, or an empty file."""
        in_place = self._in_place()
        with contextlib.suppress(sqlite3.Error):
            self.close()  # if only the log is gone, all of it goes into the file now
        self._db = None
        if not in_place:  # the log belongs to the file that is gone, not to what lies there
            for suffix in ("-wal", "-shm"):
                self._part(suffix).unlink(missing_ok=True)
        self._log.error("the journal was deleted: it is written anew", path=str(self.path))

    def _part(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def move_aside(self, why: str) -> None:
        """Keep the unreadable file for people, and start an empty one."""
        self.close()
        aside = self.path.with_name(f"{self.path.name}.unreadable-{time.time_ns()}")
        for suffix in ("", "-wal", "-shm"):
            part = self._part(suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        self._log.error(
            "the journal cannot be read: requests open in the last gateway are lost to this one;"
            " the file was moved aside",
            why=why,
            moved_to=str(aside),
        )

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            # Created here so that it is never, not even briefly, readable by others.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            os.chmod(self.path, 0o600)
            db = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                rows.prepare(db)
            except sqlite3.Error:
                db.close()
                raise
            stat = self.path.stat()
            self._opened = stat.st_dev, stat.st_ino
            self._db = db
        return self._db


@dataclass(frozen=True)
class Written:
    """What became of everything up to operation `number`."""

    number: int
    failure: str = ""  # why it is not on disk
    told: str = ""  # the same for people
    # Not all that was written before is there: another file has taken the journal's place, or the disk took nothing
    # for so long that not everything could be kept. Told before what became of the operations since.
    lost: bool = False


class JournalWriter:
    """The thread. `submit` returns at once; `wake` is called in the thread when results are there."""

    def __init__(self, journal: Journal, wake: Callable[[], None]) -> None:
        self._journal, self._wake = journal, wake
        self._batches: queue.SimpleQueue[tuple[int, list[Op]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Written | Exception] = queue.SimpleQueue()
        self._since_ns = 0  # a write is under way; 0: none is
        self._late: list[Op] = []  # what failed; tried again with the next batch
        self._dropped = False  # not all of it could be kept
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def submit(self, number: int, ops: list[Op]) -> None:
        """With no operations: only find out whether it can be written (with what is late, if there is any)."""
        self._batches.put((number, ops))

    def late(self, now_ns: int) -> str:
        """For people: what is being written does not come back; empty: it does."""
        since_ns = self._since_ns
        late_ms = (now_ns - since_ns) / 1e6 if since_ns else 0.0
        if late_ms < TOLD_MS:
            return ""
        return (
            f"the journal {self._journal.path} is being written since {late_ms / 1000:.0f} s, and its disk does not"
            " answer: new requests wait for it, those that run go on"
        )

    def results(self) -> list[Written]:
        """Of each commit since the last call. Raises what a bug raised in the thread, which has ended."""
        done = []
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, Exception):
                raise result
            done.append(result)
        return done

    def close(self) -> None:
        """Write what was submitted, then end."""
        self._batches.put(None)
        self._thread.join()
        self._journal.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - `results` raises it: the gateway ends, not only its thread
            self._results.put(error)
            self._wake()

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            number, ops = batch
            last = False
            while not self._batches.empty():
                more = self._batches.get()
                if more is None:
                    last = True
                    break
                number = max(number, more[0])
                ops = ops + more[1]
            self._since_ns = time.monotonic_ns()
            written = self._write(number, ops)
            if written.lost:  # it is known before anything is told that rests on what is lost
                self._results.put(replace(written, number=0))
            self._results.put(replace(written, lost=False))
            self._since_ns = 0
            self._wake()
            if last:
                break

    def _write(self, number: int, ops: list[Op]) -> Written:
        ops = self._late + ops
        if self._dropped:
            ops = [op for op in ops if isinstance(op, _NEVER_WRITTEN_AGAIN)]
        failure, lost = "", self._journal.deleted()
        try:
            if lost:
                self._journal.leave()
            try:
                if ops:
                    self._journal.write(ops, time.time())
                else:
                    self._journal.probe()
            except sqlite3.OperationalError as error:  # disk full, a lock: the file itself is sound
                failure = str(error)
            except sqlite3.DatabaseError as error:
                failure = str(error)
                self._journal.move_aside(failure)
                lost = True
        except OSError as error:
            failure = f"{failure}: {error.strerror}" if failure else str(error.strerror)
        if self._dropped and not failure:
            self._dropped, lost = False, True
        late: list[Op] = [op for op in ops if failure and not isinstance(op, Accept)]
        if len(late) > _KEPT_ON_FAILURE:
            self._dropped = True
            late = [op for op in late if isinstance(op, _NEVER_WRITTEN_AGAIN)]
        self._late = late[-_KEPT_ON_FAILURE:]
        told = told_failure(self._journal.path, failure) if failure else ""
        return Written(number, failure, told, lost)


def told_failure(path: Path, failure: str) -> str:
    """For people: what a journal that cannot be written means, and what to do."""
    try:
        disk = os.statvfs(path.parent)
        free = f"{disk.f_bavail * disk.f_frsize} bytes are free there"
    except OSError as error:
        free = f"its disk does not answer: {error.strerror}"
    full = any(word in failure.lower() for word in ("full", "space", "quota"))
    advice = "make room on that disk" if full else "see why that disk takes nothing"
    return (
        f"the journal {path} cannot be written ({failure}; {free}): new requests are refused until it can,"
        f" those that run go on; {advice}"
    )
