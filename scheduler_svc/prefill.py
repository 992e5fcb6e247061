"""Which prompts enter this step, and how much of each. Pure.

First the prompts already begun, then the waiting queue in its order; those that are ahead of arrivals, because
they were accepted or ran before, also go before arrivals that are begun. A prompt may overtake one that does not
fit into this step and has at least `OVERTAKES` times as much left, so a short question does not wait behind a book;
but no arrival overtakes one that is ahead of it, the oldest begun prompt gets its share of every step, and a waiting
one is overtaken a bounded number of times.

Sequences of one request with the same prompt (`n > 1`) compute it once: one leads, the others wait
beside the queue and are forked from it one token before its end (`Rank.fork`). Each then runs the last
prompt token itself, as a row of its own, so its first token is sampled as if it had been alone. Those that come from
another rank with outputs do the same, and then compute their outputs: the blocks of their prompt they need only once.
"""

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Protocol

import msgspec

from phalanx.protocol.introductions import PLAN_NEW_BYTES_MAX
from phalanx.protocol.prompt_logprobs import STEP_BYTES_MAX
from phalanx.scheduler_svc.blocks import blocks_for
from phalanx.scheduler_svc.rank import Fork, Rank
from phalanx.scheduler_svc.state import Chunk, Sequence

OVERTAKES = 4  # a prompt with so many times less left may go first
OVERTAKEN_MAX = 32  # times that a waiting sequence lets others go first
_SETTINGS, _SETTINGS_OF_CHUNK = attrgetter("settings_bytes"), attrgetter("sequence.settings_bytes")
LOOKAHEAD = 8  # waiting sequences looked at
OLDEST_SHARE = 4  # the oldest begun prompt gets at least this part of the rows


class Stored(Protocol):
    """The KV store, as far as it matters here."""

    def cut_at(self, sequence: Sequence, start: int) -> int:
        """Where a chunk from `start` on must end, because its state is copied there; 0: anywhere."""
        ...

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether what is stored of the sequence can be loaded soon, but not now."""
        ...

    def load(self, sequence: Sequence) -> None:
        """Begin to. The sequence has its blocks and slot."""
        ...


class Prefill(msgspec.Struct, eq=False):
    """What a step adds to the decoding rows."""

    chunks: list[Chunk] = []
    forks: list[Fork] = []
    num_rows: int = 0  # of all chunks


def take_chunks(
    rank: Rank,
    budget: int,
    *,
    max_num_seqs: int,
    watermark: float,
    stored: Stored | None = None,
) -> Prefill:
    """Chunks of together at most `budget` tokens; starts waiting sequences as far as room allows.
    Those with a stored prefix begin to load it, and come back with their rows once it is there.

    A sequence takes its slot and all blocks of its tokens at its first chunk, so a prompt once begun
    always gets done. One starts only while at most `watermark` of the pool is used: running sequences
    need room to grow. See `may_start`.
    """
    return _Taking(rank, budget, max_num_seqs, watermark, stored).run()


def wants_prompt(
    rank: Rank, *, max_num_seqs: int, watermark: float, stored: Stored | None = None
) -> bool:
    """Whether `take_chunks` would find something, as far as can be seen without taking it."""
    if rank.prefilling:
        return True
    taking = _Taking(rank, 1, max_num_seqs, watermark, stored)
    return bool(rank.waiting) and next(taking.startable(), None) is not None


class _Taking:
    """One call of `take_chunks`."""

    def __init__(
        self,
        rank: Rank,
        budget: int,
        max_num_seqs: int,
        watermark: float,
        stored: Stored | None,
    ) -> None:
        self._rank, self._stored = rank, stored
        self._budget = self._left = budget
        self._max_num_seqs, self._watermark = max_num_seqs, watermark
        self._room = PLAN_NEW_BYTES_MAX
        self._score_room = STEP_BYTES_MAX
        self._counts: dict[Sequence, int] = {}  # tokens given to each
        self._totals: dict[Sequence, int] = {}
        self._open: list[Sequence] = []  # begun ones that may take more
        self._begun: set[str] = set()  # their requests, and those of others in prefill
        self._whole: list[Chunk] = []  # whole prompts, which need no further thought
        self._forks: list[Fork] = []

    def run(self) -> Prefill:
        rank = self._rank
        if not (rank.prefilling or rank.waiting):
            return Prefill()
        # Without a budget nothing is planned, and plans made with the abandoned one may still be under way.
        for sequence in list(rank.prefilling) if self._left else ():
            if rank.lost_fork(sequence):
                rank.restart(sequence)
        self._open = list(rank.prefilling)
        self._begun = {s.request_id for s in chain(rank.prefilling, rank.loading, rank.aside)}
        if self._stored is not None:
            self._load()
        if not self._left:
            return Prefill()
        if self._open:
            if len(self._open) + len(rank.waiting) > 1:
                self._give(self._open[0], -(-self._left // OLDEST_SHARE))
        elif rank.waiting and not rank.waiting[0].ahead:
            self._start_whole()
            if not rank.waiting:
                return self._taken(self._whole)
        while self._left and (chosen := self._next()) is not None:
            if chosen.slot >= 0 or self._start(chosen):
                self._give(chosen, self._left)
        chunks = [self._chunk(sequence, count) for sequence, count in self._counts.items() if count]
        return self._taken(self._whole + chunks)

    def _taken(self, chunks: list[Chunk]) -> Prefill:
        return Prefill(chunks, self._forks, self._budget - self._left)

    def _start_whole(self) -> None:
        """The common case at once: arrivals at the head of the queue, as far as whole prompts fit into the step
        and are shared with nobody. The first that asks for more thought ends it."""
        rank, passes = self._rank, self._rank.table.passes
        room, used_max = self._max_num_seqs - rank.num_running, self._watermark * rank.pool.total
        room, settings_bytes = self._settings_of_heads(min(room, len(rank.free_slots)))
        most = (self._room - settings_bytes) // 4
        if passes is None:
            self._whole, left = self._start_heads(room, most, used_max)
        else:
            self._whole, left = passes.start_whole(
                rank, self._begun, self._stored, room, self._left, most, used_max
            )
        self._room -= 4 * (self._left - left) + sum(map(_SETTINGS_OF_CHUNK, self._whole))
        self._left = left

    def _settings_of_heads(self, most: int) -> tuple[int, int]:
        """At the queue's head, of at most so many: (sequences whose settings fit into half of the room, their bytes)."""
        sizes = list(map(_SETTINGS, self._rank.waiting[: max(0, most)]))
        while (nbytes := sum(sizes)) > self._room // 2:
            del sizes[-1 - len(sizes) // 2 :]
        return len(sizes), nbytes

    def _start_heads(self, room: int, most: int, used_max: float) -> tuple[list[Chunk], int]:
        """Of at most `room` sequences with `most` tokens together; (their chunks, rows that are left)."""
        rank, stored, begun, whole = self._rank, self._stored, self._begun, list[Chunk]()
        left, used, total = self._left, rank.pool.used, rank.pool.total
        outputs = rank.t.output_tokens
        num_blocks: list[int] = []
        for first in rank.waiting[: max(0, room)]:
            count = first.num_prompt + outputs.item(first.row)
            if count > left or count > most or first.stored or first.scores.wanted:
                break
            if stored is not None and stored.cut_at(first, 0):
                break
            if first.key[0] in begun or not rank.alone(first):
                break
            needed = blocks_for(count)
            if used > used_max or needed > total - used:
                break
            whole.append(Chunk(first, 0, count, True))
            num_blocks.append(needed)
            left -= count
            most -= count
            used += needed
        if whole:
            rank.start_first(num_blocks)
            begun.update([chunk.sequence.key[0] for chunk in whole])
        return whole, left

    def _load(self) -> None:
        """Begin to load what is stored: that costs no rows, so it need not wait for them."""
        passed: list[Sequence] = []
        for sequence in self.startable():
            if not sequence.stored:
                passed.append(sequence)
                continue
            self._start(sequence)
            for earlier in passed:
                earlier.overtaken += 1

    def _start(self, sequence: Sequence) -> bool:
        """A waiting sequence takes what it needs. Whether it can have rows in this step."""
        self._begun.add(sequence.request_id)
        num_blocks = blocks_for(self._tokens(sequence))
        if sequence.stored:
            assert self._stored is not None
            self._rank.start_loading(sequence, num_blocks)
            self._stored.load(sequence)
            return False
        self._rank.start(sequence, num_blocks)
        self._open.append(sequence)
        return True

    def _next(self) -> Sequence | None:
        """Whose turn it is; None when nobody can take more."""
        while self._open and not self._wants(self._open[0]):
            del self._open[0]
        first = self._first()
        if first is None or self._remaining(first) <= self._left:
            return first
        waiting = list(self.startable())
        queue = [sequence for sequence in self._open if self._wants(sequence)] + waiting
        if first.ahead:
            queue = [sequence for sequence in queue if sequence.ahead]
        chosen = min(queue, key=self._remaining)
        if self._remaining(chosen) > self._remaining(first) // OVERTAKES:
            return first
        if chosen.slot < 0:
            for passed in waiting[: waiting.index(chosen)]:
                passed.overtaken += 1
        return chosen

    def _first(self) -> Sequence | None:
        """Who is first in turn: begun or waiting, those ahead of arrivals or the others."""
        first = self._open[0] if self._open else None
        if first is not None and not first.ahead:
            for sequence in self._open:
                if sequence.ahead and self._wants(sequence):
                    return sequence
        if first is None or (
            not first.ahead and self._rank.waiting and self._rank.waiting[0].ahead
        ):
            head = next(self.startable(), None)
            if head is not None and (first is None or head.ahead):
                return head
        return first

    def startable(self) -> Iterator[Sequence]:
        """Waiting sequences that could start now, as far as one may go before those ahead of it.

        When there is no room for the first, nobody behind it starts: else it would never find room.
        """
        rank, first = self._rank, True
        for sequence in rank.waiting[:LOOKAHEAD]:
            if sequence.request_id in self._begun and rank.leader_of(sequence) is not None:
                continue
            if sequence.stored and self._stored and self._stored.must_wait(sequence):
                continue
            fits = self._told_bytes(sequence) <= self._room and may_start(
                rank, sequence, self._max_num_seqs, self._watermark
            )
            if fits:
                yield sequence
            if first and not fits or sequence.overtaken >= OVERTAKEN_MAX:
                return
            first = False

    def _tokens(self, sequence: Sequence) -> int:
        """`num_tokens`, which does not change within a step."""
        count = self._totals.get(sequence)
        if count is None:
            count = self._totals[sequence] = sequence.num_tokens
        return count

    def _told_bytes(self, sequence: Sequence) -> int:
        """What a plan that tells the worker of it takes for that."""
        return 4 * self._tokens(sequence) + sequence.settings_bytes

    def _planned(self, sequence: Sequence) -> int:
        return self._rank.t.planned.item(sequence.row) + self._counts.get(sequence, 0)

    def _remaining(self, sequence: Sequence) -> int:
        return self._tokens(sequence) - self._planned(sequence)

    def _end(self, sequence: Sequence) -> int:
        """Where its chunk of this step must end at the latest."""
        start, end = self._rank.t.planned.item(sequence.row), self._tokens(sequence)
        fork_at = sequence.num_prompt - 1 if self._rank.followers(sequence) else 0
        state_at = self._stored.cut_at(sequence, start) if self._stored else 0
        for cut in (state_at, fork_at):
            if start < cut < end:
                end = cut
        if not sequence.scores.wanted:
            return end
        # Rows before the last prompt token give a record each, and a step's result has room for so many.
        at = self._planned(sequence) + self._score_room // sequence.scores.record_bytes
        return end if at >= sequence.num_prompt - 1 else min(end, at)

    def _wants(self, sequence: Sequence) -> bool:
        told_now = not sequence.known and sequence not in self._counts
        if told_now and self._told_bytes(sequence) > self._room:
            return False
        return self._planned(sequence) < self._end(sequence)

    def _give(self, sequence: Sequence, most: int) -> None:
        if not sequence.known and sequence not in self._counts:
            self._room -= self._told_bytes(sequence)
        start = self._rank.t.planned.item(sequence.row)
        count = min(most, self._left, self._end(sequence) - self._planned(sequence))
        if sequence.scores.wanted:
            before = self._planned(sequence)
            scored = max(0, min(before + count, sequence.num_prompt - 1) - before)
            self._score_room -= scored * sequence.scores.record_bytes
        self._counts[sequence] = self._counts.get(sequence, 0) + count
        self._left -= count
        if start == sequence.num_prompt - 1 > 0:
            self._fork(sequence)

    def _fork(self, leader: Sequence) -> None:
        """Start those who wait for this prompt, as many as there is room for; the next one leads the rest."""
        rank = self._rank
        for follower in rank.followers(leader):
            shared = rank.shared_blocks(leader)
            fits = self._told_bytes(follower) <= self._room and may_start(
                rank, follower, self._max_num_seqs, self._watermark, shared
            )
            if not self._left or not fits:
                break
            self._forks.append(rank.fork(leader, follower))
            self._counts[follower] = 1
            self._room -= self._told_bytes(follower)
            self._left -= 1

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start = self._rank.t.planned.item(sequence.row)
        return Chunk(sequence, start, count, samples=start + count == self._tokens(sequence))


def may_start(
    rank: Rank, sequence: Sequence, max_num_seqs: int, watermark: float, shared: int = 0
) -> bool:
    """Whether there is room for a waiting sequence, which has so many of its blocks in common with one that runs.

    An arrival finds at most `watermark` of the pool used. One that is ahead of arrivals leaves it so, unless it
    is alone: it comes from a rank that fell, or had to make room here, and shall not push out who runs. But it
    cannot do that, however full the pool, where all have room to go on to their ends.
    """
    pool, num_blocks = rank.pool, blocks_for(sequence.num_tokens) - shared
    if rank.num_running >= max_num_seqs or not rank.free_slots or num_blocks > pool.free:
        return False
    most = watermark * pool.total
    if not sequence.ahead:
        return pool.used <= most
    if not rank.num_running or pool.used + num_blocks <= most:
        return True
    in_the_end = rank.blocks_in_the_end(sequence) - shared
    return pool.used + rank.reserved + in_the_end <= pool.total
