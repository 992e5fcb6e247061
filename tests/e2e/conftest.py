"""Real nodes for the tests: started and stopped through the command line, like a user does."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.node import PHALANX, Node


@pytest.fixture(scope="session")
def start_node(request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """Start a node of its own for a test; whatever is left of it at the end is stopped.

    After a failure the supervisors' logs are shown: they tell what fell and why.
    """
    started: list[Node] = []

    def start(ranks: int, *more: object) -> Node:
        node = Node(Path(tempfile.mkdtemp(prefix="phe2e")))
        started.append(node)
        node.start(ranks, *more)
        return node

    yield start
    for node in started:
        down = [*PHALANX, "down", "--run-dir", str(node.run_dir), "--timeout", "1"]
        subprocess.run(down, capture_output=True, check=False, timeout=60)
        if request.session.testsfailed:
            print(f"--- supervisor of {node.run_dir}")
            print((node.run_dir / "logs" / "supervisor.log").read_text()[-8000:])
        shutil.rmtree(node.run_dir, ignore_errors=True)
        assert node.names() == []


@pytest.fixture(scope="session")
def node(start_node: Callable[..., Node]) -> Node:
    """A node of two ranks that the tests of a session share; they leave it idle and healthy."""
    return start_node(2)


@pytest.fixture
def run_dir(node: Node) -> Path:
    return node.run_dir
