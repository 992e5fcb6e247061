"""What each scheduler holds, readable by anyone without asking it: the live rows of its own state.

Every scheduler keeps its sequences in an arena `ph-NODE-queueSEAT-INCARNATION`: a header and one
column for each field (struct of arrays). The scheduler computes on these columns, they are not a
copy, so `phalanx queues` shows the truth even of a scheduler that is stopped. A sequence lock in the
header tells a reader that it saw a moment between two steps.
"""

import re
import time
from collections.abc import Collection, Iterator
from enum import IntEnum
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.protocol.arena import Arena, arena_name, names, owner_lives
from phalanx.protocol.errors import ArenaError
from phalanx.protocol.steps import read_rings

LAYOUT_VERSION = 7
STEP_TIMES = 4096  # steps remembered
_US_MAX = 2**32 - 1  # a node that was paused for more than an hour took longer
REQUEST_ID_BYTES = 16  # the 32 hex digits of a request id
STEPS_SHOWN = 256  # `phalanx queues` speaks of that many
_ALIGN = 64
_READ_ATTEMPTS = 200
_READ_PAUSE_S = 0.0002


class State(IntEnum):
    FREE = 0
    WAITING = 1  # holds no block and no slot
    RUNNING = 2  # holds a slot: in prefill (also between two chunks) or in decode
    ENDING = 3  # its final is out; blocks and slot come back with the result of the step in flight


class Phase(IntEnum):
    QUEUED = 0
    RESUMED = 1  # waits, with outputs produced elsewhere
    PREEMPTED = 2  # waits, with outputs produced here
    PREFILL = 3
    DECODE = 4
    LOADING = 5  # its blocks are on their way from the KV store


HEADER = np.dtype(
    [
        ("layout", "<u4"),
        ("rows", "<u4"),
        ("version", "<u8"),  # sequence lock: odd while the scheduler changes something
        ("epoch", "<u8"),
        ("incarnation", "<u8"),
        ("seat", "<i4"),
        ("waiting", "<i4"),
        ("running", "<i4"),
        ("free_blocks", "<i4"),
        ("total_blocks", "<i4"),  # block 0 left out, here and in free_blocks
        ("free_slots", "<i4"),
        ("total_slots", "<i4"),
        ("stale_results", "<u8"),  # of plans that were not under way, dropped
        ("steps", "<u8"),  # steps done; the newest STEP_TIMES of them are in `done`
    ]
)
STEP = np.dtype(
    [
        ("done_ns", "<u8"),  # CLOCK_MONOTONIC: when its tokens were on their way to the gateway
        # What the streams wait for: since its plan was sent, or the step before it done if that was later.
        ("us", "<u4"),
        ("worker_us", "<u4"),  # of these, in the worker, waits for its peers included
        ("rows", "<u4"),
        ("prompt_rows", "<u4"),  # of these, of prompts
    ]
)
COLUMNS: tuple[tuple[str, str], ...] = (
    ("state", "u1"),
    ("phase", "u1"),
    ("index", "<i4"),
    ("attempt", "<i8"),
    ("arrival_ns", "<i8"),  # CLOCK_MONOTONIC, one clock for all processes of a host
    ("prompt_tokens", "<i4"),
    ("output_tokens", "<i4"),
    ("max_tokens", "<i4"),  # outputs after which the sequence ends with `length`
    ("min_tokens", "<i4"),  # outputs before which no stop counts
    ("end_token", "<i4"),  # -1: ignored
    ("cached_tokens", "<i4"),
    ("preemptions", "<i4"),
    ("slot", "<i4"),  # -1: none
    ("blocks", "<i4"),  # KV blocks it owns
    ("told", "<i4"),  # of these, how many its worker knows
    ("committed", "<i4"),  # tokens whose KV is written
    ("planned", "<i4"),  # the same once every plan under way is done, all drafts accepted
    ("rows_max", "<i4"),  # so many tokens go through the model at most: the last output does not
    ("drafted_max", "<i4"),  # the highest position that a predicted output, a draft, may have
    ("last_token", "<i4"),
    ("last_plan", "<i8"),  # the newest plan that contains it: under way until its result is there
    ("handle", "<i8"),  # its name in TokenRows
    ("named", "u1"),  # 1: the gateway was told the handle, and wants no more than the tokens
)
assert HEADER.fields is not None
_COUNTS, _COUNTS_AT = Struct("<6i"), HEADER.fields["waiting"][1]
_STEP = Struct("<Q4I")
_HEADER_BYTES = -(-HEADER.itemsize // _ALIGN) * _ALIGN


def _column_bytes(dtype: str, rows: int) -> int:
    return -(-np.dtype(dtype).itemsize * rows // _ALIGN) * _ALIGN


def queue_bytes(rows: int) -> int:
    """Size of the region for `rows` sequences."""
    columns = sum(_column_bytes(dtype, rows) for _, dtype in COLUMNS)
    ids = _column_bytes("u1", rows * REQUEST_ID_BYTES)
    return _HEADER_BYTES + columns + ids + STEP.itemsize * STEP_TIMES


class QueueTable:
    """Typed views of the region: `header` (one record), a column for each field, `request_ids`.

    Columns are int32 [rows] unless `COLUMNS` says otherwise; `request_ids` is uint8 [rows, 16];
    `done` is a ring, STEP [STEP_TIMES], of the steps that are done.
    """

    state: npt.NDArray[np.uint8]
    phase: npt.NDArray[np.uint8]
    index: npt.NDArray[np.int32]
    attempt: npt.NDArray[np.int64]
    arrival_ns: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    max_tokens: npt.NDArray[np.int32]
    min_tokens: npt.NDArray[np.int32]
    end_token: npt.NDArray[np.int32]
    cached_tokens: npt.NDArray[np.int32]
    preemptions: npt.NDArray[np.int32]
    slot: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    told: npt.NDArray[np.int32]
    committed: npt.NDArray[np.int32]
    planned: npt.NDArray[np.int32]
    rows_max: npt.NDArray[np.int32]
    drafted_max: npt.NDArray[np.int32]
    last_token: npt.NDArray[np.int32]
    last_plan: npt.NDArray[np.int64]
    handle: npt.NDArray[np.int64]
    named: npt.NDArray[np.uint8]

    def __init__(self, data: memoryview, rows: int) -> None:
        assert len(data) >= queue_bytes(rows)
        self.rows = rows
        self.header: npt.NDArray[Any] = np.frombuffer(data, HEADER, 1)
        self._bytes, self._epoch = data, self.header["epoch"]
        at = _HEADER_BYTES
        for name, dtype in COLUMNS:
            setattr(self, name, np.frombuffer(data, dtype, rows, at))
            at += _column_bytes(dtype, rows)
        ids = np.frombuffer(data, np.uint8, rows * REQUEST_ID_BYTES, at)
        self.request_ids = ids.reshape(rows, REQUEST_ID_BYTES)
        at += _column_bytes("u1", rows * REQUEST_ID_BYTES)
        self._done_at = at
        self.done: npt.NDArray[Any] = np.frombuffer(data, STEP, STEP_TIMES, at)

    def describe(self, epoch: int, *counts: int) -> None:
        """The header's fields from `waiting` to `total_slots`, and the epoch."""
        _COUNTS.pack_into(self._bytes, _COUNTS_AT, *counts)
        self._epoch[0] = epoch

    def note_stale(self) -> None:
        self.header["stale_results"] += 1

    def note_step(self, done_ns: int, us: int, worker_us: int, rows: int, prompt_rows: int) -> None:
        """The fields of STEP."""
        steps = self.header["steps"]
        at = self._done_at + int(steps[0]) % STEP_TIMES * _STEP.size
        _STEP.pack_into(
            self._bytes, at, done_ns, min(us, _US_MAX), min(worker_us, _US_MAX), rows, prompt_rows
        )
        steps[0] += 1

    def steps_done(self, newest: int = STEP_TIMES) -> npt.NDArray[Any]:
        """STEP of the last steps, at most `newest`, oldest first."""
        steps = int(self.header["steps"][0])
        at = np.arange(steps - min(newest, steps, STEP_TIMES), steps) % STEP_TIMES
        return self.done[at]

    def step_times(self, newest: int = STEP_TIMES) -> npt.NDArray[np.uint32]:
        """`us` of the last steps, at most `newest`, oldest first."""
        times: npt.NDArray[np.uint32] = self.steps_done(newest)["us"]
        return times

    @classmethod
    def create(cls, data: memoryview, rows: int, seat: int, incarnation: int) -> "QueueTable":
        """The scheduler's own table, over zeroed bytes."""
        table = cls(data, rows)
        header = table.header[0]
        header["layout"], header["rows"] = LAYOUT_VERSION, rows
        header["seat"], header["incarnation"] = seat, incarnation
        return table


def queue_arena_name(node: str, seat: int, incarnation: int) -> str:
    return arena_name(node, f"queue{seat}", incarnation)


def read_queues(node: str) -> dict[str, list[dict[str, Any]]]:
    """What all schedulers of the node hold now: the JSON of `phalanx queues` (docs/cli.md).

    Reads shared memory alone, so it never waits for a scheduler, not even for a stopped one.
    """
    ranks: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    for name in _live_arenas(node):
        try:
            with Arena.attach(name) as arena:
                snapshot = bytes(arena.data[:_HEADER_BYTES])
                rows = int(np.frombuffer(snapshot, HEADER, 1)[0]["rows"])
                if arena.nbytes != queue_bytes(rows):
                    continue  # its owner is still filling it in
                copy = _consistent_copy(arena.data)
        except ArenaError:
            continue  # its owner ended between the listing and now
        rank, held = _describe(QueueTable(memoryview(copy), rows))
        rank["rings"] = read_rings(node, rank["slot"], rank["incarnation"])
        ranks.append(rank)
        requests += held
    return {"ranks": ranks, "requests": requests}


def count_held(node: str, seats: Collection[int]) -> int:
    """How many sequences the schedulers of these seats hold now. In a fraction of a millisecond, since
    streams may wait for whoever asks: nothing is copied, so a change under way counts or does not. None, where no
    descriptor is left to look with: it is for people."""
    try:
        return sum(map(_rows_in_use, _live_arenas(node, seats)))
    except OSError:
        return 0


def count_left(node: str, seat: int, incarnation: int) -> int:
    """How many sequences this scheduler held when it fell; likewise."""
    return _rows_in_use(queue_arena_name(node, seat, incarnation))


def _rows_in_use(name: str) -> int:
    try:
        with Arena.attach(name) as arena:
            rows = int(np.frombuffer(arena.data, HEADER, 1)[0]["rows"])
            if arena.nbytes != queue_bytes(rows):
                return 0
            states = bytes(arena.data[_HEADER_BYTES : _HEADER_BYTES + rows])  # first column
            return rows - states.count(0)
    except ArenaError:
        return 0  # its owner ended between the listing and now


def step_times(node: str, seat: int) -> tuple[int, npt.NDArray[np.uint32]]:
    """(steps done, microseconds of the newest ones) of a seat's scheduler; (0, none) without one."""
    for table in _copied_tables(node, [seat]):
        return int(table.header[0]["steps"]), table.step_times()
    return 0, np.empty(0, np.uint32)


def steps_done(node: str) -> dict[int, npt.NDArray[Any]]:
    """STEP of the newest steps, oldest first, of each seat's scheduler."""
    return {int(table.header[0]["seat"]): table.steps_done() for table in _copied_tables(node)}


def _copied_tables(node: str, seats: Collection[int] | None = None) -> Iterator[QueueTable]:
    for name in _live_arenas(node, seats):
        try:
            with Arena.attach(name) as arena:
                copied = bytes(arena.data)
        except ArenaError:
            continue  # its owner ended between the listing and now
        yield QueueTable(memoryview(copied), int(np.frombuffer(copied, HEADER, 1)[0]["rows"]))


def _live_arenas(node: str, seats: Collection[int] | None = None) -> list[str]:
    """Of each seat, or of these, the arena of the latest incarnation whose owner lives, by seat."""
    pattern = re.compile(rf"ph-{re.escape(node)}-queue(\d+)-(\d+)")
    latest: dict[int, int] = {}
    for name in names(node):
        if (match := pattern.fullmatch(name)) is None:
            continue
        seat, incarnation = int(match[1]), int(match[2])
        if (seats is None or seat in seats) and owner_lives(name):
            latest[seat] = max(incarnation, latest.get(seat, 0))
    return [queue_arena_name(node, seat, latest[seat]) for seat in sorted(latest)]


def _consistent_copy(data: memoryview) -> bytes:
    """The region as it was between two changes. Of a scheduler that stopped in the middle of one, as
    it stands: every word is whole, only the sums may disagree by that one change."""
    copy = bytes(data)
    for _ in range(_READ_ATTEMPTS):
        before = int(np.frombuffer(copy, HEADER, 1)[0]["version"])
        now = int(np.frombuffer(data, HEADER, 1)[0]["version"])
        if before == now and before % 2 == 0:
            break
        time.sleep(_READ_PAUSE_S)
        copy = bytes(data)
    return copy


def _describe(table: QueueTable) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header = table.header[0]
    seat, now_ns = int(header["seat"]), time.monotonic_ns()
    rank: dict[str, Any] = {
        "slot": seat,
        "incarnation": int(header["incarnation"]),
        "epoch": int(header["epoch"]),
    }
    for field in ("waiting", "running", "free_blocks", "total_blocks", "free_slots", "total_slots"):
        rank[field] = int(header[field])
    times = table.step_times(STEPS_SHOWN)
    rank["steps"] = int(header["steps"])
    rank["stale_results"] = int(header["stale_results"])
    for part in (50, 99):
        rank[f"step_us_p{part}"] = float(np.percentile(times, part)) if len(times) else None
    held = [
        {
            "request_id": table.request_ids[row].tobytes().hex(),
            "index": int(table.index[row]),
            "slot": seat,
            "state": State(int(table.state[row])).name.lower(),
            "phase": Phase(int(table.phase[row])).name.lower(),
            "age_ms": max(0, now_ns - int(table.arrival_ns[row])) / 1e6,
            "prompt_tokens": int(table.prompt_tokens[row]),
            "output_tokens": int(table.output_tokens[row]),
            "max_tokens": int(table.max_tokens[row]),
            "blocks": int(table.blocks[row]),
            "cached_tokens": int(table.cached_tokens[row]),
            "preemptions": int(table.preemptions[row]),
        }
        for row in np.flatnonzero(table.state)
    ]
    held.sort(key=lambda request: -request["age_ms"])
    return rank, held
