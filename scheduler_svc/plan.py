"""Decisions to bytes: one step's plan for the worker, and what to remember until its result. Pure."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.protocol.queues import QueueTable
from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.scheduler_svc.rank import Chunk
from phalanx.scheduler_svc.state import Rows, Sequence


@dataclass(slots=True)
class Flight:
    """A plan under way. Its rows of the table and its blocks belong to it until its result."""

    seq: int
    decoders: list[Sequence]
    rows: Rows  # of the decoders
    told: npt.NDArray[np.int32]  # blocks of each decoder that the worker knows once it is done
    chunks: list[Chunk]

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self.decoders or any(c.sequence is sequence for c in self.chunks)


def make_plan(
    seq: int, t: QueueTable, decoders: list[Sequence], rows: Rows, chunks: list[Chunk]
) -> tuple[StepPlan, Flight]:
    """Decoders first (one row each, all sampled), then the chunks."""
    blocks = t.blocks[rows]
    more = blocks - t.told[rows]
    block_ids = [
        block
        for place in np.flatnonzero(more)
        for block in decoders[place].blocks[int(blocks[place] - more[place]) :]
    ]
    told = [int(t.told[chunk.sequence.row]) for chunk in chunks]
    for chunk, known in zip(chunks, told, strict=True):
        block_ids += chunk.sequence.blocks[known:]
    added = [len(c.sequence.blocks) - known for c, known in zip(chunks, told, strict=True)]
    plan = StepPlan(
        seq=seq,
        new=tuple(_new(chunk.sequence) for chunk in chunks if not chunk.sequence.known),
        slots=t.slot[rows].tobytes() + _int32([c.sequence.slot for c in chunks]),
        starts=t.committed[rows].tobytes() + _int32([c.start for c in chunks]),
        seqlens_q=np.ones(len(rows), np.int32).tobytes() + _int32([c.count for c in chunks]),
        sample=b"\1" * len(rows) + bytes(c.samples for c in chunks),
        token_ids=t.last_token[rows].tobytes() + b"".join(map(_token_ids, chunks)),
        block_counts=more.tobytes() + _int32(added),
        block_ids=_int32(block_ids),
        snapshots=tuple((c.sequence.slot, c.region) for c in chunks if c.region >= 0),
    )
    return plan, Flight(seq, list(decoders), rows, blocks, chunks)


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
