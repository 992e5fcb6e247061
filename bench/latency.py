"""How long running streams wait for their next token when prompts saturate the node, and how long a short
prompt waits behind a long one: with a target for the step time, and without.

A private node of one rank for each policy, the same load on both. First without a target: the median time
between two tokens of streams that have the node to themselves gives the target of the second (`margin`
times that). A gap is the time between two deliveries of one stream at the client.
"""

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phalanx.protocol.config import (
    KVStoreConfig,
    NodeConfig,
    SchedulerConfig,
    WorkerConfig,
    node_name,
)
from phalanx.protocol.messages import Delta
from phalanx.protocol.queues import step_times
from phalanx.services.client_async import AsyncClient, AsyncStream
from phalanx.supervisor.commands.node import private_node

# Of the target over the undisturbed time; below the goal of 2, for what a guess is off.
MARGIN = 1.6
STREAM_PROMPT, LOAD_PROMPT = 24, 1500
WAITING_PROMPTS = 4  # always so many at once while prompts saturate
SHORT_PROMPT, LONG_PROMPT = 100, 16_000
STEADY = 1.25  # of the undisturbed times of both nodes: else the machine itself changed meanwhile
REPEATS = 3  # of the short prompt, alone and behind the long one
WARM_S = 2.0  # of the streams, before anything is measured
_TOKENS_MAX = 20_000


@dataclass
class Streams:
    """Deliveries of running streams, CLOCK_MONOTONIC ns, each stream by itself."""

    times: list[list[int]] = field(default_factory=list[list[int]])

    def gaps_ms(self, start_ns: int, end_ns: int) -> list[float]:
        """Between neighbouring deliveries; a gap counts where it ends."""
        return [
            (after - before) / 1e6
            for one in self.times
            for before, after in itertools.pairwise(one)
            if start_ns <= after < end_ns
        ]


def run(
    streams: int = 8, seconds: float = 10.0, model: str = "random-tiny", margin: float = MARGIN
) -> dict[str, Any]:
    """The fields of `phalanx bench latency` (docs/cli.md)."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="phlat") as directory:
        served = _long_model(model, Path(directory) / "model")
        off = _policy(served, 0.0, streams, seconds)
        target_ms = round(margin * off["unloaded_p50_ms"], 3)
        on = _policy(served, target_ms, streams, seconds)
    quiet = sorted(row["unloaded_p50_ms"] for row in (on, off))
    return {
        "steady": quiet[1] <= STEADY * quiet[0],
        "rows": [on, off],
        "p99_ratio": on["p99_ratio"],
        "p99_ratio_off": off["p99_ratio"],
        "short_delay_ms": on["short_delay_ms"],
        "short_delay_ms_off": off["short_delay_ms"],
        "target_itl_ms": target_ms,
        "streams": streams,
        "seconds": seconds,
        "model": model,
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }


def _long_model(model: str, copy: Path) -> str:
    """The model, or a copy that takes the long prompt: what it says then is of no interest here."""
    command = [sys.executable, "-P", "-m", "phalanx.worker_svc.model.random_tiny", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"no model {model}: {done.stderr.strip()[-2000:]}")
    directory = Path(done.stdout.strip())
    config = msgspec.json.decode((directory / "config.json").read_bytes())
    text = config.get("text_config", config)
    if text["max_position_embeddings"] > LONG_PROMPT + 1:
        return model
    text["max_position_embeddings"] = _TOKENS_MAX + LONG_PROMPT
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "config.json").unlink()
    (copy / "config.json").write_bytes(msgspec.json.encode(config))
    return str(copy)


def _policy(model: str, target_ms: float, streams: int, seconds: float) -> dict[str, Any]:
    blocks = 2 + LONG_PROMPT // 128 + WAITING_PROMPTS * (1 + LOAD_PROMPT // 128) + 160 * streams
    config = NodeConfig(
        scheduler=SchedulerConfig(target_itl_ms=target_ms, max_num_seqs=streams + 8),
        worker=WorkerConfig(num_blocks=blocks),
        kvstore=KVStoreConfig(enabled=False),
    )
    with private_node(model, 1, base=config) as (node, _):
        measured = asyncio.run(_measure(node.run_path, streams, seconds))
    return {"target_itl_ms": target_ms} | measured


async def _measure(run_dir: Path, count: int, seconds: float) -> dict[str, Any]:
    async with AsyncClient(run_dir) as client, _running(client, count) as streams:
        await asyncio.sleep(WARM_S)
        start = time.monotonic_ns()
        await asyncio.sleep(seconds)
        quiet = streams.gaps_ms(start, time.monotonic_ns())
        alone = [await _first_token_ms(client, SHORT_PROMPT, at) for at in range(REPEATS)]
        async with _saturated(client) as done:
            start = time.monotonic_ns()  # how it begins counts, too
            await asyncio.sleep(seconds)
            busy = streams.gaps_ms(start, time.monotonic_ns())
            prompts = len(done) / seconds
            _, steps = step_times(node_name(run_dir), 0)
        behind = [await _behind_ms(client, at) for at in range(REPEATS)]
    figures = {
        "unloaded_p50_ms": _percentile(quiet, 50),
        "unloaded_p99_ms": _percentile(quiet, 99),
        "loaded_p50_ms": _percentile(busy, 50),
        "loaded_p99_ms": _percentile(busy, 99),
        "loaded_max_ms": _percentile(busy, 100),
        "loaded_step_p99_ms": round(float(np.percentile(steps, 99)) / 1000, 3),
        "prompt_tokens_per_s": round(prompts * LOAD_PROMPT, 1),
        "short_alone_ms": _percentile(alone, 50),
        "short_behind_ms": _percentile(behind, 50),
    }
    return figures | {
        "p99_ratio": round(figures["loaded_p99_ms"] / figures["unloaded_p99_ms"], 3),
        "short_delay_ms": round(figures["short_behind_ms"] - figures["short_alone_ms"], 3),
    }


@contextlib.asynccontextmanager
async def _running(client: AsyncClient, count: int) -> AsyncIterator[Streams]:
    """`count` streams that go on until the end of the block."""
    found = Streams([[] for _ in range(count)])

    async def follow(number: int) -> None:
        while True:  # its maximum is far away, but it need not be for ever
            stream = _ask(client, STREAM_PROMPT, number, _TOKENS_MAX)
            async for event in stream:
                if isinstance(event, Delta):
                    found.times[number].append(time.monotonic_ns())

    async with _cancelled(*(follow(number) for number in range(count))):
        while not all(found.times):
            await asyncio.sleep(0.01)
        yield found


@contextlib.asynccontextmanager
async def _saturated(client: AsyncClient) -> AsyncIterator[list[int]]:
    """More prompts than can be computed, until the end of the block; yields when each was done."""
    done: list[int] = []

    async def feed(number: int) -> None:
        while True:
            await _ask(client, LOAD_PROMPT, 1000 + number + len(done), 1).results()
            done.append(time.monotonic_ns())

    async with _cancelled(*(feed(number) for number in range(WAITING_PROMPTS))):
        yield done


@contextlib.asynccontextmanager
async def _cancelled(*work: Any) -> AsyncIterator[None]:
    """Run beside the block; an error of it ends the block, too."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


async def _first_token_ms(client: AsyncClient, prompt: int, seed: int) -> float:
    (result,) = await _ask(client, prompt, 5000 + seed, 1).results()
    if result.ttft_ms is None:
        raise RuntimeError(f"a prompt of {prompt} tokens got no token: {result.error}")
    return result.ttft_ms


async def _behind_ms(client: AsyncClient, seed: int) -> float:
    """The time to the first token of a short prompt that comes when a long one is being computed."""
    long = await _ask(client, LONG_PROMPT, 7000 + seed, 1).accepted()
    await asyncio.sleep(0.5)
    behind = await _first_token_ms(client, SHORT_PROMPT, 100 + seed)
    long.abort()
    await long.results()
    return behind


def _ask(client: AsyncClient, prompt: int, seed: int, outputs: int) -> AsyncStream:
    choose = random.Random(seed)
    ids = [choose.randrange(3, 200) for _ in range(prompt)]
    return client.generate(ids, seed=seed, max_tokens=outputs, ignore_eos=True)


def _percentile(values: list[float], share: float) -> float:
    return round(float(np.percentile(values, share)), 3)
