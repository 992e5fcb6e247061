"""A live node changes size, its processes are replaced, it is told to stop: no token of any stream changes,
and every request ends once.

CI has ranks that compute nothing, whose tokens are a hash of what came before: they start in a second.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Delta, Final, Scale, Scaled
from phalanx.protocol.queues import read_queues
from phalanx.services.client import Client
from phalanx.supervisor.ask import ask
from phalanx.worker_svc.model.random_tiny import ensure_random_tiny

pytestmark = pytest.mark.process

NULL = ("--device", "null")


@pytest.fixture(scope="module", params=["null", pytest.param("model", marks=pytest.mark.soak)])
def device(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def three(start_node: Callable[..., Node], device: str) -> Node:
    return start_node(3, *(NULL if device == "null" else ()))


@pytest.fixture(scope="module")
def requests(device: str) -> list[dict[str, Any]]:
    """Some seconds of work."""
    return [{**one, "max_tokens": 1500 if device == "null" else 90} for one in others(5)]


@pytest.fixture(scope="module")
def quiet(three: Node, requests: list[dict[str, Any]]) -> Any:
    return tokens(three.generate(requests))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Load:
    """The requests again and again, until told to stop."""

    def __init__(self, node: Node, requests: list[dict[str, Any]]) -> None:
        self._node, self._requests, self._stop = node, requests, False
        self.rounds: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop:
            self.rounds.append(tokens(self._node.generate(self._requests)))

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self._node.running() > 0, 60, "running requests")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop = True
        self._thread.join(240)


def runs_beside_the_first(node: Node) -> bool:
    ranks = read_queues(node_name(node.run_dir))["ranks"]
    return any(rank["running"] for rank in ranks if rank["slot"])


def test_three_ranks_become_one_and_four(three: Node, requests: Any, quiet: Any) -> None:
    pids = three.pids()
    with Load(three, requests) as load:
        # At once: until a command has begun, what runs on those that leave may be over.
        wait_for(lambda: runs_beside_the_first(three), 60, "requests of those that leave")
        down = ask(three.run_dir, Scale(time.monotonic_ns(), 1, 60.0), Scaled, 90.0)
        assert (down.before, down.seats) == (3, (0,))
        assert three.status()["healthy"] and len(three.status()["ranks"]) == 1
        wait_for(lambda: three.running() > 0, 60, "running requests")
        (up,) = three("scale", 4)
        assert up["seats"] == [0, 1, 2, 3]
        wait_for(lambda: three.running() > 0, 60, "running requests")
    assert load.rounds and all(found == quiet for found in load.rounds)
    status = three.status()
    assert status["healthy"] and {p["restarts"] for p in status["processes"]} == {0}
    assert three.pids("worker-0")["worker-0"] == pids["worker-0"]
    (history,) = three("epochs")
    (shrunk,) = [record for record in history if record["cause"] == "scale from 3 to 1 ranks"]
    asked = [record["outcome"] for record in history if record["kind"] == "change"]
    assert asked and set(asked) == {"done"}
    assert shrunk["survivors"] == [0] and shrunk["moved_requests"] > 0
    assert_whole(three)


@pytest.mark.soak
def test_every_process_is_replaced_under_load(three: Node, requests: Any, quiet: Any) -> None:
    before = three.pids()
    with Load(three, requests) as load:
        (done,) = three("restart", "all", timeout=240)
    assert load.rounds and all(found == quiet for found in load.rounds)
    assert {one["name"] for one in done["restarted"]} == before.keys() - {"supervisor"}
    three.wait_healthy()
    after = three.pids()
    assert [name for name in before if before[name] == after[name]] == ["supervisor"]
    assert {p["restarts"] for p in three.status()["processes"]} == {0}
    assert_whole(three)


def test_what_cannot_be_done_is_refused(three: Node) -> None:
    ranks = len(three.status()["ranks"])
    assert three("scale", 0, code=2) == three("restart", "nobody", code=2) == []
    assert three("scale", 6, "--timeout", 0.01, code=5) == []
    three.wait_healthy()
    assert three.status()["change"] == "" and len(three.status()["ranks"]) == ranks


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("down", marks=pytest.mark.soak)])
def test_a_stop_finishes_what_it_can_and_ends_the_rest_once(
    start_node: Callable[..., Node], tmp_path: Path, how: str
) -> None:
    """New requests are refused at once; running ones have until the limit; then each gets one final."""
    (tmp_path / "config.json").write_text(f'{{"drain_s": {4 if how == "down" else 3}}}')
    options = (*NULL, "--inject", "--config", tmp_path / "config.json")
    node = start_node(1, *options)
    node.inject("slow", "worker", ms=20)  # the long ones outlast any limit here
    pid = node.pids("supervisor")["supervisor"]
    with Client(node.run_dir) as client:
        short = client.generate([50] * 4, max_tokens=4, seed=1, ignore_eos=True)
        streams = [
            client.generate([70] * 4, max_tokens=8000, seed=s, ignore_eos=True) for s in range(3)
        ]
        for stream in (short, *streams):
            assert isinstance(next(iter(stream)), Delta)
        stop = threading.Thread(target=lambda: node("down", "--timeout", 4))
        stop.start() if how == "down" else os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not client.health().healthy, 20, "draining")
        with pytest.raises(Refused) as refused:
            client.generate([90] * 4, max_tokens=1).accepted()
        assert refused.value.code is Code.SHUTDOWN
        (done,) = short.results()
        assert (done.finish_reason, len(done.token_ids)) == ("length", 4)
        for stream in streams:
            *deltas, final = stream
            assert not any(isinstance(delta, Final) for delta in deltas)
            assert isinstance(final, Final) and final.finish_reason == "abort"
            assert final.code is Code.SHUTDOWN and "shutdown" in final.error
            (result,) = stream.results()
            assert len(result.token_ids) == final.offset > 0
    wait_for(lambda: not alive(pid), 20, "stopped")
    if how == "down":
        stop.join(20)
    node.start(1, *options)
    assert node.running() == 0, "what was ended does not come back to life"
    assert node.stop() == {"stopped": True, "left": []}


@pytest.mark.soak
def test_a_worker_starts_again_without_the_checkpoint(
    start_node: Callable[..., Node], tmp_path: Path
) -> None:
    """The shards are in shared memory, and the supervisor holds them: their files may go."""
    model = Path(shutil.copytree(ensure_random_tiny(), tmp_path / "model"))
    node = start_node(2, "--model", model)
    request = [{"prompt": "Hello", "seed": 3, "max_tokens": 8}]
    before = tokens(node.generate(request))
    log = node.run_dir / "logs" / "supervisor.log"
    wait_for(lambda: "host weights are held" in log.read_text(), 60, "the copy")
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    pids = node.pids("worker")
    for pid in pids.values():  # one holds every expert for a while, then none is left
        os.kill(pid, signal.SIGKILL)
    node.wait_healthy(120)
    assert not set(node.pids("worker").values()) & set(pids.values())
    assert tokens(node.generate(request)) == before
    assert node.stop() == {"stopped": True, "left": []} and node.names() == []
