"""Prompts that a real node has seen before are read from the KV store, and no token is another one for it."""

import os
import random
import resource
import signal
import threading
from typing import Any

import pytest

from e2e.node import Node, assert_whole, tokens, wait_for
from phalanx.protocol.config import node_name
from phalanx.protocol.queues import read_queues

pytestmark = pytest.mark.process


def request_of(seed: int, length: int, **sampling: object) -> dict[str, Any]:
    rng = random.Random(seed)
    prompt = [rng.randrange(10, 200) for _ in range(length)]
    settings = {"max_tokens": 24, "seed": seed, "ignore_eos": True, **sampling}
    return {"prompt_token_ids": prompt, **settings}


def cached(rows: list[dict[str, Any]]) -> list[int]:
    return [row["usage"]["cached_tokens"] for row in rows]


def records(node: Node) -> int:
    (stats,) = node("kv", "stats")
    return int(stats["records"])


def kept(node: Node, request: dict[str, Any], more: int) -> list[dict[str, Any]]:
    """Its first run, and until so many records more are stored."""
    before = records(node)
    rows = node.generate([request])
    wait_for(lambda: records(node) >= before + more, 30, "stored blocks")
    return rows


def test_warm_is_cold(node: Node) -> None:
    """Blocks and state from the store, also for n > 1, for logprobs, and after the store's restart."""
    request = request_of(71, 300, n=2, logprobs=2, frequency_penalty=0.4)
    cold = kept(node, request, 3)
    assert cached(cold) == [0, 0]

    def same(rows: list[dict[str, Any]]) -> bool:
        logprobs = [sorted((r["index"], r["logprobs"]) for r in rows) for rows in (rows, cold)]
        return tokens(rows) == tokens(cold) and logprobs[0] == logprobs[1]

    warm = node.generate([request])
    assert cached(warm) == [256, 256] and same(warm)

    pid = node.pids()["kvstore"]
    os.kill(pid, signal.SIGKILL)
    between = node.generate([request])
    assert same(between)
    node.wait_healthy()
    wait_for(lambda: node.pids()["kvstore"] != pid, 60, "another store")
    after = node.generate([request])
    assert same(after)
    assert_whole(node)


def test_a_store_that_hangs_holds_nobody_up(node: Node) -> None:
    request = request_of(72, 300)
    cold = kept(node, request, 3)
    pid = node.pids()["kvstore"]
    os.kill(pid, signal.SIGSTOP)  # until the supervisor misses it
    assert tokens(node.generate([request])) == tokens(cold)
    wait_for(lambda: node.pids().get("kvstore", pid) != pid, 60, "another store")
    node.wait_healthy()


@pytest.mark.soak
def test_streams_of_a_killed_worker_take_up_their_prompts(node: Node) -> None:
    """What their prompts' blocks were is loaded by the other rank."""
    requests = [request_of(seed, 600, max_tokens=400) for seed in range(73, 77)]
    before = records(node)
    victim = node.pids()["worker-1"]
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(node.generate(requests)))
    thread.start()

    def decoding() -> set[tuple[int, str]]:
        held = read_queues(node_name(node.run_dir))["requests"]
        return {(r["slot"], r["request_id"]) for r in held if r["phase"] == "decode"}

    wait_for(lambda: len(decoding()) == 4 and records(node) >= before + 20, 60, "stored prompts")
    moved = {request for slot, request in decoding() if slot == 1}
    os.kill(victim, signal.SIGKILL)

    def loaded() -> set[str]:
        held = read_queues(node_name(node.run_dir))["requests"]
        return {r["request_id"] for r in held if r["slot"] == 0 and r["cached_tokens"] >= 512}

    wait_for(lambda: moved <= loaded(), 60, "loaded prompts")
    thread.join(240)
    node.wait_healthy()
    assert got and tokens(got[0]) == tokens(node.generate(requests))
    assert moved and cached(got[0]) == [0] * 4
    assert_whole(node)


def test_a_worker_that_cannot_read_what_was_loaded_computes_it(node: Node) -> None:
    """It may open no more files, and so not the staging arena of a scheduler that is new."""
    request = request_of(78, 300)
    cold = kept(node, request, 3)
    before = {name: node.pids()[name] for name in ("scheduler-0", "scheduler-1")}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    def renewed() -> bool:
        now = node.pids()
        return all(now.get(name, pid) != pid for name, pid in before.items())

    wait_for(renewed, 60, "new schedulers")
    node.wait_healthy()
    workers = [node.pids()[name] for name in ("worker-0", "worker-1")]
    limits = [no_more_files(pid) for pid in workers]
    again = node.generate([request])
    logs = "".join((node.run_dir / "logs" / f"worker-{n}.log").read_text() for n in (0, 1))
    for pid, limit in zip(workers, limits, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    assert tokens(again) == tokens(cold) and cached(again) == [0]
    assert logs.count("nothing is restored from here") == 1
    assert_whole(node)


def no_more_files(pid: int) -> tuple[int, int]:
    """Of that process; returns the limits that it had."""
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = next(fd for fd in range(len(used) + 1) if fd not in used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    return before
