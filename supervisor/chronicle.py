"""Where the history is kept: in memory for who asks, and in a file of the run directory for the next start.

A line a word about an entry, the last one about an id counts. Lines are written beside the loop (`protocol/log.py`):
what a full or hung disk does not take is missing in the file, nothing else. The file is bounded: when it is full
another one begins, and the one before it stays. It is not synced: it survives processes, not the loss of power.
"""

import os
import time
from pathlib import Path

import msgspec
from msgspec import structs

from phalanx.protocol.background import within
from phalanx.protocol.log import LineFile, LineWriter, Logger, older
from phalanx.protocol.messages import HistoryEntry
from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor.events import Began, Record
from phalanx.supervisor.history import CUT_OFF, UNDER_WAY, how_it_ended

HISTORY_FILE = "history.jsonl"
VERSION = 1  # of the lines; those of another one are not read
BYTES_MAX = 1 << 20  # of each of the two files
ENTRIES_MAX = 1000  # that are kept in memory, and told
_READ_S = 1.0  # at the start: the disk may hang
_END_S = 1.0  # for the last lines, when the node ends


class _Version(msgspec.Struct):
    v: int


class Chronicle:
    """The entries of this start and of those before it, oldest first."""

    def __init__(self, run_dir: Path, log: Logger) -> None:
        look, nothing = lambda: read(run_dir), (list[HistoryEntry](), -1)
        past, unread = within(_READ_S, look, nothing)
        if unread < 0:
            log.warning("the history cannot be read in time", seconds=_READ_S)
        elif unread:
            log.warning("lines of the history cannot be read", lines=unread)
        self.before = how_it_ended(past)
        # Of a history that cannot be read a number that no start in it can have.
        last = int(time.time()) if unread < 0 else max((entry.run for entry in past), default=0)
        self.run = last + 1
        self._entries = {(entry.run, entry.id): entry for entry in cut_off(past, self.run)}
        self._writer = LineWriter(LineFile(history_file(run_dir), BYTES_MAX))

    def began(self, silent_ms: float) -> Began:
        """For the core: how the last start ended. `silent_ms`: since its last sign of life; negative: unknown."""
        return Began(self.before, max(silent_ms, 0.0))

    def add(self, record: Record) -> None:
        """Note an entry, or what has become of one."""
        age_s = (time.monotonic_ns() - record.noticed_ns) / 1e9
        entry = structs.replace(record.entry, run=self.run, at=round(time.time() - age_s, 3))
        self._entries[entry.run, entry.id] = entry
        if len(self._entries) > ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        self._writer.put(to_line(entry))

    @property
    def entries(self) -> tuple[HistoryEntry, ...]:
        return tuple(self._entries.values())

    def close(self) -> None:
        self._writer.flush(_END_S)


def to_line(entry: HistoryEntry) -> str:
    return f'{{"v":{VERSION},{msgspec.json.encode(entry).decode()[1:]}'


def read(run_dir: Path) -> tuple[list[HistoryEntry], int]:
    """The entries in the files, oldest first, as many as are kept; and how many lines could not be read. The last one
    is not counted: it may be torn."""
    entries: dict[tuple[int, int], HistoryEntry] = {}
    unread = 0
    path = history_file(run_dir)
    for file in (older(path), path):
        lines = _tail(file).split(b"\n")
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is not None:
                entries[entry.run, entry.id] = entry
            elif line and number < len(lines):
                unread += 1
    return list(entries.values())[-ENTRIES_MAX:], unread


def cut_off(entries: list[HistoryEntry], run: int) -> list[HistoryEntry]:
    """What was under way when an earlier start than this one ended will never be told."""
    return [
        structs.replace(entry, outcome=CUT_OFF)
        if entry.run < run and entry.outcome == UNDER_WAY
        else entry
        for entry in entries
    ]


def history_file(run_dir: Path) -> Path:
    return run_dir / LOG_DIR / HISTORY_FILE


def _entry(line: bytes) -> HistoryEntry | None:
    try:
        if msgspec.json.decode(line, type=_Version).v != VERSION:
            return None
        return msgspec.json.decode(line, type=HistoryEntry)
    except msgspec.DecodeError:
        return None


def _tail(path: Path) -> bytes:
    """Of a file that somebody else made longer, its last part."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 2 * BYTES_MAX))
            return file.read()
    except OSError:
        return b""
