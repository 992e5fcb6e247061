"""`phalanx inject` on a real node: it heals with every token unchanged; a node not started for it refuses."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def faulty(start_node: Callable[..., Node]) -> Node:
    return start_node(2, "--inject")


def test_a_lost_gpu_changes_no_token(faulty: Node) -> None:
    requests = others(6)
    fault_free = tokens(faulty.generate(requests))
    pids = faulty.pids()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(tokens(faulty.generate(requests))))
    thread.start()
    wait_for(lambda: faulty.running() > 0, 60, "running requests")
    (answer,) = faulty("inject", "gpu-loss", "random:worker")
    (victim,) = answer["injected"]
    thread.join(240)
    assert got and got[0] == fault_free
    wait_for(lambda: bool(faulty.status()["healthy"]), 60, "healthy again")
    now = faulty.pids()
    assert {name for name in pids if pids[name] != now[name]} == {victim}
    assert_whole(faulty)


def test_listing_hurts_nothing_and_nonsense_is_refused(faulty: Node) -> None:
    pids = faulty.pids()
    assert faulty("inject", "list", "worker") == [{"injected": ["worker-0", "worker-1"]}]
    faulty("inject", "kill", "nobody", code=2)
    faulty("inject", "melt", "worker", code=2)
    assert faulty.pids() == pids


def test_a_node_that_was_not_started_for_it_refuses(node: Node) -> None:
    pids = node.pids()
    node("inject", "kill", "worker", code=4)
    assert node.pids() == pids
