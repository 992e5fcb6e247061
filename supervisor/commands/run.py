"""`phalanx run`: thousands of prompts from a file into a file, on a node of its own; it goes on where it was stopped."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from phalanx.protocol.errors import ConfigError
from phalanx.services.client import Client, Spec
from phalanx.supervisor.commands.common import (
    check_seconds,
    console,
    errors,
    finish,
    json_option,
    print_json,
)
from phalanx.supervisor.commands.generate import document, exit_code, open_client, refused
from phalanx.supervisor.commands.node import private_node
from phalanx.supervisor.commands.prompts import (
    BadLine,
    parse_line,
    read_lines,
    sampling_options,
)
from phalanx.supervisor.resumable import Results, digest


@click.command()
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    required=True,
    help="JSONL: a request a line, as for generate.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="JSONL: a line a finished sequence. What is there already is not done again.",
)
@click.option("--model", default="random-tiny", help="Of the node of its own: a name or DIR.")
@click.option("--ranks", default=1, help="Ranks of that node.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Use the node that runs there in place of one of its own.",
)
@click.option("--concurrency", type=click.IntRange(1, 5000), default=256, help="Requests at once.")
@click.option(
    "--timeout", type=float, callback=check_seconds, default=None, help="Seconds for each request."
)
@sampling_options
@json_option
def run(
    prompts: Path,
    out: Path,
    model: str,
    ranks: int,
    run_dir: Path | None,
    concurrency: int,
    timeout: float | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Run every request of a file and append each finished sequence to --out.

    \b
    After Ctrl-C or a crash the same command goes on with what is missing; requests that failed are
    tried again. Lines come in the order in which sequences end; `position` is that of the input.
    """
    defaults = {name: value for name, value in sampling.items() if value not in (None, ())}
    lines = read_lines(prompts)
    if not lines:
        raise ConfigError(f"{prompts} holds no request")
    started = time.monotonic()
    with Results(out, [digest(line) for line in lines]) as results:
        before = len(results.done)
        requests = [parse_line(line, defaults, stream=False) for line in lines]
        left = {p: r for p, r in enumerate(requests) if not _done(p, r, results)}
        worst, tokens = 0, 0
        try:
            with contextlib.ExitStack() as stack:
                if left:
                    client = stack.enter_context(_client(run_dir, model, ranks))
                    worst, tokens = _work(client, left, results, before, timeout, concurrency)
        except KeyboardInterrupt:
            errors.print(f"stopped; the same command goes on from {out}")
            raise
    summary = {
        "requests": len(lines),
        "sequences": len(results.done),
        "done_before": before,
        "failed": _failed(requests, results),
        "tokens": tokens,
        "seconds": round(time.monotonic() - started, 2),
        "out": str(out),
    }
    if as_json:
        print_json(summary)
    else:
        console.print(
            f"{summary['sequences']} sequences in {out}, {before} of them from before;"
            f" {summary['failed']} requests failed; {tokens} tokens in {summary['seconds']} s"
        )
    if worst:
        finish(worst)


@contextlib.contextmanager
def _client(run_dir: Path | None, model: str, ranks: int) -> Iterator[Client]:
    with contextlib.ExitStack() as stack:
        if run_dir is not None:
            yield stack.enter_context(open_client(run_dir.absolute()))
        else:
            config, _ = stack.enter_context(private_node(model, ranks, quiet=False))
            yield stack.enter_context(Client(config.run_path))


def _done(position: int, request: Spec | BadLine, results: Results) -> bool:
    """Whether every sequence of the request is there. One that lacks some is done again, whole."""
    if isinstance(request, BadLine):
        return False
    return all((position, index) in results.done for index in range(request.n))


def _failed(requests: list[Spec | BadLine], results: Results) -> int:
    return sum(not _done(p, request, results) for p, request in enumerate(requests))


def _work(
    client: Client,
    left: dict[int, Spec | BadLine],
    results: Results,
    before: int,
    timeout: float | None,
    concurrency: int,
) -> tuple[int, int]:
    """(worst exit code, tokens)."""
    worst, tokens = 0, 0
    columns = (
        TextColumn("sequences"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    positions = [p for p, request in left.items() if isinstance(request, Spec)]
    specs = [request for request in left.values() if isinstance(request, Spec)]
    expected = before + sum(spec.n for spec in specs)
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=expected, completed=before)
        for position, request in left.items():
            if isinstance(request, BadLine):
                result = refused(request.text)
                worst = max(worst, exit_code(result))
                results.add(_row(position, result))
        for number, result in client.generate_many(specs, timeout=timeout, concurrency=concurrency):
            position = positions[number]
            worst = max(worst, exit_code(result))
            tokens += len(result.token_ids)
            if (position, result.index) not in results.done:
                results.add(_row(position, result))
                if not result.error:
                    results.done.add((position, result.index))
            progress.advance(task)
    return worst, tokens


def _row(position: int, result: Any) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(document(position, result))
    return row
