"""The journal's tables: a row, its checksum, and what of a file can be read though some of it cannot."""

import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from phalanx.protocol.messages import Final
from phalanx.services.gateway.entries import (
    Accept,
    Again,
    Alive,
    Entry,
    Fell,
    Finish,
    Forget,
    Op,
    Produced,
    Recovered,
    Scored,
    Stamp,
)

VERSION = 5  # 1 had no table of tokens, 2 none of scores, 3 no checksums, 4 no falls
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests
    (id TEXT PRIMARY KEY, created REAL, touched REAL, n INTEGER, fingerprint TEXT, entry BLOB, sum INTEGER)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS finals
    (id TEXT, i INTEGER, at REAL, final BLOB, sum INTEGER, PRIMARY KEY (id, i)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens
    (id TEXT, i INTEGER, offset INTEGER, ids BLOB, logprobs BLOB, sum INTEGER, PRIMARY KEY (id, i, offset))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS scores
    (id TEXT, first INTEGER, records BLOB, sum INTEGER, PRIMARY KEY (id, first)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS falls
    (id TEXT, i INTEGER, falls INTEGER, tokens INTEGER, sum INTEGER, PRIMARY KEY (id, i)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unreadable (at REAL, source TEXT, id BLOB, why TEXT, data BLOB);
"""
_KEYS = {
    "requests": (),
    "finals": ("i",),
    "tokens": ("i", "offset"),
    "scores": ("first",),
    "falls": ("i",),
}
_DATA = {
    "requests": "entry",
    "finals": "final",
    "tokens": "ids",
    "scores": "records",
    "falls": "falls",
}
_UNFINISHED = "n > (SELECT count(*) FROM finals WHERE finals.id = requests.id)"
_UNREADABLE = (
    msgspec.DecodeError,
    TypeError,  # a column that is empty, though nobody wrote it so
    ValueError,  # the checksum, or bytes that are no text
)

T = TypeVar("T")
Value = str | int | float | bytes | None


def row_sum(*values: Value) -> int:
    """Of all that is in a row and does not change."""
    return zlib.crc32(msgspec.msgpack.encode(values))


@dataclass(frozen=True)
class Unreadable:
    """A row that nothing can be made of."""

    table: str
    id: bytes
    keys: tuple[Value, ...]  # beside the id
    why: str


@dataclass
class Found:
    """What a file holds."""

    requests: list[Recovered] = field(default_factory=list[Recovered])  # oldest first
    unreadable: list[Unreadable] = field(default_factory=list[Unreadable])
    old: int = 0  # of the requests, those that were not touched for the time to live


def prepare(db: sqlite3.Connection) -> None:
    """Bring a database that may be empty or of an earlier version up to date."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in range(VERSION):
        check_version(db)  # and nothing is written: a full disk must not hide what the file holds
        return
    with db:
        db.executescript(_SCHEMA)
        for table in _KEYS:
            if "sum" not in _columns(db, table):
                db.execute(f"ALTER TABLE {table} ADD COLUMN sum INTEGER")
        db.execute(f"PRAGMA user_version={VERSION}")


def check_version(db: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError when `read` cannot read it as it is."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        raise sqlite3.DatabaseError(f"its version is {version}, this gateway writes {VERSION}")


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


# ------------------------------------------------------------ writing


def apply(db: sqlite3.Connection, op: Op, now_s: float) -> None:
    match op:
        case Accept(entry) | Again(entry):
            rid, encoded = entry.request_id, msgspec.msgpack.encode(entry)
            begun = (rid, now_s, now_s, entry.n, entry.fingerprint, encoded)
            _put(db, "requests", *begun, row_sum(rid, entry.fingerprint, encoded))
        case Produced():
            row = (op.request_id, op.index, op.offset, op.token_ids, op.logprobs)
            _put(db, "tokens", *row, row_sum(*row))
        case Scored():
            scores = (op.request_id, op.first, op.records)
            _put(db, "scores", *scores, row_sum(*scores))
        case Finish(final):
            rid, encoded = final.request_id, msgspec.msgpack.encode(final)
            _put(db, "finals", rid, final.index, now_s, encoded, row_sum(rid, final.index, encoded))
            db.execute("UPDATE requests SET touched = ? WHERE id = ?", (now_s, rid))
        case Fell():
            fell = (op.request_id, op.index, op.falls, op.tokens)
            _put(db, "falls", *fell, row_sum(*fell))
        case Forget(request_id):
            for table in _KEYS:
                db.execute(f"DELETE FROM {table} WHERE id = ?", (request_id,))
        case Stamp(fingerprint):
            for rid, encoded in _unstamped(db):
                stamped = (fingerprint, row_sum(rid, fingerprint, encoded), rid)
                db.execute("UPDATE requests SET fingerprint = ?, sum = ? WHERE id = ?", stamped)
        case Alive():
            db.execute(f"UPDATE requests SET touched = ? WHERE {_UNFINISHED}", (now_s,))


def _unstamped(db: sqlite3.Connection) -> list[tuple[str, bytes]]:
    return list(db.execute("SELECT id, entry FROM requests WHERE fingerprint = ''"))


def _put(db: sqlite3.Connection, table: str, *row: Value) -> None:
    places = ", ".join("?" * len(row))
    db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", row)


def drop_old(db: sqlite3.Connection, before_s: float) -> None:
    """Delete what has ended and was not touched since then; of what has not, a clock alone says nothing."""
    with db:
        db.execute(f"DELETE FROM requests WHERE touched < ? AND NOT {_UNFINISHED}", (before_s,))
        for table in _KEYS.keys() - {"requests"}:
            db.execute(f"DELETE FROM {table} WHERE id NOT IN (SELECT id FROM requests)")


# ------------------------------------------------------------ reading


def read(db: sqlite3.Connection, old_s: float) -> Found:
    """All that can be read. Requests untouched since `old_s` are left out if they have ended."""
    # One letter that broke is the fault of its row, not of the whole file.
    db.text_factory = lambda text: text.decode(errors="surrogateescape")
    found = Found()
    ends: dict[str, dict[int, Final]] = {}
    for rid, index, final in _each(db, "finals", "i, final", _final, found):
        ends.setdefault(rid, {})[index] = final
    log: dict[str, list[Produced]] = {}
    for piece in _each(db, "tokens", "i, offset, ids, logprobs", _checked(Produced), found):
        log.setdefault(piece.request_id, []).append(piece)
    scores: dict[str, list[Scored]] = {}
    for score in _each(db, "scores", "first, records", _checked(Scored), found):
        scores.setdefault(score.request_id, []).append(score)
    falls: dict[str, list[Fell]] = {}
    for fell in _each(db, "falls", "i, falls, tokens", _checked(Fell), found):
        falls.setdefault(fell.request_id, []).append(fell)
    columns = "fingerprint, entry, touched"
    for entry, touched in _each(db, "requests", columns, _entry, found, "created, id"):
        rid, finals = entry.request_id, ends.get(entry.request_id, {})
        is_old = touched < old_s
        if is_old and len(finals) >= entry.n:
            continue
        found.old += is_old
        pieces = tuple(_without_gaps(log.get(rid, ()), found))
        rest = tuple(scores.get(rid, ())), tuple(falls.get(rid, ()))
        found.requests.append(Recovered(entry, finals, pieces, *rest))
    return found


def _without_gaps(pieces: Sequence[Produced], found: Found) -> Iterator[Produced]:
    """What follows a piece that cannot be read is no part of a stream any more."""
    ends: dict[int, int] = {}
    for piece in pieces:
        end = ends.get(piece.index, 0)
        if piece.offset > end:
            keys, why = (piece.index, piece.offset), "the tokens before it cannot be read"
            found.unreadable.append(Unreadable("tokens", piece.request_id.encode(), keys, why))
        else:
            ends[piece.index] = max(end, piece.offset + len(piece.token_ids) // 4)
            yield piece


def _each(
    db: sqlite3.Connection,
    table: str,
    columns: str,
    decode: Callable[[Sequence[Value], int | None], T],
    found: Found,
    order: str = "",
) -> Iterator[T]:
    keys = _KEYS[table]
    order = order or ", ".join(("id", *keys))
    query = f"SELECT sum, CAST(id AS BLOB), {columns} FROM {table} ORDER BY {order}"
    for told, rid, *rest in db.execute(query):
        try:
            yield decode((_bytes(rid).decode(), *rest), told)
        except _UNREADABLE as error:
            bad = Unreadable(table, bytes(rid or b""), tuple(rest[: len(keys)]), str(error))
            found.unreadable.append(bad)


def _check(told: int | None, *values: Value) -> None:
    """None: written before there were checksums."""
    if told is not None and told != row_sum(*values):
        raise ValueError("its checksum is wrong")


def _final(row: Sequence[Value], told: int | None) -> tuple[str, int, Final]:
    rid, index, encoded = row
    _check(told, rid, index, encoded)
    final = msgspec.msgpack.decode(_bytes(encoded), type=Final)
    return final.request_id, final.index, final


def _checked(kind: Callable[..., T]) -> Callable[[Sequence[Value], int | None], T]:
    def decode(row: Sequence[Value], told: int | None) -> T:
        _check(told, *row)
        return kind(*row)

    return decode


def _entry(row: Sequence[Value], told: int | None) -> tuple[Entry, float]:
    rid, fingerprint, encoded, touched = row
    _check(told, rid, fingerprint, encoded)
    entry = msgspec.msgpack.decode(_bytes(encoded), type=Entry)
    if entry.request_id != rid or not isinstance(fingerprint, str):
        raise ValueError("it is not of this id")
    moment = touched if isinstance(touched, int | float) else 0.0
    return msgspec.structs.replace(entry, fingerprint=fingerprint), moment


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"it is {type(value).__name__}, not bytes")
    return value


def set_aside(db: sqlite3.Connection, rows: Sequence[Unreadable], now_s: float) -> None:
    """Into the table `unreadable`, for people."""
    with db:
        for row in rows:
            where = "".join(f" AND {key} IS ?" for key in _KEYS[row.table])
            where = f"FROM {row.table} WHERE CAST(id AS BLOB) = ?{where}"
            told = (now_s, row.table, row.id, row.why)
            data = f"SELECT ?, ?, ?, ?, {_DATA[row.table]} {where}"
            db.execute(f"INSERT INTO unreadable {data}", (*told, row.id, *row.keys))
            db.execute(f"DELETE {where}", (row.id, *row.keys))
