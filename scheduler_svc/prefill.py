"""Which prompts enter this step, and how much of each. Pure.

First the prompts already begun, then the waiting queue in its order. Nobody is overtaken: a long
prompt would starve behind a stream of short ones.
"""

from collections.abc import Callable

from phalanx.protocol.limits import RING_BYTES
from phalanx.scheduler_svc.blocks import blocks_for
from phalanx.scheduler_svc.rank import Chunk, Rank
from phalanx.scheduler_svc.state import Sequence

# A plan carries all tokens of its new sequences; half a ring leaves room for the rest of it.
PLAN_NEW_BYTES_MAX = RING_BYTES // 2


def take_chunks(
    rank: Rank,
    budget: int,
    *,
    max_num_seqs: int,
    watermark: float,
    cut_at: Callable[[Sequence], int],
) -> list[Chunk]:
    """Chunks of together at most `budget` tokens; starts waiting sequences as far as room allows.

    A sequence takes its slot and all blocks of its tokens at its first chunk, so a prompt once begun
    always gets done. One starts only while at most `watermark` of the pool is used: running sequences
    need room to grow.

    Args:
        cut_at: A position where a chunk of the sequence must end (its state is copied there), or 0.
    """
    chunks: list[Chunk] = []
    room = PLAN_NEW_BYTES_MAX
    for sequence in list(rank.prefilling):
        if budget == 0:
            return chunks
        chunks.append(_chunk(rank, sequence, budget, cut_at(sequence)))
        budget -= chunks[-1].count
        room -= 0 if sequence.known else 4 * sequence.num_tokens
    while budget and rank.waiting:
        head = rank.waiting[0]
        room -= 4 * head.num_tokens
        if room < 0 or not may_start(rank, head, max_num_seqs, watermark):
            break
        rank.start(head)
        chunks.append(_chunk(rank, head, budget, cut_at(head)))
        budget -= chunks[-1].count
    return chunks


def may_start(rank: Rank, sequence: Sequence, max_num_seqs: int, watermark: float) -> bool:
    return (
        rank.num_running < max_num_seqs
        and bool(rank.free_slots)
        and rank.pool.used <= watermark * rank.pool.total
        and blocks_for(sequence.num_tokens) <= rank.pool.free
    )


def _chunk(rank: Rank, sequence: Sequence, budget: int, cut: int) -> Chunk:
    start, total = int(rank.t.planned[sequence.row]), sequence.num_tokens
    end = min(total, start + budget)
    if start < cut < end:
        end = cut
    return Chunk(sequence, start, end - start, samples=end == total)
