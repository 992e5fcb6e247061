"""Options and output that the commands share: one JSON document, or something for people."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

SECONDS_MAX = 10_000_000

console = Console()
errors = Console(stderr=True)


def run_dir_option(function: F) -> F:
    return click.option(
        "--run-dir",
        type=click.Path(path_type=Path, file_okay=False),
        default=None,
        help="Where the node lives (default: $PHALANX_RUN_DIR, $XDG_RUNTIME_DIR/phalanx, /tmp/phalanx-UID).",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")(
        function
    )


def check_seconds(
    context: click.Context, option: click.Parameter, value: float | None
) -> float | None:
    """Checks an option that is a time. Written so that nan fails."""
    if value is not None and not 0 <= value <= SECONDS_MAX:
        raise click.BadParameter(f"{value:g} s, allowed are 0 to {SECONDS_MAX}")
    return value


def print_json(document: Any) -> None:
    """One document on one line. Structs become objects; numbers JSON cannot say become null."""
    print(json.dumps(_plain(msgspec.to_builtins(document))), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def finish(code: int) -> None:
    """End the command with an exit code other than 0."""
    sys.stdout.flush()
    raise click.exceptions.Exit(code)
