"""A survivor that loads the experts of a lost rank looks up: when the group changes anew it says so at once."""

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.protocol.board import Board
from phalanx.protocol.errors import EpochChanged
from phalanx.protocol.placement import initial_placement
from phalanx.worker_svc.backend import ModelBackend

LAYERS, EXPERTS = 4, 8


class Slots:
    """Weights that hold nothing yet. `on_load` is told of each expert that is read, with their number."""

    def __init__(self, on_load: Callable[[int], None]) -> None:
        self.held = [[-1] * EXPERTS for _ in range(LAYERS)]
        self.loads, self._on_load = 0, on_load

    def widen(self, layer: int, slots: int) -> None:
        pass

    def slots(self, layer: int) -> tuple[int, ...]:
        return tuple(self.held[layer])

    def load_expert(self, layer: int, expert: int) -> None:
        self.loads += 1
        self._on_load(self.loads)

    def put_expert(self, layer: int, slot: int, expert: int, matrices: None) -> None:
        self.held[layer][slot] = expert


def test_who_falls_meanwhile_ends_the_load() -> None:
    board = Board.create(f"prep{uuid.uuid4().hex[:8]}")
    try:
        board.set_epoch(3, [])
        weights = Slots(lambda loads: board.set_epoch(5 if loads == 3 else board.epoch, []))
        backend: Any = ModelBackend.__new__(ModelBackend)
        row = board.processes[0]
        backend._service = SimpleNamespace(board=board, row=row, beat=lambda: None)
        backend._weights, backend._seat = weights, 0
        placement = initial_placement(LAYERS, EXPERTS, [0], EXPERTS)
        with pytest.raises(EpochChanged, match="epoch 4 will not run"):
            backend._load_experts(4, placement)
        assert weights.loads == 3 and row.progress == 3, "each is a step forward"
        assert backend._load_experts(6, placement) == LAYERS * EXPERTS - 3, (
            "they are not read again"
        )
        assert weights.held == [list(range(EXPERTS))] * LAYERS
    finally:
        board.close()
