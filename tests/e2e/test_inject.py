"""`phalanx inject` on a real node: it heals with every token unchanged; a node not started for it refuses."""

import threading
from typing import Any

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for

pytestmark = pytest.mark.process


@pytest.mark.soak  # as a killed worker
def test_a_lost_gpu_changes_no_token(phalanx_node: Node) -> None:
    requests = others(6)
    fault_free = tokens(phalanx_node.generate(requests))
    pids = phalanx_node.pids()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(tokens(phalanx_node.generate(requests))))
    thread.start()
    wait_for(lambda: phalanx_node.running() > 0, 60, "running requests")
    (answer,) = phalanx_node("inject", "gpu-loss", "random:worker")
    (victim,) = answer["injected"]
    thread.join(240)
    assert got and got[0] == fault_free
    phalanx_node.wait_healthy()
    now = phalanx_node.pids()
    assert {name for name in pids if pids[name] != now[name]} == {victim}
    assert_whole(phalanx_node)


def test_listing_hurts_nothing_and_nonsense_is_refused(phalanx_node: Node) -> None:
    pids = phalanx_node.pids()
    assert phalanx_node("inject", "list", "worker") == [
        {"injected": ["worker-0", "worker-1"], "armed": []}
    ]
    assert phalanx_node("inject", "list") == phalanx_node("inject", "list", "all")
    phalanx_node("inject", "kill", code=2)
    phalanx_node("inject", "kill", "nobody", code=2)
    phalanx_node("inject", "melt", "worker", code=2)
    assert phalanx_node.pids() == pids


def test_a_node_that_was_not_started_for_it_refuses(node: Node) -> None:
    pids = node.pids()
    node("inject", "kill", "worker", code=4)
    assert node.pids() == pids
