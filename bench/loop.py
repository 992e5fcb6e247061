"""The whole path without a model: client, gateway, tokenizer, scheduler and a worker that computes nothing.

A private node of one rank serves 1, 64 and 256 requests at a time. A step's time is the scheduler's
own record: from its plan, or the end of the step before it if that is later, until its tokens are on
their way to the gateway.
"""

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phalanx.protocol.config import KVStoreConfig, NodeConfig, SchedulerConfig, node_name
from phalanx.protocol.messages import Sampling
from phalanx.protocol.queues import step_times
from phalanx.services.client import Client
from phalanx.services.client_flow import Spec
from phalanx.supervisor.commands.node import private_node

CONCURRENT = (1, 64, 256)
STEPS = 600  # of each measurement, about
PROMPT = tuple(range(3, 35))


def run(
    device: Literal["cpu", "null"] = "null",
    concurrent: tuple[int, ...] = CONCURRENT,
    steps: int = STEPS,
) -> dict[str, Any]:
    """The fields of `phalanx bench loop` (docs/cli.md)."""
    most = max(concurrent)
    config = NodeConfig(
        device=device,
        scheduler=SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=max(1024, 4 * most)),
        kvstore=KVStoreConfig(enabled=False),
    )
    with private_node("random-tiny", 1, base=config) as (node, _), Client(node.run_path) as client:
        _measure(client, node.run_path, 1, 20)  # warms up
        rows = [_measure(client, node.run_path, count, steps) for count in concurrent]
    return {"device": device, "rows": rows}


def _measure(client: Client, run_dir: Path, count: int, steps: int) -> dict[str, Any]:
    node = node_name(run_dir)
    before, _ = step_times(node, 0)
    specs = [
        Spec(PROMPT, Sampling(max_tokens=steps, ignore_eos=True, seed=number))
        for number in range(count)
    ]
    started = time.perf_counter()
    tokens = 0
    for _, result in client.generate_many(specs, concurrency=count):
        if result.error:
            raise RuntimeError(f"a request failed: {result.error}")
        tokens += len(result.token_ids)
    spent = time.perf_counter() - started
    after, newest = step_times(node, 0)
    times = newest[-(after - before) :]
    return {
        "requests": count,
        "tokens_per_s": round(tokens / spent, 1),
        "step_us_p50": float(np.percentile(times, 50)),
        "step_us_p99": float(np.percentile(times, 99)),
        "steps": after - before,
    }
