"""The scheduler's core over a real engine, without processes; plans may run ahead of results, and be given up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_world import EngineWorld

from phalanx.protocol.config import SchedulerConfig, WorkerConfig
from phalanx.protocol.errors import EpochChanged
from phalanx.protocol.messages import Sampling, Submit, TokenLogprobs, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Membership
from sim.token_rows import Handles

Stream = tuple[list[int], list[TokenLogprobs]]


@dataclass(frozen=True)
class Ask:
    request_id: str
    index: int
    prompt: Sequence[int]
    sampling: Sampling


@dataclass
class Carried:
    """Rows planned before the result of the step before them, by what became of that step's drafts."""

    plain: int = 0
    right: int = 0
    wrong: int = 0
    _drafts: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> drafts, tokens

    def before(self, plan: StepPlan) -> None:
        slots = np.frombuffer(plan.slots, np.int32).tolist()
        for slot, carry in zip(slots, plan.carry, strict=True):
            if carry:
                drafts, tokens = self._drafts[slot]
                self.plain += drafts == 0
                self.right += 0 < drafts < tokens
                self.wrong += 0 < drafts >= tokens

    def after(self, plan: StepPlan, result: StepResult) -> None:
        slots = np.frombuffer(plan.slots, np.int32)
        sampled = np.frombuffer(plan.sample, np.uint8).astype(bool)
        drafts = np.frombuffer(plan.drafts, np.uint8)[sampled].tolist()
        for slot, given, made in zip(slots[sampled].tolist(), drafts, result.counts, strict=True):
            self._drafts[slot] = given, made


class Served:
    """`ahead`: plans made before the first of them runs; 2 is what a node does."""

    def __init__(
        self,
        shape: str,
        budget: int,
        *,
        ahead: int = 1,
        worker: WorkerConfig | None = None,
        change: Callable[[StepPlan], StepPlan] = lambda plan: plan,
    ) -> None:
        self.engine = EngineWorld(shape, worker=worker).engine
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_waiting=16,
            async_steps=ahead > 1,
        )
        rows = 40
        columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 0, 1)
        self.core = Scheduler(config, 0, 1, columns)
        self.core.handle(self.engine.hello(), 0)
        self.core.handle(Membership(2, True), 0)
        self._ahead, self._change = ahead, change
        self.carried = Carried()
        self.forks = self.given_up = 0

    def streams(self, asks: Sequence[Ask], abandon: int = 0) -> list[Stream]:
        """Run them together; every `abandon`-th plan is given up once."""
        for call, ask in enumerate(asks):
            ids = np.array(ask.prompt, np.int32).tobytes()
            submit = Submit(call, ask.request_id, ask.index, 0, ids, ask.sampling)
            self.core.handle(submit, 0)
        found: dict[tuple[str, int], Stream] = {(a.request_id, a.index): ([], []) for a in asks}
        handles, plans, aborted = Handles(), list[StepPlan](), 0
        while True:
            for _ in range(self._ahead):
                actions = self.core.step(0)
                plans += actions.plans
                for message in actions.gateway:
                    if isinstance(message, Tokens):
                        for item in handles.items(message):
                            tokens, logprobs = found[item.request_id, item.index]
                            assert item.offset == len(tokens)
                            tokens += item.token_ids
                            logprobs += item.logprobs
            if not plans:
                return list(found.values())
            plan = plans.pop(0)
            self.forks += len(plan.forks)
            if plan.seen < aborted or (abandon and plan.seq % abandon == 0):
                if plan.seen >= aborted:
                    self._give_up(self._change(plan))
                aborted = plan.seq
                self.core.handle(StepResult(plan.seq, aborted=True), 0)
            else:
                self.carried.before(plan)
                result = self.engine.run(self._change(plan))
                self.carried.after(plan, result)
                self.core.handle(result, 0)

    def _give_up(self, plan: StepPlan) -> None:
        """What an abandoned step may do, it does: the forward pass runs, nothing is committed."""

        def moved(*ignored: object) -> None:
            raise EpochChanged("for the test")

        sample, self.engine._sample = self.engine._sample, moved  # type: ignore[method-assign,assignment]
        with pytest.raises(EpochChanged):
            self.engine.run(plan)
        self.engine._sample = sample  # type: ignore[method-assign]
        self.given_up += 1

    def close(self) -> None:
        self.engine.close()
