"""The way back from the KV store: the longest stored prefix of a sequence, with the window state at its end,
is loaded instead of computed. Pure, bounded in everything, and never longer in the way than a deadline.

Three steps. `ask`: the sequence waits aside until the store has said how much it has. `load`: at its turn
it takes slot and blocks, and the store copies what it has into regions of a staging arena that this
scheduler owns. `restores`: the worker copies them into blocks and slot with the sequence's first rows.

The store never writes where a sequence lives: blocks change hands at any moment (an abort, a lost worker, a
new scheduler), and nothing stops a copy that has begun in another process. A region changes hands, too, while
a Get for it may be late, doubled or unanswered; so each use has a generation of its own, which the store
checks. A copy that began before the generation moved ends before the copies for the next use begin, because
one thread makes them all; and a region is read only after those were answered.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.protocol.arena import Handle
from phalanx.protocol.kvkeys import block_key, root_key, state_key
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import Contains, ContainsReply, Get, GetDone
from phalanx.protocol.steps import Restore, WorkerHello
from phalanx.scheduler_svc.events import Staging
from phalanx.scheduler_svc.state import Load, Sequence

KEYS_PER_TURN = 16  # a key takes about 3 us, a turn must not delay a step
ASK_DEADLINE_MS = 1_000
LOAD_DEADLINE_MS = 3_000
QUIET_MS = 2_000  # after a store that did not answer, nothing is asked for this long
UNREAD_QUIET_MS = 30_000  # after a worker that could not read the staging arena
MS = 1_000_000


@dataclass(slots=True)
class _Ask:
    sequence: Sequence
    deadline_ns: int


class Restorer:
    """One per worker incarnation, with a staging arena of its own."""

    def __init__(self, hello: WorkerHello, staging: Staging, calls: Iterator[int]) -> None:
        self._hello, self._staging, self._calls = hello, staging, calls
        self._root = root_key(hello.fingerprint.encode(), b"")
        self._free_blocks = list(range(staging.num_blocks - 1, -1, -1))
        self._free_states = list(range(staging.num_states - 1, -1, -1))
        self._generations = [staging.generation] * (staging.num_blocks + staging.num_states)
        self._keying: deque[_Ask] = deque()  # their keys are still to be computed
        self._asked: OrderedDict[int, _Ask] = OrderedDict()  # by call, oldest first
        self._to_get: deque[Load] = deque()
        self._gets: dict[int, tuple[Load, int]] = {}  # by call, with the bytes expected
        self._loading: dict[Load, None] = {}  # oldest first
        self._live: dict[Load, None] = {}  # these, and loaded ones that no step has read yet
        self._quiet_until_ns = 0

    # ------------------------------------------------------------ what the store has

    def wants(self, sequence: Sequence, now_ns: int) -> bool:
        """Whether it is worth asking."""
        if sequence.afresh or now_ns < self._quiet_until_ns:
            return False
        return self.blocks_wanted(sequence) > 0

    def ask(self, sequence: Sequence, now_ns: int) -> None:
        sequence.stored = 0
        self._keying.append(_Ask(sequence, now_ns + ASK_DEADLINE_MS * MS))

    def answered(self, reply: ContainsReply) -> Sequence | None:
        """The sequence that need not wait aside any more; None: it left, its time was over, or since it was asked
        for another one came which needs its prompt, so that less of it is asked for."""
        ask = self._asked.pop(reply.call, None)
        if ask is None:
            return None
        sequence = ask.sequence
        if reply.state > self.blocks_wanted(sequence):
            self._keying.append(ask)
            return None
        sequence.stored = min(reply.state, len(sequence.keys))
        return sequence

    def blocks_wanted(self, sequence: Sequence) -> int:
        """Blocks that may be loaded: one token at least is computed, for its sample; where it is forked the last of
        its prompt; and every row that tells a log-probability of its prompt which is not known yet."""
        tokens = sequence.num_prompt if sequence.leads else sequence.num_tokens
        loaded = tokens - 1 if sequence.scores.complete else sequence.scores.count
        return min(loaded // BLOCK_SIZE, self._staging.num_blocks)

    # ------------------------------------------------------------ loading

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether other loads, which all end soon, hold the regions that this one needs."""
        return not self._free_states or sequence.stored > len(self._free_blocks)

    def load(self, sequence: Sequence, now_ns: int) -> None:
        """Get what is stored. The caller has looked at `must_wait`, and the sequence has its blocks."""
        regions = [self._free_blocks.pop() for _ in range(sequence.stored)]
        load = Load(sequence, regions, self._free_states.pop(), now_ns + LOAD_DEADLINE_MS * MS)
        sequence.load = load
        self._loading[load] = self._live[load] = None
        self._to_get.append(load)

    def done(self, answer: GetDone) -> Load | None:
        """The load that this answer completes, or makes useless: see `whole`."""
        load, nbytes = self._gets.pop(answer.call, (None, 0))
        if load is None:
            return None
        load.calls.remove(answer.call)
        if not answer.found or answer.nbytes != nbytes:
            self.release(load)
            return load
        if load.calls:
            return None
        del self._loading[load]
        return load

    def release(self, load: Load) -> None:
        """Nobody reads its regions any more."""
        load.wanted = False
        load.sequence.load = None
        del self._live[load]
        self._loading.pop(load, None)
        if load in self._to_get:
            self._to_get.remove(load)
        for call in load.calls:
            del self._gets[call]
        self._free_blocks += load.blocks
        self._free_states.append(load.state)

    def unread(self, load: Load, now_ns: int) -> None:
        """The worker cannot read the staging arena: this sequence is computed, and no other asks for a while."""
        load.sequence.stored = 0
        self.release(load)
        self._quiet_until_ns = max(self._quiet_until_ns, now_ns + UNREAD_QUIET_MS * MS)

    def restores(self, load: Load) -> Restore:
        """For the plan with the sequence's first rows."""
        size = self._hello.block_bytes
        return Restore(
            slot=load.sequence.slot,
            state=self._state_at(load.state),
            blocks=np.array(load.sequence.blocks[: len(load.blocks)], np.int32).tobytes(),
            places=(np.array(load.blocks, np.int64) * size).tobytes(),
        )

    @property
    def arena(self) -> str:
        return self._staging.arena

    def _state_at(self, region: int) -> int:
        hello = self._hello
        return self._staging.num_blocks * hello.block_bytes + region * hello.slot_bytes

    # ------------------------------------------------------------ messages to the store

    @property
    def busy(self) -> bool:
        return bool(self._keying or self._to_get)

    def work(self) -> list[Contains | Get]:
        """Questions and requests to send; some keys are computed for them."""
        out: list[Contains | Get] = []
        while self._to_get:
            out += self._get(self._to_get.popleft())
        budget = KEYS_PER_TURN
        while self._keying and budget > 0:
            ask = self._keying[0]
            wanted = self.blocks_wanted(ask.sequence)
            budget -= self._extend(ask.sequence, wanted, budget)
            if len(ask.sequence.keys) >= wanted:
                self._keying.popleft()
                call = next(self._calls)
                self._asked[call] = ask
                out.append(Contains(call, tuple(ask.sequence.keys[:wanted])))
        return out

    def _extend(self, sequence: Sequence, wanted: int, most: int) -> int:
        """Compute at most so many more of its keys; how many it were."""
        keys, tokens = sequence.keys, memoryview(sequence.tokens()).cast("i")
        first, last = len(keys), min(wanted, len(keys) + most)
        for at in range(first, last):
            parent = keys[-1] if keys else self._root
            keys.append(block_key(parent, tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]))
        return last - first

    def _get(self, load: Load) -> list[Get]:
        hello, keys = self._hello, load.sequence.keys
        size = hello.block_bytes
        gets = [self._ask_for(load, keys[i], r, r * size, size) for i, r in enumerate(load.blocks)]
        state, region = state_key(keys[len(load.blocks) - 1]), self._staging.num_blocks + load.state
        at = self._state_at(load.state)
        gets.append(self._ask_for(load, state, region, at, hello.slot_bytes))
        return gets

    def _ask_for(self, load: Load, key: bytes, region: int, at: int, nbytes: int) -> Get:
        call = next(self._calls)
        self._gets[call] = load, nbytes
        load.calls.add(call)
        generation = (self._generations[region] + 1) & 0xFFFFFFFF  # as the arena counts
        self._generations[region] = generation
        return Get(call, key, Handle(self.arena, at, nbytes, (nbytes,), "u1", region, generation))

    # ------------------------------------------------------------ what goes wrong

    def leave(self, sequence: Sequence) -> None:
        """It ended. If a step under way reads its regions, the caller releases them afterwards."""
        self._forget_asks(lambda ask: ask.sequence is sequence)

    def _forget_asks(self, over: Callable[[_Ask], bool]) -> list[Sequence]:
        found = [ask for ask in self._keying if over(ask)]
        calls = [call for call, ask in self._asked.items() if over(ask)]
        if found:
            self._keying = deque(ask for ask in self._keying if not over(ask))
        found += [self._asked.pop(call) for call in calls]
        return [ask.sequence for ask in found]

    def expire(self, now_ns: int) -> tuple[list[Sequence], list[Load]]:
        """(sequences that need not wait aside any more, loads given up): their time is over."""
        due_ns = self.due_ns
        if due_ns is None or due_ns > now_ns:
            return [], []
        self._quiet_until_ns = now_ns + QUIET_MS * MS
        loads = [load for load in self._loading if load.deadline_ns <= now_ns]
        for load in loads:
            self.release(load)
        return self._forget_asks(lambda ask: ask.deadline_ns <= now_ns), loads

    def lost(self) -> tuple[list[Sequence], list[Load]]:
        """The store is gone: it answers nothing. As `expire`, for all."""
        loads = list(self._loading)
        for load in loads:
            self.release(load)
        return self._forget_asks(lambda ask: True), loads

    @property
    def due_ns(self) -> int | None:
        """When `expire` has something to do, if nothing comes before."""
        if not (self._keying or self._asked or self._loading):
            return None
        dues = [ask.deadline_ns for ask in (*self._keying, *self._asked.values())]
        dues += [load.deadline_ns for load in self._loading]
        return min(dues)

    @property
    def whole(self) -> bool:
        """Every region is free."""
        free = len(self._free_blocks), len(self._free_states)
        return free == (self._staging.num_blocks, self._staging.num_states)

    def check(self) -> None:
        """Raises AssertionError unless every region is free or of exactly one load."""
        blocks = [region for load in self._live for region in load.blocks] + self._free_blocks
        states = [load.state for load in self._live] + self._free_states
        assert sorted(blocks) == list(range(self._staging.num_blocks)), "a region is lost or shared"
        assert sorted(states) == list(range(self._staging.num_states)), "a region is lost or shared"
