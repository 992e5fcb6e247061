"""What `phalanx generate` tells scripts when the node is there but its gateway does not serve."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import CLIENT_SOCKET, endpoint, prepare
from phalanx.supervisor.lock import NodeLock


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Of a node that lives: its lock is held."""
    path = prepare(tmp_path / "node")
    lock = NodeLock(path)
    yield path
    lock.release()


def generate(run_dir: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "phalanx.supervisor.cli", "generate", "Hello", *more]
    command += ["--run-dir", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_missing_socket_is_not_a_missing_node(run_dir: Path) -> None:
    done = generate(run_dir)
    assert done.returncode == ExitCode.UNHEALTHY
    assert f"the node in {run_dir} has no {CLIENT_SOCKET}" in done.stderr
    assert "no node is running" not in done.stderr


@pytest.mark.parametrize("more", [["--json"], ["--no-stream"], []])
def test_a_limit_of_time_has_its_own_exit_code(run_dir: Path, more: list[str]) -> None:
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    silent.bind(endpoint(run_dir, CLIENT_SOCKET))
    try:
        done = generate(run_dir, "--timeout", "0.2", *more)
    finally:
        silent.close(0)
    assert done.returncode == ExitCode.TIME_LIMIT, done.stderr
    if more == ["--json"]:
        (line,) = done.stdout.splitlines()
        assert "0.2 s" in json.loads(line)["error"]


@pytest.mark.parametrize("value", ["nan", "inf", "1e308", "-1"])
def test_a_time_that_is_none_is_refused(run_dir: Path, value: str) -> None:
    done = generate(run_dir, "--timeout", value)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "allowed are 0 to 10000000" in done.stderr
    assert "Traceback" not in done.stderr
