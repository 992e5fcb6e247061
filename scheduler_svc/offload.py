"""Write-behind of sequences into the KV store: blocks, and the window state that goes with them.

States are large and their number is bounded, so they are kept at few places: where a prompt's last full block
ends, where the prefix ends that it shares with a stored one, and every so many tokens, of outputs too: what
moves to another rank is computed again from the last of them on.

Pure, bounded in everything, and never in the way: what does not fit within the bounds is simply not
stored. A block under copy has the store as an extra holder until the answer or a deadline. The deadline
travels with the message: a store that comes later declines, so it never copies a block of somebody else.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.protocol.arena import Handle
from phalanx.protocol.kvkeys import block_key, block_keys, root_key, state_key
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import Put, PutDone
from phalanx.protocol.steps import WorkerHello
from phalanx.scheduler_svc.blocks import BlockPool
from phalanx.scheduler_svc.state import Chunk, Sequence

PUTS_MAX = 256  # blocks under copy at once; a prompt with more than the rest is not stored
POOL_SHARE = 4  # and at most a quarter of the pool
JOBS_MAX = 64  # prompts whose keys are still to be computed
KEYS_PER_TURN = 16  # a key takes about 3 us, a turn must not delay a step
KEYS_AT_ONCE = 4  # while a result is entered
PROMPT_REGIONS = 1  # places for window states that outputs leave to prompts
PUT_DEADLINE_MS = 5_000
QUIET_MS = 5_000  # after a store that did not answer, nothing is stored for this long
STORED_MAX = 65_536  # keys remembered, so that a common prefix is put once


@dataclass(slots=True)
class _Job:
    """One sequence whose blocks are held but not yet put."""

    tokens: bytes  # int32 ids up to the end of the last block
    keys: list[bytes]  # of the blocks
    blocks: list[int]
    region: int  # of the snapshot arena
    end: bytes  # key of the block where the state is kept; empty: all keys are still to be computed
    begun_ns: int  # see `Sequence`


@dataclass(slots=True)
class _Pin:
    block: int  # -1: the pin is on a snapshot region
    region: int
    key: bytes  # of the block; of the block behind which the state is
    deadline_ns: int
    lost: bool = (
        False  # it was put, perhaps to the store after the one that was then heard to be gone
    )


class Offload:
    """One per worker incarnation; `pool` is that worker's."""

    def __init__(
        self,
        hello: WorkerHello,
        pool: BlockPool,
        generations: tuple[int, int],
        calls: Iterator[int],
        mark_every: int = 0,
    ) -> None:
        """`mark_every`: tokens between two states within a long sequence, a multiple of a block; 0: none."""
        self._hello, self._pool, self._calls = hello, pool, calls
        self._root = root_key(hello.fingerprint.encode(), b"")
        self._mark_every = mark_every
        self._block_generation, self._state_generation = generations
        self._regions = list(range(hello.num_snapshots - 1, -1, -1))
        self._jobs: deque[_Job] = deque()
        self._pins: dict[int, _Pin] = {}  # by call, oldest first
        self._since: dict[int, None] = {}  # calls of those put since `stands`
        self._held = 0  # blocks in jobs and pins
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # blocks
        self._states: OrderedDict[bytes, None] = OrderedDict()  # by the block behind which each is
        self._quiet_until_ns = 0

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def cut_at(self, sequence: Sequence, start: int, now_ns: int) -> int:
        """Where a chunk that begins at `start` must end so that its window state can be kept; 0: nowhere."""
        if sequence.afresh or now_ns < self._quiet_until_ns or not self._regions:
            return 0
        if sequence.marks is None:
            sequence.marks = self._marks(sequence, start)
        return next((mark for mark in sequence.marks if mark > start), 0)

    def _marks(self, sequence: Sequence, start: int) -> tuple[int, ...]:
        """Ends of full blocks whose state is to be kept, in order."""
        total = sequence.num_tokens
        ends = {sequence.num_prompt // BLOCK_SIZE, total // BLOCK_SIZE, sequence.common}
        if self._mark_every:
            ends.update(range(0, total // BLOCK_SIZE, self._mark_every // BLOCK_SIZE))
        return tuple(sorted(end * BLOCK_SIZE for end in ends if end * BLOCK_SIZE > start))

    def claim(self, chunk: Chunk, now_ns: int) -> None:
        """Give a chunk that ends where a state is kept a region for it, if there is one."""
        if chunk.end == self.cut_at(chunk.sequence, chunk.start, now_ns):
            chunk.region = self._regions.pop()

    def mark_decoded(self, chunk: Chunk, now_ns: int) -> bool:
        """Whether the state behind these decoded rows, which end a block, is kept: then it has a region now.

        Every so many tokens, and while a sequence is shorter than that, each time it has doubled.
        """
        every, end = self._mark_every // BLOCK_SIZE, chunk.end // BLOCK_SIZE
        wanted = end % every == 0 or (end < every and end & (end - 1) == 0) if every else False
        if chunk.sequence.afresh or not wanted or now_ns < self._quiet_until_ns:
            return False
        if len(self._regions) <= PROMPT_REGIONS:
            return False
        chunk.region = self._regions.pop()
        return True

    def unclaim(self, chunk: Chunk) -> None:
        """The step of this chunk was abandoned, or its sequence ended."""
        if chunk.region >= 0:
            self._regions.append(chunk.region)
            chunk.region = -1

    def captured(self, chunk: Chunk) -> None:
        """The chunk is done, its region holds the state: store both, if that is within the bounds."""
        blocks = chunk.sequence.blocks[: chunk.end // BLOCK_SIZE]
        tokens = chunk.sequence.tokens()[: 4 * chunk.end]
        keys, end = self._known_keys(chunk.sequence, tokens), b""
        if keys:
            end, stored = keys[-1], self._stored
            fresh = [at for at, key in enumerate(keys) if key not in stored]
            keys, blocks = [keys[at] for at in fresh], [blocks[at] for at in fresh]
        limit = min(PUTS_MAX, self._pool.total // POOL_SHARE)
        if len(self._jobs) >= JOBS_MAX or self._held + len(blocks) > limit:
            self.unclaim(chunk)
            return
        self._pool.retain(blocks)
        self._held += len(blocks)
        begun_ns = chunk.sequence.begun_ns
        self._jobs.append(_Job(tokens, keys, blocks, chunk.region, end, begun_ns))

    def _known_keys(self, sequence: Sequence, tokens: bytes) -> list[bytes]:
        """Of all blocks of `tokens`, its first ones, if few of them are still to be computed; else none."""
        keys, count, ids = sequence.keys, len(tokens) // (4 * BLOCK_SIZE), memoryview(tokens)
        if count - len(keys) > KEYS_AT_ONCE:
            return []
        for at in range(len(keys), count):
            parent = keys[-1] if keys else self._root
            block = ids[4 * BLOCK_SIZE * at : 4 * BLOCK_SIZE * (at + 1)]
            keys.append(block_key(parent, block.cast("i")))
        return keys[:count]

    def work(self, now_ns: int) -> list[Put]:
        """Compute some keys and give the puts to send: called while the worker is busy."""
        puts: list[Put] = []
        budget = KEYS_PER_TURN
        while self._jobs and budget > 0:
            job = self._jobs.popleft()
            budget -= len(job.blocks) + 1
            puts += self._puts(job, now_ns + PUT_DEADLINE_MS * 1_000_000)
        return puts

    def _puts(self, job: _Job, deadline_ns: int) -> list[Put]:
        fingerprint, keys, end = self._hello.fingerprint.encode(), job.keys, job.end
        if not end:
            keys = list(block_keys(fingerprint, b"", memoryview(job.tokens).cast("i")))
            end = keys[-1]
        puts: list[Put] = []
        for key, block in zip(keys, job.blocks, strict=True):
            if key in self._stored:
                self._let_go(block)
            else:
                puts.append(self._put(_Pin(block, -1, key, deadline_ns), job.begun_ns))
        if end in self._states:
            self._regions.append(job.region)
        else:
            puts.append(self._put(_Pin(-1, job.region, end, deadline_ns), job.begun_ns))
        return puts

    def _put(self, pin: _Pin, begun_ns: int) -> Put:
        call, hello = next(self._calls), self._hello
        self._pins[call], self._since[call] = pin, None
        if pin.block >= 0:
            at, size = pin.block * hello.block_bytes, hello.block_bytes
            handle = Handle(hello.block_arena, at, size, (size,), "u1", 0, self._block_generation)
            return Put(call, pin.key, "block", handle, "memory", 0, pin.deadline_ns, begun_ns)
        at, size = pin.region * hello.slot_bytes, hello.slot_bytes
        handle = Handle(hello.snapshot_arena, at, size, (size,), "u1", 0, self._state_generation)
        key = state_key(pin.key)
        return Put(call, key, "state", handle, "memory", 0, pin.deadline_ns, begun_ns)

    def done(self, answer: PutDone) -> None:
        pin = self._take(answer.call)
        if pin is None:
            return  # its deadline passed, or it is of an earlier worker
        self._unpin(pin)
        if answer.stored:
            _remember(self._stored if pin.block >= 0 else self._states, [pin.key])

    def found(self, keys: list[bytes], prefix: int, state: int) -> None:
        """The store has the first `prefix` of these blocks, which need not be put again, and of all states the last
        behind block `state`; what was stored of the rest is evicted."""
        _remember(self._stored, keys[:prefix])
        for key in keys[prefix:]:
            self._stored.pop(key, None)
        for key in keys[state:]:
            self._states.pop(key, None)

    @property
    def has_put(self) -> bool:
        """Whether something was put since `stands`."""
        return bool(self._since)

    def stands(self) -> None:
        """The connection to the store has not ended: all that was put until now went there."""
        self._since.clear()

    def lost(self) -> None:
        """The store is gone, and nobody reads any more what it was given. The next one may have less than it had.

        But that is heard late, perhaps when the next one was asked already: what was put since the connection was
        looked at last is held as long as if nothing had happened.
        """
        self._stored.clear()
        self._states.clear()
        pins, self._pins = self._pins, {call: self._pins[call] for call in self._since}
        for call, pin in pins.items():
            if call in self._pins:
                pin.lost = True
            else:
                self._unpin(pin)

    def expire(self, now_ns: int) -> None:
        if self._pins and next(iter(self._pins.values())).deadline_ns < now_ns:
            late = [call for call, pin in self._pins.items() if pin.deadline_ns < now_ns]
            pins = [pin for call in late if (pin := self._take(call)) is not None]
            for pin in pins:
                self._unpin(pin)
            if not all(pin.lost for pin in pins):
                self._quiet_until_ns = now_ns + QUIET_MS * 1_000_000

    def _take(self, call: int) -> _Pin | None:
        self._since.pop(call, None)
        return self._pins.pop(call, None)

    def _unpin(self, pin: _Pin) -> None:
        if pin.block >= 0:
            self._let_go(pin.block)
        else:
            self._regions.append(pin.region)

    def _let_go(self, block: int) -> None:
        self._pool.release([block])
        self._held -= 1

    def holders(self) -> list[list[int]]:
        """Blocks held for the store, for the pool's check and for counting the unused ones."""
        pinned = [[pin.block] for pin in self._pins.values() if pin.block >= 0]
        return [job.blocks for job in self._jobs] + pinned

    def unused(self) -> int:
        """Blocks that only the store still holds: whoever counts free blocks counts them."""
        if not self._held:
            return 0
        held: dict[int, int] = {}
        for blocks in self.holders():
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        return sum(self._pool.refs(block) == count for block, count in held.items())


def _remember(kept: OrderedDict[bytes, None], keys: list[bytes]) -> None:
    for key in keys:
        kept[key] = None
        if len(kept) > STORED_MAX:
            kept.popitem(last=False)
