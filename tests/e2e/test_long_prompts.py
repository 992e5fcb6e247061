"""A node that computes prompts for a long time gives no token, and is as well as one that does."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, wait_for
from phalanx.protocol.config import node_name
from phalanx.protocol.messages import Sampling
from phalanx.protocol.queues import read_queues
from phalanx.services.client import Client, Spec

pytestmark = [pytest.mark.process, pytest.mark.soak]  # half a minute
CHUNK, STEPS, STEP_MS = 64, 44, 500


def test_prompts_without_output_for_20_s_are_progress(
    start_node: Callable[..., Node], tmp_path: Path
) -> None:
    """Every step is slow, and none ends a prompt: longer than a silent process may be silent, many times over."""
    config = tmp_path / "node.json"
    config.write_text(json.dumps({"scheduler": {"max_num_batched_tokens": CHUNK}}))
    node = start_node(2, "--inject", "--device", "null", "--config", config)
    requests = [
        Spec([10 + at] * (CHUNK * STEPS), Sampling(seed=at, max_tokens=4, ignore_eos=True))
        for at in range(2)
    ]
    fault_free, before = node.run(requests), node.look()
    node.inject("slow", "worker-0", ms=STEP_MS)
    looks, over = list[tuple[str, ...]](), threading.Event()

    def watch() -> None:
        with Client(node.run_dir) as client:
            while not over.wait(0.05):
                looks.append(client.health().reasons)

    def outputs() -> int:
        held = read_queues(node_name(node.run_dir))["requests"]
        return sum(request["output_tokens"] for request in held)

    watcher, began = threading.Thread(target=watch), time.monotonic()
    silent_s = [0.0]

    def meanwhile() -> None:
        watcher.start()
        wait_for(lambda: outputs() > 0, 120, "the first token")
        silent_s[0] = time.monotonic() - began

    try:
        assert node.run(requests, meanwhile) == fault_free
    finally:
        over.set()
        watcher.join()
        node.clear("worker-0")
    assert silent_s[0] > 20
    assert looks and set(looks) == {()}
    after = node.look()
    assert after.epochs == before.epochs
    assert {p.name: p.pid for p in after.processes} == {p.name: p.pid for p in before.processes}
