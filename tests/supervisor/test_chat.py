"""What `phalanx chat` writes is the text of the answer, in whatever pieces that comes."""

import io
import json
import random
from itertools import pairwise

import pytest
from rich.console import Console

from phalanx.services.http.replies import SSE
from phalanx.supervisor.commands import chat

THOUGHT, ANSWER = "A long thought, and more. " * 9 + "\tThus:\n\n", "One\ttwo 世界 " * 30


def pieces(text: str, cuts: list[int], name: str) -> list[SSE]:
    deltas = [{name: text[start:end]} for start, end in pairwise([0, *cuts, len(text)])]
    return [SSE(json.dumps({"choices": [{"delta": delta}]}).encode()) for delta in deltas]


@pytest.mark.parametrize("terminal", [False, True])
def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Lines were broken, and spaces dropped, where a piece after a fault was longer than a line."""
    rng = random.Random(3)
    for most in (0, 1, 9, 200):
        out = io.StringIO()
        colors = "standard" if terminal else None
        monkeypatch.setattr(chat, "console", Console(file=out, width=80, color_system=colors))
        shown = chat._Shown()
        for text, name in ((THOUGHT, "reasoning_content"), (ANSWER, "content")):
            cuts = sorted(rng.sample(range(1, len(text)), most))
            shown.take(pieces(text, cuts, name))
        shown.end()
        said = out.getvalue()
        for code in ("\x1b[2;3m", "\x1b[0m"):
            assert (code in said) is terminal
            said = said.replace(code, "")
        assert said == f"{THOUGHT}\n\n{ANSWER}\n"
        assert shown.content == ANSWER
