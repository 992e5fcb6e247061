"""Wrong numbers, and the scrubbers that name them: a rank that computes one ulp wrong, so that its streams change,
and one bit of one expert's weights at one rank."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, wait_for
from phalanx.protocol.errors import Refused
from phalanx.protocol.messages import Difference, ExpertFinding, Sampling, StatusQuery, StatusReply
from phalanx.services.client import Client, Spec
from phalanx.supervisor.ask import ask

pytestmark = pytest.mark.process

NOISY = 1


def difference(client: Client, request_id: str, seat: int) -> Difference | None:
    """What a replay on the rank finds; once more when the rank was lost meanwhile (a starved machine)."""
    deadline = time.monotonic() + 120
    while True:
        try:
            (sequence,) = client.replay(request_id, seat=seat).sequences
        except Refused:
            assert time.monotonic() < deadline, "the rank did not come back"
        else:
            lost = sequence.difference is not None and sequence.difference.what == "error"
            if not lost or time.monotonic() > deadline:
                return sequence.difference
        time.sleep(0.2)


@pytest.fixture(scope="module")
def node(start_node: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory) -> Node:
    config: Path = tmp_path_factory.mktemp("scrubbed") / "config.json"
    every = {"gateway": {"scrub_every_s": 0.1}, "worker": {"scrub_every_s": 0.02}}
    config.write_text(json.dumps(every))
    return start_node(3, "--inject", "--config", config)


def test_a_flipped_bit_of_an_expert_is_named_until_its_worker_is_replaced(node: Node) -> None:
    wrong, layer, expert = 1, 2, 3  # of 10 layers; with three ranks it holds the experts 2 to 4
    requests = [Spec("Once upon a time", Sampling(seed=4, max_tokens=12))]

    def checked(least: int) -> bool:
        found = node.look().scrubbed_experts
        assert found.findings == ()
        return found.slots >= least and found.rows > 0

    right = node.run(requests)
    wait_for(lambda: checked(120), 60, "every slot and some row")
    node.inject("bitflip", f"worker-{wrong}", only=f"{layer}.{expert}")
    finding = ExpertFinding((wrong,), (1,), layer, expert)
    wait_for(lambda: finding in node.look().scrubbed_experts.findings, 60, "found in the slot")
    assert node.run(requests) != right
    ranks = node.look().scrubbed
    wait_for(lambda: node.look().scrubbed.checked > ranks.checked + 1, 60, "ranks compared")
    told = [t for t in node.look().processes[0].detail.split("; ") if "the scrubber" in t]
    named = f"worker-{wrong} holds other bits of expert {expert} of layer {layer}"
    # Ranks that were being compared at that moment may differ, this one from the others.
    assert named in " ".join(told) and all(f"worker-{wrong}" in text for text in told)

    node("restart", f"worker-{wrong}")
    node.wait_healthy()
    assert node.run(requests) == right


def test_a_rank_that_is_one_ulp_off_changes_tokens_and_is_found(node: Node) -> None:
    node.wait_healthy()

    def status() -> StatusReply:
        return ask(node.run_dir, StatusQuery(1), StatusReply, 30.0)

    before = status().scrubbed  # another test of this node had wrong numbers, too
    with Client(node.run_dir) as client:
        ids = []
        for seed in range(2):
            stream = client.generate("The sea", max_tokens=16, ignore_eos=True, seed=seed)
            stream.results()
            ids.append(stream.request_id)
        wait_for(
            lambda: status().scrubbed.checked >= before.checked + 3, 120, "every rank compared"
        )
        assert status().scrubbed.differed == before.differed

        node("inject", "ulp", f"worker-{NOISY}")
        assert difference(client, ids[0], 0) is None  # the noise is in one rank's rows
        found = [difference(client, request_id, NOISY) for request_id in ids]
        changed = [one for one in found if one is not None and one.what == "token"]
        assert changed, "one ulp changed no token: then no test that compares them could fail"
        wait_for(lambda: bool(status().scrubbed.findings), 120, "found")
        assert status().scrubbed_experts.findings == ()  # what experts make of wrong rows is right
    finding = status().scrubbed.findings[0]
    assert (finding.seats, finding.against) == ((NOISY,), (0, 2))
    assert not status().healthy
    assert f"worker-{NOISY} computes other bits" in status().processes[0].detail

    node("inject", "clear", "all")
    os.kill(node.pids()[f"worker-{NOISY}"], signal.SIGKILL)
    wait_for(lambda: status().scrubbed.findings == (), 120, "forgotten with that worker")
    assert "the scrubber" not in status().processes[0].detail
