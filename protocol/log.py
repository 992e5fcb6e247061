"""Structured logs: JSON lines to RUN_DIR/logs/NAME.log, readable lines to a terminal.

A thread writes them: a disk that hangs keeps nobody but that. What it cannot take is lost, and counted. Lines
that say what went wrong are waited for, but not for long: their process may be about to end.
"""

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from phalanx.protocol.rundir import LOG_DIR

LINES_MAX = 4096  # on their way to the file
LOG_END_S = 1.0  # that a process which ends waits for its last lines
_LINE_S = 0.1  # that a line about something wrong is waited for
Logger = structlog.typing.FilteringBoundLogger


class LineFile:
    """A file of lines that never fails its writer: when none can be written, lines are lost, not the process.

    The first line that fits again is preceded by one that says how many are missing, and why. A file
    that was deleted is made anew, with its folder.

    Args:
        bytes_max: a file that has grown to this goes on as another one; the one before it stays beside it, under the
            name of `older`. 0: it grows without end.
    """

    def __init__(self, path: Path, bytes_max: int = 0) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._fd: int | None = None
        self._torn = False  # the file ends within a line
        self._lost = 0
        self._why = ""

    def lose(self, lines: int, why: str) -> None:
        """So many were not even tried."""
        if lines:
            self._lost, self._why = self._lost + lines, why

    def write(self, line: str) -> None:
        if self._lost:
            note = {"event": "log lines lost", "lines": self._lost, "why": self._why}
            if not self._put(json.dumps(note)):
                self._lost += 1
                return
            self._lost = 0
        if not self._put(line):
            self._lost = 1

    def _put(self, line: str) -> bool:
        data = f"{line}\n".encode(errors="backslashreplace")
        try:
            fd = self._open()
            if self._torn:
                data = b"\n" + data
            # Unbuffered: a line that does not fit is gone, and not in the way of the next one.
            written = os.write(fd, data)
        except OSError as error:
            self._why = error.strerror or str(error)
            return False
        self._torn = written < len(data)
        if self._torn:
            self._why = f"{written} of {len(data)} bytes were taken"
        return not self._torn

    def _open(self) -> int:
        """Raises OSError."""
        if self._fd is not None:
            now = os.fstat(self._fd)
            full = 0 < self._bytes_max <= now.st_size
            if now.st_nlink and not full:
                return self._fd
            os.close(self._fd)
            self._fd = None
            if now.st_nlink:
                self._path.replace(older(self._path))
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o644)
        self._torn = _ends_within_a_line(self._path)
        return self._fd


def _ends_within_a_line(path: Path) -> bool:
    """Whoever wrote there before may have died. Raises OSError."""
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def older(path: Path) -> Path:
    """Where the lines before those of a bounded file lie."""
    return path.with_name(f"{path.name}.1")


class LineWriter:
    """Lines on their way to a file. The thread begins with the first of them: a fork has none, nor lines."""

    def __init__(self, file: LineFile) -> None:
        self._file = file
        self.forget()

    def forget(self) -> None:
        self._change = threading.Condition()
        self._lines: deque[str] = deque()
        self._lost = 0
        self._thread: threading.Thread | None = None
        self._writing = False
        self._hangs = False  # somebody waited in vain, and no line was written since

    def put(self, line: str, *, wait: bool = False) -> None:
        """With `wait` it is in the file when this returns, or the file cannot be written now."""
        with self._change:
            if len(self._lines) >= LINES_MAX:
                self._lost += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="log", daemon=True)
                self._thread.start()
            self._change.notify_all()
            if wait and not self._hangs:
                self._wait(_LINE_S)

    def flush(self, limit_s: float) -> None:
        """Wait for all lines so far, but not for ever."""
        with self._change:
            self._wait(limit_s)

    def _wait(self, limit_s: float) -> None:
        written = self._change.wait_for(lambda: not (self._lines or self._writing), limit_s)
        self._hangs = not written

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._lines)
                line, lost = self._lines.popleft(), self._lost
                self._writing, self._lost = True, 0
            self._file.lose(lost, "the file could not be written in time")
            self._file.write(line)
            with self._change:
                self._writing = self._hangs = False
                self._change.notify_all()


class _Tee:
    """Writes each event as JSON to a file and, when there is a terminal, for people too."""

    def __init__(self, writer: LineWriter, terminal: TextIO | None) -> None:
        self._writer, self._terminal = writer, terminal
        self._json = structlog.processors.JSONRenderer()
        self._console = structlog.dev.ConsoleRenderer(colors=bool(terminal and terminal.isatty()))

    def __call__(self, logger: Any, method: str, event: structlog.typing.EventDict) -> str:
        line = self._json(logger, method, dict(event))
        urgent = method in ("error", "critical", "exception")
        self._writer.put(line if isinstance(line, str) else line.decode(), wait=urgent)
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # it may be a file on the same full disk, or closed
                print(self._console(logger, method, dict(event)), file=self._terminal, flush=True)
        raise structlog.DropEvent


def flush_log(limit_s: float) -> None:
    """Wait until this process's lines are written, but not for ever."""
    if _writer is not None:
        _writer.flush(limit_s)


def _begin_anew() -> None:
    if _writer is not None:
        _writer.forget()


os.register_at_fork(after_in_child=_begin_anew)
_writer: LineWriter | None = None
_epoch: Callable[[], int] | None = None


def follow_epoch(epoch: Callable[[], int] | None) -> None:
    """From now on each line says what the group's epoch was when it was written; None: no longer."""
    global _epoch
    _epoch = epoch


def _add_epoch(
    logger: Any, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Lines about an epoch say themselves which."""
    if _epoch is not None:
        event.setdefault("epoch", _epoch())
    return event


def setup_logging(
    run_dir: Path, name: str, incarnation: int, level: str, terminal: bool = False
) -> Logger:
    """Configure this process's log. Fields `process` and `incarnation` are on every line."""
    global _writer
    flush_log(LOG_END_S)
    if _writer is None:
        atexit.register(flush_log, LOG_END_S)
    _writer = writer = LineWriter(LineFile(run_dir / LOG_DIR / f"{name}.log"))
    structlog.configure(
        processors=[
            _add_epoch,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Tee(writer, sys.stderr if terminal else None),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=True,
    )
    return cast(Logger, structlog.get_logger().bind(process=name, incarnation=incarnation))
