"""A rank that computes one ulp wrong: its streams change, which the tests that compare can see, and the scrubber
names it."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, wait_for
from phalanx.protocol.messages import Difference, StatusQuery, StatusReply
from phalanx.services.client import Client
from phalanx.supervisor.ask import ask

pytestmark = pytest.mark.process

NOISY = 1


def difference(client: Client, request_id: str, seat: int) -> Difference | None:
    """What a replay on the rank finds; once more when the rank was lost meanwhile (a starved machine)."""
    deadline = time.monotonic() + 120
    while True:
        (sequence,) = client.replay(request_id, seat=seat).sequences
        lost = sequence.difference is not None and sequence.difference.what == "error"
        if not lost or time.monotonic() > deadline:
            return sequence.difference
        time.sleep(0.2)


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
        assert status().scrubbed.differed == 0

        node("inject", "ulp", f"worker-{NOISY}")
        assert difference(client, ids[0], 0) is None  # the noise is in one rank's rows
        found = [difference(client, request_id, NOISY) for request_id in ids]
        changed = [one for one in found if one is not None and one.what == "token"]
        assert changed, "one ulp changed no token: then no test that compares them could fail"
        wait_for(lambda: bool(status().scrubbed.findings), 120, "found")
    finding = status().scrubbed.findings[0]
    assert (finding.seats, finding.against) == ((NOISY,), (0, 2))
    assert not status().healthy
    assert f"worker-{NOISY} computes other bits" in status().processes[0].detail

    node("inject", "clear", "all")
    os.kill(node.pids()[f"worker-{NOISY}"], signal.SIGKILL)
    wait_for(lambda: status().scrubbed.findings == (), 120, "forgotten with that worker")
    assert "the scrubber" not in status().processes[0].detail
