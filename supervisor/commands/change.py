"""`phalanx scale`, `restart`: change a node while it serves."""

from pathlib import Path

import click

from phalanx.protocol.limits import BACK_MS_MAX, MAX_SEATS
from phalanx.protocol.messages import Restart, Restarted, Scale, Scaled
from phalanx.supervisor.ask import ask, find_run_dir
from phalanx.supervisor.commands.common import (
    check_seconds,
    console,
    errors,
    json_option,
    print_json,
    run_dir_option,
)

SCALE_S = 120.0
RESTART_S = 600.0
_LATE_S = BACK_MS_MAX / 1000 + 5.0  # the supervisor goes back when the time is up


@click.command()
@click.argument("ranks", type=click.IntRange(1, MAX_SEATS))
@click.option(
    "--timeout",
    type=float,
    callback=check_seconds,
    default=SCALE_S,
    help="Seconds until the node goes back to the ranks it had.",
)
@run_dir_option
@json_option
def scale(ranks: int, timeout: float, run_dir: Path | None, as_json: bool) -> None:
    """Give a running node another number of ranks; streams go on with the same tokens.

    \b
    More: new ranks join together when all of them are ready. Fewer: ranks that are not well go first,
    then those with the highest seats; their requests move to the others. If it cannot be done, the
    node keeps the ranks it had and the command says why (exit 4, or 5 when the time was up).
    """
    path = find_run_dir(run_dir)
    with errors.status("scaling", spinner="dots"):
        done = ask(path, Scale(1, ranks, timeout), Scaled, timeout, _LATE_S)
    if as_json:
        names = ("before", "ranks", "seats", "s")
        print_json({name: getattr(done, name) for name in names})
    else:
        seats = ", ".join(map(str, done.seats))
        console.print(f"{done.ranks} ranks (seats {seats}), before {done.before}; {done.s:.1f} s")


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--timeout",
    type=float,
    callback=check_seconds,
    default=RESTART_S,
    help="Seconds for all of them; what is not begun by then is left alone.",
)
@run_dir_option
@json_option
def restart(names: tuple[str, ...], timeout: float, run_dir: Path | None, as_json: bool) -> None:
    """Replace processes one after the other, each when the node is whole again; no request fails (HTTP finishes
    replies for 30 s and answers others with 503 meanwhile).

    \b
    NAMES are process names (worker-1), prefixes of them (tokenizer), or all: everything but the
    supervisor. A worker leaves the group first; the gateway hands over to the next one.
    """
    path = find_run_dir(run_dir)
    with errors.status("restarting", spinner="dots"):
        done = ask(path, Restart(1, names, timeout), Restarted, timeout, _LATE_S)
    if as_json:
        print_json({"restarted": [{"name": one.process, "s": one.s} for one in done.restarted]})
        return
    for one in done.restarted:
        console.print(f"{one.process}: {one.s:.1f} s")
