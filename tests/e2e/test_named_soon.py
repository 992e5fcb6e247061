"""Whatever process is stopped, the node's health names it within a second; one that goes on is named no longer."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from e2e.node import Node, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timed]
KINDS = ("worker-1", "scheduler-0", "gateway", "tokenizer-0", "kvstore", "eplb", "http")


@pytest.fixture(scope="module")
def quick(start_node: Callable[..., Node]) -> Node:
    return start_node(2, "--device", "null", "--http", 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_stopped_process_is_named_within_a_second(quick: Node, name: str) -> None:
    quick.wait_healthy()
    found = quick.process(name)
    assert found is not None

    def told() -> bool:
        return any(f"{name} gives no sign of life" in p.detail for p in quick.look().processes)

    os.kill(found.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        wait_for(told, 5, "its name")
        named_s = time.monotonic() - stopped
    finally:
        os.kill(found.pid, signal.SIGCONT)
    assert named_s < 1
    quick.wait_healthy()
    now = quick.process(name)
    assert now is not None and now.pid == found.pid, (
        "it was not stopped for long enough to be killed"
    )
