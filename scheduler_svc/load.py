"""What the gateway hears of a seat's load, and when: at once if it may place sequences here or not any more,
soon after every other change, all the time while sequences wait, and now and then all the same. Pure.

It hears also what could start here at once, and which sequences wait for want of room: those it may take
back and give to a rank that has some (`services/gateway/moves.py`).
"""

from collections.abc import Iterator
from itertools import chain

from phalanx.protocol.messages import SeatLoad
from phalanx.scheduler_svc.blocks import blocks_for
from phalanx.scheduler_svc.prefill import may_start
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Sequence

PERIOD_NS = 50 * 10**6  # between two reports of ordinary changes
REPEAT_NS = 10**9  # one that was lost must not idle the seat
STUCK_MAX = 32  # sequences named in one report; the next one names those behind them
WAITING_MAX = 32  # with more that wait there is no room, or it is a matter of a step


class LoadReport:
    def __init__(self) -> None:
        self._said: SeatLoad | None = None
        self._said_ns = 0
        self._now: SeatLoad | None = None

    def forget(self) -> None:
        """Another gateway, which has heard nothing yet."""
        self._said = None

    def update(self, load: SeatLoad, now_ns: int) -> bool:
        """Whether `load`, which is what holds now, is to be said."""
        self._now = load
        said = self._said
        urgent = said is None or (load.accepting, load.worker_incarnation) != (
            said.accepting,
            said.worker_incarnation,
        )
        if not urgent and now_ns < self.due_ns:
            return False
        self._said, self._said_ns = load, now_ns
        return True

    @property
    def due_ns(self) -> int:
        """When the load, if it stays as it is, will be said next."""
        settled = self._now == self._said and self._now is not None and not self._now.waiting
        return self._said_ns + (REPEAT_NS if settled else PERIOD_NS)


def room(rank: Rank, max_num_seqs: int, watermark: float) -> tuple[int, int, int]:
    """(blocks, sequences, spare blocks) that could start at once beside what is here, and behind what waits here.

    The pool is then no fuller than `watermark`, as is asked of sequences that come from another rank (`may_start`),
    and each sequence that runs can still grow by a block. Spare are blocks that are left if all go on to their ends.
    """
    pool, waiting = rank.pool, rank.num_waiting
    sequences = min(len(rank.free_slots), max_num_seqs - rank.num_running) - waiting
    if sequences <= 0 or waiting > WAITING_MAX:
        return 0, 0, 0
    most = min(int(watermark * pool.total), pool.total - rank.num_running)
    wanted = in_the_end = 0
    for one, shared in _with_shared(rank):
        wanted += blocks_for(one.num_tokens) - shared
        in_the_end += rank.blocks_in_the_end(one) - shared
    spare = pool.total - pool.used - rank.reserved - in_the_end
    return max(0, most - pool.used - wanted), sequences, max(0, spare)


def _with_shared(rank: Rank) -> Iterator[tuple[Sequence, int]]:
    """What waits, each with how many blocks of its prompt it shares with one before it, or with one in prefill."""
    leaders: dict[str, Sequence] = {}
    for one in chain(rank.aside, rank.waiting):
        leader = leaders.setdefault(one.request_id, one)
        if leader is one:
            leader = rank.leader_of(one) or one
        shares = leader is not one and rank.shares(leader, one)
        yield one, rank.shared_blocks(leader) if shares else 0


def stuck(rank: Rank, max_num_seqs: int, watermark: float) -> list[Sequence]:
    """The first of those that wait because there is no room for the first of them; none if there is some.

    Those that take over what another one of their request computes wait for that, not for room.
    """
    found = [one for one in rank.waiting[:STUCK_MAX] if rank.leader_of(one) is None]
    if found and may_start(rank, found[0], max_num_seqs, watermark):
        return []
    return found
