"""A stream is a function of its request: not of its neighbours, of the ranks, of a restart. Compared with ==."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.node import Node, assert_whole, others, tokens
from phalanx.protocol.messages import Sampling
from phalanx.services.client import Spec

pytestmark = pytest.mark.process

TOKENS = 24
REQUEST = {
    "prompt": "Once upon a time there was a small harbour",
    "seed": 7,
    "temperature": 0.8,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


def test_same_tokens_alone_among_others_on_any_ranks_and_after_a_restart(
    node: Node, start_node: Callable[..., Node]
) -> None:
    (alone,) = tokens(node.generate([REQUEST])).values()
    assert alone[0] == "length" and len(alone[1]) == TOKENS
    crowd = [*others(4, TOKENS), REQUEST, *others(2, TOKENS)]
    among = tokens(node.generate(crowd))
    assert among[4, 0] == alone
    other = start_node(1)
    for ranks in (1, 3):
        assert tokens(other.generate([REQUEST]))[0, 0] == alone, f"{ranks} ranks"
        assert tokens(other.generate(crowd)) == among, f"{ranks} ranks, in a crowd"
        assert other.stop() == {"stopped": True, "left": []}
        assert other.names() == []
        if ranks == 1:
            other.start(3)


def test_two_hundred_requests_of_twenty_clients_each_end_once(node: Node) -> None:
    rng = random.Random(11)
    batches = [
        [
            Spec(
                [rng.randrange(10, 200) for _ in range(rng.randrange(1, 100))],
                Sampling(max_tokens=rng.randrange(1, 12), seed=rng.randrange(1000)),
            )
            for _ in range(10)
        ]
        for _ in range(20)
    ]
    with ThreadPoolExecutor(len(batches)) as clients:
        answers = list(clients.map(node.run, batches))
    assert [len(found) for found in answers] == [10] * 20
    reasons = {reason for found in answers for reason, _, _ in found.values()}
    assert reasons <= {"length", "stop"}
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
