"""A benchmark that is killed takes its node along: no process, run directory or shared memory stays."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.protocol.arena import names
from phalanx.protocol.config import node_name
from phalanx.protocol.rundir import is_running

PHALANX = [sys.executable, "-P", "-m", "phalanx.supervisor.cli"]
_WAIT_S = 60.0


@pytest.mark.parametrize("part", [("start", "--ranks", "1"), ("http", "--streams", "4")])
def test_a_killed_benchmark_leaves_nothing(part: tuple[str, ...], tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([*PHALANX, "bench", *part], env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not (alive := [path for path in tmp_path.glob("*") if is_running(path)]):
            assert bench.poll() is None and time.monotonic() < deadline, "no node was started"
            time.sleep(0.05)
    finally:
        bench.kill()
        bench.wait()
    deadline = time.monotonic() + _WAIT_S
    while left := [
        *tmp_path.glob("*"),
        *(name for path in alive for name in names(node_name(path))),
    ]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
