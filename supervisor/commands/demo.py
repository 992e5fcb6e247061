"""`phalanx demo`: a whole node from nothing, several streams at once, and everything gone at the end."""

import click

from phalanx.protocol.messages import Sampling
from phalanx.services.client import Client, Spec
from phalanx.supervisor.commands.common import console, finish
from phalanx.supervisor.commands.generate import run_live
from phalanx.supervisor.commands.node import private_node

PROMPTS = (
    "Once upon a time",
    "The sea was",
    "In the morning the old man",
    "Question: what is a stream? Answer:",
    "She opened the door and",
    "def main():",
)


@click.command()
@click.option("--model", default="tiny", help="tiny, random-tiny or a checkpoint directory.")
@click.option("--ranks", default=2, help="Workers; the experts are spread over them.")
@click.option("--max-tokens", default=48, help="Of each stream.")
def demo(model: str, ranks: int, max_tokens: int) -> None:
    """Start a node, stream from several prompts at once, print tokens per second, stop it."""
    console.print(f"starting {ranks} ranks of {model}")
    sampling = Sampling(max_tokens=max_tokens, temperature=0.8, seed=7)
    with private_node(model, ranks, quiet=False) as (config, status):
        console.print(f"ready in {status.ready_s:.1f} s: {len(status.processes)} processes")
        with Client(config.run_path) as client:
            failed = run_live(client, [Spec(text, sampling) for text in PROMPTS], 120.0)
    if failed:
        finish(failed)
    console.print("stopped, nothing left behind")
