"""Real nodes for the tests: started and stopped through the command line, like a user does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.field import Field, specs
from e2e.node import Node
from phalanx.testing.plugin import (
    phalanx_node,
    session_node,
    start_node,
    start_session_node,
)

__all__ = ["phalanx_node", "session_node", "start_node", "start_session_node"]


@pytest.fixture(scope="session")
def node(start_session_node: Callable[..., Node]) -> Node:
    """A node of two ranks that the tests of a session share; they leave it idle and healthy."""
    return start_session_node(2)


@pytest.fixture
def run_dir(node: Node) -> Path:
    return node.run_dir


@pytest.fixture(scope="session")
def control(start_session_node: Callable[..., Node]) -> Field:
    """Three ranks that compute nothing, so that a worker is back in a second: their tokens are a hash."""
    return Field(lambda: start_session_node(3, "--inject", "--device", "null"), specs(400))
