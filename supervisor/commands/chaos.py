"""`phalanx chaos`: random faults on a live node under load, every stream compared with the fault-free one."""

import importlib
from contextlib import ExitStack
from pathlib import Path

import click

from phalanx.protocol.errors import ExitCode
from phalanx.supervisor.commands.bench import report
from phalanx.supervisor.commands.common import errors, finish, json_option
from phalanx.supervisor.commands.node import private_node


@click.command()
@click.option(
    "--minutes",
    type=click.FloatRange(0.05, 100_000),
    default=5.0,
    help="Of faults; fault-free runs come before.",
)
@click.option("--seed", default=1, help="Of requests and faults: the same ones again.")
@click.option("--streams", type=click.IntRange(1, 256), default=12, help="Clients at once.")
@click.option("--model", default="random-tiny", help="Of a node of its own.")
@click.option("--ranks", type=click.IntRange(1, 16), default=3, help="Of a node of its own.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="A running node, started with up --inject, in place of one of its own.",
)
@json_option
def chaos(
    minutes: float,
    seed: int,
    streams: int,
    model: str,
    ranks: int,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Kill and stop random processes of a node under load; compare every stream.

    \b
    The node is one of its own unless --run-dir names another. What happens is told on standard error.
    Exit 4 when a stream changed, was lost, or the node did not heal whole.
    """
    run = importlib.import_module("phalanx.bench.chaos").run
    with ExitStack() as stack:
        if run_dir is None:
            config, _ = stack.enter_context(private_node(model, ranks, inject=True))
            run_dir = config.run_path
        figures = run(run_dir.absolute(), minutes, seed, streams, lambda line: errors.print(line))
        report(dict(figures), as_json)
    if not figures["ok"]:
        finish(ExitCode.UNHEALTHY)
