"""Fixtures for pytest: `pytest_plugins = ["phalanx.testing.plugin"]`."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.protocol import arena
from phalanx.protocol.config import node_name
from phalanx.testing.node import PHALANX, Node, wait_for


def _nodes(session: pytest.Session) -> Iterator[Callable[..., Node]]:
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
        log = node.run_dir / "logs" / "supervisor.log"
        if session.testsfailed and log.exists():
            print(f"--- supervisor of {node.run_dir}")
            print(log.read_text()[-8000:])
        left = [name for name in node.names() if arena.kind_of(name) != arena.TOKENS]
        arena.sweep(node_name(node.run_dir))  # of one that failed the token log is left
        shutil.rmtree(node.run_dir, ignore_errors=True)
        assert left == []


@pytest.fixture(scope="module")
def start_node(request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """Start a node: `start_node(ranks, *options of phalanx up)`. It is stopped after the module's last test.

    After a failure the supervisors' logs are shown: they tell what fell and why.
    """
    yield from _nodes(request.session)


@pytest.fixture(scope="session")
def start_session_node(request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """The same, for a node that the tests of a session share: stopped after the last of all tests."""
    yield from _nodes(request.session)


@pytest.fixture(scope="session")
def session_node(start_session_node: Callable[..., Node]) -> Node:
    return start_session_node(2, "--inject")


@pytest.fixture
def phalanx_node(session_node: Node) -> Iterator[Node]:
    """A node of two ranks that obeys `inject`, healthy and without faults; shared by the session's tests,
    which may break anything but the supervisor. Afterwards it must heal and have nothing left."""
    session_node.wait_healthy()
    yield session_node
    session_node.clear()
    session_node.wait_healthy()
    wait_for(session_node.whole, 60, "nothing left")
