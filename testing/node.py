"""A real node under test: driven through the command line as a user does, hurt through its supervisor."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.protocol.config import load_config, node_name
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.failpoints import kind_of
from phalanx.protocol.fault_table import SUPERVISOR_ROW, FaultTable
from phalanx.protocol.messages import (
    Final,
    Inject,
    Injected,
    ProcessStatus,
    StatusQuery,
    StatusReply,
)
from phalanx.protocol.queues import read_queues
from phalanx.services.client import Client, Spec
from phalanx.supervisor.ask import ask
from phalanx.supervisor.inject import RANDOM
from phalanx.supervisor.processes import process_table

PHALANX = [sys.executable, "-P", "-m", "phalanx.supervisor.cli"]
_ANSWER_S = 10.0
_START_S = 400.0

# (position, index) -> (finish reason, token ids, text)
Streams = dict[tuple[int, int], tuple[str, tuple[int, ...], str]]


class Node:
    """A running node. `node(...)` runs a command; the other methods ask the supervisor, or look into
    shared memory, and so take milliseconds."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    # ------------------------------------------------------------ the command line

    def __call__(self, *arguments: object, code: int = 0, timeout: float = 120) -> list[Any]:
        """Run a command with --json and return its documents; it must end with `code`."""
        command = [*PHALANX, *map(str, arguments), "--json", "--run-dir", str(self.run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    def start(self, ranks: int, *more: object) -> dict[str, Any]:
        # A GPU's kernels are compiled at the first start.
        limit = ("--timeout", _START_S)
        (document,) = self("up", "--ranks", ranks, "--detach", *limit, *more, timeout=_START_S + 30)
        assert isinstance(document, dict)
        return document

    def stop(self) -> dict[str, Any]:
        (document,) = self("down")
        assert isinstance(document, dict)
        return document

    def status(self) -> dict[str, Any]:
        (document,) = self("status")
        assert isinstance(document, dict)
        return document

    def generate(self, requests: list[dict[str, Any]], *more: object) -> list[dict[str, Any]]:
        """Run requests through `phalanx generate --prompts`; one document a sequence."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(request) + "\n" for request in requests)
            file.flush()
            return self("generate", "--prompts", file.name, "--no-stream", *more, timeout=240)

    # ------------------------------------------------------------ what it does

    def look(self) -> StatusReply:
        """The supervisor's view. Raises PhalanxError when there is none."""
        return ask(self.run_dir, StatusQuery(1), StatusReply, _ANSWER_S)

    def pids(self, prefix: str = "") -> dict[str, int]:
        """Process name -> pid of those whose name starts with `prefix`."""
        found = self.look().processes
        return {p.name: p.pid for p in found if p.pid and p.name.startswith(prefix)}

    def process(self, name: str) -> ProcessStatus | None:
        return next((p for p in self.look().processes if p.name == name), None)

    def healthy(self) -> bool:
        try:
            return self.look().healthy
        except PhalanxError:
            return False

    def wait_healthy(self, timeout_s: float = 60.0) -> None:
        wait_for(self.healthy, timeout_s, "healthy again")

    def running(self) -> int:
        """Sequences that run now, read from shared memory: fast enough to catch short ones."""
        return sum(rank["running"] for rank in read_queues(node_name(self.run_dir))["ranks"])

    def whole(self) -> bool:
        """Nothing runs or waits, and every block and slot is back."""
        found = read_queues(node_name(self.run_dir))
        return not found["requests"] and all(
            rank["free_blocks"] == rank["total_blocks"] > 0
            and rank["free_slots"] == rank["total_slots"] > 0
            for rank in found["ranks"]
        )

    def names(self) -> list[str]:
        """What it has in shared memory."""
        return [p.name for p in Path("/dev/shm").glob(f"ph-{node_name(self.run_dir)}-*")]

    def run(
        self,
        specs: Iterable[Spec],
        meanwhile: Callable[[], None] = lambda: None,
        timeout: float = 120,
    ) -> Streams:
        """Run the requests and return every stream; `meanwhile` is called once all are accepted.

        Raises AssertionError when a sequence ends twice, and whatever the client raises.
        """
        found: Streams = {}
        with Client(self.run_dir) as client:
            streams = [client.generate(spec, timeout=timeout) for spec in specs]
            for stream in streams:
                stream.accepted()
            meanwhile()
            for position, stream in enumerate(streams):
                finals = [event.index for event in stream if isinstance(event, Final)]
                assert len(finals) == len(set(finals)), f"request {position} ended twice: {finals}"
                for r in stream.results():
                    found[position, r.index] = (r.finish_reason, r.token_ids, r.text)
        return found

    # ------------------------------------------------------------ what goes wrong

    def inject(self, kind: str, target: str, **options: Any) -> tuple[str, ...]:
        """`phalanx inject KIND TARGET`; the options are those of `messages.Inject`. Returns what was hit."""
        request = Inject(1, kind, target, **options)
        return ask(self.run_dir, request, Injected, _ANSWER_S).injected

    def failpoint(
        self,
        name: str,
        action: str = "kill",
        *,
        process: str = "",
        nth: int = 1,
        count: int = 1,
        ms: int = 0,
    ) -> str:
        """Arm a failpoint in one process, at random if none is named. Returns which."""
        target = process or f"{RANDOM}{kind_of(name)}"
        (armed,) = self.inject(
            "failpoint", target, only=name, action=action, nth=nth, count=count, ms=ms
        )
        return armed

    def clear(self, target: str = "all") -> None:
        """No faults any more; what was stopped goes on."""
        self.inject("clear", target)

    def came_up(self, process: str) -> dict[str, int]:
        """How often each fault of the process came up: failpoint, type of message, disk or kind -> count."""
        table = process_table(load_config(self.run_dir))
        rows = {spec.name: spec.index for spec in table} | {"supervisor": SUPERVISOR_ROW}
        faults = FaultTable.attach(node_name(self.run_dir))
        row = faults.row(rows[process])
        read = row.read()
        found = {f.name or f.kind: row.count(f.slot) for f in (read[1] if read else ())}
        del row
        faults.close()
        return found


def assert_whole(node: Node) -> None:
    """Nothing runs, and every block and slot is back."""
    wait_for(node.whole, 20, "nothing runs, every block and slot is back")
    for rank in read_queues(node_name(node.run_dir))["ranks"]:
        assert (rank["waiting"], rank["running"]) == (0, 0)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
