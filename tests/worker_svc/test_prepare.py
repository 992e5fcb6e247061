"""A survivor that loads the experts of a lost rank looks up: when the group changes anew it says so at once.
A rank that cannot have an expert beside its steps says why, and nothing else happens.
"""

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.protocol.board import Board
from phalanx.protocol.errors import EpochChanged
from phalanx.protocol.placement import initial_placement
from phalanx.worker_svc.backend import ModelBackend
from phalanx.worker_svc.experts import CopyTable, GroupExperts
from phalanx.worker_svc.model.shards import CheckpointError
from phalanx.worker_svc.rebalance import NotReady

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


GONE = [
    OSError(5, "Input/output error"),
    CheckpointError("model is cut short"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    MemoryError(),
]


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
def test_an_expert_that_cannot_be_had_is_no_reason_to_fall(error: Exception) -> None:
    def fail(loads: int) -> None:
        if loads == 2:
            raise error

    weights, alive = Slots(fail), list[int]()
    backend: Any = ModelBackend.__new__(ModelBackend)
    backend._weights, backend._host, backend._alive = weights, backend, lambda: alive.append(1)
    backend.bring(1, 3, 5)
    with pytest.raises(NotReady, match=r"layer 1, expert 6: \S"):
        backend.bring(1, 4, 6)
    backend.bring(1, 3, 5)
    assert weights.loads == 2 and alive == [1], "what is there is not read again"
    assert weights.held[1][3] == 5 and weights.held[1][4] == -1


def test_tables_without_memory_are_no_reason_to_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*placement: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(CopyTable, "of", fail)
    backend: Any = ModelBackend.__new__(ModelBackend)
    backend._experts = GroupExperts.__new__(GroupExperts)
    backend._experts._coming = []
    backend._experts._weights = SimpleNamespace(device="cuda")
    with pytest.raises(NotReady, match="layer 0: the GPU ran out of memory"):
        backend.lay_out(initial_placement(LAYERS, EXPERTS, [0], EXPERTS), 0)
