"""The sweep takes what dead owners left, and nothing else: no half-made arena of a live node, no arena of a
node whose name begins alike."""

import fcntl
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


def test_half_made_arenas_stay_while_the_node_runs(node: str) -> None:
    path = SHM / arena_name(node, "kv", 1)
    path.write_bytes(b"")  # its creator is between open and lock
    assert sweep(node, half_made=False) == []
    assert sweep(node) == [path.name]


def test_abandoned_arenas_go_while_the_node_runs(node: str) -> None:
    owner = Arena.create(arena_name(node, "kv", 1), 4096)
    assert sweep(node, half_made=False) == []
    fcntl.flock(owner._fd, fcntl.LOCK_UN)  # as the kernel does when the owner dies
    assert sweep(node, half_made=False) == [owner.name]
    owner.close()


def test_a_node_whose_name_begins_alike_is_another_node(node: str) -> None:
    (SHM / arena_name(f"{node}-b", "kv", 1)).write_bytes(b"")
    assert names(node) == [] and sweep(node) == []
    assert names(f"{node}-b") == [arena_name(f"{node}-b", "kv", 1)]
