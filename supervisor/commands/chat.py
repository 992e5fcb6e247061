"""`phalanx chat`: a conversation in the terminal, thinking shown apart from the answer."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.control import strip_control_codes
from rich.segment import Segment, Segments

from phalanx.protocol.config import NodeConfig, load_config
from phalanx.protocol.errors import PhalanxError
from phalanx.services.client import Client
from phalanx.supervisor.ask import find_run_dir
from phalanx.supervisor.commands.common import console, errors, run_dir_option
from phalanx.supervisor.commands.generate import open_client
from phalanx.supervisor.commands.node import private_node

_HELP = "/reset begins anew, /think on or off, /system TEXT, /quit; Ctrl-C ends an answer"


@click.command()
@click.option("--system", default=None, help="What the model is told before the conversation.")
@click.option("--think/--no-think", default=True, help="Whether it thinks before it answers.")
@click.option("--max-tokens", type=int, default=1024, help="Of each answer.")
@click.option("--temperature", type=float, default=None, help="0 is greedy; thinking takes 1.")
@click.option("--seed", type=int, default=None, help="The same questions, the same answers.")
@click.option("--model", default=None, help="Start a node for this model and stop it again.")
@run_dir_option
def chat(
    system: str | None,
    think: bool,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    model: str | None,
    run_dir: Path | None,
) -> None:
    """Talk to the model.

    \b
    Commands: /reset begins anew, /think on|off, /system TEXT, /quit (or Ctrl-D).
    Ctrl-C ends the answer at hand. Without a terminal, each line of standard input is a turn.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with contextlib.ExitStack() as stack:
        if model is not None:
            config, _ = stack.enter_context(private_node(model, 1, quiet=False))
            client = stack.enter_context(Client(config.run_path))
        else:
            path = find_run_dir(run_dir)
            client = stack.enter_context(open_client(path))
            config = load_config(path)
        Conversation(client, config, system, think, options).run()


class Conversation:
    """The turns so far, and how the next one is asked for."""

    def __init__(
        self,
        client: Client,
        config: NodeConfig,
        system: str | None,
        think: bool,
        options: dict[str, Any],
    ) -> None:
        # Loaded here: other commands need neither the tokenizer nor the recipe.
        from phalanx.services.http.recipe import model_of
        from phalanx.services.model_limits import read_model
        from phalanx.services.tokenizer.core import load_tokenizer

        limits = read_model(config.model_path, config.model)
        self._model = model_of(limits, load_tokenizer(config.model_path))
        self._client, self._system, self._think = client, system, think
        self._options = {name: value for name, value in options.items() if value is not None}
        self._turns: list[dict[str, str]] = []

    def run(self) -> None:
        interactive = sys.stdin.isatty()
        if interactive:
            errors.print(f"{self._model.name}: {_HELP}", style="dim")
        while (line := self._read(interactive)) is not None:
            line = line.strip()
            if not line:
                continue
            if line.startswith("/"):
                if not self._obey(line):
                    return
                continue
            try:
                self._turn(line)
            except PhalanxError as error:
                errors.print(f"[red]{error}[/]")
                if not interactive:
                    raise

    def _read(self, interactive: bool) -> str | None:
        try:
            return input("> ") if interactive else sys.stdin.readline() or None
        except (EOFError, KeyboardInterrupt):
            return None

    def _obey(self, line: str) -> bool:
        """False when the conversation is over."""
        command, _, rest = line.partition(" ")
        match command:
            case "/quit":
                return False
            case "/reset":
                self._turns.clear()
            case "/think" if rest in ("on", "off"):
                self._think = rest == "on"
            case "/system":
                self._system = rest or None
            case _:
                errors.print(_HELP, style="dim")
        return True

    def _turn(self, text: str) -> None:
        """One question and its answer, which join the turns unless it was refused."""
        from phalanx.services.http import recipe
        from phalanx.services.http.replies import Started

        system = [{"role": "system", "content": self._system}] if self._system else []
        asked_turn = {"role": "user", "content": text}
        body = self._options | {
            "messages": [*system, *self._turns, asked_turn],
            "thinking": {"type": "enabled" if self._think else "disabled"},
            "stream": True,
        }
        asked = recipe.ask(recipe.CHAT, body, self._model)
        stream = self._client.generate(asked.specs[0]).accepted()
        reply = asked.reply()
        shown = _Shown()
        shown.take(reply.begin([Started(stream.request_id, stream.prompt_tokens)]))
        try:
            for event in stream:
                shown.take(reply.take(0, event))
        except KeyboardInterrupt:
            stream.abort()
        shown.end()
        self._turns += [asked_turn, {"role": "assistant", "content": shown.content}]


class _Shown:
    """An answer on the terminal as it comes."""

    def __init__(self) -> None:
        self.content = ""
        self._thinking = False

    def take(self, events: list[Any]) -> None:
        for event in events:
            for choice in msgspec.json.decode(event.data)["choices"]:
                delta = choice["delta"]
                if thought := delta.get("reasoning_content"):
                    self._thinking = True
                    _write(thought, "dim italic")
                if text := delta.get("content"):
                    if self._thinking:
                        console.print("\n")
                        self._thinking = False
                    self.content += text
                    _write(text)

    def end(self) -> None:
        console.print()


def _write(text: str, style: str = "none") -> None:
    """As it is. A `Text` would break lines and count tabs anew in each piece in which an answer comes."""
    segment = Segment(strip_control_codes(text), console.get_style(style))
    console.print(Segments([segment]), end="", soft_wrap=True)
