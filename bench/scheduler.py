"""Cost of one decode step in the scheduler: a result in, the next plan and the tokens' message out.

This is the live code path: the core that the process runs, planning one step ahead. Every request
has a stop id; with drafts, the client predicted its outputs and about three of five are accepted. With
churn, requests end in every step and as many new ones start (their submission, like the peers'
`add_request`, is not part of the step). `encoded_*` adds the bytes of plan and message.
"""

import gc
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from phalanx.protocol.codec import encode
from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import FinalSeen, Sampling, Submit, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Membership

RUNNING = (16, 64, 256)
DRAFTS = (0, 5)
CHURN = (0.0, 0.05)
STEPS, WARM_UP = 1000, 100
PROMPT_TOKENS = 100
OUTPUTS_MAX = 1 << 13
PREDICTED_IF_CHURNED = 1000  # tokens: nobody stays longer
ACCEPTED = (3, 2, 4, 3)  # drafts that pass, in turn
EOS, STOP_ID = 1, 2
STEP_NS = 20_000_000


def run(
    running: tuple[int, ...] = RUNNING,
    steps: int = STEPS,
    drafts: tuple[int, ...] = DRAFTS,
    churn: tuple[float, ...] = CHURN,
) -> dict[str, Any]:
    """The fields of `phalanx bench scheduler` (docs/cli.md); a row for each combination."""
    return {
        "rows": [
            Course(count, each, share).measure(steps)
            for share in churn
            for each in drafts
            for count in running
        ],
        "yardstick_us": yardstick_us(),
    }


def yardstick_us() -> float:
    """A fixed mix of interpreter and numpy work on this machine now: what a step may be compared with."""
    values, at = np.arange(4096, dtype=np.int32), np.arange(0, 4096, 16)
    kept: dict[int, int] = {}
    spent = []
    for _ in range(50):
        before = time.thread_time_ns()
        for number in range(50):
            (values[at] + number).any()
            for key in range(10):
                kept[key] = kept.get(key, 0) + 1
        spent.append((time.thread_time_ns() - before) / 1e3)
    return float(np.median(spent))


class Course:
    """A full scheduler and the worker's answers, made up outside of what is timed."""

    def __init__(self, running: int, drafts: int, churn: float) -> None:
        self.running, self.drafts, self.churn = running, drafts, churn
        self._leaving = 0.0  # sequences that ought to have ended by now, less those that have
        self._submitted = 0
        self._plans: deque[StepPlan] = deque()
        predicted = PREDICTED_IF_CHURNED if churn else OUTPUTS_MAX
        self._predicted = tuple(range(3, 3 + 50)) * (predicted // 50 if drafts else 0)
        self.core = self._scheduler()
        for _ in range(running):
            self._submit(0)

    def _scheduler(self) -> Scheduler:
        count = self.running
        config = SchedulerConfig(
            max_num_seqs=count,
            max_num_batched_tokens=max(1024, 16 * count),
            max_waiting=count,
        )
        rows = 3 * count
        columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 0, 1)
        core = Scheduler(config, 0, 1, columns)
        blocks = 1 + 2 * count * (2 + (PROMPT_TOKENS + OUTPUTS_MAX) // 128)
        hello = WorkerHello(
            1, blocks, count, 1 << 20, 4096, EOS, 1, 1, "ph-a", "ph-b", 0, self.drafts, "bench"
        )
        core.handle(hello, 0)
        core.handle(Membership(2, True), 0)
        return core

    def _submit(self, now_ns: int) -> None:
        number = self._submitted
        self._submitted += 1
        sampling = Sampling(
            seed=number,
            max_tokens=OUTPUTS_MAX,
            stop_token_ids=(STOP_ID,),
            predicted_token_ids=self._predicted,
        )
        prompt = np.arange(3, 3 + PROMPT_TOKENS, dtype=np.int32).tobytes()
        self.core.handle(Submit(number, f"{number:032x}", 0, 0, prompt, sampling), now_ns)

    def measure(self, steps: int) -> dict[str, Any]:
        core, encoder, now_ns = self.core, msgspec.msgpack.Encoder(), STEP_NS
        self._plans += core.step(now_ns).plans
        spent, busy, encoded = [], [], []
        gc.collect()
        gc.freeze()  # a pause of the collector over this process's heap is no cost of a step
        for at in range(steps + WARM_UP):
            result = self._answer(self._plans.popleft(), at)
            now_ns += STEP_NS
            cpu = time.thread_time_ns()
            before = time.perf_counter_ns()
            core.handle(result, now_ns)
            actions = core.step(now_ns)
            after = time.perf_counter_ns()
            busy.append(time.thread_time_ns() - cpu)
            for plan in actions.plans:
                encoder.encode(plan)
            for message in actions.gateway:
                encode(message)
            encoded.append(time.perf_counter_ns() - before)
            spent.append(after - before)
            self._plans += actions.plans
            for message in actions.gateway:
                if isinstance(message, Tokens):
                    self._replace_ended(message, now_ns)
            if len(self._plans) < 2:
                self._plans += core.step(now_ns).plans  # the one ahead
        gc.unfreeze()
        figures: dict[str, Any] = {
            "running": self.running,
            "drafts": self.drafts,
            "churn": self.churn,
        }
        for name, ns in (("", spent), ("cpu_", busy), ("encoded_", encoded)):
            for part in (50, 99):
                value = float(np.percentile(ns[WARM_UP:], part)) / 1e3
                figures[f"{name}p{part}_us"] = round(value, 1)
        return figures

    def _answer(self, plan: StepPlan, at: int) -> StepResult:
        """The worker's: drafts accepted in turn, and a stop id where a sequence is to leave."""
        drafts = np.frombuffer(plan.drafts, np.uint8)
        sampled = np.frombuffer(plan.sample, np.uint8).astype(bool)
        accepted = np.array(ACCEPTED)[(np.arange(len(drafts)) + at) % len(ACCEPTED)]
        counts = (1 + np.minimum(accepted, drafts))[sampled]
        tokens = np.full(int(counts.sum()), 7 + plan.seq % 50, np.int32)
        self._leaving += self.churn * self.running if at > WARM_UP // 2 else 0.0
        leave = min(int(self._leaving), len(counts))
        self._leaving -= leave
        first = np.cumsum(counts) - counts
        tokens[first[(at * 31 + np.arange(leave) * 17) % max(1, len(counts))]] = STOP_ID
        return StepResult(
            plan.seq, False, counts.astype(np.uint8).tobytes(), tokens.tobytes(), bytes(len(counts))
        )

    def _replace_ended(self, message: Tokens, now_ns: int) -> None:
        ended = [i for i in message.items if i.finish_reason is not None]
        for _ in ended:
            self._submit(now_ns)
        if ended:
            seen = tuple((i.request_id, i.index, i.attempt) for i in ended)
            self.core.handle(FinalSeen(seen), now_ns)
