"""A live node is told to stop, and loses processes while it does: every stream has its end within the limit and as
it would have been until then, the command answers, and nothing is left.

The ranks compute nothing, so that thousands of tokens come in a second; they are a hash of what came before.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, Self

import pytest

from e2e.node import PHALANX, Node, wait_for
from phalanx.protocol.errors import Code, PhalanxError, Refused
from phalanx.protocol.limits import DRAIN_GRACE_MS, TERM_GRACE_MS
from phalanx.protocol.messages import Final, Sampling
from phalanx.services.client import Client, Result, Spec
from phalanx.supervisor.ask import NodeGone

pytestmark = pytest.mark.process

LONG = 8000  # tokens: some seconds of work, on fast machines too
SPECS = [
    Spec([70] * 4, Sampling(seed=seed, max_tokens=most, ignore_eos=True))
    for seed, most in enumerate((40, 2500, LONG, LONG))
]
DRAIN_S = 2


class Readers:
    """The requests, read in a thread until each has ended."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.results: list[Result] = []
        self.finals = 0
        self.error: Exception | None = None
        self._accepted = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            with Client(self._node.run_dir) as client:
                streams = [client.generate(spec) for spec in SPECS]
                for stream in streams:
                    stream.accepted()
                self._accepted.set()
                for stream in streams:
                    self.finals += sum(isinstance(event, Final) for event in stream)
                    self.results += stream.results()
        except PhalanxError as error:
            self.error = error

    def __enter__(self) -> Self:
        # They last until a command has begun, however fast the machine; a start ends the fault.
        self._node.inject("slow", "worker", ms=20)
        self._thread.start()
        assert self._accepted.wait(30)
        wait_for(lambda: self._node.running() >= 2, 30, "streams")
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join(120)


def start(command: list[Any], node: Node) -> "subprocess.Popen[str]":
    arguments = [*PHALANX, *map(str, command), "--json", "--run-dir", str(node.run_dir)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(readers: Readers, quiet: list[Result]) -> None:
    """One final each; the end of a quiet run, or the beginning of it and the word that the node stops."""
    assert readers.error is None
    assert readers.finals == len(SPECS) == len(readers.results)
    for got, right in zip(readers.results, quiet, strict=True):
        if got.finish_reason == "length":
            assert got.token_ids == right.token_ids
        else:
            assert (got.finish_reason, got.code) == ("abort", Code.SHUTDOWN)
            assert got.token_ids == right.token_ids[: len(got.token_ids)]
        assert got.usage.completion_tokens == len(got.token_ids)
    assert readers.results[0].finish_reason == "length"


@pytest.fixture(scope="module")
def quiet(start_node: Callable[..., Node]) -> list[Result]:
    node = start_node(2, "--device", "null")
    with Client(node.run_dir) as client:
        streams = [client.generate(spec) for spec in SPECS]
        return [stream.results()[0] for stream in streams]


@pytest.mark.parametrize(
    "victims, how",
    [
        (("gateway",), signal.SIGKILL),
        *(
            pytest.param(victims, how, marks=pytest.mark.soak)
            for victims in (
                ("gateway", "gateway"),
                ("gateway", "scheduler-0", "worker-0", "tokenizer-0"),
                ("scheduler-1", "worker-1"),
                ("kvstore", "eplb", "tokenizer-1"),
            )
            for how in (signal.SIGKILL, signal.SIGSTOP)
        ),
        pytest.param(("gateway",), signal.SIGSTOP, marks=pytest.mark.soak),
    ],
)
def test_what_falls_while_the_node_drains_loses_no_end(
    start_node: Callable[..., Node],
    quiet: list[Result],
    victims: tuple[str, ...],
    how: signal.Signals,
) -> None:
    node = start_node(2, "--device", "null", "--inject")
    with Readers(node) as readers:
        late = Client(node.run_dir)
        down = start(["down", "--timeout", DRAIN_S], node)
        wait_for(lambda: node.process("supervisor").state == "draining", 20, "draining")  # type: ignore[union-attr]
        for victim in victims:
            with suppress(NodeGone):  # it was faster
                wait_for(lambda victim=victim: ready(node, victim), 20, victim)  # type: ignore[misc]
                os.kill(node.pids()[victim], how)
            time.sleep(0.1)
        output, errors = down.communicate(timeout=60)
    assert down.returncode == 0, errors
    assert output == '{"stopped": true, "left": []}\n'
    with late, pytest.raises(Refused, match="ended before it accepted"):
        late.generate("nobody hears this", timeout=20).results()
    check(readers, quiet)
    assert stopped_after_s(node) < DRAIN_S + (DRAIN_GRACE_MS + TERM_GRACE_MS) / 1000 + 2
    assert node.names() == [] and not list(node.run_dir.glob("*.sock"))


def stopped_after_s(node: Node) -> float:
    """By the supervisor's clock, so that a loaded machine's start of the command does not count."""
    lines = (node.run_dir / "logs" / "supervisor.log").read_text().splitlines()
    told = {entry["event"]: entry["timestamp"] for entry in map(json.loads, lines)}
    first, last = (datetime.fromisoformat(told[event]) for event in ("draining", "stopped"))
    return (last - first).total_seconds()


def ready(node: Node, name: str) -> bool:
    process = node.process(name)
    return process is not None and process.state == "ready"


def test_a_supervisor_that_dies_while_the_node_drains_is_told_of(
    start_node: Callable[..., Node], quiet: list[Result]
) -> None:
    """Nobody is left to answer: the command sweeps, and the streams go on with the next start."""
    node = start_node(2, "--device", "null", "--inject")
    with Readers(node) as readers:
        down = start(["down", "--timeout", 30], node)
        wait_for(lambda: node.process("supervisor").state == "draining", 20, "draining")  # type: ignore[union-attr]
        os.kill(node.pids()["supervisor"], signal.SIGKILL)
        output, errors = down.communicate(timeout=60)
        assert down.returncode == 0, errors
        assert '"stopped": true' in output and "supervisor (died)" in output
        assert [name for name in node.names() if "-tokens-" not in name] == []
        node.start(2, "--device", "null")
    check(readers, quiet)
    assert {result.finish_reason for result in readers.results} == {"length"}
    assert node.stop() == {"stopped": True, "left": []} and node.names() == []


@pytest.mark.soak
@pytest.mark.parametrize(
    "change", [("restart", "gateway"), ("restart", "all"), ("scale", 1), ("scale", 4)]
)
@pytest.mark.parametrize("later_s", [0.0, 0.3, 1.0])
def test_a_node_that_is_told_to_stop_in_the_middle_of_a_change(
    start_node: Callable[..., Node], quiet: list[Result], change: tuple[Any, ...], later_s: float
) -> None:
    node = start_node(2, "--device", "null", "--inject")
    with Readers(node) as readers:
        changing = start(list(change), node)
        wait_for(lambda: bool(node.look().change) or changing.poll() is not None, 20, "the change")
        time.sleep(later_s)
        down = start(["down", "--timeout", DRAIN_S], node)
        _, errors = changing.communicate(timeout=60)
        assert changing.returncode in (0, 4), errors
        if changing.returncode:
            assert "stop" in errors
        output, errors = down.communicate(timeout=60)
    assert (down.returncode, output) == (0, '{"stopped": true, "left": []}\n'), errors
    check(readers, quiet)
    assert node.names() == []
