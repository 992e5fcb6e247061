"""A stream is a function of its request: not of its neighbours, of the ranks, of a restart. Compared with ==."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from e2e.node import Node, assert_whole, others, tokens

pytestmark = pytest.mark.process

REQUEST = {
    "prompt": "Once upon a time there was a small harbour",
    "seed": 7,
    "temperature": 0.8,
    "max_tokens": 64,
    "ignore_eos": True,
}


def test_same_tokens_alone_among_others_on_any_ranks_and_after_a_restart(
    node: Node, start_node: Callable[..., Node]
) -> None:
    (alone,) = tokens(node.generate([REQUEST])).values()
    assert alone[0] == "length" and len(alone[1]) == 64
    crowd = [*others(4), REQUEST, *others(2)]
    among = tokens(node.generate(crowd))
    assert among[4, 0] == alone
    for ranks in (1, 3):
        other = start_node(ranks)
        assert tokens(other.generate([REQUEST]))[0, 0] == alone, f"{ranks} ranks"
        assert tokens(other.generate(crowd)) == among, f"{ranks} ranks, in a crowd"
        if ranks == 1:
            assert other.stop() == {"stopped": True, "left": []}
            assert other.names() == []
            other.start(1)
            assert tokens(other.generate([REQUEST]))[0, 0] == alone, "after down and up"
        other.stop()


def test_two_hundred_requests_of_twenty_clients_each_end_once(node: Node) -> None:
    rng = random.Random(11)
    batches = [
        [
            {
                "prompt_token_ids": [rng.randrange(10, 200) for _ in range(rng.randrange(1, 200))],
                "max_tokens": rng.randrange(1, 24),
                "seed": rng.randrange(1000),
            }
            for _ in range(10)
        ]
        for _ in range(20)
    ]
    answers: list[list[dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda batch=batch: answers.append(node.generate(batch)))
        for batch in batches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    rows = [row for answer in answers for row in answer]
    assert len(rows) == 200
    assert max(Counter(row["request_id"] for row in rows).values()) == 1
    assert {row["finish_reason"] for row in rows} <= {"length", "stop"}
    assert_whole(node)


def test_n_sequences_have_seeds_of_their_own(node: Node) -> None:
    request = {**REQUEST, "n": 3, "max_tokens": 12}
    rows = tokens(node.generate([request]))
    assert len({tuple(ids) for _, ids, _ in rows.values()}) == 3
    assert rows == tokens(node.generate([request]))
    (single,) = tokens(node.generate([{**request, "n": 1}])).values()
    assert rows[0, 0] == single, "index 0 keeps the request's own seed"


def test_stop_strings_cut_at_the_token_that_completes_them(node: Node) -> None:
    (row,) = node.generate([REQUEST])
    stop = row["text"][10:14]
    (cut,) = node.generate([{**REQUEST, "stop": [stop]}])
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == row["text"][: row["text"].index(stop)]
    count = len(cut["token_ids"])
    assert (
        cut["token_ids"] == row["token_ids"][:count] and count == cut["usage"]["completion_tokens"]
    )
    assert_whole(node)


def test_chat_and_stop_ids_and_min_tokens(node: Node) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 1}
    (row,) = node.generate([{**chat, "ignore_eos": True}])
    assert row["finish_reason"] == "length" and row["usage"]["prompt_tokens"] > 2
    stop_id = row["token_ids"][3]
    first = row["token_ids"].index(stop_id)
    (cut,) = node.generate([{**chat, "ignore_eos": True, "stop_token_ids": [stop_id]}])
    assert (cut["finish_reason"], len(cut["token_ids"])) == ("stop", first + 1)
    late = {**chat, "ignore_eos": True, "stop_token_ids": [stop_id], "min_tokens": first + 2}
    (kept,) = node.generate([late])
    assert len(kept["token_ids"]) > first + 1
