"""What `phalanx generate` tells scripts when the node is there but its gateway does not serve."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from phalanx.protocol.errors import ExitCode, PhalanxError
from phalanx.protocol.rundir import CLIENT_SOCKET, endpoint, prepare
from phalanx.supervisor.ask import NoNode
from phalanx.supervisor.commands.generate import open_client
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
    with pytest.raises(PhalanxError, match=f"has had no {CLIENT_SOCKET} for 0.1 s") as raised:
        open_client(run_dir, 0.1)
    assert not isinstance(raised.value, NoNode)


def test_a_gateway_that_is_just_replaced_is_waited_for(run_dir: Path) -> None:
    """The old one has taken its socket along, the new one has not bound its own."""
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    late = threading.Timer(4.0, silent.bind, (endpoint(run_dir, CLIENT_SOCKET),))
    late.start()
    try:
        done = generate(run_dir, "--timeout", "0.2", "--no-stream", "--json")
    finally:
        late.join()
        silent.close(0)
    assert done.returncode == ExitCode.TIME_LIMIT, done.stderr  # it was asked
    assert "0.2 s" in json.loads(done.stdout)["error"]


def test_a_node_that_ends_meanwhile_is_told(tmp_path: Path) -> None:
    path = prepare(tmp_path / "node")
    lock = NodeLock(path)
    threading.Timer(0.3, lock.release).start()
    with pytest.raises(NoNode):
        open_client(path, 20)


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
