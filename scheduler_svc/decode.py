"""Which running sequences get a token in this step, and who makes room. Pure."""

import numpy as np

from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Rows, Sequence

NOBODY: Rows = np.empty(0, np.intp)


def take_decoders(rank: Rank) -> tuple[list[Sequence], Rows]:
    """Every decoding sequence, each with a block for its next position.

    Out of blocks, the one with the longest output is preempted: it frees most, and recomputing gives
    the same tokens. The last one left is never its own victim: it waits a step, since whatever else
    holds blocks (a prompt in prefill, a copy into the KV store) is bounded.
    """
    while rank.decoding:
        rows = rank.decode_rows
        short = np.flatnonzero(rank.t.committed[rows] >= rank.t.blocks[rows] * BLOCK_SIZE)
        if len(short) <= rank.pool.free:
            for place in short:
                rank.grow(rank.decoding[place])
            return rank.decoding, rows
        if len(rank.decoding) == 1:
            break
        rank.preempt(longest(rank.decoding))
    return [], NOBODY


def longest(decoding: list[Sequence]) -> Sequence:
    """The one with most outputs; among equals the one that came last."""
    return max(decoding, key=lambda sequence: (len(sequence.outputs), sequence.order))
