"""Requests and readings of results for the tests of real nodes; the node itself is `phalanx.testing`."""

import random
from typing import Any

from phalanx.testing.node import PHALANX, Node, assert_whole, wait_for

__all__ = ["PHALANX", "Node", "assert_whole", "others", "tokens", "wait_for"]

Rows = dict[tuple[int, int], tuple[str, list[int], str]]


def tokens(rows: list[dict[str, Any]]) -> Rows:
    """(position, index) -> (finish reason, token ids, text)."""
    return {
        (r["position"], r["index"]): (r["finish_reason"], r["token_ids"], r["text"]) for r in rows
    }


def others(count: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths and sampling; ids that any tokenizer has."""
    rng = random.Random(5)
    return [
        {
            "prompt_token_ids": [
                rng.randrange(10, 200) for _ in range(rng.choice([1, 9, 130, 300]))
            ],
            "max_tokens": rng.choice([8, 40, 80]),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([0.9, 1.0]),
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]
