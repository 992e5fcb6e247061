"""Log-probabilities of prompts on real nodes: one answer, whatever the steps, with siblings, and through the
loss of the worker that was in the middle of the prompt."""

import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, assert_whole, wait_for
from phalanx.protocol.config import node_name
from phalanx.protocol.queues import read_queues
from phalanx.services.client import Client, Result

pytestmark = pytest.mark.process

PROMPT = random.Random(5).choices(range(3, 500), k=700)
ASK = {"max_tokens": 3, "seed": 5, "ignore_eos": True, "prompt_logprobs": 2, "logprobs": 1}


def told(result: Result) -> tuple[object, ...]:
    return result.prompt_logprobs, result.token_ids, result.logprobs, result.usage


@pytest.fixture(scope="module")
def quiet(node: Node) -> Result:
    with Client(node.run_dir) as client:
        return client.generate(PROMPT, **ASK).results()[0]


def test_every_prompt_token_but_the_first_has_an_entry(node: Node, quiet: Result) -> None:
    first, *others = quiet.prompt_logprobs
    assert first is None and len(others) == len(PROMPT) - 1
    for token, entry in zip(PROMPT[1:], others, strict=True):
        assert entry is not None and math.isfinite(entry.logprob) and entry.rank >= 1
        assert len(entry.top_ids) == 2 and entry.top_logprobs[0] >= entry.top_logprobs[1]
        assert (token in entry.top_ids) == (entry.rank <= 2)
        if entry.rank <= 2:
            place = entry.rank - 1
            assert (entry.top_ids[place], entry.top_logprobs[place]) == (token, entry.logprob)
    assert len({entry.rank for entry in others if entry is not None}) > 100


def test_scoring_alone_and_siblings_say_the_same(node: Node, quiet: Result) -> None:
    head = PROMPT[:300]
    with Client(node.run_dir) as client:
        alone = client.generate(head, **{**ASK, "max_tokens": 0}).results()[0]
        family = client.generate(head, n=3, stream=False, **ASK).results()
    assert (alone.finish_reason, alone.token_ids, alone.text) == ("length", (), "")
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (300, 0)
    assert alone.prompt_logprobs == quiet.prompt_logprobs[:300]
    assert [bool(one.prompt_logprobs) for one in family] == [True, False, False]
    assert family[0].prompt_logprobs == alone.prompt_logprobs
    assert_whole(node)


@pytest.mark.soak
def test_small_steps_and_a_killed_worker_change_nothing(
    start_node: Callable[..., Node], quiet: Result, tmp_path: Path
) -> None:
    """Another budget of rows a step; then kill -9 in the middle of the prompt."""
    config = tmp_path / "small.json"
    config.write_text('{"scheduler": {"max_num_batched_tokens": 40, "max_num_seqs": 8}}')
    small = start_node(2, "--config", config)
    pids = small.pids("worker-")
    with Client(small.run_dir) as client:
        assert told(client.generate(PROMPT, **ASK).results()[0]) == told(quiet)
        stream = client.generate(PROMPT, **ASK)
        stream.accepted()
        # Questions make the client read what has come.
        wait_for(lambda: bool(client.stats() and stream.prompt_logprobs), 60, "the first ones")
        (seat,) = [row["slot"] for row in read_queues(node_name(small.run_dir))["requests"]]
        os.kill(pids[f"worker-{seat}"], signal.SIGKILL)
        assert len(stream.prompt_logprobs) < len(PROMPT)
        assert told(stream.results()[0]) == told(quiet)
    (history,) = small("epochs")
    assert any(record["moved_requests"] == 1 for record in history)
    small.wait_healthy()
    assert_whole(small)
