"""How long a node takes from nothing to ready, and where the time goes."""

import subprocess
import sys
import tempfile
from typing import Any

import msgspec

_CLI = [sys.executable, "-P", "-m", "phalanx.supervisor.cli"]


def run(model: str, ranks: int) -> dict[str, Any]:
    """Start and stop a private node. Returns `ready_s` and the phases of each process."""
    with tempfile.TemporaryDirectory(prefix="phstart") as run_dir:
        where = ["--run-dir", run_dir, "--json"]
        up = [*_CLI, "up", "--model", model, "--ranks", str(ranks), "--detach", *where]
        started = subprocess.run(up, capture_output=True, text=True, check=False)
        if started.returncode:
            raise RuntimeError(f"the node did not start: {started.stderr.strip()}")
        figures = msgspec.json.decode(started.stdout)
        subprocess.run([*_CLI, "down", *where], capture_output=True, check=True)
        return {
            "ready_s": figures["ready_s"],
            "model": model,
            "ranks": ranks,
            "rows": figures["phases"],
        }
