"""What one rank holds: its sequences in three queues, its blocks and its state slots. Pure.

A sequence waits (holding nothing), prefills (holding a slot and all blocks of its tokens, also
between two chunks) or decodes. Every way out of a queue goes through here, so that each of them gives
everything back.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np

from phalanx.protocol.queues import Phase, State
from phalanx.scheduler_svc.blocks import BlockPool, blocks_for
from phalanx.scheduler_svc.state import Rows, Sequence, Table


@dataclass(slots=True)
class Chunk:
    """Tokens `start .. start + count` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last chunk: its last row gives the next token
    region: int = -1  # where the worker copies the state slot to afterwards; -1: nowhere

    @property
    def end(self) -> int:
        return self.start + self.count


class Rank:
    """`num_blocks` and `num_slots` are the worker's; without a worker both are 0."""

    def __init__(self, table: Table) -> None:
        self.table, self.t = table, table.columns
        self.waiting: list[Sequence] = []  # by `order`
        self.prefilling: list[Sequence] = []  # cut prompts first: the head of the queue
        self.decoding: list[Sequence] = []
        self.reset(0, 0)

    def reset(self, num_blocks: int, num_slots: int) -> None:
        """A new worker, or none: every sequence is dropped, blocks and slots are those of `hello`."""
        for sequence in list(self.table.by_row.values()):
            sequence.slot, sequence.blocks = -1, []
            self.table.remove(sequence)
        for queue in (self.waiting, self.prefilling, self.decoding):
            queue.clear()
        self.pool = BlockPool(num_blocks)
        self.total_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._rows: Rows | None = None

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def decode_rows(self) -> Rows:
        """intp [len(decoding)]: their rows of the table, in order."""
        if self._rows is None:
            self._rows = np.array([sequence.row for sequence in self.decoding], np.intp)
        return self._rows

    def enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def start(self, sequence: Sequence) -> None:
        """The head of the waiting queue takes a slot and all blocks of its tokens."""
        assert self.waiting[0] is sequence
        del self.waiting[0]
        row = sequence.row
        sequence.slot = self.free_slots.pop()
        sequence.blocks = self.pool.allocate(blocks_for(sequence.num_tokens))
        self.t.slot[row] = sequence.slot
        self.t.blocks[row] = len(sequence.blocks)
        self.t.state[row], self.t.phase[row] = State.RUNNING, Phase.PREFILL
        self.prefilling.append(sequence)

    def to_decode(self, sequence: Sequence) -> None:
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)
        self.t.phase[sequence.row] = Phase.DECODE
        self._rows = None

    def to_prefill(self, sequence: Sequence) -> None:
        """Its last chunk was abandoned: the next prompt to go on."""
        self.decoding.remove(sequence)
        self.prefilling.insert(0, sequence)
        self.t.phase[sequence.row] = Phase.PREFILL
        self._rows = None

    def grow(self, sequence: Sequence, count: int) -> None:
        """More blocks for a decoding sequence. The caller has looked at the pool."""
        sequence.blocks += self.pool.allocate(count)
        self.t.blocks[sequence.row] = len(sequence.blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the waiting queue without blocks and slot; all its tokens will be computed again.

        No plan under way may contain it.
        """
        assert self.t.in_flight[sequence.row] == 0
        row = sequence.row
        self.leave(sequence)
        self.free(sequence)
        sequence.known = False
        self.t.committed[row] = self.t.planned[row] = 0
        self.t.preemptions[row] += 1
        self.t.state[row], self.t.phase[row] = State.WAITING, Phase.PREEMPTED
        sequence.order = (0, *sequence.order[1:])  # as a resumed one: ahead of arrivals
        self.enqueue(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Out of whichever queue it is in; blocks and slot stay with it."""
        for queue in (self.decoding, self.prefilling, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._rows = None

    def free(self, sequence: Sequence) -> None:
        """Blocks and slot back. No step in flight may still write them."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence.slot >= 0:
            self.free_slots.append(sequence.slot)
        sequence.slot = -1
        row = sequence.row
        self.t.slot[row] = -1
        self.t.blocks[row] = self.t.told[row] = 0
