"""A rank that computes one ulp wrong: its streams change, which the tests that compare can see, and the scrubber
names it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, wait_for
from phalanx.protocol.messages import StatusQuery, StatusReply
from phalanx.services.client import Client
from phalanx.supervisor.ask import ask

pytestmark = pytest.mark.process

NOISY = 1


def test_a_rank_that_is_one_ulp_off_changes_tokens_and_is_found(
    start_node: Callable[..., Node], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"gateway": {"scrub_every_s": 0.1}}))
    node = start_node(3, "--inject", "--config", config)

    def status() -> StatusReply:
        return ask(node.run_dir, StatusQuery(1), StatusReply, 30.0)

    with Client(node.run_dir) as client:
        ids = []
        for seed in range(2):
            stream = client.generate("The sea", max_tokens=32, ignore_eos=True, seed=seed)
            stream.results()
            ids.append(stream.request_id)
        wait_for(lambda: status().scrubbed.checked >= 3, 120, "every rank compared")
        assert status().scrubbed.differed == 0 and status().healthy

        node("inject", "ulp", f"worker-{NOISY}")
        assert client.replay(ids[0], seat=0).equal  # the noise is in one rank's rows
        again = [client.replay(request_id, seat=NOISY) for request_id in ids]
        assert not all(found.equal for found in again), "then nothing that compares could fail"
        wait_for(lambda: bool(status().scrubbed.findings), 120, "found")
    finding = status().scrubbed.findings[0]
    assert (finding.seats, finding.against) == ((NOISY,), (0, 2))
    assert not status().healthy
    assert f"worker-{NOISY} computes other bits" in status().processes[0].detail

    node("inject", "clear", "all")
    os.kill(node.pids()[f"worker-{NOISY}"], signal.SIGKILL)
    wait_for(lambda: status().scrubbed.findings == (), 120, "forgotten with that worker")
    assert "the scrubber" not in status().processes[0].detail
