"""`phalanx inspect`: what a checkpoint is, before anything is loaded."""

import subprocess
import sys

import click

from phalanx.supervisor.commands.common import finish, json_option


@click.command()
@click.argument("directory")
@json_option
def inspect(directory: str, as_json: bool) -> None:
    """Parameters, bytes by kind and KV bytes per token of DIRECTORY (or of a config.json alone)."""
    command = [sys.executable, "-P", "-m", "phalanx.worker_svc.model.inspect", directory]
    finish(subprocess.run([*command, *(["--json"] if as_json else [])], check=False).returncode)
