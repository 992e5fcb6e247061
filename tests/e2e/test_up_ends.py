"""`phalanx up` in the foreground, as a container or a unit of systemd has it: what it says when it is ready, and that
its exit code tells why it ended."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.node import PHALANX, Node, family, wait_for
from phalanx.protocol import arena
from phalanx.protocol.errors import ExitCode, PhalanxError
from phalanx.protocol.messages import Final, Sampling
from phalanx.services.client import Client, Spec

pytestmark = pytest.mark.process

PROCESSES = {"worker-0", "scheduler-0", "gateway", "tokenizer-0", "tokenizer-1", "kvstore", "eplb"}


class Foreground:
    """A node whose supervisor is a child of ours."""

    def __init__(self, run_dir: Path, *more: object) -> None:
        self.node = Node(run_dir)
        options = ["--ranks", 1, "--device", "null", "--run-dir", run_dir, "--json", *more]
        command = [*PHALANX, "up", *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def ready(self) -> Any:
        """Its document, once it is."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def up() -> Iterator[Foreground]:
    with tempfile.TemporaryDirectory(prefix="ph", dir="/tmp") as folder:
        config = Path(folder, "given.json")
        config.write_text('{"drain_s": 2}')
        made = Foreground(Path(folder), "--config", config)
        yield made
        made.close()


def test_it_tells_each_phase_of_each_process_and_ends_well(up: Foreground) -> None:
    said = up.ready()
    phases = said["phases"]
    assert {phase["process"] for phase in phases} == PROCESSES
    assert all(0 <= phase["s"] <= said["ready_s"] for phase in phases)
    assert phases == up.node.status()["phases"]
    found = family(up.process.pid)
    os.kill(up.process.pid, signal.SIGTERM)
    assert up.process.wait(30) == ExitCode.OK
    assert not any(Path(f"/proc/{pid}").exists() for pid in found) and up.node.names() == []


@pytest.mark.soak  # the delays between the restarts add up to 11 s
def test_a_process_that_crashes_again_and_again_has_a_code_of_its_own(up: Foreground) -> None:
    """As soon as it is ready, each time: by a signal that no Python hears of. What ran is the next node's."""
    up.ready()
    with Client(up.node.run_dir) as client:
        wanted = Spec([70] * 4, Sampling(max_tokens=8_000, seed=3, ignore_eos=True))
        fault_free = [one.token_ids for one in client.generate(wanted).results()]
        stream = client.generate(wanted, timeout=200)
        next(iter(stream))
        _crash_worker(up)
        assert {arena.kind_of(name) for name in up.node.names()} <= {arena.TOKENS}
        again = Foreground(up.node.run_dir)
        try:
            again.ready()
            assert [one.token_ids for one in stream.results()] == fault_free
        finally:
            again.close()


def _crash_worker(up: Foreground) -> None:
    killed = set[int]()
    while up.process.poll() is None:
        with contextlib.suppress(PhalanxError, ProcessLookupError):
            row = up.node.process("worker-0")
            if row is not None and row.state == "ready" and row.pid not in killed:
                os.kill(row.pid, signal.SIGSEGV)
                killed.add(row.pid)
        time.sleep(0.02)
    assert up.process.wait() == ExitCode.GAVE_UP and len(killed) == 9
    reason = json.loads((up.node.run_dir / "failed.json").read_text())["reason"]
    assert "worker-0 died 9 times" in reason and "SIGSEGV" in reason


@pytest.mark.soak
def test_a_signal_to_all_of_it_at_once_ends_each_stream_once(up: Foreground) -> None:
    """As systemd sends it unless told `KillMode=mixed`."""
    up.ready()
    with Client(up.node.run_dir) as client:
        streams = [
            client.generate([70] * 4, max_tokens=8000, seed=seed, ignore_eos=True)
            for seed in range(3)
        ]
        for stream in streams:
            next(iter(stream))
        found = [up.process.pid, *family(up.process.pid)]
        for pid in found:
            os.kill(pid, signal.SIGTERM)
        for stream in streams:
            *deltas, final = stream
            assert not any(isinstance(delta, Final) for delta in deltas)
            assert isinstance(final, Final)
            (result,) = stream.results()
            assert final.offset == len(result.token_ids) > 0
            assert final.finish_reason == "length" or "shutdown" in final.error
    assert up.process.wait(30) == ExitCode.OK
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found), 20, "all gone")
    assert up.node.names() == []
