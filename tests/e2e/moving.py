"""Experts that a test has moved in a node that runs: it proposes placements in the supervisor's stead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from e2e.node import wait_for
from phalanx.protocol.board import Board
from phalanx.protocol.config import node_name
from phalanx.protocol.placement import EMPTY, Placement, widened
from phalanx.protocol.topology import Proposal
from phalanx.testing.node import Node

_FIRST_VERSION = 1_000  # above whatever the supervisor gives


class Mover:
    """Knows what the group runs as long as nobody else moves anything, for one epoch."""

    def __init__(self, board: Board) -> None:
        self.board = board
        topology = board.topology()
        assert topology is not None and topology.placement
        self.epoch, self.seats = topology.epoch, topology.members()
        self.runs = msgspec.msgpack.decode(topology.placement, type=Placement)

    def propose(self, layers: Callable[[list[list[int]], int], None]) -> Placement:
        """What `layers` makes of each layer's slots, by seat; it is told the layer, too."""
        made = []
        for layer, seats in enumerate(self.runs.physical_to_logical):
            held = [list(row) for row in seats]
            layers(held, layer)
            made.append(tuple(map(tuple, held)))
        version = max(self.runs.version + 1, _FIRST_VERSION)
        placement = msgspec.structs.replace(
            self.runs, version=version, physical_to_logical=tuple(made)
        )
        self.board.propose(Proposal(self.epoch, msgspec.msgpack.encode(placement)))
        for seat in self.seats:
            self.board.seats[seat].bell.ring()
        return placement

    def move(self, layers: Callable[[list[list[int]], int], None]) -> None:
        """Propose it, and wait until all run it. The node must take steps meanwhile."""
        placement = self.propose(layers)

        def run() -> bool:
            rows = [self.board.seats[seat] for seat in self.seats]
            return all(row.placement_run == placement.version for row in rows)

        wait_for(run, 60, f"all run placement {placement.version}")
        self.runs = placement

    def widen(self) -> None:
        """Another slot for every seat. Workers without a model have any number of them."""
        self.runs = widened(self.runs, self.runs.slots_per_rank + 1)


@contextmanager
def mover(node: Node) -> Iterator[Mover]:
    board = Board.attach(node_name(node.run_dir))
    try:
        yield Mover(board)
    finally:
        board.close()


def one_more_copy(held: list[list[int]], layer: int) -> None:
    """At every seat."""
    for seat, row in enumerate(held):
        row[row.index(EMPTY)] = (layer + seat) % 2
