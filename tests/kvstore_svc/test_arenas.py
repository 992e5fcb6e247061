"""Copies through handles are believed only while the region was the caller's from beginning to end; a
mapping lasts as long as its owner."""

import os
import time
from collections.abc import Iterator

import pytest

from phalanx.kvstore_svc import arenas as module
from phalanx.kvstore_svc.arenas import Arenas
from phalanx.protocol.arena import Arena, Handle, arena_name

NODE = f"kvtest{os.getpid()}"
CALL = (b"caller", 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(arena_name(NODE, "caller", 1), 8192) as one:
        one.data[:4] = b"data"
        yield one


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    one = Arenas(NODE)
    yield one
    one.close()


def copied(arenas: Arenas, handle: Handle, deadline_ns: int = 0) -> tuple[str, bytes]:
    into = bytearray(handle.nbytes)
    arenas.expect(CALL, handle, deadline_ns)
    reason = arenas.copy_in(CALL, memoryview(into))
    arenas.forget(CALL)
    return reason, bytes(into)


def test_bytes_are_copied_both_ways(arenas: Arenas, arena: Arena) -> None:
    assert copied(arenas, arena.handle(0, 4)) == ("", b"data")
    arenas.expect(CALL, arena.handle(4096, 100))
    assert arenas.copy_out(CALL, memoryview(b"answer")) == ""
    assert bytes(arena.data[4096:4103]) == b"answer\0"


def test_a_region_that_changes_hands_during_the_copy_is_not_believed(
    arenas: Arenas, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Arena.view

    def reused_meanwhile(self: Arena, handle: Handle) -> memoryview:
        found = view(self, handle)
        arena.bump(handle.region)
        return found

    monkeypatch.setattr(Arena, "view", reused_meanwhile)
    assert copied(arenas, arena.handle(0, 4))[0].startswith("stale handle")
    arenas.expect(CALL, arena.handle(0, 4))
    assert arenas.copy_out(CALL, memoryview(b"late")).startswith("stale handle")


def test_a_copy_after_the_deadline_is_thrown_away(arenas: Arenas, arena: Arena) -> None:
    now_ns = time.monotonic_ns()
    assert copied(arenas, arena.handle(0, 4), now_ns + 10**12)[0] == ""
    assert copied(arenas, arena.handle(0, 4), now_ns - 1)[0].startswith("late")


@pytest.mark.parametrize("offset, nbytes", [(-1, 4), (0, -1), (8190, 4), (0, 2**62), (2**62, 4)])
def test_a_handle_out_of_bounds_copies_nothing(
    arenas: Arenas, arena: Arena, offset: int, nbytes: int
) -> None:
    arenas.expect(CALL, Handle(arena.name, offset, nbytes))
    assert arenas.copy_in(CALL, memoryview(bytearray(4))).startswith("stale handle")


@pytest.mark.parametrize("rest", ["absent", "a\0b", "x" * 300, "../caller", ""])
def test_a_name_that_is_no_arena_is_a_stale_handle(arenas: Arenas, rest: str) -> None:
    reason, _ = copied(arenas, Handle(f"ph-{NODE}-{rest}", 0, 4))
    assert reason.startswith("stale handle")


def test_a_repeated_call_keeps_its_first_handle(arenas: Arenas, arena: Arena) -> None:
    arenas.expect(CALL, arena.handle(0, 4))
    arenas.expect(CALL, arena.handle(0, 4000))
    into = bytearray(4)
    assert arenas.copy_in(CALL, memoryview(into)) == "" and into == b"data"


def test_a_lease_ends_with_the_name_and_with_a_new_file_of_that_name(arenas: Arenas) -> None:
    name = arena_name(NODE, "holder", 1)
    with Arena.create(name, 4096) as first:
        copied(arenas, first.handle(0, 4))
        assert arenas.end_leases() == []
    assert arenas.end_leases() == [name]
    with Arena.create(name, 4096) as second:
        second.data[:4] = b"anew"
        assert copied(arenas, second.handle(0, 4)) == ("", b"anew")
    with Arena.create(name, 4096) as third:
        assert arenas.end_leases() == [name]
        assert copied(arenas, third.handle(0, 4)) == ("", bytes(4))


def test_mappings_are_bounded(arenas: Arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARENAS_MAX", 2)
    made = [Arena.create(arena_name(NODE, "many", n), 4096) for n in range(5)]
    try:
        for one in made * 2:
            assert copied(arenas, one.handle(0, 4))[0] == ""
        assert len(arenas._mapped) <= 2
    finally:
        for one in made:
            one.close()
