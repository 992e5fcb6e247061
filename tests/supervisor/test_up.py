"""`phalanx up --detach` never reports success for a node that ended before it was ready."""

import fcntl
import os
import resource
import sys
import threading
from pathlib import Path

import pytest

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.protocol.rundir import prepare
from phalanx.supervisor import headway
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
