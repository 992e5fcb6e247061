"""A node of trivial children in a process of its own, for tests that kill real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.protocol import arena
from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import node_name
from phalanx.protocol.link import connect_dealer
from phalanx.protocol.messages import (
    FromSupervisor,
    Message,
    ProcessStatus,
    Shutdown,
    ShutdownDone,
    StatusQuery,
    StatusReply,
)
from phalanx.protocol.rundir import SUPERVISOR_SOCKET, endpoint

CHILDREN = Path(__file__).parent / "children"


def until(condition: Callable[[], object], timeout_s: float = 20.0, every_s: float = 0.005) -> None:
    """Poll with a deadline, and leave the processor to whom it waits for: some conditions read all of /proc."""
    began = time.monotonic()
    deadline = began + timeout_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"not within {timeout_s} s"
        time.sleep(max(every_s, min(3 * (now - began), 0.1)))
        began = time.monotonic()


@dataclass
class TestNode:
    """Start with `start`; `stop` in the test's teardown ends whatever is left."""

    __test__ = False
    run_dir: Path
    ranks: int = 3
    environment: dict[str, str] = field(default_factory=dict[str, str])
    supervisor: "subprocess.Popen[bytes] | None" = None

    def behave(self, name: str, fault: str) -> None:
        (self.run_dir / "behave").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "behave" / name).write_text(fault)

    def start(self, stderr: int | None = None) -> None:
        self.run_dir.mkdir(exist_ok=True)
        self.close()
        command = [sys.executable, "-P", "-m", "node_main", str(self.run_dir), str(self.ranks)]
        paths = [str(CHILDREN), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths), **self.environment}
        output = (self.run_dir / "supervisor.out").open("ab")
        with output:
            self.supervisor = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output if stderr is None else stderr,
                process_group=0,
            )
        self.socket = connect_dealer(endpoint(self.run_dir, SUPERVISOR_SOCKET))

    def close(self) -> None:
        if self.supervisor is not None:
            self.socket.close()

    def said(self) -> str:
        return (self.run_dir / "supervisor.out").read_text()

    def ask(self, message: Message, timeout_s: float = 30.0) -> FromSupervisor | None:
        self.socket.send(encode(message))
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return Decoder[FromSupervisor](FromSupervisor).decode(self.socket.recv())

    def status(self) -> StatusReply:
        reply = self.ask(StatusQuery(1))
        assert isinstance(reply, StatusReply), self.said()
        return reply

    def process(self, name: str) -> ProcessStatus:
        """A live process of the node; waits for it if it is just being restarted."""

        def living() -> list[ProcessStatus]:
            return [p for p in self.status().processes if p.name == name]

        found: list[ProcessStatus] = []
        while not found:
            until(living)
            found = living()
        return found[0]

    def wait_healthy(self, timeout_s: float = 60.0) -> StatusReply:
        until(lambda: self.status().healthy, timeout_s, 0.01)
        return self.status()

    def shut_down(self, timeout_s: float = 1.0) -> ShutdownDone:
        reply = self.ask(Shutdown(2, timeout_s), timeout_s + 15)
        assert isinstance(reply, ShutdownDone), self.said()
        return reply

    def supervisor_killed(self) -> None:
        """Kill it, and wait until what it ran is gone."""
        assert self.supervisor is not None
        self.supervisor.kill()
        self.wait_end()
        until(lambda: not self.children())

    def wait_end(self, timeout_s: float = 20) -> int:
        assert self.supervisor is not None
        return self.supervisor.wait(timeout_s)

    def board(self) -> Board:
        return Board.attach(node_name(self.run_dir))

    def children(self) -> list[int]:
        """Pids of every process of this node but the supervisor, zombies included."""
        return [pid for pid in pids_of(self.run_dir) if pid != self.supervisor_pid]

    @property
    def supervisor_pid(self) -> int:
        assert self.supervisor is not None
        return self.supervisor.pid

    def stop(self) -> None:
        if self.supervisor is not None:
            self.supervisor.kill()
            self.supervisor.wait()
        self.close()
        until(lambda: not self.children())
        arena.sweep(node_name(self.run_dir))


def pids_of(run_dir: Path) -> list[int]:
    """Processes that were started with this run directory."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run_dir).encode() in words:
            found.append(int(path.name))
    return found
