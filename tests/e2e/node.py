"""Requests and readings of results for the tests of real nodes; the node itself is `phalanx.testing`."""

import os
import random
from pathlib import Path
from typing import Any

from phalanx.testing.node import PHALANX, Node, assert_whole, wait_for

__all__ = ["PHALANX", "Node", "assert_whole", "family", "others", "rss", "tokens", "wait_for"]

Rows = dict[tuple[int, int], tuple[str, list[int], str]]


def tokens(rows: list[dict[str, Any]]) -> Rows:
    """(position, index) -> (finish reason, token ids, text)."""
    return {
        (r["position"], r["index"]): (r["finish_reason"], r["token_ids"], r["text"]) for r in rows
    }


def others(count: int, tokens_max: int = 80) -> list[dict[str, Any]]:
    """Requests of mixed lengths and sampling; ids that any tokenizer has."""
    rng = random.Random(5)
    return [
        {
            "prompt_token_ids": [
                rng.randrange(10, 200) for _ in range(rng.choice([1, 9, 130, 300]))
            ],
            "max_tokens": min(rng.choice([8, 40, 80]), tokens_max),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([0.9, 1.0]),
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


def family(pid: int) -> dict[int, str]:
    """The state of every process below this one, whoever knows of it: `Z` is a zombie."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)] = int(parent)
        states[int(path.parent.name)] = state

    def below(one: int) -> bool:
        while one in parents and one != pid:
            one = parents[one]
        return one == pid

    return {one: state for one, state in states.items() if one != pid and below(one)}


def rss(pid: int) -> int:
    """Bytes in memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
