"""One scheduler core and a worker whose steps take time by a law, in virtual time: for questions of when,
not of what. Tokens mean nothing here."""

import heapq
from dataclasses import dataclass, field

import numpy as np

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import FinalSeen, Sampling, Submit, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Membership
from sim.token_rows import Handles

MS = 1_000_000
STEP_US, ROW_US, CONTEXT_US = 3000.0, 20.0, 0.001


@dataclass
class Served:
    """When a request came, and each of its tokens."""

    arrival_ns: int
    tokens_ns: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.tokens_ns[0] - self.arrival_ns) / MS


class Paced:
    def __init__(self, config: SchedulerConfig, num_blocks: int = 1 << 14) -> None:
        rows = 2 * config.max_waiting + config.max_num_seqs
        columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 0, 1)
        self.core = Scheduler(config, 0, 1, columns)
        slots = config.max_num_seqs
        hello = WorkerHello(1, num_blocks, slots, 1 << 18, 100, 1, 1, 1, "a", "b", 0, 0, "paced")
        self.core.handle(hello, 0)
        self.epoch = 2
        self.core.handle(Membership(self.epoch, True), 0)
        self.now_ns = 0
        self.served: dict[int, Served] = {}
        self._arrivals: list[tuple[int, int, int, int, int, bool]] = []
        self._plans: list[StepPlan] = []
        self._done_ns = 0  # when the worker is done with its oldest plan
        self._handles = Handles()

    def arrive(
        self,
        at_ns: int,
        number: int,
        prompt: int,
        outputs: int,
        priority: int = 0,
        resumed: bool = False,
    ) -> None:
        heapq.heappush(self._arrivals, (at_ns, number, prompt, outputs, priority, resumed))

    def run(self, until_ns: int) -> None:
        """Until then, or until nothing is left to do."""
        while self._plans or self._arrivals:
            arrival_ns = self._arrivals[0][0] if self._arrivals else until_ns
            if self._plans and self._done_ns <= arrival_ns:
                self.now_ns = self._done_ns
                self._finish(self._plans.pop(0))
            elif not self._arrivals:
                return  # what is under way ends later
            else:
                self.now_ns = arrival_ns
                self._submit(*heapq.heappop(self._arrivals))
            if self.now_ns >= until_ns:
                return
            self._decide()

    def stop(self) -> None:
        """A peer falls: what is under way is abandoned, and the group goes on without it."""
        for plan in self._plans:
            self.core.handle(StepResult(plan.seq, aborted=True), self.now_ns)
        self._plans.clear()
        self.epoch += 2
        self.core.handle(Membership(self.epoch, True), self.now_ns)
        self._decide()

    def _submit(
        self, at_ns: int, number: int, prompt: int, outputs: int, priority: int, resumed: bool
    ) -> None:
        self.served[number] = Served(at_ns)
        sampling = Sampling(seed=number, max_tokens=outputs, ignore_eos=True)
        ids = np.full(prompt, 7, np.int32).tobytes()
        submit = Submit(number, f"{number:032x}", 0, 0, ids, sampling, b"", priority, resumed)
        self.core.handle(submit, self.now_ns)

    def _decide(self) -> None:
        actions = self.core.step(self.now_ns)
        for plan in actions.plans:
            self._plans.append(plan)
            if len(self._plans) == 1:
                self._done_ns = self.now_ns + self._took_us(plan) * 1000
        for message in actions.gateway:
            if not isinstance(message, Tokens):
                continue
            for item in self._handles.items(message):
                times = self.served[int(item.request_id, 16)].tokens_ns
                times += [self.now_ns] * len(item.token_ids)
                if item.finish_reason:
                    self.core.handle(FinalSeen(((item.request_id, 0, 0),)), self.now_ns)

    def _finish(self, plan: StepPlan) -> None:
        us = self._took_us(plan)
        count = plan.sample.count(1)
        tokens = np.full(count, 9, np.int32).tobytes()
        self.core.handle(
            StepResult(plan.seq, False, b"\1" * count, tokens, bytes(count), step_us=us),
            self.now_ns,
        )
        if self._plans:
            self._done_ns = self.now_ns + self._took_us(self._plans[0]) * 1000

    @staticmethod
    def _took_us(plan: StepPlan) -> int:
        starts = np.frombuffer(plan.starts, np.int32).astype(np.int64)
        rows = np.frombuffer(plan.seqlens_q, np.int32)
        context = int((starts * rows + rows * rows // 2).sum())
        return int(STEP_US + ROW_US * int(rows.sum()) + CONTEXT_US * context)
