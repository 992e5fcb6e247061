"""What HTTP costs: its part of the time to first token, and many streams at once, against a worker that computes nothing.

The same completions request goes alternately over the message API and over HTTP to one idle node; both
clients are lean and live in one event loop. Then as many streams as asked for run at once over HTTP.
"""

import asyncio
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from phalanx.protocol.config import HttpConfig, KVStoreConfig, NodeConfig, SchedulerConfig
from phalanx.protocol.messages import Delta, Sampling
from phalanx.services.client_async import AsyncClient
from phalanx.services.client_flow import Spec
from phalanx.supervisor.commands.node import http_address, private_node

PROMPT = tuple(range(3, 35))
TOKENS = 64  # of each of the many streams
ROUNDS = 200
_WARM_UP = 20
_STREAM_S_MAX = 300.0


def run(streams: int = 500, rounds: int = ROUNDS) -> dict[str, Any]:
    """The fields of `phalanx bench http` (docs/cli.md)."""
    config = NodeConfig(
        device="null",
        http=HttpConfig(enabled=True, port=0),
        scheduler=SchedulerConfig(max_num_seqs=streams, max_num_batched_tokens=4 * streams),
        kvstore=KVStoreConfig(enabled=False),
    )
    with private_node(config.model, 1, base=config) as (node, _):
        address = (http_address(node) or "").removeprefix("http://").rpartition(":")
        return asyncio.run(_measure(node.run_path, address[0], int(address[2]), streams, rounds))


async def _measure(
    run_dir: Path, host: str, port: int, streams: int, rounds: int
) -> dict[str, Any]:
    direct, http = list[float](), list[float]()
    async with AsyncClient(run_dir) as client:
        connection = await asyncio.open_connection(host, port)
        for number in range(rounds + _WARM_UP):
            direct.append(await _first_direct(client, number))
            http.append((await _post(*connection, number, 2))[0])
        connection[1].close()
    del direct[:_WARM_UP], http[:_WARM_UP]
    started = time.perf_counter()
    found = await asyncio.gather(
        *(_alone(host, port, number) for number in range(streams)), return_exceptions=True
    )
    spent = time.perf_counter() - started
    whole = [f for f in found if not isinstance(f, BaseException) and f[1] == TOKENS]
    return {
        "ttft_overhead_ms_p50": round((median(http) - median(direct)) * 1000, 3),
        "ttft_direct_ms_p50": round(median(direct) * 1000, 3),
        "ttft_http_ms_p50": round(median(http) * 1000, 3),
        "rounds": rounds,
        "streams": streams,
        "dropped": streams - len(whole),
        "tokens_per_s": round(len(whole) * TOKENS / spent, 1),
        "streams_s": round(spent, 3),
        "load_average": round(os.getloadavg()[0], 2),
    }


async def _first_direct(client: AsyncClient, seed: int) -> float:
    """Seconds from the request to its first token over the message API."""
    spec = Spec(PROMPT, Sampling(max_tokens=2, ignore_eos=True, seed=seed))
    started, first = time.perf_counter(), 0.0
    async for event in client.generate(spec, timeout=_STREAM_S_MAX):
        if isinstance(event, Delta) and not first:
            first = time.perf_counter() - started
    return first


async def _alone(host: str, port: int, seed: int) -> tuple[float, int]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(_STREAM_S_MAX):
            return await _post(reader, writer, seed, TOKENS)
    finally:
        writer.close()


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seed: int, tokens: int
) -> tuple[float, int]:
    """One streamed completion on a connection that stays open: (seconds to its first token, tokens)."""
    body = msgspec.json.encode(
        {
            "prompt": PROMPT,
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    started, first, counted = time.perf_counter(), 0.0, 0
    writer.write(head.encode() + body)
    status = await reader.readuntil(b"\r\n\r\n")
    if not status.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"refused: {status[:200]!r}")
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunk = await reader.readexactly(size + 2)
        for line in chunk.split(b"\n\n"):
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if event["choices"] and not first:
                first = time.perf_counter() - started
            if "usage" in event:
                counted = event["usage"]["completion_tokens"]
    await reader.readexactly(2)
    return first, counted
