"""What all tests of the worker share: torch with one thread, and a board for ranks that are threads."""

import uuid
from collections.abc import Iterator

import pytest
import torch

from phalanx.protocol import arena
from phalanx.protocol.board import Board


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def board() -> Iterator[Board]:
    """In epoch 2, which nobody has entered."""
    node = f"test{uuid.uuid4().hex[:8]}"
    board = Board.create(node)
    board.set_epoch(2, [])
    yield board
    board.close()
    assert arena.names(node) == []
