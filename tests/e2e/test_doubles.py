"""The gateway and a rank's scheduler, its worker or both are killed within 100 ms: no token changes, and none that
was delivered is made again."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.draws import seed_of_run
from e2e.node import Node, assert_whole, wait_for
from phalanx.protocol.messages import Delta, Sampling
from phalanx.services.client import Spec
from phalanx.services.client_async import AsyncClient

pytestmark = pytest.mark.process

RANKS = 3
TOKENS = 1_000
TOGETHER_S = 0.1
TRIES = 3  # on a loaded machine
DOUBLES = (("gateway", "scheduler"), ("gateway", "worker"), ("gateway", "scheduler", "worker"))
SEED = seed_of_run("DOUBLE_SEED")
Streams = list[list[int]]


@pytest.fixture(scope="module")
def node(start_node: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Its ranks compute nothing, so a worker is back soon; its log tells of every sequence that is placed."""
    config = tmp_path_factory.mktemp("doubles") / "config.json"
    config.write_text(json.dumps({"log_level": "debug"}))
    return start_node(RANKS, "--device", "null", "--config", config)


def specs() -> list[Spec]:
    rng = random.Random(5)
    return [
        Spec(
            tuple(rng.randrange(10, 200) for _ in range(rng.choice((1, 17, 130, 300)))),
            Sampling(seed=at, max_tokens=TOKENS, ignore_eos=True),
        )
        for at in range(9)
    ]


class Run:
    """The requests, once; `have` grows as tokens arrive."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.have: dict[str, list[int]] = {}
        self.before: dict[str, int] = {}  # tokens that had arrived when something was killed

    def play(self, victims: tuple[str, ...] = ()) -> Streams:
        return asyncio.run(self._play(victims))

    async def _play(self, victims: tuple[str, ...]) -> Streams:
        async with AsyncClient(self.node.run_dir) as client:
            jobs = [asyncio.create_task(self._read(client, spec)) for spec in specs()]
            if victims:
                await self._kill(victims)
            return list(await asyncio.gather(*jobs))

    async def _read(self, client: AsyncClient, spec: Spec) -> list[int]:
        stream = client.generate(spec, timeout=240)
        tokens: list[int] = []
        async for event in stream:
            self.have[stream.request_id] = tokens
            if isinstance(event, Delta):
                tokens += event.token_ids
        return tokens

    async def _kill(self, victims: tuple[str, ...]) -> None:
        pids = self.node.pids()
        aim = random.Random(f"{SEED} {victims}")
        seat = aim.randrange(RANKS)
        # The gateway first: if it lives for some ms more, it has moved the streams, and nothing is to be shown.
        names = [kind if kind == "gateway" else f"{kind}-{seat}" for kind in victims]
        wanted = aim.uniform(0.1, 0.4) * TOKENS
        while len(self.have) < len(specs()) or min(map(len, self.have.values())) < wanted:
            await asyncio.sleep(0.002)
        self.before = {request_id: len(tokens) for request_id, tokens in self.have.items()}
        for at, name in enumerate(names):
            await asyncio.sleep(aim.uniform(0, TOGETHER_S / len(names)) if at else 0)
            os.kill(pids[name], signal.SIGKILL)


def taken_up(run_dir: Path, request_ids: set[str]) -> list[tuple[str, int]]:
    """(request id, tokens it came with) of every sequence that was given to another scheduler."""
    lines = map(json.loads, (run_dir / "logs" / "gateway.log").read_text().splitlines())
    moved = [line for line in lines if line["event"] == "moved"]
    return [(m["request_id"], m["tokens"]) for m in moved if m["request_id"] in request_ids]


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(
            kinds,
            id=f"{'-'.join(kinds)}-{SEED}",
            marks=() if at == SEED % len(DOUBLES) else pytest.mark.soak,
        )
        for at, kinds in enumerate(DOUBLES)
    ],
)
def test_what_was_delivered_is_not_made_again(node: Node, victims: tuple[str, ...]) -> None:
    right = Run(node).play()
    for _ in range(TRIES):
        run = Run(node)
        assert run.play(victims) == right
        found = taken_up(node.run_dir, set(run.before))
        if found:
            break
        node.wait_healthy()  # the second one fell so late that the rank's streams were over
    else:
        raise AssertionError("nothing was taken up anew")
    again = {rid: run.before[rid] - tokens for rid, tokens in found if tokens < run.before[rid]}
    assert not again, f"delivered tokens that are made again: {again} of {run.before}"
    node.wait_healthy()
    assert_whole(node)
    logs = [name for name in node.names() if "-tokens-" in name]
    assert len(logs) == 1, "the dead gateways' are gone"


def test_a_clean_stop_leaves_no_log(node: Node) -> None:
    node.stop()
    wait_for(lambda: not node.names(), 20, "no name in shared memory")
