"""`phalanx replay ID`: a request that has ended, run again and compared with what was delivered."""

from pathlib import Path

import click
from rich.table import Table

from phalanx.protocol.errors import Code, ConfigError, ExitCode, Refused
from phalanx.protocol.limits import MAX_SEATS
from phalanx.protocol.messages import Replayed, ReplayedSequence
from phalanx.services.client import GatewaySilent
from phalanx.supervisor.ask import NoAnswer, find_run_dir
from phalanx.supervisor.commands.common import (
    check_seconds,
    console,
    finish,
    json_option,
    print_json,
    run_dir_option,
)
from phalanx.supervisor.commands.generate import open_client


@click.command()
@click.argument("request_id")
@click.option(
    "--rank",
    type=click.IntRange(0, MAX_SEATS - 1),
    default=None,
    help="Run it on this rank; else on whichever is free.",
)
@click.option(
    "--timeout", type=float, callback=check_seconds, default=600.0, help="Seconds for all of it."
)
@run_dir_option
@json_option
def replay(
    request_id: str, rank: int | None, timeout: float, run_dir: Path | None, as_json: bool
) -> None:
    """Run the request REQUEST_ID (or the only one whose id begins so) again, and compare.

    \b
    Tokens are compared, and log-probabilities where they were asked for; when the tokens are no longer
    kept, their digest. Exit 4 when something differs or the request is not kept any more. A run that is
    ended early to make room for others (scheduler.preempt: stop) is compared as far as it came.
    """
    if not request_id:
        raise ConfigError("the request id is empty")
    with open_client(find_run_dir(run_dir)) as client:
        try:
            found = client.replay(request_id, seat=-1 if rank is None else rank, timeout=timeout)
        except Refused as error:
            wrong = error.code is Code.BAD_REQUEST
            raise (ConfigError(str(error)) if wrong else error) from None
        except GatewaySilent as error:
            raise NoAnswer(f"the replay was not done within {timeout:g} s") from error
    if as_json:
        print_json(
            {name: getattr(found, name) for name in found.__struct_fields__ if name != "call"}
        )
    else:
        _show(found)
    if not found.equal:
        finish(ExitCode.UNHEALTHY)


def _show(found: Replayed) -> None:
    verdict = "[green]equal[/]" if found.equal else "[red]not equal[/]"
    table = Table(title=f"{found.request_id}: {verdict}")
    for column in ("sequence", "rank", "tokens", "compared", "first difference"):
        table.add_column(column, justify="right" if column == "tokens" else "left")
    for one in found.sequences:
        parts = ("logprobs" * bool(one.logprobs), "prompt logprobs" * bool(one.prompt_logprobs))
        compared = ", ".join((one.compared, *filter(None, parts)))
        rank = str(one.seat) if one.seat >= 0 else "-"
        table.add_row(str(one.index), rank, str(one.tokens), compared, _difference(one))
    console.print(table)
    for one in found.sequences:
        if one.ended_early:
            console.print(f"sequence {one.index} ended early this time, {one.ended_early}")
    if found.fingerprint != found.fingerprint_then:
        console.print(
            f"accepted with numerics {found.fingerprint_then or 'unknown'}, run again with"
            f" {found.fingerprint or 'unknown'}: they need not give the same tokens"
        )


def _difference(one: ReplayedSequence) -> str:
    if one.difference is None:
        return "none"
    d = one.difference
    return f"{d.what} at {d.at}: delivered {d.delivered}, now {d.replayed}"
