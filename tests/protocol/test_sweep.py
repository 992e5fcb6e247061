"""The sweep takes what dead owners left, and nothing else, of no node whose name begins alike; and nobody who dies
while an arena is made leaves anything."""

import fcntl
import os
import uuid
from collections.abc import Iterator

import pytest

from phalanx.protocol.arena import SHM, Arena, arena_name, names, sweep


@pytest.fixture
def node() -> Iterator[str]:
    name = f"sweep{uuid.uuid4().hex[:8]}"
    yield name
    for path in SHM.glob(f"ph-{name}*"):
        path.unlink()


def test_an_arena_has_no_name_before_it_is_whole(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies while memory is taken for it leaves none of it behind."""
    named: list[list[str]] = []
    allocate = os.posix_fallocate

    def look(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length)
        named.append([path.name for path in SHM.glob(f"ph-{node}-*")])

    monkeypatch.setattr(os, "posix_fallocate", look)
    with Arena.create(arena_name(node, "kv", 1), 4096) as arena:
        assert named == [[]] and names(node) == [arena.name]
        assert Arena.attach(arena.name).nbytes == 4096


def test_abandoned_arenas_go(node: str) -> None:
    owner = Arena.create(arena_name(node, "kv", 1), 4096)
    assert sweep(node) == []
    fcntl.flock(owner._fd, fcntl.LOCK_UN)  # as the kernel does when the owner dies
    assert sweep(node) == [owner.name]
    owner.close()


def test_a_node_whose_name_begins_alike_is_another_node(node: str) -> None:
    (SHM / arena_name(f"{node}-b", "kv", 1)).write_bytes(b"")
    assert names(node) == [] and sweep(node) == []
    assert names(f"{node}-b") == [arena_name(f"{node}-b", "kv", 1)]
