"""A worker whose next token is a hash of what it reads through the real block tables and slots.

It keeps each position's token in `blocks[block][offset]` and the newest `WINDOW + SPARE` of each
sequence in a ring, as the real worker keeps KV and window state. So a wrong block, slot, ring or free
shows as a wrong token. What an abandoned step may write, it does write: the rows of its positions.
"""

import copy
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import PromptLogprob, TokenLogprobs
from phalanx.protocol.steps import NewSequence, StepPlan, StepResult, WorkerHello
from phalanx.worker_svc.slots import PlanRows, Slots

WINDOW, SPARE = 128, 6
VOCAB, EOS = 61, 1
MAX_MODEL_LEN = 700
NOTHING = -7  # what memory holds that nobody wrote
Ints = npt.NDArray[np.int64]


def entries(tokens: Ints, start: int) -> Ints:
    """What is kept for `tokens` at positions `start`..: token and position in one number."""
    return tokens + (np.arange(start, start + len(tokens)) << 20)


def next_token(seed: int, read: Ints, window: Ints) -> int:
    """The token after the entries `read` (all positions) and `window` (the last WINDOW of them)."""
    digest = zlib.crc32(read.tobytes(), zlib.crc32(window.tobytes(), seed & 0xFFFFFFFF))
    return digest % VOCAB


def fault_free(
    prompt: Sequence[int], seed: int, count: int, forced: Sequence[int] = ()
) -> list[int]:
    """The first `count` outputs, stop rules aside: a function of prompt, seed and what is forced."""
    tokens = np.array([*prompt, *forced[:count], *([0] * (count - len(forced)))], np.int64)
    for at in range(len(prompt) + len(forced), len(tokens)):
        read = entries(tokens[:at], 0)
        tokens[at] = next_token(seed, read, read[-WINDOW:])
    return [int(token) for token in tokens[len(prompt) :]]


def score(read: Ints, token: int, num_top: int) -> PromptLogprob:
    """Of a prompt token after the entries `read`; the numbers are whole eighths, exact in float32."""
    digest = zlib.crc32(read.tobytes(), token)
    ids = tuple((digest + at) % VOCAB for at in range(num_top))
    return PromptLogprob(-(digest % 999) / 8, 1 + digest % VOCAB, ids, (-0.125,) * num_top)


def fault_free_scores(prompt: Sequence[int], num_top: int) -> list[PromptLogprob]:
    """Of every prompt token but the first."""
    read = entries(np.array(prompt, np.int64), 0)
    return [score(read[:at], prompt[at], num_top) for at in range(1, len(prompt))]


class Staged:
    """A staging arena: what comes from the KV store, for the worker to copy."""

    def __init__(self, num_blocks: int, num_states: int, ring: int) -> None:
        self.blocks: Ints = np.full((num_blocks, BLOCK_SIZE), NOTHING, np.int64)
        self.states: Ints = np.full((num_states, ring), NOTHING, np.int64)
        self.generations = [0] * (num_blocks + num_states)

    def record(self, place: int) -> Ints:
        """The region that begins `place` bytes from the start."""
        before = self.blocks.nbytes
        if place < before:
            return self.blocks[place // self.blocks[0].nbytes]
        return self.states[(place - before) // self.states[0].nbytes]


class HashWorker:
    """One worker incarnation."""

    def __init__(
        self,
        incarnation: int,
        num_blocks: int,
        num_slots: int,
        max_model_len: int = MAX_MODEL_LEN,
        *,
        ring: int = WINDOW + SPARE,
        num_snapshots: int = 2,
    ) -> None:
        self.incarnation, self.ring = incarnation, ring
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.blocks: Ints = np.full((num_blocks, BLOCK_SIZE), NOTHING, np.int64)
        self.rings: Ints = np.full((num_slots, ring), NOTHING, np.int64)
        self.snapshots: Ints = np.full((num_snapshots, ring), NOTHING, np.int64)
        self.staging: dict[str, Staged] = {}  # by name
        self.unread: set[str] = set()  # of these, those that cannot be attached any more
        self.reset()

    def reset(self) -> None:
        """Forget every sequence, as with a new scheduler; memory keeps what it holds."""
        self.slots = Slots(self.num_slots)
        self.aborted = 0  # seq of the newest abandoned plan
        self.tables: dict[int, list[int]] = {}
        self.new: dict[int, NewSequence] = {}

    def hello(self) -> WorkerHello:
        return WorkerHello(
            worker_incarnation=self.incarnation,
            num_blocks=len(self.blocks),
            num_slots=self.num_slots,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            eos_token_id=EOS,
            block_bytes=self.blocks[0].nbytes,
            slot_bytes=self.rings[0].nbytes,
            block_arena="ph-sim-blocks",
            snapshot_arena="ph-sim-snapshots",
            num_snapshots=len(self.snapshots),
            max_drafts=SPARE - 1,
            fingerprint="hash",
        )

    def run(self, plan: StepPlan, *, abandon: bool = False) -> StepResult:
        """One step. With `abandon`, it writes what such a step may write and commits nothing.

        A plan that did not know of an abandoned one is abandoned with it, as the real worker does.
        """
        if plan.seen < self.aborted:
            self.aborted = plan.seq
            return StepResult(plan.seq, aborted=True)
        if plan.restores and plan.staging in self.unread:
            self.aborted = plan.seq
            return StepResult(plan.seq, aborted=True, unrestored=True)
        new = {sequence.slot: sequence for sequence in plan.new}
        slots = copy.deepcopy(self.slots) if abandon else self.slots
        for sequence in plan.new:
            slots.admit(sequence)
        rows = slots.resolve(plan)
        tables = {slot: list(self.tables.get(slot, ())) for slot in rows.slots.tolist()}
        for slot in new:
            tables[slot] = []
        ids = np.frombuffer(plan.block_ids, np.int32).tolist()
        for slot, more in zip(
            rows.slots.tolist(), np.frombuffer(plan.block_counts, np.int32).tolist(), strict=True
        ):
            tables[slot] += ids[:more]
            del ids[:more]
        for restore in plan.restores:
            staged = self.staging[plan.staging]
            places = np.frombuffer(restore.places, np.int64).tolist()
            restored = np.frombuffer(restore.blocks, np.int32).tolist()
            for block, place in zip(restored, places, strict=True):
                self.blocks[block] = staged.record(place)
            self.rings[restore.slot] = staged.record(restore.state)
        for leader, follower, block, new_block in plan.forks:
            self.rings[follower] = self.rings[leader]
            if block:
                self.blocks[new_block] = self.blocks[block]
        steps = []  # (slot, start, entries of all rows)
        for i, slot in enumerate(rows.slots.tolist()):
            start = int(rows.starts[i])
            kept = entries(rows.token_ids[rows.cu[i] : rows.cu[i + 1]], start)
            steps.append((slot, start, kept))
            self._write(tables[slot], start, kept)
            if abandon and len(kept) <= SPARE:  # its rows may be in the ring, drafts included
                places = np.arange(start, start + SPARE) % self.ring
                self.rings[slot, places] = NOTHING
        if abandon:
            self.aborted = plan.seq
            return StepResult(plan.seq, aborted=True)
        self.tables.update(tables)
        self.new.update(new)
        tokens = []
        for at, i in enumerate(rows.sample_seqs.tolist()):
            slot, start, kept = steps[i]
            count = int(rows.positions[at]) - start
            seed = self.new[slot].sampling.seed or 0
            self._write_ring(slot, start, kept[:count])
            tokens.append(self._next(slot, tables[slot], start + count, seed))
        forced = slots.forced(rows)
        sampled = np.where(forced >= 0, forced, np.array(tokens, np.int64))
        outcome = slots.settle(rows, sampled, np.zeros(len(sampled), np.uint8))
        for (slot, start, kept), count in zip(steps, outcome.accepted.tolist(), strict=True):
            if start + len(kept) > start + count:  # rejected drafts: their entries are dirt
                places = np.arange(start + count, start + len(kept)) % self.ring
                self.rings[slot, places] = NOTHING
            self._write_ring(slot, start, kept[:count])
        for slot, region in plan.snapshots:
            self.snapshots[region] = self.rings[slot]
        logprobs = [
            TokenLogprobs(-float(sampled[at])) if self._wants(rows, at) else None
            for at in outcome.kept.tolist()
        ]
        return StepResult(
            plan.seq,
            aborted=False,
            counts=outcome.counts.astype(np.uint8).tobytes(),
            tokens=sampled[outcome.kept].astype(np.int32).tobytes(),
            status=outcome.status.tobytes(),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            prompt_logprobs=tuple(self._scores(steps)),
        )

    def _scores(self, steps: list[tuple[int, int, Ints]]) -> Iterator[bytes]:
        """Of the prompt tokens after each sequence's rows, from what the blocks hold before them."""
        for slot, start, kept in steps:
            new = self.new[slot]
            num_top = new.sampling.prompt_logprobs
            end = min(start + len(kept), new.num_prompt - 1)
            if num_top is None or start >= end:
                continue
            read = self.blocks[self.tables[slot]].reshape(-1)
            prompt = np.frombuffer(new.tokens, np.int32).tolist()
            found = [score(read[:at], prompt[at], num_top) for at in range(start + 1, end + 1)]
            layout = struct.Struct(f"<fi{num_top}i{num_top}f")
            yield b"".join(
                layout.pack(s.logprob, s.rank, *s.top_ids, *s.top_logprobs) for s in found
            )

    def _wants(self, rows: PlanRows, at: int) -> bool:
        slot = int(rows.slots[rows.sample_seqs[at]])
        return self.new[slot].sampling.logprobs is not None

    def _write(self, table: list[int], start: int, kept: Ints) -> None:
        positions = np.arange(start, start + len(kept))
        self.blocks[np.array(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE] = kept

    def _write_ring(self, slot: int, start: int, kept: Ints) -> None:
        last = kept[-self.ring :]
        first = start + len(kept) - len(last)
        self.rings[slot, np.arange(first, first + len(last)) % self.ring] = last

    def _next(self, slot: int, table: list[int], length: int, seed: int) -> int:
        read = self.blocks[table].reshape(-1)[:length]
        positions = np.arange(max(0, length - WINDOW), length)
        return next_token(seed, read, self.rings[slot, positions % self.ring])
