"""Structured logs: JSON lines to RUN_DIR/logs/NAME.log, readable lines to a terminal."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from phalanx.protocol.rundir import LOG_DIR

Logger = structlog.typing.FilteringBoundLogger


class LineFile:
    """A file of lines that never fails its writer: when none can be written, lines are lost, not the process.

    The first line that fits again is preceded by one that says how many are missing, and why. A file
    that was deleted is made anew, with its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._torn = False  # the file ends within a line
        self._lost = 0
        self._why = ""

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
        if self._fd is not None and os.fstat(self._fd).st_nlink:
            return self._fd
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd, self._torn = os.open(self._path, flags, 0o644), False
        return self._fd


class _Tee:
    """Writes each event as JSON to a file and, when there is a terminal, for people too."""

    def __init__(self, file: LineFile, terminal: TextIO | None) -> None:
        self._file, self._terminal = file, terminal
        self._json = structlog.processors.JSONRenderer()
        self._console = structlog.dev.ConsoleRenderer(colors=bool(terminal and terminal.isatty()))

    def __call__(self, logger: Any, method: str, event: structlog.typing.EventDict) -> str:
        line = self._json(logger, method, dict(event))
        self._file.write(line if isinstance(line, str) else line.decode())
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # it may be a file on the same full disk, or closed
                print(self._console(logger, method, dict(event)), file=self._terminal, flush=True)
        raise structlog.DropEvent


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
    file = LineFile(run_dir / LOG_DIR / f"{name}.log")
    structlog.configure(
        processors=[
            _add_epoch,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Tee(file, sys.stderr if terminal else None),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=True,
    )
    return cast(Logger, structlog.get_logger().bind(process=name, incarnation=incarnation))
