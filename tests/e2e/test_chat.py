"""`phalanx chat` on a real node: turns, commands, and the same answers for the same questions. Its ranks compute
nothing: a token is a hash of all that came before, so that other histories have other answers."""

import subprocess

import pytest

from e2e.field import Field
from e2e.node import PHALANX, Node

pytestmark = pytest.mark.process


def say(node: Node, text: str, *more: str) -> str:
    command = [*PHALANX, "chat", "--run-dir", str(node.run_dir), "--max-tokens", "8", *more]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversation_remembers_until_it_is_reset(control: Field) -> None:
    node = control.healthy_node()
    ask = ("--no-think", "--seed", "3")
    first, second = "Hello\n", "And then?\n"
    alone = say(node, second, *ask)
    both = say(node, first + second, *ask)
    assert both.startswith(say(node, first, *ask)) and not both.endswith(alone)
    assert say(node, f"{first}/reset\n{second}/quit\nnever asked\n", *ask).endswith(alone)
    assert say(node, f"/system Be brief.\n{second}", *ask) != alone
