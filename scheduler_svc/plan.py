"""Decisions to bytes: one step's plan for the worker, and what to remember until its result. Pure.

Making a plan changes the state to what it will be once the step is done with every draft accepted; a
result corrects it (`commit.py`), an abandoned step takes it back (`retract`).
"""

from dataclasses import dataclass

import numpy as np

from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.scheduler_svc.decode import Decoders
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.prefill import Prefill
from phalanx.scheduler_svc.rank import Chunk, Rank
from phalanx.scheduler_svc.restore import Restorer
from phalanx.scheduler_svc.state import Load, Sequence


@dataclass(slots=True)
class Flight:
    """A plan under way. Its rows of the table and its blocks belong to it until its result."""

    seq: int
    decoders: Decoders
    decoder_blocks: Int32  # that the worker learns with it, for each decoder
    chunks: list[Chunk]
    chunk_blocks: list[int]  # likewise
    new: list[Sequence]  # sequences that the worker meets with it
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
    chunks = prefill.chunks
    t, rows, drafts = rank.t, decoders.rows, decoders.drafts
    blocks = t.blocks.take(rows)
    more = blocks - t.told.take(rows)
    block_ids = [
        block
        for place in more.nonzero()[0].tolist()
        for block in rank.decoding[int(rows[place])].blocks[int(blocks[place] - more[place]) :]
    ]
    told = [int(t.told[chunk.sequence.row]) for chunk in chunks]
    for chunk, known in zip(chunks, told, strict=True):
        block_ids += chunk.sequence.blocks[known:]
    added = [len(c.sequence.blocks) - known for c, known in zip(chunks, told, strict=True)]
    new = [chunk.sequence for chunk in chunks if not chunk.sequence.known]
    none = bytes(len(chunks))
    loads = [sequence.load for sequence in new if sequence.load is not None]
    assert restorer is not None or not loads
    plan = StepPlan(
        seq=seq,
        seen=seen,
        new=tuple(map(_new, new)),
        slots=t.slot.take(rows).tobytes() + _int32([c.sequence.slot for c in chunks]),
        starts=t.planned.take(rows).tobytes() + _int32([c.start for c in chunks]),
        seqlens_q=(drafts + 1).tobytes() + _int32([c.count for c in chunks]),
        drafts=drafts.astype(np.uint8).tobytes() + none,
        sample=b"\1" * len(rows) + bytes(c.samples for c in chunks),
        carry=(t.in_flight.take(rows) > 0).tobytes() + none,
        token_ids=t.last_token.take(rows).tobytes() + b"".join(map(_token_ids, chunks)),
        block_counts=more.tobytes() + _int32(added),
        block_ids=_int32(block_ids),
        snapshots=tuple((c.sequence.slot, c.region) for c in chunks if c.region >= 0),
        forks=tuple(
            (f.leader_slot, f.follower_slot, f.leader_block, f.follower_block)
            for f in prefill.forks
        ),
        restores=tuple(map(restorer.restores, loads)) if restorer and loads else (),
        staging=restorer.arena if restorer and loads else "",
        turn=turn,
    )
    num_rows = decoders.num_rows + sum(chunk.count for chunk in chunks)
    context = decoders.context(rank) + sum(chunk.context for chunk in chunks)
    flight = Flight(seq, decoders, more, chunks, added, new, num_rows, context, loads)
    _expect(rank, flight)
    return plan, flight


def _expect(rank: Rank, flight: Flight) -> None:
    t, rows = rank.t, flight.decoders.rows
    t.planned[rows] += flight.decoders.drafts + 1
    t.in_flight[rows] += 1
    t.last_plan[rows] = flight.seq
    t.told[rows] += flight.decoder_blocks
    for chunk, blocks in zip(flight.chunks, flight.chunk_blocks, strict=True):
        row = chunk.sequence.row
        t.planned[row] += chunk.count
        t.in_flight[row] += 1
        t.last_plan[row] = flight.seq
        t.told[row] += blocks
        chunk.sequence.known = True
        if chunk.samples:
            rank.to_decode(chunk.sequence)


def retract(rank: Rank, flight: Flight) -> None:
    """The step was abandoned: everything is as before its plan, but for blocks that were taken."""
    t, rows = rank.t, flight.decoders.rows
    t.planned[rows] -= flight.decoders.drafts + 1
    t.in_flight[rows] -= 1
    t.told[rows] -= flight.decoder_blocks
    for chunk, blocks in zip(flight.chunks, flight.chunk_blocks, strict=True):
        sequence = chunk.sequence
        t.planned[sequence.row] -= chunk.count
        t.in_flight[sequence.row] -= 1
        t.told[sequence.row] -= blocks
        if chunk.samples and sequence.finish is None:
            rank.to_prefill(sequence)
    for sequence in flight.new:
        sequence.known = False


def _new(sequence: Sequence) -> NewSequence:
    return NewSequence(
        slot=sequence.slot,
        copy_key=sequence.copy_key,
        num_prompt=sequence.num_prompt,
        sampling=sequence.sampling,
        tokens=sequence.tokens(),
    )


def _token_ids(chunk: Chunk) -> bytes:
    sequence = chunk.sequence
    within_prompt = chunk.end <= sequence.num_prompt  # then the whole need not be copied
    tokens = sequence.prompt if within_prompt else sequence.tokens()
    return tokens[4 * chunk.start : 4 * chunk.end]


def _int32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()
