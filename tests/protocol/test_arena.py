"""Arenas are private, bounded, swept by lock (not by pid), and a stale handle never yields bytes."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phalanx.protocol import arena as arenas
from phalanx.protocol.arena import Arena, Handle, arena_name, sweep
from phalanx.protocol.errors import ArenaError, NoRoom, StaleHandle

HOLDER = """
import sys, time
from phalanx.protocol.arena import Arena
arena = Arena.create(sys.argv[1], 4096)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def node() -> Iterator[str]:
    name = f"test{uuid.uuid4().hex[:8]}"
    yield name
    for path in arenas.SHM.glob(f"ph-{name}-*"):
        path.unlink()


def hold(name: str) -> "subprocess.Popen[str]":
    """A real process that owns an arena."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, name], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def kill(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def test_what_one_writes_the_other_reads(node: str) -> None:
    with Arena.create(arena_name(node, "kv", 1), 8192) as owner:
        owner.data[100:105] = b"hello"
        handle = owner.handle(100, 5, shape=(5,))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=Handle) == handle
        with Arena.attach(owner.name) as other:
            assert other.copy_out(handle) == b"hello"
            assert (arenas.SHM / owner.name).stat().st_mode & 0o777 == 0o600
    assert arenas.names(node) == []


def test_a_handle_dies_with_its_region(node: str) -> None:
    with Arena.create(arena_name(node, "kv", 1), 8192) as owner, Arena.attach(owner.name) as other:
        first, second = owner.handle(0, 8, region=3), owner.handle(8, 8, region=4)
        owner.bump(3)
        with pytest.raises(StaleHandle, match="region 3 is at generation 1"):
            other.view(first)
        other.view(second)


@pytest.mark.parametrize("offset,nbytes", [(-1, 4), (0, 8193), (8192, 1), (2**70, 1), (0, -1)])
def test_a_handle_outside_the_arena_is_refused(node: str, offset: int, nbytes: int) -> None:
    with Arena.create(arena_name(node, "kv", 1), 8192) as owner, pytest.raises(StaleHandle):
        owner.view(Handle(owner.name, offset, nbytes))


def test_sweep_takes_only_what_nobody_owns(node: str) -> None:
    """The lock decides, also when the dead owner's pid is in use again."""
    dead, alive = arena_name(node, "kv", 1), arena_name(node, "kv", 2)
    first, second = hold(dead), hold(alive)
    try:
        with pytest.raises(ArenaError, match="belongs to a live process"):
            Arena.create(dead, 4096)
        kill(first)
        assert [arenas.owner_lives(name) for name in (dead, alive)] == [False, True]
        assert sweep(node) == [dead]
        assert arenas.names(node) == [alive]
    finally:
        kill(second)
    with Arena.create(alive, 4096):  # a start succeeds with a leaked arena in the way
        pass


def test_the_memory_of_an_arena_is_its_own_from_the_start(node: str) -> None:
    """Pages taken at the first write would mean a SIGBUS once others have filled /dev/shm."""
    with Arena.create(arena_name(node, "kv", 2), 1 << 20):
        assert (arenas.SHM / arena_name(node, "kv", 2)).stat().st_blocks * 512 > 1 << 20


def test_too_little_room_is_a_message_not_a_signal(node: str) -> None:
    free = os.statvfs(arenas.SHM).f_bavail * os.statvfs(arenas.SHM).f_frsize
    with pytest.raises(ArenaError, match=r"MiB free, arena .* needs .* MiB and leaves 16 MiB"):
        Arena.create(arena_name(node, "kv", 1), free)
    assert arenas.names(node) == []


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, os.urandom(9000)])
def test_a_file_that_is_no_arena_is_refused(node: str, content: bytes) -> None:
    name = arena_name(node, "kv", 9)
    (arenas.SHM / name).write_bytes(content)
    with pytest.raises(ArenaError):
        Arena.attach(name)


@pytest.mark.parametrize("name", ["../etc/passwd", "ph-/x", "other"])
def test_only_arena_names_are_attached(name: str) -> None:
    with pytest.raises(ArenaError):
        Arena.attach(name)


def test_views_outlive_close(node: str, tmp_path: Path) -> None:
    owner = Arena.create(arena_name(node, "kv", 1), 4096)
    view = owner.data[:4]
    owner.close()
    view[:] = b"safe"
    assert bytes(view) == b"safe"


WRITER = """
import sys, time
from phalanx.protocol.arena import Arena
arena = Arena.attach(sys.argv[1], writes=True)
print("attached", flush=True)
time.sleep(60)
"""


def test_the_owner_knows_when_all_who_store_into_it_are_gone(node: str) -> None:
    with Arena.create(arena_name(node, "kv", 1), 4096) as owner:
        assert not owner.written_by_others()
        with Arena.attach(owner.name):
            assert not owner.written_by_others(), "it only reads"
        with Arena.attach(owner.name, writes=True), Arena.attach(owner.name, writes=True) as second:
            view = second.data[:8]
            assert owner.written_by_others()
        assert not owner.written_by_others(), "they are done, although a view is still there"
        del view
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, owner.name], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "attached\n"
        assert owner.written_by_others()
        kill(child)
        assert not owner.written_by_others()


def test_an_arena_under_another_name_is_not_found_by_the_old_one(node: str) -> None:
    first, second = arena_name(node, "kv", 1), arena_name(node, "kv", 2)
    with Arena.create(first, 4096) as owner:
        owner.rename(second)
        with pytest.raises(ArenaError, match="cannot attach"):
            Arena.attach(first, writes=True)
        Arena.attach(second, writes=True).close()
        assert arenas.names(node) == [second]
    assert arenas.names(node) == []


def test_a_name_that_somebody_removed_leads_to_its_arena_again(node: str) -> None:
    with Arena.create(arena_name(node, "kv", 1), 4096) as owner:
        assert arenas.restore_names() == []
        for _ in range(2):  # and the name that was restored may go, too
            (arenas.SHM / owner.name).unlink()
            assert arenas.restore_names() == [(owner.name, "")] and arenas.restore_names() == []
            with Arena.attach(owner.name, writes=True) as other:
                other.data[0] = 7
                assert owner.data[0] == 7 and owner.written_by_others()
                owner.data[0] = 0
            assert sweep(node) == [], "its owner lives"
            with pytest.raises(ArenaError, match="belongs to a live process"):
                Arena.create(owner.name, 4096)
        second = arena_name(node, "kv", 2)
        owner.rename(second)
        (arenas.SHM / second).unlink()
        owner.rename(second)
        Arena.attach(second).close()
    assert arenas.names(node) == [] and arenas.restore_names() == []


def test_a_restored_name_goes_when_its_owner_is_gone(node: str) -> None:
    name = arena_name(node, "kv", 1)
    child = subprocess.Popen(["sleep", "60"])
    (arenas.SHM / name).symlink_to(f"/proc/{child.pid}/fd/77")
    assert sweep(node) == [name], "of a process that took its number"
    (arenas.SHM / name).symlink_to(f"/proc/{child.pid}/fd/1")
    kill(child)
    with Arena.create(name, 4096):
        (arenas.SHM / name).unlink()
        (arenas.SHM / name).symlink_to(f"/proc/{child.pid}/fd/1")
        assert arenas.restore_names() == [(name, "")]
        Arena.attach(name).close()
    (arenas.SHM / name).symlink_to("/proc/1/../1/fd/1")
    assert sweep(node) == [], "this is none of ours"


def test_too_little_room_is_told_with_numbers(node: str) -> None:
    stat = os.statvfs(arenas.SHM)
    free = stat.f_bavail * stat.f_frsize
    with pytest.raises(NoRoom, match=r"has \d+ MiB free, .* needs \d+ MiB and leaves 16 MiB to"):
        Arena.create(arena_name(node, "kv", 1), free - (8 << 20))
    assert arenas.names(node) == []
