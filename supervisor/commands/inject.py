"""`phalanx inject KIND TARGET`: break a part of a node on purpose, to see that it heals."""

from pathlib import Path

import click

from phalanx.protocol.messages import Inject, Injected
from phalanx.supervisor.ask import ask, find_run_dir
from phalanx.supervisor.commands.common import console, json_option, print_json, run_dir_option
from phalanx.supervisor.inject import KINDS, MS_MAX


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("target")
@click.option(
    "--ms", type=click.IntRange(0, MS_MAX), default=0, help="stop: go on after this; 0: never."
)
@run_dir_option
@json_option
def inject(kind: str, target: str, ms: int, run_dir: Path | None, as_json: bool) -> None:
    """Hurt processes of a node that was started with `up --inject`; others refuse (exit 4).

    \b
    TARGET is a process name, a prefix of names, or random:PREFIX for one of them.
      list      hurts nothing: which processes TARGET names
      kill      SIGKILL
      stop      SIGSTOP, and SIGCONT after --ms
      cont      SIGCONT
      gpu-loss  what the node sees of a lost GPU: its worker ends by SIGKILL
    """
    hit = ask(find_run_dir(run_dir), Inject(1, kind, target, ms), Injected, 5.0).injected
    if as_json:
        print_json({"injected": hit})
    else:
        console.print(f"{kind}: {', '.join(hit)}")
