"""An engine without processes: requests become plans in any schedule, and are preempted at will."""

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from forward_world import weights_of
from msgspec.structs import replace

from phalanx.protocol.config import NodeConfig, SchedulerConfig, WorkerConfig
from phalanx.protocol.messages import PromptLogprob, Sampling, TokenLogprobs
from phalanx.protocol.prompt_logprobs import entries
from phalanx.protocol.steps import NewSequence, StepPlan, StepResult
from phalanx.worker_svc.engine import Engine
from phalanx.worker_svc.model.caches import BLOCK_TOKENS
from phalanx.worker_svc.model.moe import LocalExperts

MAX_LEN = 256
_numbers = itertools.count()


@dataclass
class Request:
    """A request and what has come of it so far.

    Attributes:
        status: 0, or why it ended early.
        committed: tokens in the caches.
        forked: blocks that the next plan puts into the table first.
        shared: how many of the first blocks are another's.
    """

    prompt: Sequence[int]
    sampling: Sampling
    max_outputs: int
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    scores: dict[int, PromptLogprob] = field(default_factory=dict)  # by prompt token
    status: int = 0
    slot: int = -1
    committed: int = 0
    blocks: list[int] = field(default_factory=list)
    forked: list[int] = field(default_factory=list)
    shared: int = 0

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.outputs]

    @property
    def done(self) -> bool:
        return self.status != 0 or len(self.outputs) >= self.max_outputs

    def again(self) -> "Request":
        """The same request, from its start."""
        return Request(self.prompt, self.sampling, self.max_outputs)


class EngineWorld:
    """An engine with its slots and blocks; `step` is one plan."""

    def __init__(
        self, shape: str, *, num_slots: int = 8, seed: int = 0, worker: WorkerConfig | None = None
    ) -> None:
        weights = weights_of(shape)
        self.random = random.Random(seed)
        per_slot = -(-MAX_LEN // BLOCK_TOKENS)
        num_blocks = 1 + num_slots * per_slot
        config = NodeConfig(
            run_dir=f"/engine-{os.getpid()}-{next(_numbers)}",  # a name: nothing is made there
            scheduler=SchedulerConfig(max_num_seqs=num_slots),
            worker=replace(worker or WorkerConfig(), num_blocks=num_blocks),
        )
        self.engine = Engine(weights, LocalExperts(weights), config, 0, 1, 1, "test")
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(1, num_blocks))
        self._seq = 0
        self._forks: list[tuple[int, int, int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()

    def step(self, parts: Sequence[tuple[Request, int, int]]) -> None:
        """Run (request, most rows, drafts) side by side; rows beyond what is known are left out."""
        new, starts, lengths, drafts, samples, tokens, counts, blocks = ([] for _ in range(8))
        for request, most, guesses in parts:
            known = request.known
            if request.slot < 0 or request.forked:
                new.append(self._admit(request))
            ids = known[request.committed : request.committed + most]
            sampled = request.committed + len(ids) == len(known)
            guesses = min(guesses, request.max_outputs - len(request.outputs) - 1) * sampled
            needed = -(-(request.committed + len(ids) + guesses) // BLOCK_TOKENS)
            added = [self._take(self.free_blocks) for _ in range(needed - len(request.blocks))]
            added, request.blocks = request.forked + added, request.blocks + added
            request.forked = []
            starts.append(request.committed)
            lengths.append(len(ids) + guesses)
            drafts.append(guesses)
            samples.append(sampled)
            tokens += ids
            counts.append(len(added))
            blocks += added
        self._seq += 1
        plan = StepPlan(
            seq=self._seq,
            seen=self._seq - 1,
            new=tuple(new),
            slots=_int32([request.slot for request, *_ in parts]),
            starts=_int32(starts),
            seqlens_q=_int32(lengths),
            drafts=bytes(drafts),
            sample=bytes(samples),
            carry=bytes(len(parts)),
            token_ids=_int32(tokens),
            block_counts=_int32(counts),
            block_ids=_int32(blocks),
            forks=tuple(self._forks),
        )
        self._forks = []
        result = self.engine.run(plan)
        made = np.frombuffer(result.tokens, np.int32).tolist()
        logprobs = list(result.logprobs or [None] * len(made))
        answers = zip(result.counts, result.status, strict=True)
        for (request, *_), start, length, guessed, sampled in zip(
            parts, starts, lengths, drafts, samples, strict=True
        ):
            request.committed = start + length - guessed
            if sampled:
                count, request.status = next(answers)
                request.committed += max(count - 1, 0)
                request.outputs += made[:count]
                request.logprobs += logprobs[:count]
                del made[:count], logprobs[:count]
        assert not made
        self._take_scores(result, parts, starts, lengths)

    @staticmethod
    def _take_scores(
        result: StepResult,
        parts: Sequence[tuple[Request, int, int]],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """What a step tells twice (after a preemption) must be the same."""
        given = list(result.prompt_logprobs)
        for (request, *_), start, length in zip(parts, starts, lengths, strict=True):
            num_top, last = request.sampling.prompt_logprobs, len(request.prompt) - 1
            if num_top is not None and start < last:
                found = entries(given.pop(0), num_top)
                assert len(found) == min(start + length, last) - start
                for at, one in enumerate(found, start + 1):
                    assert request.scores.setdefault(at, one) == one
        assert not given

    def _admit(self, request: Request) -> NewSequence:
        if request.slot < 0:
            request.slot = self._take(self.free_slots)
        prompt = len(request.prompt)
        return NewSequence(request.slot, 7, prompt, request.sampling, _int32(request.known))

    def _take(self, pool: list[int]) -> int:
        return pool.pop(self.random.randrange(len(pool)))

    def fork(self, parent: Request, child: Request) -> None:
        """The child goes on from all that the parent has computed; its next step makes the copies."""
        child.slot, child.committed = self._take(self.free_slots), parent.committed
        shared = parent.blocks[: parent.committed // BLOCK_TOKENS]
        copied = parent.blocks[len(shared) : -(-parent.committed // BLOCK_TOKENS)]
        own = [self._take(self.free_blocks) for _ in copied]
        child.blocks, child.forked, child.shared = shared + own, shared + own, len(shared)
        pair = (copied[0], own[0]) if copied else (0, 0)
        self._forks.append((parent.slot, child.slot, *pair))

    def drop(self, request: Request) -> None:
        """Take slot and blocks away: preemption, or the end. A parent must outlive its children."""
        if request.slot >= 0:
            self.free_slots.append(request.slot)
            self.free_blocks += request.blocks[request.shared :]
        request.shared = 0
        request.slot, request.committed, request.blocks = -1, 0, []

    def finish(self, request: Request) -> Request:
        """Run it alone, its prompt in one step, one token after the other."""
        while not request.done:
            self.step([(request, len(request.known), 0)])
        self.drop(request)
        return request


def _int32(values: Sequence[int]) -> bytes:
    return np.array(values, np.int32).tobytes()
