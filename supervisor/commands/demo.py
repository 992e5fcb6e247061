"""`phalanx demo`: a whole node from nothing, several streams at once, and everything gone at the end."""

import tempfile
from pathlib import Path

import click

from phalanx.protocol.arena import names
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.messages import Sampling, Shutdown, ShutdownDone
from phalanx.services.client import Client, Spec
from phalanx.supervisor.ask import ask
from phalanx.supervisor.commands.common import console, finish
from phalanx.supervisor.commands.generate import run_live
from phalanx.supervisor.commands.node import build_config, start_detached

PROMPTS = (
    "Once upon a time",
    "The sea was",
    "In the morning the old man",
    "Question: what is a stream? Answer:",
    "She opened the door and",
    "def main():",
)


@click.command()
@click.option("--model", default="tiny")
@click.option("--ranks", default=2)
@click.option("--max-tokens", default=48)
def demo(model: str, ranks: int, max_tokens: int) -> None:
    """Start a node, stream from several prompts at once, print tokens per second, stop it."""
    with tempfile.TemporaryDirectory(prefix="phdemo") as folder:
        config = build_config(NodeConfig(), Path(folder), {"model": model, "ranks": ranks})
        console.print(f"starting {ranks} ranks of {model}")
        status = start_detached(config, quiet=False)
        console.print(f"ready in {status.ready_s:.1f} s: {len(status.processes)} processes")
        try:
            sampling = Sampling(max_tokens=max_tokens, temperature=0.8, seed=7)
            with Client(config.run_path) as client:
                failed = run_live(client, [Spec(text, sampling) for text in PROMPTS], 120.0)
        finally:
            left = ask(config.run_path, Shutdown(1, 5.0), ShutdownDone, 30.0).left
        left_names = [*left, *names(config.node)]
    if failed or left_names:
        console.print(f"[red]failed[/]: {left_names}")
        finish(failed or ExitCode.INTERNAL)
    console.print("stopped, nothing left behind")
