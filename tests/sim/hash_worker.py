"""A worker whose next token is a hash of what it reads through the real block tables and slots.

It keeps each position's token in `blocks[block][offset]` and the newest `WINDOW + SPARE` of each
sequence in a ring, as the real worker keeps KV and window state. So a wrong block, slot, ring or free
shows as a wrong token. What an abandoned step may write, it does write: the rows of its positions.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import TokenLogprobs
from phalanx.protocol.steps import NewSequence, StepPlan, StepResult, WorkerHello

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


def fault_free(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The first `count` outputs, stop rules aside: a function of prompt and seed alone."""
    tokens = np.array(list(prompt) + [0] * count, np.int64)
    for at in range(len(prompt), len(tokens)):
        read = entries(tokens[:at], 0)
        tokens[at] = next_token(seed, read, read[-WINDOW:])
    return [int(token) for token in tokens[len(prompt) :]]


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
        self.tables: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
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
            fingerprint="hash",
        )

    def run(self, plan: StepPlan, *, abandon: bool = False) -> StepResult:
        """One step. With `abandon`, it writes what such a step may write and commits nothing."""
        ints = {
            name: np.frombuffer(getattr(plan, name), np.int32).astype(int).tolist()
            for name in ("slots", "starts", "seqlens_q", "token_ids", "block_counts", "block_ids")
        }
        new = {sequence.slot: sequence for sequence in plan.new}
        tables = {slot: list(self.tables.get(slot, ())) for slot in ints["slots"]}
        for slot in new:
            tables[slot] = []
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        row = added = 0
        for i, slot in enumerate(ints["slots"]):
            start, count = ints["starts"][i], ints["seqlens_q"][i]
            more = ints["block_counts"][i]
            tables[slot] += ints["block_ids"][added : added + more]
            added += more
            rows = np.array(ints["token_ids"][row : row + count], np.int64)
            row += count
            kept = entries(rows, start)
            self._write(tables[slot], start, kept)
            if abandon:
                if count == 1:  # drafts would have been written beside it
                    places = np.arange(start, start + SPARE) % self.ring
                    self.rings[slot, places] = NOTHING
                continue
            self._write_ring(slot, start, kept)
            if plan.sample[i]:
                sequence = new.get(slot) or self.new[slot]
                token = self._next(slot, tables[slot], start + count, sequence.sampling.seed or 0)
                sampled.append(token)
                wanted = sequence.sampling.logprobs is not None
                logprobs.append(TokenLogprobs(-float(token)) if wanted else None)
        if abandon:
            return StepResult(plan.seq, aborted=True)
        self.tables.update(tables)
        self.new.update(new)
        for slot, region in plan.snapshots:
            self.snapshots[region] = self.rings[slot]
        return StepResult(
            plan.seq,
            aborted=False,
            tokens=np.array(sampled, np.int32).tobytes(),
            status=bytes(len(sampled)),
            logprobs=tuple(logprobs) if any(logprobs) else (),
        )

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
