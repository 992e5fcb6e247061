"""Ranks without room for all experts, for real: the survivor of three keeps what it has and is waited for."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for
from phalanx.protocol.rundir import read_plans

pytestmark = [pytest.mark.process, pytest.mark.soak]


def test_too_few_survivors_are_kept(start_node: Callable[..., Node], tmp_path: Path) -> None:
    """Eight experts a layer, room for four: two ranks hold them all, one does not."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"worker": {"expert_slots": 4}}))
    node = start_node(3, "--config", config)
    plan = read_plans(node.run_dir)[0]
    assert plan["expert slots of a layer"] == "4 for 8 experts, room for 4"
    assert plan["one rank lost"].endswith("4 slots a rank")
    assert plan["ranks at least"] == "2, of 4 slots each"
    requests = others(6)
    fault_free = tokens(node.generate(requests))

    before, told, got = node.pids(), set[str](), []
    thread = threading.Thread(target=lambda: got.append(tokens(node.generate(requests))))
    thread.start()
    wait_for(lambda: node.running() > 0, 60, "running requests")
    for name in ("worker-0", "worker-1"):
        os.kill(before[name], signal.SIGKILL)

    def stopped() -> bool:
        told.update(p.detail for p in node.look().processes if p.name == "supervisor")
        return any("worker-2 has room for 1 x 4 of 8 experts a layer" in text for text in told)

    wait_for(stopped, 60, "the word of health")
    thread.join(240)
    assert got and got[0] == fault_free
    node.wait_healthy()
    after = node.pids()
    assert {name for name in after if after[name] != before[name]} == {"worker-0", "worker-1"}
    assert_whole(node)
