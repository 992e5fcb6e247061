"""`phalanx inject KIND TARGET`: break a part of a node on purpose, to see that it heals."""

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from phalanx.protocol.failpoints import NAMES, kind_of
from phalanx.protocol.messages import Inject, Injected
from phalanx.supervisor.ask import ask, find_run_dir
from phalanx.supervisor.commands.common import console, json_option, print_json, run_dir_option
from phalanx.supervisor.inject import ACTIONS, COUNT_MAX, FAILPOINTS, KINDS, MS_MAX, RANDOM


@click.command()
@click.argument("kind", type=click.Choice(KINDS), metavar="KIND")
@click.argument("target", default="")
@click.option(
    "--ms",
    type=click.IntRange(0, MS_MAX),
    default=0,
    help="How long it lasts (0: for ever); of slow, delay and a sleep: how much each time.",
)
@click.option("--rate", type=float, default=1.0, help="Share of messages, turns or writes hit.")
@click.option("--count", type=click.IntRange(0, COUNT_MAX), default=None, help="So often at most.")
@click.option(
    "--only", default="", help="Messages of this type, e.g. Tokens; the expert of a bitflip."
)
@click.option("--action", type=click.Choice(ACTIONS), default=None, help="Of a failpoint.")
@click.option("--nth", type=click.IntRange(1, COUNT_MAX), default=1, help="From the n-th time on.")
@click.option("--process", default="", help="Where a failpoint is armed; else one at random.")
@run_dir_option
@json_option
def inject(
    kind: str,
    target: str,
    ms: int,
    rate: float,
    count: int | None,
    only: str,
    action: str | None,
    nth: int,
    process: str,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Break parts of a node that was started with `up --inject`; others refuse (exit 4).

    \b
    TARGET is a process name, a prefix of names, random:PREFIX for one of them, or all (but the
    supervisor). KIND is one of
      list       breaks nothing: which processes TARGET names (without one: all), and what was
                 broken there; `list failpoints` names those
      kill       SIGKILL
      stop       SIGSTOP, and SIGCONT after --ms
      cont       SIGCONT
      gpu-loss   what the node sees of a lost GPU: its worker ends by SIGKILL
      slow       every turn (of a worker: every step) takes --ms longer
      drop, duplicate, corrupt
                 messages that the process sends or gets: lost, doubled, a bit flipped
      delay      they arrive --ms later, and so in another order
      diskfull   writes of the journal (gateway) or of the KV store fail
      ulp        a worker computes a little wrong: tokens change, on purpose
      bitflip    one bit of a routed expert's weights at a worker is wrong from now on: of --only
                 LAYER.EXPERT, or of any; tokens may change
      failpoint  TARGET is a name from `list failpoints`: --action there, once (--count 0: always)
      clear      end all of these, and SIGCONT
    """
    if not target:
        if kind != "list":
            raise click.UsageError("Missing argument 'TARGET'.")
        target = "all"
    if kind == "failpoint":
        only, target = target, process or f"{RANDOM}{kind_of(target)}"
        action, count = action or ACTIONS[0], 1 if count is None else count
    request = Inject(1, kind, target, ms, rate, count or 0, only, action or "", nth)
    reply = ask(find_run_dir(run_dir), request, Injected, 5.0)
    hit = reply.injected
    if as_json:
        print_json({"injected": hit, "armed": reply.armed})
    elif (kind, target) == ("list", FAILPOINTS):
        console.print(_failpoints(hit))
    elif kind == "list":
        console.print("\n".join((*hit, *reply.armed)), markup=False, highlight=False)
    else:
        console.print(f"{kind}: {', '.join(hit)}")


def _failpoints(names: tuple[str, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name in names:
        table.add_row(name, Text(NAMES.get(name, "")))
    return table
