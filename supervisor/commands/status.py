"""`phalanx status`: what lives, and whether all is well."""

from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.messages import ProcessStatus, StatusQuery, StatusReply
from phalanx.supervisor.ask import ask, find_run_dir
from phalanx.supervisor.commands.common import (
    console,
    finish,
    json_option,
    print_json,
    run_dir_option,
)
from phalanx.supervisor.headway import share


@click.command()
@run_dir_option
@json_option
def status(run_dir: Path | None, as_json: bool) -> None:
    """Which processes live, which ranks are in the group, whether all is well.

    \b
    Exit 4 when it is not; with --json `healthy` says so, and the exit code is 0.
    """
    reply = ask(find_run_dir(run_dir), StatusQuery(1), StatusReply, 5.0)
    if as_json:
        fields = [name for name in reply.__struct_fields__ if name != "call"]
        # Without a pid it is about to be there; and a `kill` of 0 ends whoever asks for it.
        reply = msgspec.structs.replace(reply, processes=tuple(p for p in reply.processes if p.pid))
        print_json({name: getattr(reply, name) for name in fields})
        return
    console.print(title(reply), soft_wrap=True)
    console.print(status_table(reply))
    for line in remarks(reply):
        console.print(Text(line), soft_wrap=True)
    if not reply.healthy:
        finish(ExitCode.UNHEALTHY)


def title(reply: StatusReply) -> Text:
    style, health = ("green", "healthy") if reply.healthy else ("red", "not healthy")
    first = Text(f"{reply.model} in {reply.run_dir}: epoch {reply.epoch}, ")
    return Text("\n").join((first.append(health, style), *map(Text, reply.inexact)))


def status_table(reply: StatusReply) -> Table:
    table = Table()
    for column in ("process", "pid", "state", "restarts", "last beat"):
        table.add_column(column, justify="left" if column in ("process", "state") else "right")
    for process in reply.processes:
        beat = f"{process.last_beat_ms} ms" if process.last_beat_ms >= 0 else ""
        pid = str(process.pid or "")
        table.add_row(process.name, pid, _state(process), str(process.restarts), beat)
    return table


def remarks(reply: StatusReply) -> list[str]:
    """Below the table, whole: what keeps the node from being healthy, what else should be known, what is under way."""
    return [
        *(f"not healthy: {reason}" for reason in reply.reasons),
        *([reply.note] if reply.note else ()),
        *([f"asked for: {reply.change}"] if reply.change else ()),
    ]


def _state(process: ProcessStatus) -> str:
    """What the supervisor says of the node is below the table."""
    if process.name == "supervisor" or process.detail in ("", process.state):
        return process.state
    return f"{process.state}: {process.detail}{share(process.fraction)}"
