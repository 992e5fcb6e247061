"""Decisions to bytes: one step's plan for the worker, and what to remember until its result. Pure.

Making a plan changes the state to what it will be once the step is done with every draft accepted; a
result corrects it (`commit.py`), an abandoned step takes it back (`retract`).
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.scheduler_svc.decode import Decoders, Int32
from phalanx.scheduler_svc.rank import Chunk, Rank
from phalanx.scheduler_svc.state import Sequence


@dataclass(slots=True)
class Flight:
    """A plan under way. Its rows of the table and its blocks belong to it until its result."""

    seq: int
    decoders: Decoders
    decoder_blocks: Int32  # that the worker learns with it, for each decoder
    chunks: list[Chunk]
    chunk_blocks: list[int]  # likewise
    new: list[Sequence]  # sequences that the worker meets with it

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self.decoders.sequences or any(
            chunk.sequence is sequence for chunk in self.chunks
        )


def make_plan(
    seq: int, seen: int, rank: Rank, decoders: Decoders, chunks: list[Chunk]
) -> tuple[StepPlan, Flight]:
    """Decoders first (all sampled), then the chunks."""
    t, rows, drafts = rank.t, decoders.rows, decoders.drafts
    blocks = t.blocks[rows]
    more = blocks - t.told[rows]
    block_ids = [
        block
        for place in np.flatnonzero(more)
        for block in decoders.sequences[place].blocks[int(blocks[place] - more[place]) :]
    ]
    told = [int(t.told[chunk.sequence.row]) for chunk in chunks]
    for chunk, known in zip(chunks, told, strict=True):
        block_ids += chunk.sequence.blocks[known:]
    added = [len(c.sequence.blocks) - known for c, known in zip(chunks, told, strict=True)]
    new = [chunk.sequence for chunk in chunks if not chunk.sequence.known]
    none = bytes(len(chunks))
    plan = StepPlan(
        seq=seq,
        seen=seen,
        new=tuple(map(_new, new)),
        slots=t.slot[rows].tobytes() + _int32([c.sequence.slot for c in chunks]),
        starts=t.planned[rows].tobytes() + _int32([c.start for c in chunks]),
        seqlens_q=(drafts + 1).tobytes() + _int32([c.count for c in chunks]),
        drafts=drafts.astype(np.uint8).tobytes() + none,
        sample=b"\1" * len(rows) + bytes(c.samples for c in chunks),
        carry=(t.in_flight[rows] > 0).tobytes() + none,
        token_ids=t.last_token[rows].tobytes() + b"".join(map(_token_ids, chunks)),
        block_counts=more.tobytes() + _int32(added),
        block_ids=_int32(block_ids),
        snapshots=tuple((c.sequence.slot, c.region) for c in chunks if c.region >= 0),
    )
    flight = Flight(seq, decoders, more, chunks, added, new)
    _expect(rank, flight)
    return plan, flight


def _expect(rank: Rank, flight: Flight) -> None:
    t, rows = rank.t, flight.decoders.rows
    t.planned[rows] += flight.decoders.drafts + 1
    t.in_flight[rows] += 1
    t.told[rows] += flight.decoder_blocks
    for chunk, blocks in zip(flight.chunks, flight.chunk_blocks, strict=True):
        row = chunk.sequence.row
        t.planned[row] += chunk.count
        t.in_flight[row] += 1
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
        copy_key=copy_key(sequence),
        num_prompt=sequence.num_prompt,
        sampling=sequence.sampling,
        tokens=sequence.tokens(),
    )


def copy_key(sequence: Sequence) -> int:
    """63 bits of (request_id, index): the same on every rank and after every move."""
    name = f"{sequence.request_id}/{sequence.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def _token_ids(chunk: Chunk) -> bytes:
    sequence = chunk.sequence
    within_prompt = chunk.end <= sequence.num_prompt  # then the whole need not be copied
    tokens = sequence.prompt if within_prompt else sequence.tokens()
    return tokens[4 * chunk.start : 4 * chunk.end]


def _int32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()
