"""Which running sequences get tokens in this step, with how many drafts, and who makes room. Pure."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Rows, Sequence

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Decoders:
    """Sequences with one row and `drafts` draft rows each; parallel arrays."""

    sequences: list[Sequence] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: np.empty(0, np.intp))
    drafts: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_rows(self) -> int:
        return len(self.sequences) + int(self.drafts.sum())


def take_decoders(rank: Rank, *, budget: int, max_drafts: int, idle: bool) -> Decoders | None:
    """Every decoding sequence that may need another token, each with blocks for its rows.

    Out of blocks, drafts are left out first. Then the sequence with the longest output is preempted:
    it frees most, and recomputing gives the same tokens. The last one left is never its own victim:
    it waits a step, since whatever else holds blocks (a prompt in prefill, a copy into the KV store)
    is bounded.

    Args:
        budget: Rows the step may have; at least one for each decoding sequence.
        max_drafts: Draft rows that the worker can take back.
        idle: No plan is under way. Only then can a sequence be preempted.

    Returns:
        None when somebody must be preempted, but plans are under way: wait for their results.
    """
    while rank.decoding:
        found = _eligible(rank, budget, max_drafts)
        for drafts in (found.drafts, np.zeros_like(found.drafts)):
            found.drafts = drafts
            missing = _missing_blocks(rank, found)
            if int(missing.sum()) <= rank.pool.free:
                for place in np.flatnonzero(missing):
                    rank.grow(found.sequences[place], int(missing[place]))
                return found
        if not idle:
            return None
        if len(rank.decoding) == 1:
            break
        rank.preempt(longest(rank.decoding))
    return Decoders()


def _eligible(rank: Rank, budget: int, max_drafts: int) -> Decoders:
    """Those whose outputs, with all that is under way, do not reach their maximum yet."""
    t, rows, sequences = rank.t, rank.decode_rows, rank.decoding
    planned = t.planned[rows]
    outputs = planned + 1 - t.prompt_tokens[rows]  # once everything under way is done
    room = t.max_tokens[rows] - outputs
    if (room <= 0).any():
        going = np.flatnonzero(room > 0)
        sequences = [sequences[place] for place in going]
        rows, outputs, room = rows[going], outputs[going], room[going]
    else:
        sequences = list(sequences)
    predicted = t.predicted[rows] - outputs
    most = min(max_drafts, budget // max(len(sequences), 1) - 1)
    drafts = np.minimum(np.minimum(predicted, room - 1), most).clip(0)
    return Decoders(sequences, rows, drafts.astype(np.int32))


def _missing_blocks(rank: Rank, found: Decoders) -> Int32:
    last = rank.t.planned[found.rows] + found.drafts  # position of the last row
    missing: Int32 = (last // BLOCK_SIZE + 1 - rank.t.blocks[found.rows]).clip(0)
    return missing


def longest(decoding: list[Sequence]) -> Sequence:
    """The one with most outputs; among equals the one that came last."""
    return max(decoding, key=lambda sequence: (len(sequence.outputs), sequence.order))
