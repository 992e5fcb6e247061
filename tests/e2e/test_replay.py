"""`phalanx replay` on a real node: what was delivered is made again, on every rank, to the last bit."""

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from e2e.node import Node, assert_whole
from phalanx.protocol.messages import Sampling
from phalanx.services.client import Client, Spec, Stream

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
    assert node("replay", row["request_id"], "--rank", "9", code=2) == []


# Of each kind: sequences, and how their tokens are chosen.
KINDS = {
    "two sequences, no seed, logprobs": (2, Sampling(logprobs=2)),
    "penalties, banned tokens": (
        1,
        Sampling(
            repetition_penalty=1.2,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logit_bias={40: 2.0},
            blocked_token_ids=(41, 42),
            logprobs=1,
        ),
    ),
    "stop strings": (1, Sampling(stop=("e", "qu"), min_tokens=3)),
    "stop tokens": (2, Sampling(stop_token_ids=tuple(range(20, 60)), min_tokens=20)),
    "drafts": (1, Sampling(predicted_token_ids=(50,) * 30, temperature=0.3, logprobs=0)),
    "forced": (1, Sampling(forced_token_ids=(50, 51, 52, 50), logprobs=3, raw_logprobs=True)),
    "prompt logprobs": (2, Sampling(prompt_logprobs=2)),
    "a long prompt": (1, Sampling(top_k=9, min_p=0.02)),
}


def start(client: Client, kinds: Iterable[str]) -> list[Stream]:
    rng = random.Random(3)
    streams = []
    for kind in kinds:
        n, sampling = KINDS[kind]
        sampling = msgspec.structs.replace(sampling, max_tokens=24, ignore_eos=True)
        ids = [rng.randrange(10, 200) for _ in range(400 if "long" in kind else 20)]
        streams.append(client.generate(Spec(ids, sampling, n=n), timeout=120))
    for stream in streams:
        stream.accepted()
    return streams


def test_requests_of_every_kind_that_moved_are_made_again(phalanx_node: Node) -> None:
    node = phalanx_node
    with Client(node.run_dir) as client:
        known = len(node.look().epochs)
        node.failpoint("worker.step.after_commit", process="worker-1", nth=9)  # amid its outputs
        streams = start(client, KINDS)
        delivered = [stream.results() for stream in streams]
        node.wait_healthy()
        assert sum(record.moved_requests for record in node.look().epochs[known:]) > 0
        for at, (kind, stream, results) in enumerate(zip(KINDS, streams, delivered, strict=True)):
            found = client.replay(stream.request_id, seat=at % 2)
            assert found.equal, (kind, found)
            for one, result in zip(found.sequences, results, strict=True):
                count, scored = len(result.token_ids), kind == "prompt logprobs" and not one.index
                assert (one.tokens, one.compared, one.seat) == (count, "tokens", at % 2)
                assert one.logprobs == (count if KINDS[kind][1].logprobs is not None else 0)
                assert one.prompt_logprobs == (19 if scored else 0)


def test_a_gateway_that_fell_makes_again_what_its_journal_has(phalanx_node: Node) -> None:
    with Client(phalanx_node.run_dir) as client:
        streams = start(client, list(KINDS)[:4])
        delivered = [stream.results() for stream in streams]
        phalanx_node.inject("kill", "gateway")
        for stream, results in zip(streams, delivered, strict=True):
            found = client.replay(stream.request_id)
            assert found.equal, found
            assert [s.tokens for s in found.sequences] == [len(r.token_ids) for r in results]
