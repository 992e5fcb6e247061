"""What a rank receives into: fresh memory in every epoch, and when /dev/shm is full the one it has, once nobody
else stores there."""

import os
import uuid
from collections.abc import Iterator

import pytest
import torch

from phalanx.protocol import arena as arenas
from phalanx.protocol.arena import Arena
from phalanx.protocol.board import Board
from phalanx.protocol.errors import ArenaError, NoRoom
from phalanx.worker_svc import exchange
from phalanx.worker_svc.exchange import Exchange, Inbox, Region, Shape, source_part
from phalanx.worker_svc.group import Group

SHAPE = Shape(4, 8)


@pytest.fixture
def node() -> Iterator[str]:
    name = f"test{uuid.uuid4().hex[:8]}"
    yield name
    assert arenas.names(name) == []


def region(node: str, seats: int = 2) -> Region:
    return Region(node, 0, 1, seats, SHAPE, newcomer=False)


def no_room(name: str, nbytes: int, owner: str = "", *, keep_free: int = 0) -> Arena:
    raise NoRoom("full")


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.Arena, "create", no_room)


class Turns:
    """Says that the epoch is over when it was asked so often."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_with_room_every_epoch_has_fresh_memory(node: str) -> None:
    held = region(node)
    first = held.enter(2, 2, Turns(1))
    second = held.enter(4, 2, Turns(1))
    assert first is not None and second is not None and second is not first
    assert arenas.names(node) == [held.name(4)], "the old name is gone"
    held.close()


def test_what_a_dying_peer_still_stores_lands_where_nobody_reads(node: str) -> None:
    """As the first exchange of the new epoch has it, number and all: of that nothing has come."""
    held = region(node)
    first = held.enter(2, 2, Turns(1))
    assert first is not None
    dying = Inbox(source_part(first, 1, SHAPE), SHAPE)
    second = held.enter(4, 2, Turns(1))
    assert second is not None
    for number in (1, 2):
        rows = torch.full((4, 8), 9.0, dtype=torch.bfloat16)
        dying.store_dispatch(number, torch.ones(4, dtype=torch.int32), torch.ones(4), rows)
        dying.store_combine(number, rows)
        assert not any(second.data), "fresh memory, and none but its own"
    del dying
    held.close()


def test_without_room_the_old_memory_serves_again_and_tells_no_old_tale(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = region(node)
    full(monkeypatch)
    first = held.enter(2, 2, Turns(1))
    assert first is not None, "it was there before"
    rows = torch.ones(3, 8, dtype=torch.bfloat16)
    peer = Inbox(source_part(first, 1, SHAPE), SHAPE)
    peer.store_dispatch(7, torch.zeros(3, dtype=torch.int32), torch.ones(3), rows)
    peer.store_combine(7, rows)
    second = held.enter(4, 2, Turns(1))
    assert second is first and arenas.names(node) == [held.name(4)]
    assert [list(h) for h in (peer.dispatch_header, peer.combine_header)] == [[0, 0], [0, 0]]
    with pytest.raises(ArenaError):
        Arena.attach(held.name(2), writes=True)
    del peer
    held.close()


def test_who_cannot_reach_a_peer_holds_no_other(node: str) -> None:
    """It tries again until the peer's STOP comes: each time one more file of those that are there, were they
    kept. And a peer that lives may have its memory back."""
    board = Board.create(node)
    held = [Region(node, seat, 1, 3, SHAPE, newcomer=False) for seat in range(2)]  # seat 2 fell
    own, peers = (region.enter(2, 3, Turns(1)) for region in held)
    assert own is not None and peers is not None
    exchange = Exchange(held[0], 2, [0, 1, 2], own)
    group = Group(board, 0, [0, 1, 2], 2, lambda: None)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ArenaError, match="cannot attach"):
            exchange.connect(group, {0: 1, 1: 1, 2: 1})
        assert len(os.listdir("/proc/self/fd")) == before
        assert not peers.written_by_others()
    exchange.close()
    for region in held:
        region.close()
    board.close()


def test_it_waits_for_whoever_may_still_store_there(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = region(node)
    full(monkeypatch)
    first = held.enter(2, 2, Turns(1))
    dying = Arena.attach(held.name(2), writes=True)
    assert held.enter(4, 2, Turns(3)) is None, "the epoch was over before the peer was gone"
    turns = Turns(3)

    def over() -> bool:
        if turns.left == 1:
            dying.close()
        return turns()

    assert held.enter(6, 2, over) is first
    assert arenas.names(node) == [held.name(6)]
    held.close()


def test_a_larger_group_needs_larger_memory(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = region(node)
    grown = held.enter(2, 3, Turns(1))
    assert grown is not None and grown.nbytes == 3 * SHAPE.source_bytes
    full(monkeypatch)
    assert held.enter(6, 4, Turns(3)) is None, "what it had is too small"
    held.close()


def test_who_finds_no_room_fails_before_it_joins(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch)
    with pytest.raises(NoRoom):
        region(node)


def test_a_newcomer_leaves_room_for_those_who_have_to_grow(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def create(name: str, nbytes: int, owner: str = "", *, keep_free: int = 0) -> Arena:
        asked.append(keep_free)
        raise NoRoom("full")

    monkeypatch.setattr(exchange.Arena, "create", create)
    for newcomer in (False, True):
        with pytest.raises(NoRoom):
            Region(node, 0, 1, 3, SHAPE, newcomer=newcomer)
    assert asked[1] - asked[0] == 3 * 3 * SHAPE.source_bytes
