"""The backend that computes nothing: tokens are a hash, and a step takes no time.

It shows what the control plane alone can do (`phalanx up --device null`, `phalanx bench loop`). A
token depends on the seed and the position, so streams are equal over faults here, too.
"""

import json
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.messages import TokenLogprobs
from phalanx.protocol.placement import Placement
from phalanx.protocol.prompt_logprobs import record_bytes
from phalanx.protocol.service import Service
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.slots import Int, PlanRows, Slots

_NUM_BLOCKS = 1 << 16
_RECORD_BYTES = 64  # of a block and of a slot: nobody looks inside

U64 = npt.NDArray[np.uint64]


class NullBackend:
    """Offers the model's vocabulary and lengths, and as many blocks as anyone could want unless told how many."""

    fingerprint = "null"

    def __init__(self, service: Service) -> None:
        config = service.config
        raw = json.loads((config.model_path / "config.json").read_text())
        text = raw["text_config"]
        self._vocab, self._max_len = text["vocab_size"], text["max_position_embeddings"]
        self._eos = raw["eos_token_id"]
        self._max_drafts = text["dspark_block_size"]
        self._num_slots = config.scheduler.max_num_seqs
        # Without a model each token is as likely as any other; the number is what its records hold, a float32.
        self._even = np.float32(-math.log(self._vocab))
        self._num_blocks = config.worker.num_blocks or _NUM_BLOCKS
        self._incarnation = service.incarnation
        name = arena_name(config.node, f"kv{service.seat}", service.incarnation)
        self._arena = Arena.create(name, _RECORD_BYTES, f"worker-{service.seat}")
        self.reset()

    def hello(self) -> WorkerHello:
        return WorkerHello(
            worker_incarnation=self._incarnation,
            num_blocks=self._num_blocks,
            num_slots=self._num_slots,
            max_model_len=self._max_len,
            vocab_size=self._vocab,
            eos_token_id=self._eos,
            block_bytes=_RECORD_BYTES,
            slot_bytes=_RECORD_BYTES,
            block_arena=self._arena.name,
            snapshot_arena=self._arena.name,
            num_snapshots=0,
            max_drafts=self._max_drafts,
            fingerprint=self.fingerprint,
        )

    def reset(self) -> None:
        self._arena.bump(0)
        self._slots = Slots(self._num_slots)
        self._seeds = np.zeros(self._num_slots, np.uint64)
        self._prompts: dict[int, tuple[bytes, int]] = {}  # by slot, of those with prompt_logprobs
        self._num_top: dict[int, int] = {}  # by slot, of those with logprobs

    def restore(self, plan: StepPlan) -> None:
        pass  # it offers no snapshots, so nothing is ever stored

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            self._slots.admit(new)
            self._seeds[new.slot] = new.sampling.seed or 0
            self._prompts.pop(new.slot, None)
            self._num_top.pop(new.slot, None)
            if new.sampling.logprobs is not None:
                self._num_top[new.slot] = new.sampling.logprobs
            if (num_top := new.sampling.prompt_logprobs) is not None:
                self._prompts[new.slot] = (new.tokens[: 4 * new.num_prompt], num_top)
        rows = self._slots.resolve(plan)
        seeds = self._seeds[rows.slots[rows.sample_seqs]]
        tokens = self._tokens(seeds, rows.positions.astype(np.uint64))
        forced = self._slots.forced(rows)
        tokens = np.where(forced >= 0, forced, tokens)
        outcome = self._slots.settle(rows, tokens, np.zeros(len(tokens), np.uint8))
        return StepResult(
            seq=plan.seq,
            aborted=False,
            counts=outcome.counts.astype(np.uint8).tobytes(),
            tokens=tokens[outcome.kept].astype(np.int32).tobytes(),
            status=outcome.status.tobytes(),
            logprobs=self._logprobs(rows.slots[rows.sample_seqs[outcome.kept]]),
            prompt_logprobs=tuple(self._score(rows)),
        )

    def _logprobs(self, slots: Int) -> tuple[TokenLogprobs | None, ...]:
        """Of the new tokens, which are of the sequences in `slots`; empty when none of these asks."""
        asked = [self._num_top.get(slot, -1) for slot in slots.tolist()] if self._num_top else []
        if max(asked, default=-1) < 0:
            return ()
        even = self._even.item()
        told = {n: TokenLogprobs(even, tuple(range(n)), (even,) * n) for n in set(asked) - {-1}}
        return tuple(told.get(n) for n in asked)

    def _score(self, rows: PlanRows) -> Iterator[bytes]:
        """Of prompt tokens."""
        even = self._even.view(np.int32)
        for start, length, slot in zip(rows.starts, rows.lengths, rows.slots, strict=True):
            prompt, num_top = self._prompts.get(slot, (b"", 0))
            ids = np.frombuffer(prompt, np.int32)[start + 1 : start + 1 + length]
            if len(ids):
                words = np.full((len(ids), record_bytes(num_top) // 4), even, np.int32)
                words[:, 1] = ids + 1
                words[:, 2 : 2 + num_top] = np.arange(num_top)
                yield words.tobytes()

    def _tokens(self, seeds: U64, positions: U64) -> Int:
        """One of the ids above the special ones, by SplitMix64 of seed and position."""
        word = seeds + positions * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
        tokens: Int = (word % np.uint64(self._vocab // 2)).astype(np.int64) + 3
        return tokens

    def serve(self) -> None:
        pass

    def prepare(self, epoch: int, members: list[int], placement: Placement) -> int:
        return 0

    bits = None  # it has no experts

    @property
    def slots(self) -> int:
        return 0

    def bring(self, layer: int, slot: int, expert: int) -> None:
        pass

    def lay_out(self, placement: Placement, layer: int) -> None:
        pass

    def flip(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def connect(self, group: Group, incarnations: dict[int, int]) -> None:
        pass

    def take_counts(self) -> tuple[int, int, bytes] | None:
        return None

    def close(self) -> None:
        self._arena.close()
