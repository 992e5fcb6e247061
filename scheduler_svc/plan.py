"""Decisions to bytes: one step's plan for the worker, and what to remember until its result. Pure.

Making a plan changes the state to what it will be once the step is done with every draft accepted; a
result corrects it (`commit.py`), an abandoned step takes it back (`retract`).
"""

from array import array
from dataclasses import dataclass

import numpy as np

from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.scheduler_svc.decode import Decoders
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.prefill import Prefill
from phalanx.scheduler_svc.rank import Chunk, Rank
from phalanx.scheduler_svc.restore import Restorer
from phalanx.scheduler_svc.state import Load
from phalanx.scheduler_svc.stops import Rows


@dataclass(slots=True)
class Flight:
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
    num_rows: int
    context: int  # sum over its rows of the tokens that each may read
    loads: list[Load]  # whose regions its worker reads


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
    chunks, t = prefill.chunks, rank.t
    rows, asked, sampled, samples = _with_chunks(decoders, chunks)
    starts, blocks = t.planned.take(rows), t.blocks.take(rows)
    added = blocks - t.told.take(rows)
    new = [chunk for chunk in chunks if not chunk.sequence.known]
    none, drafts = bytes(len(chunks)), decoders.drafts
    carried = t.last_plan.take(decoders.rows) > rank.seen
    loads = [load for chunk in new if (load := chunk.sequence.load) is not None]
    assert restorer is not None or not loads
    plan = StepPlan(
        seq=seq,
        seen=seen,
        new=tuple([_new(chunk) for chunk in new]),
        slots=t.slot.take(rows).tobytes(),
        starts=starts.tobytes(),
        seqlens_q=asked.tobytes(),
        drafts=drafts.astype(np.uint8).tobytes() + none,
        sample=b"\1" * len(drafts) + bytes(samples),
        carry=carried.tobytes() + none,
        token_ids=t.last_token.take(decoders.rows).tobytes()
        + b"".join([_token_ids(chunk) for chunk in chunks]),
        block_counts=added.tobytes(),
        block_ids=_block_ids(rank, rows, added),
        snapshots=tuple([(c.sequence.slot, c.region) for c in chunks if c.region >= 0]),
        forks=tuple(
            [
                (f.leader_slot, f.follower_slot, f.leader_block, f.follower_block)
                for f in prefill.forks
            ]
        ),
        restores=tuple(map(restorer.restores, loads)) if restorer and loads else (),
        staging=restorer.arena if restorer and loads else "",
        turn=turn,
    )
    num_rows, context = int(np.add.reduce(asked)), _context(starts, asked, len(decoders.rows))
    flight = Flight(
        seq, decoders, chunks, rows, asked, added, sampled, new, num_rows, context, loads
    )
    t.planned[rows] = starts + asked
    t.told[rows] = blocks
    t.last_plan[rows] = seq
    for chunk in chunks:
        chunk.sequence.known = True
        if chunk.samples:
            rank.to_decode(chunk.sequence)
    return plan, flight


def _with_chunks(decoders: Decoders, chunks: list[Chunk]) -> tuple[Rows, Int32, Rows, list[bool]]:
    """`rows`, `asked` and `sampled` of a Flight, and which chunks sample."""
    rows, asked = decoders.rows, decoders.drafts + np.int32(1)
    if not chunks:
        return rows, asked, rows, []
    of_chunks = np.array([chunk.sequence.row for chunk in chunks], np.intp)
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    both = np.concatenate((rows, of_chunks))
    samples = [chunk.samples for chunk in chunks]
    sampled = both if all(samples) else np.concatenate((rows, of_chunks[samples]))
    return both, np.concatenate((asked, counts)), sampled, samples


def _context(starts: Int32, asked: Int32, decoding: int) -> int:
    """Sum over the step's rows of the tokens that each may read; a prompt's rows also read each other."""
    counts = asked.astype(np.int64)
    return int(np.dot(counts, starts)) + int(np.dot(counts[decoding:], counts[decoding:])) // 2


def _block_ids(rank: Rank, rows: Rows, added: Int32) -> bytes:
    """The last `added[i]` blocks of each row."""
    places = added.nonzero()[0]
    ids, by_row = array("i"), rank.table.by_row
    counts = added.take(places).tolist()
    for row, count in zip(rows.take(places).tolist(), counts, strict=True):
        ids.extend(by_row[row].blocks[-count:])
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


def _token_ids(chunk: Chunk) -> bytes:
    sequence, end = chunk.sequence, chunk.start + chunk.count
    within_prompt = end <= sequence.num_prompt  # then the whole need not be copied
    tokens = sequence.prompt if within_prompt else sequence.tokens()
    return tokens[4 * chunk.start : 4 * end]
