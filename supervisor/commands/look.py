"""`phalanx queues`, `logs`, `kv`, `eplb`: what a running node holds."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import load_config
from phalanx.protocol.errors import ExitCode, PhalanxError
from phalanx.protocol.link import connect_dealer, receive, send
from phalanx.protocol.messages import (
    EplbReply,
    Error,
    KVClear,
    KVCleared,
    KVReply,
    KVStats,
    KVStatsReply,
    Message,
    PlanReply,
    PlanShow,
    StatusQuery,
    StatusReply,
)
from phalanx.protocol.rundir import EPLB_SOCKET, KVSTORE_SOCKET, LOG_DIR, endpoint, is_running
from phalanx.supervisor.ask import NoAnswer, NoNode, ask, asker, find_run_dir
from phalanx.supervisor.commands.common import (
    console,
    errors,
    finish,
    json_option,
    print_json,
    run_dir_option,
)
from phalanx.supervisor.commands.group import Group

R = TypeVar("R")
_ANSWER_S = 5.0
_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@run_dir_option
@json_option
def queues(run_dir: Path | None, as_json: bool) -> None:
    """Every request with its rank, state and age, read from shared memory: works while a scheduler hangs."""
    from phalanx.protocol.queues import read_queues  # numpy: only here

    path = _running(run_dir)
    found = read_queues(load_config(path).node)
    if as_json:
        print_json(found)
        return
    table = Table(title="ranks")
    columns = (
        "rank",
        "epoch",
        "waiting",
        "running",
        "free blocks",
        "free slots",
        "step p50/p99 us",
        "unread",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for rank in found["ranks"]:
        table.add_row(
            str(rank["slot"]),
            str(rank["epoch"]),
            str(rank["waiting"]),
            str(rank["running"]),
            f"{rank['free_blocks']}/{rank['total_blocks']}",
            f"{rank['free_slots']}/{rank['total_slots']}",
            "-"
            if rank["step_us_p50"] is None
            else f"{rank['step_us_p50']:.0f}/{rank['step_us_p99']:.0f}",
            ", ".join(
                f"{ring['written'] - ring['read']} B by {ring['reader']}"
                for ring in rank["rings"]
                if ring["written"] > ring["read"]
            ),
        )
    console.print(table)
    if not found["requests"]:
        return
    table = Table(title="sequences (all of one: phalanx requests ID)")
    for column in ("id", "rank", "phase", "age", "prompt", "done", "of", "blocks", "preempted"):
        table.add_column(
            column, justify="left" if column in ("id", "phase") else "right", no_wrap=True
        )
    for request in found["requests"]:
        table.add_row(
            f"{request['request_id'][:8]}/{request['index']}",
            str(request["slot"]),
            request["phase"],
            f"{request['age_ms'] / 1000:.1f} s",
            str(request["prompt_tokens"]),
            str(request["output_tokens"]),
            str(request["max_tokens"]),
            str(request["blocks"]),
            str(request["preemptions"]),
        )
    console.print(table)


@click.command()
@click.argument("request_id")
@run_dir_option
@json_option
def requests(request_id: str, run_dir: Path | None, as_json: bool) -> None:
    """What each sequence of one request is at (the id, or the start of it); exit 4 when none is known."""
    from phalanx.protocol.queues import read_queues

    found = read_queues(load_config(_running(run_dir)).node)["requests"]
    mine = [request for request in found if request["request_id"].startswith(request_id)]
    if as_json:
        print_json({"requests": mine})
    for request in [] if as_json else mine:
        table = Table(show_header=False, title=f"{request['request_id']} / {request['index']}")
        for name, value in request.items():
            shown = f"{value:.0f}" if isinstance(value, float) else str(value)
            table.add_row(name.replace("_", " "), shown)
        console.print(table)
    if not mine:
        errors.print(f"no rank holds a request {request_id!r}: it has ended, or never was here")
        finish(ExitCode.UNHEALTHY)


@click.command()
@click.argument("process", required=False)
@click.option("--level", type=click.Choice(_LEVELS), default="debug", help="Least level shown.")
@click.option("--tail", type=int, default=200, help="Lines of each process; 0: all.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@run_dir_option
@json_option
def logs(
    process: str | None, level: str, tail: int, follow: bool, run_dir: Path | None, as_json: bool
) -> None:
    """The log of one PROCESS (e.g. worker-0), or of all in order of time."""
    folder = find_run_dir(run_dir) / LOG_DIR
    files = sorted(folder.glob(f"{process or '*'}.log"))
    if not files:
        have = ", ".join(sorted(file.stem for file in folder.glob("*.log")))
        if not have:  # logs outlive a node, so there never was one
            raise NoNode(folder.parent)
        raise click.UsageError(f"no log of {process!r} in {folder}; there are: {have}")
    least = _LEVELS.index(level)
    lines = [line for file in files for line in _last_lines(file, tail)]
    for line in sorted(lines, key=lambda event: str(event.get("timestamp", ""))):
        _show(line, least, as_json)
    if follow:
        for line in _follow(files):
            _show(line, least, as_json)


def _last_lines(file: Path, tail: int) -> list[dict[str, Any]]:
    lines = file.read_text(errors="replace").splitlines()
    return [_parsed(line) for line in (lines[-tail:] if tail else lines)]


def _parsed(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"event": line}


def _follow(files: list[Path]) -> Iterator[dict[str, Any]]:
    handles = [file.open(errors="replace") for file in files]
    for handle in handles:
        handle.seek(0, 2)
    while True:
        lines = [line for handle in handles for line in handle]
        yield from map(_parsed, lines)
        if not lines:
            time.sleep(0.1)


def _show(event: dict[str, Any], least: int, as_json: bool) -> None:
    level = str(event.get("level", "info"))
    if level in _LEVELS and _LEVELS.index(level) < least:
        return
    if as_json:
        print_json(event)
        return
    known = ("timestamp", "level", "process", "event", "incarnation", "exception")
    rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in known)
    when = str(event.get("timestamp", ""))[11:23]
    name = str(event.get("process", ""))
    print(f"{when} {level:7} {name:12} {event.get('event', '')} {rest}".rstrip())
    if "exception" in event:
        print(event["exception"])


@click.group(cls=Group)
def kv() -> None:
    """The KV store."""


@kv.command()
@run_dir_option
@json_option
def stats(run_dir: Path | None, as_json: bool) -> None:
    """What the KV store holds and how it is used."""
    reply = _ask(_running(run_dir), KVSTORE_SOCKET, KVStats(1), KVReply, KVStatsReply)
    _print_fields(reply, as_json)


@kv.command()
@run_dir_option
@json_option
def clear(run_dir: Path | None, as_json: bool) -> None:
    """Forget all that the KV store holds: after a rank computed wrong numbers, what it wrote is wrong too."""
    reply = _ask(_running(run_dir), KVSTORE_SOCKET, KVClear(1), KVReply, KVCleared)
    if as_json:
        print_json({"records": reply.records})
    else:
        console.print(f"{reply.records} records forgotten")


@click.group(cls=Group)
def eplb() -> None:
    """Expert placement."""


@eplb.command()
@run_dir_option
@json_option
def show(run_dir: Path | None, as_json: bool) -> None:
    """The planner's last plan: balance of each layer as it was, as planned, and at best."""
    reply = _ask(_running(run_dir), EPLB_SOCKET, PlanShow(1), EplbReply, PlanReply)
    if as_json:
        document = {
            "layers": reply.layers,
            "plan_age_s": reply.plan_age_s,
            "applied": reply.applied,
            "refused": reply.refused,
            "refusal": reply.refusal,
        }
        print_json(document)
        return
    age = "none yet" if reply.plan_age_s is None else f"{reply.plan_age_s:.0f} s old"
    table = Table(title=f"plan: {age}, applied {reply.applied}, refused {reply.refused}")
    for column in ("layer", "busiest/mean", "planned", "bound", "copies"):
        table.add_column(column, justify="right")
    for layer in reply.layers:
        balance = (f"{value:.3f}" for value in (layer.now, layer.moe_lb, layer.bound))
        table.add_row(str(layer.layer), *balance, str(layer.copies))
    console.print(table)
    if reply.refusal:
        console.print(f"the last one that was refused: {reply.refusal}", highlight=False)


@eplb.command()
@run_dir_option
@json_option
def history(run_dir: Path | None, as_json: bool) -> None:
    """The plans that were given to the running group: what came of each, and how long each part took."""
    path = find_run_dir(run_dir)
    reply = ask(path, StatusQuery(1), StatusReply, _ANSWER_S)
    if as_json:
        print_json(reply.rebalances)
        return
    table = Table(title=f"under way: {reply.rebalance}" if reply.rebalance else "plans")
    for column in ("version", "epoch", "outcome", "copies", "busiest/mean", "plan", "copy", "flip"):
        table.add_column(column, justify="left" if column == "outcome" else "right")
    for one in reply.rebalances:
        outcome = f"{one.outcome}: {one.why}" if one.why else one.outcome
        times = (_ms(part) for part in (one.plan_ms, one.copy_ms, one.flip_ms))
        balance = f"{one.before:.3f} to {one.after:.3f}"
        table.add_row(str(one.version), str(one.epoch), outcome, str(one.moved), balance, *times)
    console.print(table)


def _ms(part: float) -> str:
    return "-" if part < 0 else f"{part:.0f} ms"


def _running(run_dir: Path | None) -> Path:
    path = find_run_dir(run_dir)
    if not is_running(path):
        raise NoNode(path)
    return path


def _ask(run_dir: Path, socket_name: str, question: Message, union: Any, answer: type[R]) -> R:
    socket = connect_dealer(endpoint(run_dir, socket_name), asker())
    frames: list[bytes] = []
    try:
        for _ in range(10):  # a question or an answer may get lost
            send(socket, encode(question))
            if socket.poll(500) and (frames := receive(socket, 1)):
                break
        else:
            raise NoAnswer(f"{socket_name.removesuffix('.sock')} did not answer within 5 s")
        reply = Decoder[Any](union).decode(frames[0])
    finally:
        socket.close()
    if isinstance(reply, Error):
        raise PhalanxError(reply.message)
    assert isinstance(reply, answer)
    return reply


def _print_fields(reply: Any, as_json: bool) -> None:
    fields = {name: getattr(reply, name) for name in reply.__struct_fields__ if name != "call"}
    if as_json:
        print_json(fields)
    else:
        for name, value in fields.items():
            console.print(f"{name:10} {value}")
