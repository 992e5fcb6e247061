"""Cost of one decode step in the scheduler: a result in, the next plan and the tokens' message out.

Also with both encoded, as the process sends them: that is what a step pays on the control side.
"""

import gc
import os
import platform
import time
from typing import Any

import msgspec
import numpy as np

from phalanx.protocol.codec import encode
from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import Sampling, Submit
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Actions, Membership

RUNNING = (1, 16, 64, 256)
STEPS, WARM_UP = 1500, 200
PROMPT_TOKENS = 100


def run(running: tuple[int, ...] = RUNNING, steps: int = STEPS) -> dict[str, Any]:
    """The fields of `phalanx bench scheduler` (contract.md). `drafts` is 0: one row a sequence."""
    return {
        "host": platform.node(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rows": [measure(count, steps) for count in running],
    }


def measure(running: int, steps: int) -> dict[str, Any]:
    core = full_scheduler(running, steps + WARM_UP)
    now_ns, plan = 0, _plan_of(core.step(0))
    while not _decodes_all(plan, running):
        core.handle(_answer(plan), now_ns)
        plan = _plan_of(core.step(now_ns))
    encoder = msgspec.msgpack.Encoder()
    spent: list[int] = []
    busy: list[int] = []  # on the CPU: what a step costs where nobody else wants the core
    encoded: list[int] = []
    gc.collect()
    gc.freeze()  # a pause of the collector over this process's heap is no cost of a step
    for _ in range(steps + WARM_UP - 2):
        result = _answer(plan)
        now_ns += 20_000_000
        cpu = time.thread_time_ns()
        before = time.perf_counter_ns()
        core.handle(result, now_ns)
        actions = core.step(now_ns)
        after = time.perf_counter_ns()
        busy.append(time.thread_time_ns() - cpu)
        for made in actions.plans:
            encoder.encode(made)
        for message in actions.gateway:
            encode(message)
        encoded.append(time.perf_counter_ns() - before)
        spent.append(after - before)
        plan = _plan_of(actions)
    gc.unfreeze()
    core_us, cpu_us, all_us = (np.array(ns[WARM_UP:]) / 1e3 for ns in (spent, busy, encoded))
    return {
        "running": running,
        "drafts": 0,
        "p50_us": float(np.percentile(core_us, 50)),
        "p99_us": float(np.percentile(core_us, 99)),
        "cpu_p50_us": float(np.percentile(cpu_us, 50)),
        "cpu_p99_us": float(np.percentile(cpu_us, 99)),
        "encoded_p50_us": float(np.percentile(all_us, 50)),
        "encoded_p99_us": float(np.percentile(all_us, 99)),
    }


def full_scheduler(running: int, outputs: int) -> Scheduler:
    """A scheduler with `running` sequences submitted, room for all and nothing else to do."""
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=max(1024, running), max_waiting=running
    )
    rows = 2 * running + running
    columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 0, 1)
    core = Scheduler(config, 0, 1, columns)
    blocks = running * (2 + (PROMPT_TOKENS + outputs) // 128) * 2
    core.handle(
        WorkerHello(1, blocks, running, 1 << 20, 1000, 1, 1, 1, "ph-a", "ph-b", 0, 5, "bench"), 0
    )
    core.handle(Membership(2, True), 0)
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32).tobytes()
    for number in range(running):
        sampling = Sampling(seed=number, max_tokens=outputs + 8, ignore_eos=True)
        core.handle(Submit(number, f"{number:032x}", 0, 0, prompt, sampling), 0)
    return core


def _plan_of(actions: Actions) -> StepPlan:
    (plan,) = actions.plans
    return plan


def _decodes_all(plan: StepPlan, running: int) -> bool:
    return len(plan.slots) == 4 * running and len(plan.token_ids) == 4 * running


def _answer(plan: StepPlan) -> StepResult:
    count = plan.sample.count(1)
    tokens = np.full(count, 7 + plan.seq % 50, np.int32).tobytes()
    return StepResult(plan.seq, False, b"\1" * count, tokens, bytes(count))
