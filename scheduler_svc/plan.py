"""Decisions to bytes: one step's plan for the worker, and what to remember until its result. Pure.

Making a plan changes the state to what it will be once the step is done with every draft accepted; a
result corrects it (`commit.py`), an abandoned step takes it back (`retract`).
"""

from array import array

import msgspec
import numpy as np

from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.scheduler_svc.decode import Decoders
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.prefill import Prefill
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.restore import Restorer
from phalanx.scheduler_svc.state import Chunk, Load, Sequence
from phalanx.scheduler_svc.stops import Rows

_ONE = np.int32(1)

# Fields of a StepPlan, from `new` to `snapshots`.
Wire = tuple[
    tuple[NewSequence, ...],
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    tuple[tuple[int, int], ...],
]


class Flight(msgspec.Struct, eq=False):
    """A plan under way. Its rows of the table and its blocks belong to it until its result.

    The arrays are parallel to the plan's: decoders first (all sampled), then the chunks.
    """

    seq: int
    decoders: Decoders
    chunks: list[Chunk]
    rows: Rows
    asked: Int32  # rows of the step that each has
    added: Int32  # blocks that the worker learns with it
    sampled: Rows  # `rows` without those of chunks that do not sample
    new: list[Chunk]  # those of sequences that the worker meets with it
    loads: list[Load]  # whose regions its worker reads
    scored: bool  # log-probabilities of some prompt may come back
    drafted: bool  # some of its rows are drafts
    num_rows: int
    context: int  # sum over its rows of the tokens that each may read
    kept: list[Chunk] = []  # decoded rows behind which a state is kept


def make_plan(
    seq: int,
    seen: int,
    rank: Rank,
    decoders: Decoders,
    prefill: Prefill,
    restorer: Restorer | None = None,
    turn: int = 0,
) -> tuple[StepPlan, Flight]:
    """Decoders first (all sampled), then the chunks."""
    passes = rank.table.passes
    if passes is None:
        wire, flight = _made(seq, rank, decoders, prefill.chunks)
        sampled = [chunk.sequence for chunk in prefill.chunks if chunk.samples]
    else:
        wire, every, at, sampled, new, loads, scored, drafted, num_rows, context = passes.plan(
            rank, decoders.rows, decoders.drafts, prefill.chunks, seq, rank.seen
        )
        rows = decoders.rows if every is None else np.frombuffer(every, np.intp)
        flight = Flight(
            seq,
            decoders,
            prefill.chunks,
            rows,
            np.frombuffer(wire[3], np.int32),
            np.frombuffer(wire[8], np.int32),
            rows if at is None else np.frombuffer(at, np.intp),
            new,
            loads,
            scored,
            drafted,
            num_rows,
            context,
        )
    if sampled:
        rank.to_decode(sampled)
    assert restorer is not None or not flight.loads
    restores = tuple(map(restorer.restores, flight.loads)) if restorer and flight.loads else ()
    staging = restorer.arena if restorer and flight.loads else ""
    return StepPlan(seq, seen, *wire, tuple(prefill.forks), restores, staging, turn), flight


def _made(seq: int, rank: Rank, decoders: Decoders, taken: list[Chunk]) -> tuple[Wire, Flight]:
    chunks, t = _Chunks(taken), rank.t
    rows, asked, sampled = _with_chunks(decoders, chunks)
    starts, blocks = t.planned.take(rows), t.blocks.take(rows)
    added = blocks - t.told.take(rows)
    none, drafts = bytes(len(taken)), decoders.drafts
    carried = t.last_plan.take(decoders.rows) > rank.seen
    wire = (
        tuple([_new(chunk) for chunk in chunks.new]),
        t.slot.take(rows).tobytes(),
        starts.tobytes(),
        asked.tobytes(),
        drafts.astype(np.uint8).tobytes() + none,
        b"\1" * len(drafts) + bytes(chunks.samples),
        carried.tobytes() + none,
        t.last_token.take(decoders.rows).tobytes() + b"".join(chunks.token_ids),
        added.tobytes(),
        _block_ids(rank, rows, added),
        tuple(chunks.snapshots),
    )
    flight = Flight(
        seq,
        decoders,
        taken,
        rows,
        asked,
        added,
        sampled,
        chunks.new,
        chunks.loads,
        any(chunk.sequence.scores.wanted for chunk in taken),
        decoders.num_rows > len(drafts),
        decoders.num_rows + sum(chunks.counts),
        _context(starts, asked, chunks.counts),
    )
    t.planned[rows] = starts + asked
    t.told[rows] = blocks
    t.last_plan[rows] = seq
    return wire, flight


class _Chunks:
    """What a plan says of its chunks, gathered in one pass. Their sequences are known from now on."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.rows: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.sampled: list[Sequence] = []  # sequences of those that sample
        self.token_ids: list[bytes] = []
        self.new: list[Chunk] = []  # those of sequences that the worker meets
        self.loads: list[Load] = []
        self.snapshots: list[tuple[int, int]] = []
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            self.rows.append(sequence.row)
            self.counts.append(chunk.count)
            self.samples.append(chunk.samples)
            if chunk.samples:
                self.sampled.append(sequence)
            # Within the prompt the whole need not be copied.
            tokens = sequence.prompt if end <= sequence.num_prompt else sequence.tokens()
            self.token_ids.append(tokens[4 * start : 4 * end])
            if not sequence.known:
                sequence.known = True
                self.new.append(chunk)
                if sequence.load is not None:
                    self.loads.append(sequence.load)
            if chunk.region >= 0:
                self.snapshots.append((sequence.slot, chunk.region))


def _with_chunks(decoders: Decoders, chunks: _Chunks) -> tuple[Rows, Int32, Rows]:
    """`rows`, `asked` and `sampled` of a Flight."""
    rows, asked = decoders.rows, decoders.drafts + _ONE
    if not chunks.rows:
        return rows, asked, rows
    both = np.concatenate((rows, np.array(chunks.rows, np.intp)))
    asked = np.concatenate((asked, np.array(chunks.counts, np.int32)))
    if len(chunks.sampled) == len(chunks.rows):
        return both, asked, both
    sampled = np.array([sequence.row for sequence in chunks.sampled], np.intp)
    return both, asked, np.concatenate((rows, sampled))


def _context(starts: Int32, asked: Int32, of_chunks: list[int]) -> int:
    """Sum over the step's rows of the tokens that each may read; a prompt's rows also read each other."""
    within = sum([count * count for count in of_chunks]) // 2
    return int(np.dot(asked.astype(np.int64), starts.astype(np.int64))) + within


def _block_ids(rank: Rank, rows: Rows, added: Int32) -> bytes:
    """The last `added[i]` blocks of each row."""
    places = added.nonzero()[0]
    if not len(places):
        return b""
    counts, by_row = added.take(places).tolist(), rank.table.by_row
    of_rows = [by_row[row].blocks for row in rows.take(places).tolist()]
    if max(counts) == 1:
        return array("i", [blocks[-1] for blocks in of_rows]).tobytes()
    ids = array("i")
    for blocks, count in zip(of_rows, counts, strict=True):
        ids.extend(blocks[-count:])
    return ids.tobytes()


def retract(rank: Rank, flight: Flight) -> None:
    """The step was abandoned: everything is as before its plan, but for blocks that were taken."""
    rank.t.planned[flight.rows] -= flight.asked
    rank.t.told[flight.rows] -= flight.added
    for chunk in flight.chunks:
        if chunk.samples and chunk.sequence.finish is None:
            rank.to_prefill(chunk.sequence)
    for chunk in flight.new:
        chunk.sequence.known = False


def _new(chunk: Chunk) -> NewSequence:
    one = chunk.sequence
    whole_prompt = chunk.samples and chunk.start + chunk.count == one.num_prompt
    tokens = one.prompt if whole_prompt else one.tokens()
    return NewSequence(one.slot, one.copy_key, one.num_prompt, one.sampling, tokens)
