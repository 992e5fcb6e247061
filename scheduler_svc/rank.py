"""What one rank holds: its sequences in three queues, its blocks and its state slots. Pure.

A sequence waits (holding nothing), prefills (holding a slot and all blocks of its tokens, also
between two chunks) or decodes. Beside these three are those whose stored prefix is looked up (holding
nothing) or loaded (holding slot and blocks). Every way out of a queue goes through here, so that each of
them gives everything back.
"""

from bisect import insort
from itertools import chain
from typing import NamedTuple

import numpy as np

from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.scheduler_svc.blocks import BlockPool, blocks_for
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.state import (
    DECODE,
    LOADING,
    PREEMPTED,
    PREFILL,
    QUEUED,
    RUNNING,
    WAITING,
    Ended,
    Fence,
    Key,
    Sequence,
    Table,
)
from phalanx.scheduler_svc.stops import Flags, Rows


class Fork(NamedTuple):
    """A follower takes over what its leader has computed: for the worker to copy before the step."""

    leader_slot: int
    follower_slot: int
    leader_block: int  # the block that is not full, 0: there is none
    follower_block: int


class Rank:
    """`num_blocks` and `num_slots` are the worker's; without a worker both are 0."""

    def __init__(self, table: Table) -> None:
        self.table, self.t = table, table.columns
        self.waiting: list[Sequence] = []  # by `order`
        self._waiting_of: dict[str, list[Sequence]] = {}  # by request
        self.seen = 0  # the newest plan whose result is in
        self.prefilling: list[Sequence] = []  # cut prompts first: the head of the queue
        self.decoding: dict[int, Sequence] = {}  # by row, in order of their first token
        self.aside: dict[Sequence, None] = {}  # not ready to wait: looked up in the KV store
        self.loading: dict[Sequence, None] = {}  # their first blocks come from the KV store
        self.decodes: Flags = np.zeros(self.t.rows, bool)  # by row
        self.reset(0, 0)

    def reset(self, num_blocks: int, num_slots: int) -> None:
        """A new worker, or none: every sequence is dropped, blocks and slots are those of `hello`."""
        sequences = list(self.table.by_row.values())
        for sequence in sequences:
            sequence.slot, sequence.blocks = -1, []
        self.table.remove(sequences)
        self.waiting.clear()
        self._waiting_of.clear()
        self.prefilling.clear()
        self.decoding.clear()
        self.aside.clear()
        self.loading.clear()
        self.pool = BlockPool(num_blocks)
        self.total_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._rows: Rows = np.empty(0, np.intp)  # of `decoding`, and of some that have left it
        self.decodes[:] = False
        self._some_left = False

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self.prefilling) + len(self.decoding) + len(self.loading)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.aside)

    @property
    def decode_rows(self) -> Rows:
        """intp [len(decoding)]: their rows of the table, in order."""
        if self._some_left:
            passes = self.table.passes
            if passes is not None:
                self._rows = np.frombuffer(passes.to_decode(self, [], self._rows), np.intp)
            else:
                self._rows = self._rows[self.decodes.take(self._rows)]
            self._some_left = False
        return self._rows

    def enqueue(self, sequence: Sequence) -> None:
        if self.waiting and sequence.order < self.waiting[-1].order:
            insort(self.waiting, sequence, key=lambda waiting: waiting.order)
        else:
            self.waiting.append(sequence)
        self._waiting_of.setdefault(sequence.request_id, []).append(sequence)

    def _leave_waiting(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        of_request = self._waiting_of[sequence.request_id]
        of_request.remove(sequence)
        if not of_request:
            del self._waiting_of[sequence.request_id]

    def start(self, sequence: Sequence, num_blocks: int) -> None:
        """A waiting sequence takes a slot and all blocks of its tokens."""
        self._take_slot(sequence, self.pool.allocate(num_blocks))
        self._prefill(sequence)

    def start_first(self, num_blocks: list[int]) -> None:
        """As `start`, for the first so many of the waiting ones, each alone of its request."""
        count = len(num_blocks)
        sequences, blocks, at = self.waiting[:count], self.pool.allocate(sum(num_blocks)), 0
        slots = self.free_slots[: -count - 1 : -1]
        del self.waiting[:count], self.free_slots[-count:]
        for sequence, slot, more in zip(sequences, slots, num_blocks, strict=True):
            del self._waiting_of[sequence.key[0]]
            sequence.blocks, sequence.slot = blocks[at : at + more], slot
            at += more
        t, rows = self.t, np.array([sequence.row for sequence in sequences], np.intp)
        t.slot[rows] = slots
        t.blocks[rows], t.state[rows], t.phase[rows] = num_blocks, RUNNING, PREFILL
        self.prefilling += sequences

    def _take_slot(self, sequence: Sequence, blocks: list[int]) -> None:
        self._leave_waiting(sequence)
        t, row = self.t, sequence.row
        sequence.blocks = blocks
        sequence.slot = t.slot[row] = self.free_slots.pop()
        t.blocks[row], t.state[row] = len(blocks), RUNNING

    def _prefill(self, sequence: Sequence) -> None:
        self.t.phase[sequence.row] = PREFILL
        self.prefilling.append(sequence)

    def under_way(self, sequence: Sequence) -> bool:
        """Whether a plan that has no result yet contains it."""
        return self.t.last_plan.item(sequence.row) > self.seen

    # ------------------------------------------------------------ what the KV store has

    def set_aside(self, sequence: Sequence) -> None:
        """A waiting sequence makes room for those that are ready."""
        self._leave_waiting(sequence)
        self.aside[sequence] = None

    def take_back(self, sequence: Sequence) -> None:
        """One that was set aside waits for its turn again."""
        del self.aside[sequence]
        self.enqueue(sequence)

    def start_loading(self, sequence: Sequence, num_blocks: int) -> None:
        """As `start`, for one whose first blocks are filled by the KV store first."""
        self._take_slot(sequence, self.pool.allocate(num_blocks))
        self.t.phase[sequence.row] = LOADING
        self.loading[sequence] = None

    def loaded(self, sequence: Sequence, num_tokens: int) -> None:
        """Its prefill begins, behind so many tokens that need not be computed."""
        del self.loading[sequence]
        row = sequence.row
        self.t.committed[row] = self.t.planned[row] = self.t.cached_tokens[row] = num_tokens
        self._prefill(sequence)

    # ------------------------------------------------------------ sequences of one request

    def alone(self, sequence: Sequence) -> bool:
        """No other sequence of the request of this waiting one waits."""
        return len(self._waiting_of[sequence.key[0]]) == 1

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Waiting sequences that need the prompt that `leader` computes."""
        waiting = self._waiting_of.get(leader.request_id, ())
        return [one for one in waiting if self.shares(leader, one)]

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """A sequence in prefill, or on its way there past the KV store, that computes the prompt which this
        waiting one needs; it is worth waiting for."""
        if sequence.num_prompt == 1:
            return None
        for leader in chain(self.prefilling, self.loading, self.aside):
            same = leader.request_id == sequence.request_id and self.shares(leader, sequence)
            if same and self._is_before_fork(leader):
                return leader
        return None

    def shares(self, leader: Sequence, follower: Sequence) -> bool:
        """Whether two sequences of one request need the same of its prompt. With outputs, which each has of its own,
        it is for the blocks that they need only once."""
        if follower.scores.wanted or follower.prompt != leader.prompt:
            return False  # scores come from rows of its own
        return self.shared_blocks(leader) > 0 or not (leader.num_outputs or follower.num_outputs)

    def _is_before_fork(self, leader: Sequence) -> bool:
        """It has not computed, and does not load, the last token of its prompt."""
        begun = self.t.planned.item(leader.row)
        if leader in self.loading:
            begun = leader.stored * BLOCK_SIZE
        return begun < leader.num_prompt

    @staticmethod
    def shared_blocks(leader: Sequence) -> int:
        """Blocks that are full one token before the prompt's end: nobody writes them any more."""
        return (leader.num_prompt - 1) // BLOCK_SIZE

    def fork(self, leader: Sequence, follower: Sequence) -> Fork:
        """Start `follower` one token before the end of its prompt, on the leader's blocks. What it has of outputs
        it computes itself.

        The block that is not full and the state slot are copied, by the worker, before the step with
        the follower's first row and the leader's last: at that moment the leader's slot stands there.
        """
        at, shared = leader.num_prompt - 1, self.shared_blocks(leader)
        own = self.pool.allocate(blocks_for(follower.num_tokens) - shared)
        self.pool.retain(leader.blocks[:shared])
        if not follower.num_outputs:
            follower.cached = leader.cached
        follower.begun_ns = min(follower.begun_ns, leader.begun_ns)
        self._take_slot(follower, leader.blocks[:shared] + own)
        self._prefill(follower)
        row = follower.row
        self.t.committed[row] = self.t.planned[row] = at
        copied = (leader.blocks[shared], own[0]) if at % BLOCK_SIZE else (0, 0)
        return Fork(leader.slot, follower.slot, *copied)

    def lost_fork(self, sequence: Sequence) -> bool:
        """Whether what it builds on was never copied: forked, or loaded, in a step that was abandoned. (What
        was loaded, and is still there, is copied again.)"""
        not_told = not sequence.known and sequence.load is None
        return not_told and self.t.planned.item(sequence.row) > 0

    def restart(self, sequence: Sequence) -> None:
        """Back to the waiting queue, as if it had never begun. No plan under way may contain it."""
        assert not self.under_way(sequence)
        self._to_waiting(sequence)
        self.t.phase[sequence.row] = QUEUED
        self.enqueue(sequence)

    def _to_waiting(self, sequence: Sequence) -> None:
        row = sequence.row
        self.leave(sequence)
        self.free([sequence])
        sequence.known, sequence.marks = False, None
        self.t.slot[row], self.t.blocks[row], self.t.told[row] = -1, 0, 0
        self.t.committed[row] = self.t.planned[row] = self.t.cached_tokens[row] = 0
        self.t.state[row] = WAITING

    # ------------------------------------------------------------ room

    @property
    def reserved(self) -> int:
        """Blocks that those who run do not have, and will if each gets as far as it may."""
        begun = [one.row for one in chain(self.prefilling, self.loading)]
        rows = np.concatenate((self.decode_rows, np.array(begun, np.intp)))
        lacking = (self.t.rows_max.take(rows) - 1) // BLOCK_SIZE + 1 - self.t.blocks.take(rows)
        return int(np.add.reduce(np.maximum(lacking, 0)))

    def blocks_in_the_end(self, sequence: Sequence) -> int:
        """That the sequence may come to hold."""
        return max(blocks_for(self.t.rows_max.item(sequence.row)), blocks_for(sequence.num_tokens))

    # ------------------------------------------------------------ phases

    def to_decode(self, sequences: list[Sequence]) -> None:
        passes = self.table.passes
        if passes is not None:
            rows = passes.to_decode(self, sequences, self._rows)
            self._rows, self._some_left = np.frombuffer(rows, np.intp), False
            return
        for sequence in sequences:
            self.prefilling.remove(sequence)
            self.decoding[sequence.row] = sequence
        at = np.array([sequence.row for sequence in sequences], np.intp)
        self._rows = np.concatenate((self.decode_rows, at))  # without those that left these rows
        self.decodes[at], self.t.phase[at] = True, DECODE

    def finish(
        self, ended: list[Ended], kept: dict[Key, Sequence], now_ns: int, due_ns: int
    ) -> tuple[list[Fence], list[Sequence]] | None:
        """End sequences that decode, and nothing else that ends; `Scheduler._finish_all` says how. None: not
        possible, and nothing has changed."""
        passes = self.table.passes
        if passes is None:
            return None
        self._some_left = True
        return passes.finish(self, ended, kept, now_ns, due_ns)

    def to_prefill(self, sequence: Sequence) -> None:
        """Its last chunk was abandoned: the next prompt to go on."""
        self._leave_decoding(sequence)
        self.prefilling.insert(0, sequence)
        self.t.phase[sequence.row] = PREFILL

    def _leave_decoding(self, sequence: Sequence) -> None:
        del self.decoding[sequence.row]
        self.decodes[sequence.row], self._some_left = False, True

    def grow(self, rows: Rows, counts: Int32) -> None:
        """More blocks for decoding sequences. The caller has looked at the pool."""
        blocks, at = self.pool.allocate(int(np.add.reduce(counts))), 0
        decoding = self.decoding
        if len(blocks) == len(rows):  # nearly always
            for row, block in zip(rows.tolist(), blocks, strict=True):
                decoding[row].blocks.append(block)
        else:
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                decoding[row].blocks += blocks[at : at + count]
                at += count
        self.t.blocks[rows] += counts

    def preempt(self, sequence: Sequence) -> None:
        """Back to the waiting queue without blocks and slot; all its tokens will be computed again.

        No plan under way may contain it.
        """
        assert not self.under_way(sequence)
        row = sequence.row
        self._to_waiting(sequence)
        self.t.preemptions[row] += 1
        self.t.phase[row] = PREEMPTED
        sequence.order = (0, *sequence.order[1:])  # as a resumed one: ahead of arrivals
        self.enqueue(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Out of whichever queue it is in; blocks and slot stay with it."""
        if sequence.row in self.decoding:
            self._leave_decoding(sequence)
        elif sequence in self.loading:
            del self.loading[sequence]
        elif sequence in self.aside:
            del self.aside[sequence]
        elif sequence.slot >= 0:
            self.prefilling.remove(sequence)
        else:
            self._leave_waiting(sequence)

    def free(self, sequences: list[Sequence]) -> None:
        """Blocks and slots back. No step in flight may still write them."""
        if self.table.passes is not None:
            self.table.passes.free(self, sequences)
            return
        blocks: list[int] = []
        for sequence in sequences:
            blocks += reversed(sequence.blocks)
            sequence.blocks = []
            if sequence.slot >= 0:
                self.free_slots.append(sequence.slot)
                sequence.slot = -1
        self.pool.release(blocks)
