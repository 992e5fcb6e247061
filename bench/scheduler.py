"""Cost of one decode step in the scheduler: a result in, the next plan and the tokens' message out.

This is the live code path: the core that the process runs, planning one step ahead. Every request
has a stop id; with drafts, the client predicted its outputs and about three of five are accepted. With
churn, requests end in every step and as many new ones start, so a step also ends the ones and computes
the prompts of the others. `p50_us` is of result and plan (a peer's update and schedule), `intake_*` of
the messages between two steps (new sequences, finals that were seen), `encoded_*` of a step with the
bytes of plan and message. `bytecodes` counts what the interpreter executes in a step: the same on every
machine, however busy.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from phalanx.bench.scheduler_peer import measure_peer
from phalanx.protocol.codec import encode
from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import FinalSeen, Sampling, Submit, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.scheduler_svc.compiled import which
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Actions, Membership
from phalanx.scheduler_svc.garbage import STEPS_BETWEEN

RUNNING = (16, 64, 256)
DRAFTS = (0, 5)
CHURN = (0.0, 0.05)
STEPS, WARM_UP = 1000, 100
STEPS_COUNTED = 20
PEER_STEPS = 200  # a peer may take milliseconds for each
PROMPT_TOKENS = 100
OUTPUTS_MAX = 1 << 13
PREDICTED_IF_CHURNED = 400  # tokens: hardly anybody stays longer
ACCEPTED = (3, 2, 4, 3)  # drafts that pass, in turn
EOS, STOP_ID = 1, 2
STEP_NS = 20_000_000


def run(
    running: tuple[int, ...] = RUNNING,
    steps: int = STEPS,
    drafts: tuple[int, ...] = DRAFTS,
    churn: tuple[float, ...] = CHURN,
    peer_python: str | None = None,
) -> dict[str, Any]:
    """The fields of `phalanx bench scheduler` (docs/cli.md); a row for each combination."""
    rows = [
        Course(count, each, share).measure(steps)
        for share in churn
        for each in drafts
        for count in running
    ]
    for row in rows:
        course = Course(row["running"], row["drafts"], row["churn"])
        row["bytecodes"] = course.bytecodes(STEPS_COUNTED)
    return {
        "rows": rows,
        "yardstick_us": yardstick_us(),
        "passes": which(),
        **measure_peer(rows, _course(steps), peer_python),
    }


def _course(steps: int) -> dict[str, Any]:
    """What a peer's course has in common with ours."""
    return {
        "steps": min(steps, PEER_STEPS),
        "warm_up": WARM_UP,
        "prompt_tokens": PROMPT_TOKENS,
        "accepted": ACCEPTED,
        "stop_id": STOP_ID,
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

    def __init__(self, running: int, drafts: int, churn: float, compiled: bool = True) -> None:
        self.running, self.drafts, self.churn = running, drafts, churn
        self._compiled = compiled
        self._leaving = 0.0  # sequences that ought to have ended by now, less those that have
        self._submitted = 0
        self._plans: deque[StepPlan] = deque()
        self._turns = 0
        self._now_ns = STEP_NS
        predicted = PREDICTED_IF_CHURNED if churn else OUTPUTS_MAX
        self._predicted = tuple(range(3, 3 + 50)) * (predicted // 50 if drafts else 0)
        self.core = self._scheduler()
        for _ in range(running):
            self.core.handle(self._new(), 0)
        self._plans += self.core.step(self._now_ns).plans

    def _scheduler(self) -> Scheduler:
        count = self.running
        config = SchedulerConfig(
            max_num_seqs=count,
            max_num_batched_tokens=max(1024, 16 * count),
            max_waiting=count,
        )
        rows = 3 * count
        columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 0, 1)
        core = Scheduler(config, 0, 1, columns, compiled=self._compiled)
        blocks = 1 + 2 * count * (2 + (PROMPT_TOKENS + OUTPUTS_MAX) // 128)
        hello = WorkerHello(
            1, blocks, count, 1 << 20, 4096, EOS, 1, 1, "ph-a", "ph-b", 0, self.drafts, "bench"
        )
        core.handle(hello, 0)
        core.handle(Membership(2, True), 0)
        return core

    def _new(self) -> Submit:
        number = self._submitted
        self._submitted += 1
        sampling = Sampling(
            seed=number,
            max_tokens=OUTPUTS_MAX,
            stop_token_ids=(STOP_ID,),
            predicted_token_ids=self._predicted,
        )
        prompt = np.arange(3, 3 + PROMPT_TOKENS, dtype=np.int32).tobytes()
        return Submit(number, f"{number:032x}", 0, 0, prompt, sampling)

    def measure(self, steps: int) -> dict[str, Any]:
        encoder = msgspec.msgpack.Encoder()
        spent, busy, encoded, intake, collected = [], [], [], [], [0]
        gc.collect()
        gc.freeze()  # what else lives in this process is no cost of a step
        gc.disable()  # as the process does: the collector looks only between steps
        for at in range(steps + WARM_UP):
            result, now_ns = self._next_result()
            cpu = time.thread_time_ns()
            before = time.perf_counter_ns()
            actions = self._step(result, now_ns)
            after = time.perf_counter_ns()
            busy.append(time.thread_time_ns() - cpu)
            for plan in actions.plans:
                encoder.encode(plan)
            for message in actions.gateway:
                encode(message)
            encoded.append(time.perf_counter_ns() - before)
            spent.append(after - before)
            if at % STEPS_BETWEEN == 0:
                before = time.perf_counter_ns()
                gc.collect(1)
                collected.append(time.perf_counter_ns() - before)
            events = self._events(actions)
            before = time.perf_counter_ns()
            for event in events:
                self.core.handle(event, now_ns)
            intake.append(time.perf_counter_ns() - before)
            self._go_on(actions)
        gc.enable()
        gc.unfreeze()
        figures: dict[str, Any] = {
            "running": self.running,
            "drafts": self.drafts,
            "churn": self.churn,
        }
        for name, ns in (("", spent), ("cpu_", busy), ("encoded_", encoded), ("intake_", intake)):
            for part in (50, 99):
                value = float(np.percentile(ns[WARM_UP:], part)) / 1e3
                figures[f"{name}p{part}_us"] = round(value, 1)
        figures["collect_max_us"] = round(max(collected) / 1e3, 1)
        return figures

    def bytecodes(self, steps: int) -> int:
        """The mean over so many steps of the instructions that the interpreter executes in one."""
        for _ in range(WARM_UP):
            self._turn(self._step)
        counts = [0]
        gc.disable()  # what other libraries do when the collector comes is no cost of a step
        for _ in range(steps):
            self._turn(lambda *event: _counted(counts, lambda: self._step(*event)))
        gc.enable()
        return round(counts[0] / steps)

    def _turn(self, step: Callable[[StepResult, int], Actions]) -> None:
        result, now_ns = self._next_result()
        actions = step(result, now_ns)
        for event in self._events(actions):
            self.core.handle(event, now_ns)
        self._go_on(actions)

    def _step(self, result: StepResult, now_ns: int) -> Actions:
        self.core.handle(result, now_ns)
        return self.core.step(now_ns)

    def _next_result(self) -> tuple[StepResult, int]:
        self._turns += 1
        self._now_ns += STEP_NS
        return self._answer(self._plans.popleft(), self._turns - 1), self._now_ns

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
            plan.seq,
            False,
            counts.astype(np.uint8).tobytes(),
            tokens.tobytes(),
            bytes(len(counts)),
            step_us=STEP_NS // 1000 + at % 100,
        )

    def _events(self, actions: Actions) -> list[Submit | FinalSeen]:
        """The gateway's, to what a step said: a new sequence for each that ended, and what it has seen."""
        ended = [
            (item.request_id, item.index, item.attempt)
            for message in actions.gateway
            if isinstance(message, Tokens)
            for item in message.items
            if item.finish_reason is not None
        ]
        seen = [FinalSeen(tuple(ended))] if ended else []
        return [*(self._new() for _ in ended), *seen]

    def _go_on(self, actions: Actions) -> None:
        self._plans += actions.plans
        if len(self._plans) < 2:
            self._plans += self.core.step(self._now_ns).plans  # the one ahead


def _counted(counts: list[int], step: Callable[[], Actions]) -> Actions:
    """Adds to `counts[0]` the instructions executed by `step`."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        counts[0] += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return step()
    finally:
        sys.settrace(before)
