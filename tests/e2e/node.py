"""A real node under test, driven through the command line like a user does; and what tests ask of it."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.protocol.queues import read_queues

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

    def running(self) -> int:
        """Sequences that run now, read from shared memory: fast enough to catch short ones."""
        return sum(rank["running"] for rank in read_queues(self.run_dir.name)["ranks"])

    def names(self) -> list[str]:
        return [p.name for p in Path("/dev/shm").glob(f"ph-{self.run_dir.name}-*")]


Streams = dict[tuple[int, int], tuple[str, list[int], str]]


def tokens(rows: list[dict[str, Any]]) -> Streams:
    """(position, index) -> (finish reason, token ids, text)."""
    return {
        (r["position"], r["index"]): (r["finish_reason"], r["token_ids"], r["text"]) for r in rows
    }


def assert_whole(node: Node) -> None:
    """Nothing runs, and every block and slot is back."""
    (found,) = node("queues")
    assert found["requests"] == []
    for rank in found["ranks"]:
        assert (rank["waiting"], rank["running"]) == (0, 0)
        assert rank["free_blocks"] == rank["total_blocks"] > 0
        assert rank["free_slots"] == rank["total_slots"] > 0


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def others(count: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths and sampling; ids that any tokenizer has."""
    rng = random.Random(5)
    return [
        {
            "prompt_token_ids": [
                rng.randrange(10, 200) for _ in range(rng.choice([1, 9, 130, 300]))
            ],
            "max_tokens": rng.choice([8, 40, 80]),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([0.9, 1.0]),
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]
