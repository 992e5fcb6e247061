"""Experts move from rank to rank while streams run: no token changes."""

import pytest

from e2e.field import specs
from e2e.moving import mover
from phalanx.protocol.placement import EMPTY
from phalanx.testing.node import Node

pytestmark = pytest.mark.process


def apart(held: list[list[int]], layer: int) -> None:
    """Two ranks that hold everything let go of two experts each: then there is one copy of those."""
    for seat, row in enumerate(held):
        for expert in (2 * seat, 2 * seat + 1):
            row[row.index(expert)] = EMPTY


def back(held: list[list[int]], layer: int) -> None:
    """They return, each to the other one's slot."""
    for seat, row in enumerate(held):
        first, second = (slot for slot, expert in enumerate(row) if expert == EMPTY)
        row[first], row[second] = 2 * seat + 1, 2 * seat


def test_no_token_changes_when_experts_move(node: Node) -> None:
    asked = specs(30)
    fault_free = node.run(asked)
    pids = node.pids("worker")

    def meanwhile() -> None:
        with mover(node) as experts:
            experts.move(apart)
            experts.move(back)

    assert node.run(asked, meanwhile) == fault_free
    assert node.pids("worker") == pids
