"""The sweep takes what dead owners left, and nothing else, of no node whose name begins alike; and nobody who dies
while an arena is made leaves anything."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.protocol.arena import SHM, Arena, arena_name, names, sweep, sweep_if_dead
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import ArenaError
from phalanx.supervisor.lock import clean


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


@pytest.fixture
def strange(node: str) -> Iterator[str]:
    """A name like an arena's of the node."""
    name = arena_name(node, "x", 0)
    yield name
    path = SHM / name
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_what_is_no_file_stays_and_does_no_harm(strange: str, node: str, tmp_path: Path) -> None:
    (SHM / strange).mkdir()
    assert sweep(node) == []
    with pytest.raises(ArenaError, match="belongs to"):
        Arena.create(strange, 4096)
    (SHM / strange).rmdir()
    target = tmp_path / "of-ours"
    target.write_bytes(b"x")
    (SHM / strange).symlink_to(target)
    assert sweep(node) == [] and target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_put_here_is_none_of_ours(strange: str, node: str) -> None:
    (SHM / strange).write_bytes(b"x")
    os.chown(SHM / strange, 65534, 65534)
    assert names(node) == [] and sweep(node) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_file_that_may_not_be_opened_is_left_alone(strange: str, node: str) -> None:
    (SHM / strange).write_bytes(b"x")
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        swept = sweep(node)
        try:
            Arena.create(strange, 4096)
        except ArenaError as error:
            os._exit(0 if swept == [] and "belongs to another user" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_directories_that_are_called_the_same_are_other_nodes(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "phalanx", tmp_path / "b" / "phalanx"
    assert node_name(first) != node_name(second)
    assert node_name(first).startswith("phalanx-")
    first.mkdir(parents=True)
    second.parent.symlink_to(first.parent)
    assert node_name(first) == node_name(second)  # it is one directory


def let_go(owner: Arena) -> None:
    """As the kernel does when the owner dies."""
    fcntl.flock(owner._fd, fcntl.LOCK_UN)


def test_of_a_shared_name_all_goes_once_nobody_owns_any_of_it(node: str) -> None:
    """Under the names of earlier versions a live node looks like a dead one of another directory."""
    board, pool = (Arena.create(arena_name(node, kind, 0), 4096) for kind in ("board", "kv0"))
    (SHM / arena_name(node, "foreign", 0)).write_bytes(b"not an arena, though it is as long as one")
    (SHM / arena_name(node, "empty", 0)).write_bytes(b"")
    let_go(pool)  # a worker fell; the next one finds what it left
    assert sweep_if_dead(node) == []
    let_go(board)
    assert sweep_if_dead(node) == [board.name, pool.name]
    assert names(node) == [arena_name(node, "empty", 0), arena_name(node, "foreign", 0)]
    board.close()
    pool.close()


def test_a_start_removes_what_a_node_left_under_the_name_that_it_had(
    node: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / node
    run_dir.mkdir()
    left = [Arena.create(arena_name(name, "kv0", 3), 4096) for name in (node, node_name(run_dir))]
    other = Arena.create(arena_name(f"{node}-b", "kv0", 3), 4096)
    for one in (*left, other):
        let_go(one)
    assert sorted(clean(run_dir)) == sorted(one.name for one in left)
    assert names(f"{node}-b") == [other.name]
    for one in (*left, other):
        one.close()
