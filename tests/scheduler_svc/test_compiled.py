"""The compiled passes decide as those in Python do, and leave every column and list the same."""

from collections import deque
from random import Random

import numpy as np
import pytest

from phalanx.bench import scheduler as bench
from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import AbortSequence, FinalSeen, Sampling, Submit, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.scheduler_svc import compiled
from phalanx.scheduler_svc.events import Membership
from sim import scheduler_world
from sim.scheduler_twin import Twin
from sim.scheduler_world import Options, World

pytestmark = pytest.mark.skipif(compiled.ROWS is None, reason=compiled.WHY_NOT)
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("options", [Options.of, Options.stored, Options.soak])
def test_the_same_in_every_world(options: object, monkeypatch: Patch) -> None:
    monkeypatch.setattr(scheduler_world, "Scheduler", Twin)
    for seed in range(3):
        World(seed, options=options).run()


@pytest.mark.parametrize("drafts", [0, 5])
def test_the_same_in_wide_steps(drafts: int, monkeypatch: Patch) -> None:
    """Many starts and ends in a step, rows that outgrow their regions."""
    monkeypatch.setattr(bench, "Scheduler", Twin)
    course = bench.Course(40, drafts, 0.1)
    for _ in range(120):
        course._turn(course._step)


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_the_same_whatever_comes(first: int) -> None:
    for seed in range(first, first + 8):
        try:
            Anything(seed).run(120)
        except Exception as error:
            error.add_note(f"seed {seed}: Anything({seed}).run(120) shows it again")
            raise


VOCAB, EOS = 40, 1


class Anything:
    """Requests of every kind, and a worker that answers at random: any count of tokens that the plan allows,
    any tokens, samples that fail, steps that are abandoned."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        count = rng.choice((1, 3, 8, 24))
        config = SchedulerConfig(
            max_num_seqs=count,
            max_num_batched_tokens=max(count, rng.choice((8, 64, 400, 2000))),
            max_waiting=2 * count,
            prefill_watermark=rng.choice((0.5, 0.9, 1.0)),
            async_steps=rng.random() < 0.8,
            preempt=rng.choice(("recompute", "stop")),
        )
        rows = 5 * count
        zeroed = memoryview(bytearray(queue_bytes(rows)))
        self.core = Twin(config, 0, 1, QueueTable.create(zeroed, rows, 0, 1))
        self.drafts = rng.choice((0, 5))
        blocks = 1 + count * rng.choice((3, 4, 6))
        hello = WorkerHello(
            1,
            blocks,
            count,
            3 * BLOCK_SIZE,
            VOCAB,
            EOS,
            1,
            1,
            "ph-a",
            "ph-b",
            0,
            self.drafts,
            "any",
        )
        self.core.handle(hello, 0)
        self.core.handle(Membership(2, True), 0)
        self.now_ns, self.submitted = 0, 0
        self.plans: deque[StepPlan] = deque()
        self.finals: list[tuple[str, int, int]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now_ns += self.rng.choice((1, 5, 2000)) * 1_000_000
            for event in (*self._requests(), *self._answers()):
                self.core.handle(event, self.now_ns)
            self._decide()
            if self.rng.random() < 0.9:
                self._decide()  # the one ahead

    def _decide(self) -> None:
        actions = self.core.step(self.now_ns)
        self.plans += actions.plans
        for message in actions.gateway:
            for item in message.items if isinstance(message, Tokens) else ():
                if item.finish_reason is not None:
                    self.finals.append((item.request_id, item.index, item.attempt))

    def _requests(self) -> list[object]:
        rng, events = self.rng, list[object]()
        for _ in range(rng.choice((0, 0, 1, 4))):
            self.submitted += 1
            prompt, sampling = self._ids(rng.choice((1, 20, 128, 250))), self._sampling()
            outputs = self._ids(rng.choice((0, 0, 0, 30)))
            for index in range(rng.choice((1, 1, 3))):
                name = f"{self.submitted:032x}"
                events.append(
                    Submit(
                        self.submitted,
                        name,
                        index,
                        0,
                        prompt,
                        sampling,
                        outputs,
                        resumed=bool(outputs) or self.submitted % 4 == 0,
                    )
                )
        if self.core.sequences and rng.random() < 0.1:
            request, index = rng.choice(list(self.core.sequences))
            events.append(AbortSequence(0, request, index, 0))
        if self.finals and rng.random() < 0.5:
            events.append(FinalSeen(tuple(self.finals)))
            self.finals = []
        return events

    def _sampling(self) -> Sampling:
        rng = self.rng
        return Sampling(
            seed=0,
            max_tokens=rng.choice((1, 2, 9, 60, None)),
            min_tokens=rng.choice((0, 0, 3)),
            stop_token_ids=rng.choice(((), (2,), (2, 3), (2, VOCAB - 1))),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice((None, None, None, 0)),
            predicted_token_ids=tuple(range(VOCAB)) * rng.choice((0, 1, 3)),
        )

    def _ids(self, count: int) -> bytes:
        return np.array([self.rng.randrange(4, VOCAB) for _ in range(count)], np.int32).tobytes()

    def _answers(self) -> list[StepResult]:
        rng = self.rng
        if not self.plans or rng.random() < 0.1:
            return []
        plan = self.plans.popleft()
        if rng.random() < 0.05:
            behind = [StepResult(late.seq, True) for late in self.plans]
            self.plans.clear()
            return [StepResult(plan.seq, True), *behind]
        drafts = [d for d, sampled in zip(plan.drafts, plan.sample, strict=True) if sampled]
        status = bytes([rng.random() < 0.02 for _ in drafts])
        pairs = zip(drafts, status, strict=True)
        counts = bytes([0 if failed else 1 + rng.randint(0, most) for most, failed in pairs])
        tokens = [rng.choice((rng.randrange(VOCAB), 20, 21)) for _ in range(sum(counts))]
        return [StepResult(plan.seq, False, counts, np.array(tokens, np.int32).tobytes(), status)]
