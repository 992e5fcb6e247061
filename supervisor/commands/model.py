"""`phalanx inspect`: what a checkpoint is and where it fits, before anything is loaded."""

import subprocess
import sys

import click

from phalanx.supervisor.commands.common import finish, json_option


@click.command()
@click.argument("directory")
@click.option("--ranks", type=click.IntRange(1, 1024), help="How many ranks to work out.")
@click.option(
    "--memory",
    type=click.FloatRange(0, min_open=True),
    metavar="GIB",
    help="Suppose GPUs of this size instead of the devices at hand.",
)
@json_option
def inspect(directory: str, ranks: int | None, memory: float | None, as_json: bool) -> None:
    """Parameters, bytes by kind and KV bytes per token of DIRECTORY (or of a config.json alone), and
    what of it fits on this machine's memory and GPUs."""
    command = [sys.executable, "-P", "-m", "phalanx.worker_svc.model.inspect", directory]
    options = {"--ranks": ranks, "--memory": memory}
    command += [word for name, value in options.items() if value for word in (name, str(value))]
    finish(subprocess.run([*command, *(["--json"] if as_json else [])], check=False).returncode)
