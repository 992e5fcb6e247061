"""Which running sequences get tokens in this step, with how many drafts, and who makes room. Pure."""

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Sequence
from phalanx.scheduler_svc.stops import Rows


class Decoders(msgspec.Struct, eq=False):
    """Sequences with one row and `drafts` draft rows each; parallel arrays."""

    rows: Rows = msgspec.field(default_factory=lambda: np.empty(0, np.intp))
    drafts: Int32 = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    num_rows: int = 0

    def context(self, rank: Rank) -> int:
        """Sum over the rows of the tokens that each may read, before the step is planned."""
        return int(np.dot(rank.t.planned.take(self.rows), self.drafts + 1))


def take_decoders(
    rank: Rank, *, budget: int, max_drafts: int, idle: bool, evict: Callable[[Sequence], None]
) -> Decoders | None:
    """Every decoding sequence that may need another token, each with blocks for its rows.

    Out of blocks, drafts are left out first. Then a sequence is evicted (`victim`), perhaps one that is moving here
    and has not got as far as a token. The last one left is never its own victim: it waits a step, since whatever
    else holds blocks (a prompt in prefill, a copy into the KV store) is bounded.

    Args:
        budget: Rows the step may have; at least one for each decoding sequence.
        max_drafts: Draft rows that the worker can take back.
        idle: No plan is under way. Only then can a sequence be evicted.
        evict: Takes its blocks and slot away.

    Returns:
        None when somebody must be evicted, but plans are under way: wait for their results.
    """
    passes = rank.table.passes
    if passes is not None and rank.decoding:
        taken = passes.take_decoders(rank, rank.decode_rows, budget, max_drafts)
        if taken is not None:
            rows, drafts, num_rows = taken
            return Decoders(
                np.frombuffer(rows, np.intp) if isinstance(rows, bytes) else rows,
                np.frombuffer(drafts, np.int32),
                num_rows,
            )
    while rank.decoding:
        found = _eligible(rank, budget, max_drafts)
        for with_drafts in (True, False):
            if not with_drafts:
                found = _without_drafts(found.rows)
            short, missing = _missing_blocks(rank, found)
            if not len(short):
                return found
            if int(np.add.reduce(missing)) <= rank.pool.free:
                rank.grow(short, missing)
                return found
        if not idle:
            return None
        moving = [one for one in rank.prefilling if one.ahead and one.load is None]
        if len(rank.decoding) == 1 and not moving:
            break
        evict(victim([*rank.decoding.values(), *moving]))
    return Decoders()


def _eligible(rank: Rank, budget: int, max_drafts: int) -> Decoders:
    """Those whose outputs, with all that is under way, do not reach their maximum yet."""
    t, rows = rank.t, rank.decode_rows
    planned = t.planned.take(rows)
    going = planned < t.rows_max.take(rows)
    if np.count_nonzero(going) < len(going):
        rows, planned = rows[going], planned[going]
    most = min(max_drafts, budget // max(len(rows), 1) - 1)
    if most <= 0:
        return _without_drafts(rows)
    drafts = np.minimum(t.drafted_max.take(rows) - planned, most)
    np.maximum(drafts, 0, out=drafts)
    return Decoders(rows, drafts, len(rows) + int(np.add.reduce(drafts)))


def _without_drafts(rows: Rows) -> Decoders:
    return Decoders(rows, np.zeros(len(rows), np.int32), len(rows))


def _missing_blocks(rank: Rank, found: Decoders) -> tuple[Rows, Int32]:
    """Which of the rows need more blocks, and how many."""
    last = rank.t.planned.take(found.rows) + found.drafts  # position of the last row
    places = (last // BLOCK_SIZE >= rank.t.blocks.take(found.rows)).nonzero()[0]
    rows = found.rows.take(places)
    return rows, last.take(places) // BLOCK_SIZE + 1 - rank.t.blocks.take(rows)


def victim(decoding: Iterable[Sequence]) -> Sequence:
    """Who makes room: of those that came from another rank, or back to this one, the one that came last, so
    that a fault elsewhere pushes nobody out; without any of them the one with most outputs, which frees most
    (among equals the one that came last)."""
    every = list(decoding)
    if ahead := [sequence for sequence in every if sequence.ahead]:
        return max(ahead, key=lambda sequence: sequence.order)
    return max(every, key=lambda sequence: (sequence.num_outputs, sequence.order))
