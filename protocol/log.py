"""Structured logs: JSON lines to RUN_DIR/logs/NAME.log, readable lines to a terminal."""

import logging
import sys
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from phalanx.protocol.rundir import LOG_DIR

Logger = structlog.typing.FilteringBoundLogger


class _Tee:
    """Writes each event as JSON to a file and, when there is a terminal, for people too."""

    def __init__(self, file: TextIO, terminal: TextIO | None) -> None:
        self._file, self._terminal = file, terminal
        self._json = structlog.processors.JSONRenderer()
        self._console = structlog.dev.ConsoleRenderer(colors=bool(terminal and terminal.isatty()))

    def __call__(self, logger: Any, method: str, event: structlog.typing.EventDict) -> str:
        line = self._json(logger, method, dict(event))
        self._file.write(f"{line}\n" if isinstance(line, str) else line.decode() + "\n")
        if self._terminal is not None:
            print(self._console(logger, method, dict(event)), file=self._terminal, flush=True)
        raise structlog.DropEvent


def setup_logging(
    run_dir: Path, name: str, incarnation: int, level: str, terminal: bool = False
) -> Logger:
    """Configure this process's log. Fields `process` and `incarnation` are on every line."""
    file = (run_dir / LOG_DIR / f"{name}.log").open("a", buffering=1)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Tee(file, sys.stderr if terminal else None),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=True,
    )
    return cast(Logger, structlog.get_logger().bind(process=name, incarnation=incarnation))
