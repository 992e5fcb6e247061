"""A rank falls while every queue is full: whatever was accepted is finished, what moved goes ahead of what waits,
and what comes on top is refused before it is accepted."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, wait_for
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Sampling
from phalanx.protocol.queues import read_queues
from phalanx.services.client import Client, Spec

pytestmark = [pytest.mark.process, pytest.mark.soak]  # minutes on a busy machine

REQUESTS = 18
CAPACITY = 4  # sequences that the gateway gives a rank


def specs() -> list[Spec]:
    rng = random.Random(3)
    lengths = [rng.choice([1, 9, 130]) for _ in range(REQUESTS)]
    prompts = [[rng.randrange(10, 200) for _ in range(length)] for length in lengths]
    return [
        Spec(tuple(prompt), Sampling(seed=at, max_tokens=24, ignore_eos=True))
        for at, prompt in enumerate(prompts)
    ]


def test_a_rank_lost_under_full_queues_loses_no_stream(
    start_node: Callable[..., Node], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    scheduler = {"max_num_seqs": 2, "max_waiting": CAPACITY}
    gateway = {"max_open_requests": REQUESTS}
    config.write_text(json.dumps({"scheduler": scheduler, "gateway": gateway}))
    node = start_node(3, "--config", config)
    fault_free = node.run(specs())
    victim = node.pids()["worker-1"]

    def held() -> Counter[int]:
        """Sequences by rank."""
        return Counter(r["slot"] for r in read_queues(node_name(node.run_dir))["requests"])

    def full() -> bool:
        ranks = read_queues(node_name(node.run_dir))["ranks"]
        return all((r["running"], r["waiting"]) == (2, CAPACITY - 2) for r in ranks)

    def fall() -> None:
        wait_for(full, 60, "full queues")
        with Client(node.run_dir) as client, pytest.raises(Refused) as refused:
            client.generate([5, 6], max_tokens=3).accepted()
        assert refused.value.code is Code.OVERLOADED and refused.value.retry_after_ms > 0
        os.kill(victim, signal.SIGKILL)
        # What the others wait with does not hold it up: they are given more than their share.
        wait_for(lambda: max(held()[0], held()[2]) > CAPACITY, 20, "moved to ranks that are full")

    assert node.run(specs(), fall) == fault_free
    node.wait_healthy()
    wait_for(node.whole, 60, "every block and slot back")
