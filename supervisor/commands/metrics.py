"""`phalanx metrics`: what Prometheus reads, without an HTTP server."""

from pathlib import Path

import click

from phalanx.protocol.rundir import is_running
from phalanx.services.metrics import exposition
from phalanx.supervisor.ask import NoNode, find_run_dir
from phalanx.supervisor.commands.common import run_dir_option


@click.command()
@run_dir_option
def metrics(run_dir: Path | None) -> None:
    """Everything the node counts, as Prometheus reads it; the HTTP server has the same at /metrics."""
    path = find_run_dir(run_dir)
    if not is_running(path):
        raise NoNode(path)
    print(exposition(path).decode(), end="")
