"""Clients abort at random moments: in the queue, between chunks, while it runs, preempted, with everything full.

Each sequence ends once, with what it would have had until then, everybody else has the fault-free stream, and every
block and slot is back. The seed stands in the names; `ABORT_SEED=N` repeats the moments that were drawn.
"""

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from e2e.draws import seed_of_run
from e2e.node import Node, assert_whole
from phalanx.protocol.config import node_name
from phalanx.protocol.messages import Delta, Final, Sampling
from phalanx.protocol.queues import read_queues
from phalanx.services.client import Spec
from phalanx.services.client_async import AsyncClient, AsyncStream

pytestmark = pytest.mark.process

SEED = seed_of_run("ABORT_SEED")
REQUESTS, TOKENS = 40, 500
Right = dict[tuple[int, int], tuple[int, ...]]  # (position, index) -> tokens
# A fraction of what all of them need at once, and chunks of the longer prompts.
TIGHT = {
    "worker": {"num_blocks": 26},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
}


@pytest.fixture(scope="module")
def node(start_node: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory) -> Node:
    config = tmp_path_factory.mktemp("aborts") / "config.json"
    config.write_text(json.dumps(TIGHT))
    return start_node(2, "--device", "null", "--config", config)


def specs() -> list[Spec]:
    rng = random.Random(6)
    return [
        Spec(
            tuple(rng.randrange(10, 200) for _ in range(rng.choice((1, 130, 700, 1500)))),
            Sampling(seed=at, max_tokens=TOKENS, ignore_eos=True),
            n=1 + at % 3 // 2,
        )
        for at in range(REQUESTS)
    ]


@contextmanager
def watched(node: Node) -> Iterator[set[str]]:
    """The phases in which its requests were seen meanwhile, or must have been."""
    seen, over = set[str](), threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            rows = read_queues(node_name(node.run_dir))["requests"]
            seen.update(row["phase"] for row in rows)
            seen.update("preempted" for row in rows if row["preemptions"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def calm(node: Node) -> Right:
    """Every stream without an abort."""
    with watched(node) as seen:
        found = node.run(specs())
    assert {finish for finish, _, _ in found.values()} == {"length"}
    assert seen >= {"queued", "prefill", "decode", "preempted"}, "it is as tight as it should be"
    return {key: ids for key, (_, ids, _) in found.items()}


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("", id=f"nobody-{SEED}"),
        pytest.param("worker-1", id=f"worker-1-{SEED}", marks=pytest.mark.soak),
        pytest.param("scheduler-0", id=f"scheduler-0-{SEED}", marks=pytest.mark.soak),
        pytest.param("gateway", id=f"gateway-{SEED}", marks=pytest.mark.soak),
    ],
)
def test_an_abort_at_any_moment_ends_that_request_once_and_no_other(
    node: Node, calm: Right, victim: str
) -> None:
    node.wait_healthy()
    rng = random.Random(f"{SEED} {victim}")
    # Who leaves, every other one, and when: once the clients together have so many tokens.
    most = REQUESTS * TOKENS // 2
    leaving = {at: rng.randrange(most) for at in range(0, REQUESTS, 2)}
    found = asyncio.run(run(node, leaving, victim))
    cut = 0
    for at, events in enumerate(found):
        for index in range(specs()[at].n):
            *deltas, final = [event for event in events if event.index == index]
            assert isinstance(final, Final)
            ids = [token for delta in deltas for token in of_delta(delta)]
            assert final.offset == len(ids) and tuple(ids) == calm[at, index][: len(ids)]
            if final.finish_reason == "abort":
                assert at in leaving, "nobody aborted it"
                cut += 1
            else:
                assert (final.finish_reason, len(ids)) == ("length", TOKENS)
    assert cut > len(leaving) / 4, "they came too late to show anything"
    node.wait_healthy()
    assert_whole(node)


def of_delta(event: Delta | Final) -> tuple[int, ...]:
    assert isinstance(event, Delta), "nothing comes after the final"
    return event.token_ids


async def run(node: Node, leaving: dict[int, int], victim: str) -> list[list[Delta | Final]]:
    """What came of every request. Somebody is killed when a third of those that leave has left."""
    due = sorted((tokens, at) for at, tokens in leaving.items())
    count, kill_at, pids = 0, 2 * len(due) // 3, node.pids()
    async with AsyncClient(node.run_dir) as client:
        streams = [client.generate(spec, timeout=120) for spec in specs()]

        async def read(stream: AsyncStream) -> list[Delta | Final]:
            nonlocal count
            events: list[Delta | Final] = []
            async for event in stream:
                events.append(event)
                count += len(event.token_ids) if isinstance(event, Delta) else 0
                while due and count >= due[0][0]:
                    streams[due.pop(0)[1]].abort()
                    if victim and len(due) == kill_at:
                        os.kill(pids[victim], signal.SIGKILL)
            return events

        found = list(await asyncio.gather(*map(read, streams)))
    assert not due, "all have left"
    return found
