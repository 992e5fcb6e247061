"""Regions of the staging arena change hands: what the KV store was asked for before finds that out."""

import uuid
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.protocol.arena import Arena, Handle, arena_name
from phalanx.protocol.errors import StaleHandle
from phalanx.protocol.messages import Get
from phalanx.scheduler_svc import main
from phalanx.scheduler_svc.main import Shell


def test_the_generation_of_a_region_moves_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Arena.create(arena_name(f"t{uuid.uuid4().hex[:8]}", "stage0", "1.1"), 4096) as arena:

        def get(generation: int) -> Get:
            return Get(generation, b"key", Handle(arena.name, 512, 64, (64,), "u1", 3, generation))

        sent: list[int] = []

        def send(socket: object, frame: bytes) -> bool:
            sent.append(arena.generation(3))
            return len(sent) < 2

        monkeypatch.setattr(main, "send", send)
        shell = cast(Any, SimpleNamespace(_staging=arena, store=None))
        assert Shell._ask_store(shell, get(1))
        assert len(arena.view(get(1).handle)) == 64
        assert not Shell._ask_store(shell, get(2)), "the store is away"
        for late in (get(0), get(1)):
            with pytest.raises(StaleHandle):
                arena.check(late.handle)
        Shell._ask_store(shell, get(3))
        assert sent == [1, 2, 3] and [arena.generation(region) for region in (2, 4)] == [0, 0]
