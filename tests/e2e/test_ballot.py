"""A node whose ranks vote on prompt steps gives the tokens of one whose steps are mixed, also over faults."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for

pytestmark = [pytest.mark.process, pytest.mark.soak]


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    return others(9)


@pytest.fixture(scope="module")
def mixed(node: Node, requests: list[dict[str, Any]]) -> Any:
    return tokens(node.generate(requests))


@pytest.fixture(scope="module")
def voting(start_node: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Points come often, and prompts take several steps."""
    config: Path = tmp_path_factory.mktemp("ballot") / "config.json"
    scheduler = {
        "policy": "ballot", "prompt_all_steps": 7, "prompt_any_steps": 10, "prompt_steps_max": 2,
        "max_num_batched_tokens": 128,
    }  # fmt: skip
    config.write_text(json.dumps({"scheduler": scheduler}))
    return start_node(2, "--config", config)


def test_tokens_are_those_of_mixed_steps(
    voting: Node, requests: list[dict[str, Any]], mixed: Any
) -> None:
    assert tokens(voting.generate(requests)) == mixed
    assert_whole(voting)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["scheduler-0", "worker-1"])
def test_a_killed_process_changes_no_token(
    voting: Node, requests: list[dict[str, Any]], mixed: Any, victim: str
) -> None:
    pids = voting.pids()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(tokens(voting.generate(requests))))
    thread.start()
    wait_for(lambda: voting.running() > 0, 60, "running requests")
    os.kill(pids[victim], signal.SIGKILL)
    thread.join(240)
    assert got and got[0] == mixed
    voting.wait_healthy()
    assert voting.pids()[victim] != pids[victim]
    assert_whole(voting)
