"""Whatever process is stopped, the node's health names it within a second; one that goes on is named no longer."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from e2e.field import Field
from e2e.node import Node, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timed]


@pytest.mark.parametrize("name", ["worker-1", "gateway"])
def test_a_stopped_process_is_named_within_a_second(control: Field, name: str) -> None:
    check(control.healthy_node(), name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["scheduler-0", "tokenizer-0", "kvstore", "eplb"])
def test_any_stopped_process_is_named_within_a_second(control: Field, name: str) -> None:
    check(control.healthy_node(), name)


@pytest.mark.soak
def test_a_stopped_http_server_is_named_within_a_second(start_node: Callable[..., Node]) -> None:
    check(start_node(1, "--device", "null", "--http", 0), "http")


def check(node: Node, name: str) -> None:
    found = node.process(name)
    assert found is not None

    def told() -> bool:
        return any(f"{name} gives no sign of life" in p.detail for p in node.look().processes)

    os.kill(found.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        wait_for(told, 5, "its name")
        named_s = time.monotonic() - stopped
    finally:
        os.kill(found.pid, signal.SIGCONT)
    assert named_s < 1
    node.wait_healthy()
    now = node.process(name)
    assert now is not None and now.pid == found.pid, "it was not stopped long enough to be killed"
