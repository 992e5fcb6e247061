"""`phalanx generate`: prompts in, text out; streamed for people, a line a sequence for programs."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

from phalanx.protocol.errors import Code, ConfigError, ExitCode, PhalanxError, Refused
from phalanx.protocol.limits import HAND_OVER_MS, RESTART_DELAY_MS_MAX, TERM_GRACE_MS
from phalanx.protocol.messages import Delta, Usage
from phalanx.protocol.rundir import CLIENT_SOCKET, is_running
from phalanx.services.client import Client, GatewaySilent, RequestTimeout, Result, Spec, Stream
from phalanx.supervisor.ask import NoNode, find_run_dir
from phalanx.supervisor.commands.common import (
    check_seconds,
    console,
    errors,
    finish,
    json_option,
    print_json,
    run_dir_option,
)
from phalanx.supervisor.commands.node import private_node
from phalanx.supervisor.commands.prompts import BadLine, parse_file, parse_texts, sampling_options

# A gateway that is replaced hands over and starts, or comes back after many deaths (`protocol/limits.py`).
GATEWAY_S = (HAND_OVER_MS + TERM_GRACE_MS + RESTART_DELAY_MS_MAX) / 1000 + 7.0
_POLL_S = 0.02
_BAD_INPUT = (Code.BAD_REQUEST, Code.TOO_LARGE, Code.UNKNOWN_MODEL)


@click.command()
@click.argument("texts", nargs=-1)
@click.option(
    "--prompts", type=click.Path(path_type=Path, dir_okay=False), help="JSONL: a request a line."
)
@click.option(
    "--model", default=None, help="Start a node for this model (a name or DIR) and stop it again."
)
@click.option("--ranks", default=1, help="Ranks of that node.")
@sampling_options
@click.option("--no-stream", is_flag=True, help="Fetch each sequence whole.")
@click.option(
    "--timeout", type=float, callback=check_seconds, default=None, help="Seconds for each request."
)
@run_dir_option
@json_option
def generate(
    texts: tuple[str, ...],
    prompts: Path | None,
    model: str | None,
    ranks: int,
    no_stream: bool,
    timeout: float | None,
    run_dir: Path | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate from TEXT... or from a file of requests.

    \b
    A line of the file is {"prompt": str}, {"prompt_token_ids": [int]} or {"messages": [...]},
    with any sampling field beside it. Options are defaults for lines that do not say.
    """
    if sampling["prompt_logprobs"] is not None and not as_json:
        raise click.UsageError("--prompt-logprobs is told in JSON only: add --json")
    if bool(texts) == (prompts is not None):
        raise click.UsageError("give prompts on the command line or --prompts FILE, one of the two")
    defaults = {name: value for name, value in sampling.items() if value not in (None, ())}
    stream = not no_stream
    if prompts is not None:
        requests = parse_file(prompts, defaults, stream)
    else:
        requests = parse_texts(texts, defaults, stream)
    if not requests:
        raise ConfigError(f"{prompts} holds no request")
    with contextlib.ExitStack() as stack:
        if model is None:
            client = stack.enter_context(open_client(find_run_dir(run_dir)))
        else:
            config, _ = stack.enter_context(private_node(model, ranks, quiet=as_json))
            client = stack.enter_context(Client(config.run_path))
        if as_json or prompts is not None or no_stream:
            worst = _run_batch(client, requests, timeout, as_json)
        else:
            worst = run_live(client, requests, timeout)
    if worst:
        finish(worst)


def open_client(run_dir: Path, wait_s: float = GATEWAY_S) -> Client:
    """A client of the node there, once it has a gateway. Raises NoNode, or PhalanxError when there is no
    gateway for so long."""
    deadline = time.monotonic() + wait_s
    while is_running(run_dir):
        if (run_dir / CLIENT_SOCKET).exists():
            return Client(run_dir)
        if time.monotonic() >= deadline:
            raise PhalanxError(
                f"the node in {run_dir} has had no {CLIENT_SOCKET} for {wait_s:g} s: its gateway is not"
                " there yet, or does not start; `phalanx status` says why"
            )
        time.sleep(_POLL_S)
    raise NoNode(run_dir)


def document(position: int, result: Result) -> dict[str, Any]:
    """One finished sequence for programs, as docs/cli.md says."""
    row: dict[str, Any] = {
        "request_id": result.request_id,
        "position": position,
        "index": result.index,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": result.usage,
        "seed": result.seed,
        "ttft_ms": None if result.ttft_ms is None else round(result.ttft_ms, 2),
        "error": result.error or None,
        "code": result.code,
    }
    if result.logprobs:
        row["logprobs"] = result.logprobs
    if result.prompt_logprobs:
        row["prompt_logprobs"] = result.prompt_logprobs
    return row


def _results(
    client: Client, requests: list[Spec | BadLine], timeout: float | None
) -> Iterator[tuple[int, Result]]:
    """Results by input position as they come; a line that is no request is a result at once."""
    positions = [i for i, request in enumerate(requests) if isinstance(request, Spec)]
    for position, request in enumerate(requests):
        if isinstance(request, BadLine):
            yield position, refused(request.text)
    specs = [request for request in requests if isinstance(request, Spec)]
    for number, result in client.generate_many(specs, timeout=timeout):
        yield positions[number], result


def refused(text: str) -> Result:
    return Result("", 0, "", (), "error", Usage(0, 0), 0, None, code=Code.BAD_REQUEST, error=text)


def _run_batch(
    client: Client, requests: list[Spec | BadLine], timeout: float | None, as_json: bool
) -> int:
    worst, tokens, started = 0, 0, time.monotonic()
    expected = sum(request.n if isinstance(request, Spec) else 1 for request in requests)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    show = errors.is_terminal and len(requests) > 1
    with Progress(*columns, console=errors, disable=not show) as progress:
        task = progress.add_task("sequences", total=expected)
        for position, result in _results(client, requests, timeout):
            worst = max(worst, exit_code(result))
            tokens += len(result.token_ids)
            if as_json:
                print_json(document(position, result))
            else:
                _print_result(position, result)
            progress.advance(task)
    if not as_json:
        seconds = time.monotonic() - started
        errors.print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")
    return worst


def _print_result(position: int, result: Result) -> None:
    name = f"{position}" if result.index == 0 else f"{position}.{result.index}"
    if result.error:
        console.print(f"[bold]{name}[/] [red]{result.finish_reason}[/]: {result.error}")
    else:
        console.print(f"[bold]{name}[/] ({result.finish_reason})", end=" ")
        console.print(Text(result.text))


def exit_code(result: Result) -> int:
    if not result.error:
        return 0
    if result.code is None:  # the node said nothing of it: its time ran out, or the gateway's
        return ExitCode.TIME_LIMIT
    return ExitCode.BAD_INPUT if result.code in _BAD_INPUT else ExitCode.UNHEALTHY


def run_live(client: Client, requests: list[Spec | BadLine], timeout: float | None) -> int:
    """Several streams at once, growing on the terminal; what was wrong with any goes to stderr."""
    started, tokens, failures = time.monotonic(), 0, Failures()
    board = Board(requests)
    streams: dict[int, Stream] = {}
    for position, request in enumerate(requests):
        if isinstance(request, BadLine):
            failures.add(position, Refused(Code.BAD_REQUEST, request.text))
            continue
        with failures.of(position):
            streams[position] = client.generate(request, timeout=timeout)
    live = Live(board, console=console, refresh_per_second=12) if console.is_terminal else None
    with live or contextlib.nullcontext():
        for position, stream in streams.items():
            with failures.of(position):
                for event in stream:
                    board.add(position, event.index, event.text)
                    if isinstance(event, Delta):
                        tokens += len(event.token_ids)
    if live is None:
        console.print(board)
    failures.tell()
    if tokens:
        seconds = time.monotonic() - started
        errors.print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")
    return failures.worst


class Failures:
    """What went wrong with which prompt, and the exit code that follows."""

    def __init__(self) -> None:
        self.worst = 0
        self._lines: list[str] = []

    def add(self, position: int, error: PhalanxError) -> None:
        if isinstance(error, RequestTimeout | GatewaySilent):
            code = ExitCode.TIME_LIMIT
        elif getattr(error, "code", None) in _BAD_INPUT:
            code = ExitCode.BAD_INPUT
        else:
            code = ExitCode.UNHEALTHY
        self.worst = max(self.worst, code)
        self._lines.append(f"prompt {position}: {error}")

    @contextlib.contextmanager
    def of(self, position: int) -> Iterator[None]:
        try:
            yield
        except PhalanxError as error:
            self.add(position, error)

    def tell(self) -> None:
        for line in self._lines:
            print(line, file=sys.stderr)


class Board:
    """The prompts and what came of them so far."""

    def __init__(self, requests: list[Spec | BadLine]) -> None:
        self._lines = {
            (position, index): Text(str(request.prompt), style="bold")
            for position, request in enumerate(requests)
            if isinstance(request, Spec)
            for index in range(request.n)
        }

    def add(self, position: int, index: int, text: str) -> None:
        self._lines[position, index].append(text, style="not bold")

    def __rich__(self) -> RenderableType:
        return Group(*self._lines.values())
