"""A node that truncates prompts: a stream taken up elsewhere may go on with other tokens, but what was delivered
stays delivered, whoever reads it and whatever died."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, assert_whole
from phalanx.protocol.messages import Delta
from phalanx.services.client import Client

pytestmark = pytest.mark.process

PROMPT = [10 + (7 * at) % 190 for at in range(300)]  # longer than what is not truncated


def test_what_was_delivered_never_changes(start_node: Callable[..., Node], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"worker": {"yoco_truncation": "compact"}}))
    node = start_node(2, "--config", config)
    assert len(node.status()["inexact"]) == 1
    with Client(node.run_dir) as client:
        streams = [
            client.generate(PROMPT, seed=seed, max_tokens=24, ignore_eos=True, logprobs=0)
            for seed in range(2)
        ]
        events = iter(streams[0])
        have: list[int] = []
        while len(have) < 4:
            event = next(events)
            have += event.token_ids if isinstance(event, Delta) else ()
        pids = node.pids()
        for victim in ("worker-0", "gateway", "worker-1"):
            os.kill(pids[victim], signal.SIGKILL)
        results = [stream.results()[0] for stream in streams]
    with Client(node.run_dir) as other:
        for stream, result in zip(streams, results, strict=True):
            (again,) = other.attach(stream.request_id, timeout=60).results()
            assert (again.token_ids, again.text) == (result.token_ids, result.text)
            assert (again.logprobs, again.finish_reason) == (result.logprobs, "length")
    assert list(results[0].token_ids[: len(have)]) == have
    assert [len(result.token_ids) for result in results] == [24, 24]
    node.wait_healthy(120)
    assert_whole(node)
