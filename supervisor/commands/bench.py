"""`phalanx bench NAME`: measurements that state their conditions and compare within the same run."""

import importlib
import json
import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.supervisor.commands.common import console, finish, json_option, print_json
from phalanx.supervisor.commands.group import Group

VICTIMS = ("worker", "scheduler", "gateway", "tokenizer", "kvstore", "eplb")
KERNEL_PARTS = ("experts", "linear", "attention", "indexer", "fused", "sample")


@click.group(cls=Group)
def bench() -> None:
    """Benchmarks. Compare ratios inside one run: machines differ and are noisy."""


def conditions() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("phalanx-serve", "pyzmq", "msgspec", "numpy")
        },
    }


def report(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({**figures, **conditions()})
        return
    rows = figures.pop("rows", None)
    table = Table(show_header=False)
    parts: dict[str, dict[str, Any]] = {}  # with rows of their own
    for name, value in figures.items():
        if isinstance(value, dict) and "rows" in value:
            parts[name] = value
        else:
            table.add_row(name, _shown(value))
    console.print(table)
    if rows:
        columns = list(rows[0])
        table = Table(*columns)
        for row in rows:
            table.add_row(*(_shown(row[column]) for column in columns))
        console.print(table)
    for name, part in parts.items():
        console.print(f"{name}:")
        report(part, as_json)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _run(name: str, as_json: bool, **arguments: Any) -> None:
    module = importlib.import_module(f"phalanx.bench.{name}")
    report(module.run(**arguments), as_json)


def in_process(name: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark that loads torch, which the command line must not."""
    command = [sys.executable, "-P", "-m", f"phalanx.bench.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PhalanxError(f"the benchmark failed: {done.stderr.strip()[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@bench.command()
@click.option("--model", default="tiny", help="Of the node that is started.")
@click.option("--ranks", default=2, help="Of that node.")
@json_option
def start(model: str, ranks: int, as_json: bool) -> None:
    """Seconds from `up` to all ready."""
    _run("start", as_json, model=model, ranks=ranks)


@bench.command()
@json_option
def ipc(as_json: bool) -> None:
    """A message round trip and a hand-over of 16 MiB, against copies through ZeroMQ."""
    _run("ipc", as_json)


@bench.command()
@click.option(
    "--peer-python", metavar="PATH", help="An interpreter with vLLM, whose scheduler is compared."
)
@json_option
def scheduler(peer_python: str | None, as_json: bool) -> None:
    """CPU time of a decode step's scheduling at 16, 64 and 256 running requests."""
    _run("scheduler", as_json, peer_python=peer_python)


@bench.command()
@click.option(
    "--device",
    type=click.Choice(["null", "cpu"]),
    default="null",
    help="null: a worker that computes nothing.",
)
@json_option
def loop(device: str, as_json: bool) -> None:
    """Client, gateway, scheduler and worker without a model: what the control plane alone can do."""
    _run("loop", as_json, device=device)


@bench.command()
@json_option
def model(as_json: bool) -> None:
    """The tiny model's forward pass on the CPU, and what exactness costs."""
    report(in_process("model"), as_json)


@bench.command()
@click.option("--gib", default=1.0, help="How much to write.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default="/tmp",
    help="On the disk to measure.",
)
@json_option
def kvstore(gib: float, directory: Path, as_json: bool) -> None:
    """The KV store's puts and gets against the raw disk."""
    _run("kvstore", as_json, gib=gib, directory=directory)


@bench.command()
@click.option("--streams", type=click.IntRange(1, 64), default=8, help="That are measured.")
@click.option("--seconds", type=click.FloatRange(1, 600), default=10.0, help="Of each part.")
@click.option("--model", default="random-tiny", help="Of a node of its own.")
@click.option(
    "--margin",
    type=click.FloatRange(1.01, 100),
    default=1.6,
    help="The target over the unloaded median.",
)
@json_option
def latency(streams: int, seconds: float, model: str, margin: float, as_json: bool) -> None:
    """Running streams beside saturating prompts, and a short prompt behind a long one.

    The target of a step's time is MARGIN times what the streams alone take; then the same without.
    """
    _run("latency", as_json, streams=streams, seconds=seconds, model=model, margin=margin)


@bench.command()
@click.option(
    "--kills", type=click.IntRange(1, 1000), default=10, help="Faults, one after the other."
)
@click.option("--ranks", type=click.IntRange(2, 8), default=3, help="Of the node.")
@click.option("--streams", type=click.IntRange(1, 256), default=12, help="At once.")
@click.option("--model", default="random-tiny", help="Of a node of its own.")
@click.option("--seed", default=1, help="Of prompts, moments and victims.")
@click.option("--blocks", default=0, help="KV blocks of each rank, to see full pools; 0: plenty.")
@click.option(
    "--target-itl-ms",
    type=click.FloatRange(0, 60_000),
    default=0.0,
    help="scheduler.target_itl_ms of the node: no step is longer, so none that a fault ends.",
)
@click.option("--victim", default="worker", help=f"Who takes turns: {','.join(VICTIMS)}.")
@click.option(
    "--how",
    type=click.Choice(["kill", "stop", "restart"]),
    default="kill",
    help="What happens to the victim.",
)
@click.option("--noise", is_flag=True, help="The control: one rank is one ulp off.")
@click.option("--outputs", type=click.IntRange(8, 1000), default=160, help="Tokens of each stream.")
@json_option
def recovery(
    kills: int,
    ranks: int,
    streams: int,
    model: str,
    seed: int,
    blocks: int,
    target_itl_ms: float,
    victim: str,
    how: str,
    noise: bool,
    outputs: int,
    as_json: bool,
) -> None:
    """Kill processes under load: how long streams stand still, and whether a token changes.

    `--how stop` stops them for ever instead (SIGSTOP): the node must notice, and kill them itself.
    `--how restart` has the supervisor replace them, as `phalanx restart` does.
    Ended early, by SIGTERM too, it tells what it has. Exit 4 then, and when a stream changed, log-probabilities
    too, or was lost; with `--noise` when none changed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = importlib.import_module("phalanx.bench.recovery").run
    victims = tuple(name.strip() for name in victim.split(","))
    if unknown := set(victims) - set(VICTIMS):
        raise ConfigError(f"--victim {sorted(unknown)}: allowed are {', '.join(VICTIMS)}")
    sizes = importlib.import_module("phalanx.bench.recovery_load").Sizes(outputs=outputs)
    figures = run(
        kills, ranks, streams, model, seed, blocks, target_itl_ms, victims, how, noise, sizes
    )
    report(figures, as_json)
    wrong = bool(figures["tokens_changed"]) is not noise or figures["streams_lost"]
    wrong = wrong or (figures["logprobs_changed"] and not noise)
    if figures["failed"] or wrong:
        finish(ExitCode.UNHEALTHY)


@bench.command()
@click.option(
    "--streams", type=click.IntRange(1, 10_000), default=500, help="At once, in the second part."
)
@json_option
def http(streams: int, as_json: bool) -> None:
    """What HTTP adds to the time to first token, and many streams at once, without a model."""
    _run("http", as_json, streams=streams)


@bench.command()
@click.argument("parts", nargs=-1, metavar="[PART]...", type=click.Choice(KERNEL_PARTS))
@json_option
def kernels(parts: tuple[str, ...], as_json: bool) -> None:
    """The GPU's kernels at the full model's dimensions, against limits measured in the same run.

    PART: experts, linear, attention, indexer, fused or sample; all of them if none is named.
    """
    report(in_process("kernels", "run", *parts), as_json)
