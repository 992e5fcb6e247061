"""Seven ranks, of whom one falls, then all others but one: sizes that divide nothing, and the last one standing."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for

pytestmark = [pytest.mark.process, pytest.mark.soak]

RANKS = 7


def test_seven_become_six_and_one_and_no_token_changes(start_node: Callable[..., Node]) -> None:
    node, requests = start_node(RANKS), others(9)
    fault_free = tokens(node.generate(requests))
    for fallen in ([3], [0, 1, 2, 4, 5, 6]):
        assert under_load(node, requests, fallen) == fault_free
        (history,) = node("epochs")
        groups = [record["survivors"] for record in history if record["kind"] == "group"]
        rest = [seat for seat in range(RANKS) if seat not in fallen]
        assert rest in groups, groups
        assert tokens(node.generate(requests)) == fault_free
        assert_whole(node)


def under_load(node: Node, requests: list[dict[str, Any]], fallen: Sequence[int]) -> Any:
    """What comes of the requests while these ranks fall at once; all are back then."""
    pids, got = node.pids(), list[Any]()
    thread = threading.Thread(target=lambda: got.append(tokens(node.generate(requests))))
    thread.start()
    wait_for(lambda: node.running() > 0, 60, "running requests")
    for seat in fallen:
        os.kill(pids[f"worker-{seat}"], signal.SIGKILL)
    thread.join(240)
    node.wait_healthy()
    now = node.pids("worker-")
    assert {name for name in now if now[name] != pids[name]} == {f"worker-{n}" for n in fallen}
    return got[0]
