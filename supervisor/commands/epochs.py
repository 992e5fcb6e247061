"""`phalanx epochs`: what happened to the node, and what became of it."""

import time
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from phalanx.protocol.messages import HistoryEntry, HistoryQuery, HistoryReply, PhaseTime
from phalanx.protocol.rundir import is_running
from phalanx.supervisor.ask import ask, find_run_dir
from phalanx.supervisor.chronicle import cut_off, history_file, read
from phalanx.supervisor.commands.common import (
    console,
    errors,
    json_option,
    print_json,
    run_dir_option,
)
from phalanx.supervisor.history import UNDER_WAY


@click.command()
@click.option("--offline", is_flag=True, help="Read the file: of a node that ended, or hangs.")
@run_dir_option
@json_option
def epochs(offline: bool, run_dir: Path | None, as_json: bool) -> None:
    """What happened to the node's processes and to the group, in this start and in those before it.

    \b
    What fell, how it was noticed, what was decided, and how long each part took until all was well again.
    """
    path = find_run_dir(run_dir)
    entries = _of_file(path) if offline else ask(path, HistoryQuery(1), HistoryReply, 5.0).entries
    if offline and not entries:
        errors.print(
            f"nothing is told in {history_file(path)}: no node has run there", soft_wrap=True
        )
    if as_json:
        print_json(entries)
    else:
        console.print(_lines(entries))


def _of_file(run_dir: Path) -> tuple[HistoryEntry, ...]:
    entries, unread = read(run_dir)
    if unread:
        errors.print(f"{unread} lines cannot be read, of another version or torn", style="yellow")
    now = entries[-1].run if entries else 0
    return tuple(cut_off(entries, now if is_running(run_dir) else now + 1))


def _lines(entries: tuple[HistoryEntry, ...]) -> Table:
    """An entry is a paragraph: when and what, then how it was noticed, what was decided, what came of it."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column()
    run = 0
    for entry in entries:
        if entry.run != run and run:
            lines.add_row()
        run = entry.run
        for when, name, text in paragraph(entry):
            lines.add_row(when, name, Text(text))
    return lines


def paragraph(entry: HistoryEntry) -> list[tuple[str, str, str]]:
    """Its lines: the time (of the first one), the name of what is told, and that."""
    second, ms = divmod(int(entry.at * 1000), 1000)
    when = f"{time.strftime('%m-%d %H:%M:%S', time.localtime(second))}.{ms:03}"
    again = f", {entry.deaths} deaths" if entry.deaths > 1 else ""
    what = f"{entry.cause} ({entry.ended})" if entry.ended else entry.cause
    after = _ms(entry.detected_ms) if entry.detected_ms > 0 else ""
    noticed = ", ".join(filter(None, (entry.noticed, after)))
    count = entry.moved_requests
    moved = f"{count} request{'s move' if count > 1 else ' moves'}" if count else ""
    decided = "; ".join(filter(None, (entry.decided, moved)))
    told = (("noticed", noticed), ("decided", decided), ("outcome", _until(entry)))
    first = (when, f"epoch {entry.epoch}", what + again)
    return [first, *(("", name, text) for name, text in told if text)]


def _until(entry: HistoryEntry) -> str:
    if entry.outcome == UNDER_WAY:
        return UNDER_WAY
    # Of a start there are as many as processes have steps: `phalanx up` shows them.
    phases = entry.phases if entry.kind != "start" else ()
    shown = ", ".join(f"{_named(phase, entry)} {_ms(phase.s * 1000)}" for phase in phases)
    took = (
        f"{entry.outcome} after {_ms(entry.resumed_ms)}" if entry.resumed_ms >= 0 else entry.outcome
    )
    return f"{took}: {shown}" if shown else took


def _named(phase: PhaseTime, entry: HistoryEntry) -> str:
    own = phase.process in ("", entry.process)
    return phase.name if own else f"{phase.name} {phase.process}"


def _ms(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"
