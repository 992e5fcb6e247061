"""A node in the foreground: whatever becomes of its terminal, it goes on, and ends as it should."""

import contextlib
import fcntl
import json
import os
import pty
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor.node import TestNode, until

from phalanx.protocol import arena
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import LOG_DIR

pytestmark = pytest.mark.process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TestNode]:
    made = TestNode(tmp_path / f"fg{os.getpid()}", 1, {"NODE_NARRATES": "1"})
    yield made
    made.stop()


def ended(node: TestNode) -> list[str]:
    """The last lines of its log, once it has ended in good order."""
    assert node.wait_end() == ExitCode.OK
    assert arena.names(node_name(node.run_dir)) == []
    lines = (node.run_dir / LOG_DIR / "supervisor.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def test_a_terminal_that_is_closed_stops_the_node_as_a_signal_does(node: TestNode) -> None:
    terminal, slave = pty.openpty()
    node.start(slave)
    os.close(slave)
    said = b""
    while b"node ready" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)  # from now on writing fails
    os.kill(node.supervisor_pid, signal.SIGHUP)
    assert ended(node)[-1] == "stopped"


@pytest.mark.parametrize("what", ["closed", "full"])
def test_a_pipe_that_takes_nothing_keeps_nobody(node: TestNode, what: str) -> None:
    reader, writer = os.pipe()
    if what == "closed":
        os.close(reader)
    else:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, b" " * 4096):
                pass
        os.set_blocking(writer, True)
    node.start(writer)
    os.close(writer)
    node.wait_healthy()
    victim = node.process("worker-0")
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: node.process("worker-0").incarnation > victim.incarnation)
    node.wait_healthy()
    assert node.shut_down().left == ()
    assert ended(node)[-1] == "stopped"
    if what == "full":
        os.close(reader)
