"""`phalanx up --detach` never reports success for a node that ended before it was ready."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.protocol.rundir import LOCK_FILE, PID_FILE, is_running, prepare
from phalanx.supervisor import headway
from phalanx.supervisor.ask import NoAnswer
from phalanx.supervisor.commands import node
from phalanx.supervisor.lock import NodeBusy, NodeLock


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (ExitCode.OK, ExitCode.UNHEALTHY),
        (ExitCode.BAD_INPUT, ExitCode.BAD_INPUT),
        (99, ExitCode.INTERNAL),
    ],
)
def test_a_supervisor_that_ends_while_the_node_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, code: ExitCode
) -> None:
    run_dir = prepare(tmp_path / "node")
    ends = [sys.executable, "-c", f"raise SystemExit({int(ended)})"]
    monkeypatch.setattr(node, "_SUPERVISOR", ends)
    with pytest.raises(PhalanxError) as raised:
        node.start_detached(NodeConfig(run_dir=str(run_dir)))
    assert raised.value.exit_code == code  # type: ignore[attr-defined]
    assert ("it was stopped before it was ready" in str(raised.value)) == (ended == 0)


def test_what_a_start_waits_for_is_said_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "_SUPERVISOR", [sys.executable, "-c", "import time; time.sleep(3)"])
    monkeypatch.setattr(headway, "SAY_AFTER_S", 0.2)
    config = NodeConfig(run_dir=str(prepare(tmp_path / "node")))
    with pytest.raises(PhalanxError):
        node.start_detached(config, quiet=False)
    assert capsys.readouterr().err.count("waiting for the supervisor\n") == 1


def test_a_disk_without_a_byte_is_told(tmp_path: Path) -> None:
    config = NodeConfig(run_dir=str(prepare(tmp_path / "node")))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # files can be made, and not written
    try:
        with pytest.raises(ConfigError, match=rf"{tmp_path}/node/config\.\d+\.json: .*free some"):
            node.start_detached(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_who_waits_for_an_earlier_node_is_named_to_the_next(tmp_path: Path) -> None:
    """Not the supervisor that died, whose processes are waited for."""
    run_dir = prepare(tmp_path / "node")
    (run_dir / "supervisor.pid").write_text("1\n")
    children = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(children, fcntl.LOCK_EX)
    waits = threading.Event()
    first = threading.Thread(target=lambda: NodeLock(run_dir, lambda text: waits.set()).release())
    first.start()
    try:
        assert waits.wait(20)
        with pytest.raises(NodeBusy, match=rf"supervisor pid {os.getpid()}\)"):
            NodeLock(run_dir)
    finally:
        os.close(children)
        first.join()


STOPPED = """
import fcntl, os, signal, sys
lock = open(sys.argv[1] + "/node.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
with open(sys.argv[1] + "/supervisor.pid", "w") as pid:
    pid.write(str(os.getpid()))
os.kill(os.getpid(), signal.SIGSTOP)
"""


def stopped(run_dir: Path) -> list[str]:
    """A supervisor that holds its run directory when a signal stops it."""
    code = STOPPED.replace("node.lock", LOCK_FILE).replace("supervisor.pid", PID_FILE)
    return [sys.executable, "-P", "-c", code, str(run_dir)]


def test_a_supervisor_that_is_stopped_is_told_of_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = prepare(tmp_path / "node")
    monkeypatch.setattr(node, "_SUPERVISOR", stopped(run_dir))
    children: list[subprocess.Popen[bytes]] = []
    popen, begun = subprocess.Popen, time.monotonic()

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        children.append(popen(*arguments, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        with pytest.raises(NoAnswer) as raised:
            node.start_detached(NodeConfig(run_dir=str(run_dir)), timeout_s=1.0)
    finally:
        children[0].kill()
        children[0].wait()
    pid = children[0].pid
    assert f"`kill -CONT {pid}` lets it go on" in str(raised.value)
    assert time.monotonic() - begun < 15


def test_a_node_of_ones_own_is_gone_though_its_supervisor_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def start(config: NodeConfig, *_: object) -> tuple[None, "subprocess.Popen[bytes]"]:
        child = subprocess.Popen(stopped(config.run_path))
        while not is_running(config.run_path):
            time.sleep(0.01)
        made.append((config.run_path, child))
        return None, child

    monkeypatch.setattr(node, "resolve_model", Path)
    monkeypatch.setattr(node, "_start", start)
    monkeypatch.setattr(node, "_PRIVATE_DRAIN_S", 0.2)
    with (
        pytest.raises(PhalanxError, match=r"left something behind: supervisor \(died\)"),
        node.private_node("random-tiny", 1),
    ):
        pass
    ((run_dir, child),) = made
    assert child.returncode == -signal.SIGKILL and not run_dir.exists()
