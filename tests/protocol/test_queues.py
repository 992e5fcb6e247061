"""The queues of a node are read from shared memory alone: of live schedulers, whole, in the words of
docs/cli.md."""

import fcntl
import os
import resource
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from phalanx.protocol import queues
from phalanx.protocol.arena import Arena, names
from phalanx.protocol.board import Board
from phalanx.protocol.queues import (
    COLUMNS,
    STEP_TIMES,
    Phase,
    QueueTable,
    State,
    count_held,
    queue_arena_name,
    queue_bytes,
    read_queues,
    step_times,
    steps_done,
)
from phalanx.protocol.steps import Link

ROWS = 10


@pytest.fixture
def node() -> Iterator[str]:
    name = f"q{uuid.uuid4().hex[:8]}"
    yield name
    for arena in names(name):
        os.unlink(f"/dev/shm/{arena}")


def make(node: str, seat: int, incarnation: int) -> tuple[Arena, QueueTable]:
    name = queue_arena_name(node, seat, incarnation)
    arena = Arena.create(name, queue_bytes(ROWS), "test")
    return arena, QueueTable.create(arena.data[:], ROWS, seat, incarnation)


def test_columns_do_not_overlap() -> None:
    table = QueueTable(memoryview(bytearray(queue_bytes(ROWS))), ROWS)
    for number, (name, _) in enumerate(COLUMNS):
        getattr(table, name)[:] = number + 1
    table.request_ids[:] = 99
    table.header[0]["rows"] = 77
    for number, (name, _) in enumerate(COLUMNS):
        assert (getattr(table, name) == number + 1).all()
    assert (table.request_ids == 99).all() and table.header[0]["layout"] == 0


def test_the_reader_that_is_behind_is_named(node: str) -> None:
    arena, table = make(node, 1, 4)
    with arena, Board.create(node).arena:
        board = Board.attach(node)
        old, link = (Link.create(node, 1, 4 << 32 | number, board.seats[1]) for number in (9, 10))
        worker = Link.attach(node, 1, 4 << 32 | 10, board.seats[1])
        old._plans.write(b"of a worker that is gone")
        for _ in range(2):
            link._plans.write(b"x" * 100)
        assert worker._plans.read() is not None
        worker._results.write(b"hello")
        ((rank,), _) = read_queues(node).values()
        assert rank["rings"] == [
            {"ring": "plans", "reader": "worker-1", "written": 208, "read": 104},
            {"ring": "results", "reader": "scheduler-1", "written": 16, "read": 0},
        ]
        del table
        for one in (worker, link, old):
            one.close()
        board.close()


def test_the_documented_fields(node: str) -> None:
    arena, table = make(node, 1, 4)
    with arena:
        header = table.header[0]
        header["epoch"], header["waiting"], header["running"] = 6, 1, 2
        header["free_blocks"], header["total_blocks"] = 5, 9
        header["free_slots"], header["total_slots"] = 3, 4
        table.request_ids[2] = np.frombuffer(bytes(range(16)), np.uint8)
        table.state[2], table.phase[2] = State.RUNNING, Phase.DECODE
        table.arrival_ns[2] = time.monotonic_ns() - 50_000_000
        table.prompt_tokens[2], table.output_tokens[2], table.max_tokens[2] = 11, 12, 13
        table.blocks[2], table.cached_tokens[2], table.preemptions[2] = 2, 0, 1
        for us in (10, 30, 20):
            table.note_step(0, us, 0, 1, 0)
        table.note_stale()
        seen = read_queues(node)
        del table, header
    assert seen["ranks"] == [
        {
            "slot": 1,
            "incarnation": 4,
            "epoch": 6,
            "waiting": 1,
            "running": 2,
            "free_blocks": 5,
            "total_blocks": 9,
            "free_slots": 3,
            "total_slots": 4,
            "steps": 3,
            "stale_results": 1,
            "step_us_p50": 20.0,
            "step_us_p99": pytest.approx(29.8),
            "rings": [],
        }
    ]
    (request,) = seen["requests"]
    assert 50 <= request.pop("age_ms") < 5000
    assert request == {
        "request_id": "000102030405060708090a0b0c0d0e0f",
        "index": 0,
        "slot": 1,
        "state": "running",
        "phase": "decode",
        "prompt_tokens": 11,
        "output_tokens": 12,
        "max_tokens": 13,
        "blocks": 2,
        "cached_tokens": 0,
        "preemptions": 1,
    }


def test_steps_are_the_newest_ones() -> None:
    table = QueueTable(memoryview(bytearray(queue_bytes(ROWS))), ROWS)
    for us in range(STEP_TIMES + 7):
        table.note_step(10 * us, us, us // 2, 5, 3)
    assert table.step_times().tolist() == list(range(7, STEP_TIMES + 7))
    assert table.step_times(3).tolist() == [STEP_TIMES + 4, STEP_TIMES + 5, STEP_TIMES + 6]
    us = STEP_TIMES + 6
    assert table.steps_done(1).tolist() == [(10 * us, us, us // 2, 5, 3)]


def test_the_steps_of_every_seat(node: str) -> None:
    held = [make(node, 0, 1), make(node, 2, 4)]
    held[1][1].note_step(1000, 10, 5, 7, 4)
    seen = steps_done(node)
    assert step_times(node, 2)[0] == 1 and step_times(node, 1)[0] == 0
    assert {seat: steps.tolist() for seat, steps in seen.items()} == {
        0: [],
        2: [(1000, 10, 5, 7, 4)],
    }
    for arena, _ in held:
        arena.close()


def test_one_that_dies_while_it_is_looked_at_has_no_figures(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape then has those of the others: it failed as a whole."""
    held = {seat: make(node, seat, 1) for seat in (0, 2)}

    def dies(name: str) -> bool:
        if name == queue_arena_name(node, 0, 1):
            held[0][0].close()
        return True

    monkeypatch.setattr(queues, "owner_lives", dies)
    assert step_times(node, 0)[0] == 0
    held[0] = make(node, 0, 1)
    assert list(steps_done(node)) == [2]
    held[0] = make(node, 0, 1)
    assert [rank["slot"] for rank in read_queues(node)["ranks"]] == [2]
    held[2][0].close()


def test_a_step_of_hours_is_the_longest_that_can_be_told() -> None:
    """A node that was paused for 72 minutes: its schedulers do not end over a figure for people."""
    table = QueueTable(memoryview(bytearray(queue_bytes(ROWS))), ROWS)
    table.note_step(1, 2**32 + 5, 2**32 + 4, 2, 0)
    assert table.steps_done().tolist() == [(1, 2**32 - 1, 2**32 - 1, 2, 0)]


def test_only_the_latest_live_incarnation_of_each_seat(node: str) -> None:
    held = [make(node, 0, 1), make(node, 0, 2), make(node, 5, 1)]
    dead, _ = make(node, 0, 9)
    fcntl.flock(dead._fd, fcntl.LOCK_UN)  # as if its owner had died
    other, _ = make(f"{node}-queue0", 3, 1)  # another node, whose name starts like ours
    ranks = read_queues(node)["ranks"]
    assert [(rank["slot"], rank["incarnation"]) for rank in ranks] == [(0, 2), (5, 1)]
    assert read_queues("nobody") == {"ranks": [], "requests": []}
    arenas = [*(arena for arena, _ in held), dead, other]
    del held
    for arena in arenas:
        arena.close()


def test_a_reader_sees_a_moment_between_two_changes(node: str) -> None:
    """A writer keeps two words equal under the sequence lock: a reader never sees them differ."""
    arena, table = make(node, 0, 1)
    stop = threading.Event()

    def write(header: Any) -> None:
        for number in range(1_000_000):
            header["version"] += 1
            header["waiting"] = number
            header["running"] = number
            header["version"] += 1
            if stop.is_set():
                return

    writer = threading.Thread(target=write, args=(table.header[0],))
    writer.start()
    try:
        for _ in range(50):
            (rank,) = read_queues(node)["ranks"]
            assert rank["waiting"] == rank["running"]
    finally:
        stop.set()
        writer.join()
    del table, write, writer
    arena.close()


def test_a_writer_that_stopped_in_the_middle_is_still_read(node: str) -> None:
    arena, table = make(node, 0, 1)
    table.header[0]["version"] = 7
    table.header[0]["waiting"] = 3
    (rank,) = read_queues(node)["ranks"]
    assert rank["waiting"] == 3
    del table
    arena.close()


def test_what_some_seats_hold_is_counted(node: str) -> None:
    held = [make(node, 0, 1), make(node, 1, 1), make(node, 1, 2), make(node, 2, 1)]
    for number, (_, table) in enumerate(held):
        table.state[[0, 3, *range(5, 5 + number)]] = State.RUNNING
        for name, _ in COLUMNS[1:]:
            getattr(table, name)[:] = 1
    assert count_held(node, [1]) == 4, "of the latest incarnation"
    assert count_held(node, {0, 2}) == 2 + 5
    assert count_held(node, []) == count_held("nobody", [0]) == 0
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert count_held(node, [1]) == 0, "no descriptor is left to look with"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    arenas = [arena for arena, _ in held]
    del held, table
    for arena in arenas:
        arena.close()
