"""`phalanx replay` on a real node: what was delivered is made again, on every rank, to the last bit."""

from typing import Any

import pytest

from e2e.node import Node, assert_whole

pytestmark = pytest.mark.process

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "seed": 4, "max_tokens": 24, "logprobs": 3, "n": 2},
    {"prompt": "The sea", "seed": 5, "max_tokens": 24, "stop": ["e", "a"], "top_p": 0.9},
]


def test_a_request_is_made_again_on_every_rank(node: Node) -> None:
    rows = node.generate(REQUESTS)
    for request_id in {row["request_id"] for row in rows}:
        mine = sorted((r for r in rows if r["request_id"] == request_id), key=lambda r: r["index"])
        for rank in (0, 1):
            (found,) = node("replay", request_id[:12], "--rank", rank)
            assert found["equal"] and found["request_id"] == request_id
            assert found["fingerprint"] == found["fingerprint_then"] != ""
            for row, one in zip(mine, found["sequences"], strict=True):
                assert one["tokens"] == len(row["token_ids"]) and one["compared"] == "tokens"
                assert one["logprobs"] == len(row.get("logprobs", []))
                assert (one["seat"], one["difference"]) == (rank, None)
    assert_whole(node)


def test_what_cannot_be_made_again_is_refused(node: Node) -> None:
    assert node("replay", "f" * 32, code=4) == []
    node("replay", "", code=2)
    (row,) = node.generate([REQUESTS[1]])
    (found,) = node("replay", row["request_id"], "--rank", "9", code=4)
    assert found["sequences"][0]["difference"]["what"] == "error"
