"""`phalanx chat` on a real node: turns, commands, and the same answers for the same questions."""

import subprocess

import pytest

from e2e.node import PHALANX, Node

pytestmark = pytest.mark.process


def say(node: Node, text: str, *more: str) -> str:
    command = [*PHALANX, "chat", "--run-dir", str(node.run_dir), "--max-tokens", "64", *more]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversation_remembers_until_it_is_reset(node: Node) -> None:
    ask = ("--no-think", "--seed", "3")
    # The tiny model listens mostly to the last words: only a longer answer tells two histories apart.
    first, second = "Hello\n", "And then?\n"
    alone = say(node, second, *ask)
    both = say(node, first + second, *ask)
    assert both.startswith(say(node, first, *ask)) and not both.endswith(alone)
    assert say(node, f"{first}/reset\n{second}/quit\nnever asked\n", *ask).endswith(alone)
    assert say(node, f"/system Be brief.\n{second}", *ask) != alone
