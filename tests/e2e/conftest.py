"""Real nodes for the tests: started and stopped through the command line, like a user does."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PHALANX = [sys.executable, "-P", "-m", "phalanx.supervisor.cli"]


class Node:
    """A running node and its command line."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def __call__(self, *arguments: object, code: int = 0, timeout: float = 120) -> list[Any]:
        """Run a command with --json and return its documents; it must end with `code`."""
        command = [*PHALANX, *map(str, arguments), "--json", "--run-dir", str(self.run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    def start(self, ranks: int, *more: object) -> dict[str, Any]:
        (document,) = self("up", "--ranks", ranks, "--detach", *more)
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

    def pids(self, prefix: str = "") -> dict[str, int]:
        """Process name -> pid of those whose name starts with `prefix`."""
        processes = self.status()["processes"]
        return {p["name"]: p["pid"] for p in processes if p["name"].startswith(prefix)}

    def generate(self, requests: list[dict[str, Any]], *more: object) -> list[dict[str, Any]]:
        """Run requests through `phalanx generate --prompts`; one document a sequence."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(request) + "\n" for request in requests)
            file.flush()
            return self("generate", "--prompts", file.name, "--no-stream", *more, timeout=240)

    def names(self) -> list[str]:
        return [p.name for p in Path("/dev/shm").glob(f"ph-{self.run_dir.name}-*")]


@pytest.fixture(scope="session")
def start_node() -> Iterator[Callable[..., Node]]:
    """Start a node of its own for a test; whatever is left of it at the end is stopped."""
    started: list[Node] = []

    def start(ranks: int, *more: object) -> Node:
        node = Node(Path(tempfile.mkdtemp(prefix="phe2e")))
        started.append(node)
        node.start(ranks, *more)
        return node

    yield start
    for node in started:
        down = [*PHALANX, "down", "--run-dir", str(node.run_dir), "--timeout", "1"]
        subprocess.run(down, capture_output=True, check=False, timeout=60)
        shutil.rmtree(node.run_dir, ignore_errors=True)
        assert node.names() == []


@pytest.fixture(scope="session")
def node(start_node: Callable[..., Node]) -> Node:
    """A node of two ranks that the tests of a session share; they leave it idle and healthy."""
    return start_node(2)


@pytest.fixture
def run_dir(node: Node) -> Path:
    return node.run_dir
