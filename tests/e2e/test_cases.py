"""What users of such systems report, done to real nodes: fifty that start at once, a disk that stalls, shared memory
that a killed node left behind and that has no room for two, steps that grow long with the age of the process."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from e2e.node import PHALANX, Node
from phalanx.protocol.config import node_name
from phalanx.protocol.messages import Sampling
from phalanx.protocol.queues import STEP_TIMES, step_times
from phalanx.services.client import Client, Spec

pytestmark = [pytest.mark.process, pytest.mark.soak]

NODES = 50
WITH_HTTP = 10  # of so many, one: each takes memory
START_S = 500
STALL_MS = 30_000

_OWN_SHM = 'mount -t tmpfs -o size=200m tmpfs /dev/shm && exec "$@"'
_ALONE = ["unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",))]
_POOL_BYTES = 120 << 20
_KILL_AND_START = """
import os, signal, sys
from pathlib import Path
from phalanx.protocol.rundir import is_running
from phalanx.testing.node import Node, wait_for

node, pool = Node(Path(sys.argv[1])), int(sys.argv[3])
node.start(1, "--config", sys.argv[2])
pids = node.pids()
for pid in pids.values():
    os.kill(pid, signal.SIGKILL)
wait_for(lambda: not is_running(node.run_dir), 20, "everything is gone")
assert any("-kv0-" in name for name in node.names()), node.names()
room = os.statvfs("/dev/shm")
assert room.f_bavail * room.f_frsize < pool, "there is room for two"
node.start(1, "--config", sys.argv[2])
assert node.generate([{"prompt": "The sea", "max_tokens": 4}])[0]["finish_reason"] == "length"
assert node.stop() == {"stopped": True, "left": []}
assert node.names() == []
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: sockets lie in it; and not in /dev/shm, where `TMPDIR` may be, and which is mounted over."""
    made = Path(tempfile.mkdtemp(prefix="ph", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def test_a_start_sweeps_a_leaked_pool_where_two_have_no_room(folder: Path) -> None:
    if subprocess.run([*_ALONE, "sh", "-c", _OWN_SHM, "sh", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    config = folder / "config.json"
    config.write_text(json.dumps({"worker": {"kv_bytes": _POOL_BYTES}}))
    script = [sys.executable, "-P", "-c", _KILL_AND_START, folder / "run", config, str(_POOL_BYTES)]
    command = [*_ALONE, "sh", "-c", _OWN_SHM, "sh", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.timed
@pytest.mark.timeout(1200)
def test_fifty_nodes_start_at_once(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({"tokenizers": 1, "kvstore": {"enabled": False}}))
    nodes = [Node(folder / str(number) / "phalanx") for number in range(NODES)]
    options = ["--ranks", "1", "--device", "null", "--detach", "--config", config]

    serving = nodes[::WITH_HTTP]

    def up(node: Node) -> "subprocess.Popen[bytes]":
        limit = ["--timeout", str(START_S), "--run-dir", node.run_dir]
        http = ["--http", "0"] if node in serving else []
        command = [*PHALANX, "up", *options, *limit, *http]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    started = time.monotonic()
    starts = [up(node) for node in nodes]
    try:
        assert [start.wait(START_S + 60) for start in starts] == [0] * NODES
        print(f"{NODES} nodes in {time.monotonic() - started:.0f} s")
        for number, node in enumerate(nodes):
            spec = Spec([5, number], Sampling(seed=number, max_tokens=3, ignore_eos=True))
            ((finish, tokens, _),) = node.run([spec]).values()
            assert (finish, len(tokens)) == ("length", 3)
        told = [json.loads((node.run_dir / "http.json").read_text()) for node in serving]
        assert len({at["port"] for at in told}) == len(told)
        for at in told:
            assert httpx.get(f"http://{at['host']}:{at['port']}/health", timeout=60).is_success
    finally:
        ends = [
            subprocess.Popen(
                [*PHALANX, "down", "--timeout", "1", "--run-dir", node.run_dir],
                stdout=subprocess.DEVNULL,
            )
            for node in nodes
        ]
        assert [end.wait(300) for end in ends] == [0] * NODES
    assert [name for node in nodes for name in node.names()] == []


@pytest.mark.timed
def test_no_step_grows_long_with_the_age_of_the_process(start_node: Callable[..., Node]) -> None:
    """The control plane's part of a step: at most one in a thousand takes longer than this, and no more so
    late in a process's life than early."""
    most_us, rounds = 50_000, 8
    node = start_node(1, "--device", "null")
    name = node_name(node.run_dir)
    found: list[npt.NDArray[np.uint32]] = []
    specs = [
        Spec([5, at], Sampling(seed=at, max_tokens=4_000, ignore_eos=True)) for at in range(16)
    ]
    with Client(node.run_dir) as client:
        for _ in range(rounds):
            before, _ = step_times(name, 0)
            for stream in [client.generate(spec, timeout=300) for spec in specs]:
                stream.results()
            steps, newest = step_times(name, 0)
            found.append(newest[-min(steps - before, STEP_TIMES) :])
    p999 = [float(np.percentile(times, 99.9)) for times in found]
    told = f"{sum(map(len, found))} steps, p99.9 by age: {[round(us) for us in p999]} us"
    print(told)
    assert all(len(times) >= 1_000 for times in found)
    assert float(np.percentile(np.concatenate(found), 99.9)) < most_us, told
    early, late = np.median(p999[: rounds // 2]), np.median(p999[rounds // 2 :])
    assert late < 3 * early + 5_000, told


def test_a_disk_that_stalls_for_half_a_minute_holds_up_what_is_new_and_nothing_else(
    start_node: Callable[..., Node],
) -> None:
    node = start_node(1, "--inject", "--device", "null")
    spec = Spec([5], Sampling(seed=1, max_tokens=2_000, ignore_eos=True))
    fault_free = node.run([spec])
    restarts = [(p.name, p.restarts) for p in node.look().processes]
    with Client(node.run_dir) as client, Client(node.run_dir) as late:
        running = client.generate(spec, timeout=120)
        running.accepted()
        node.failpoint("gateway.journal.before_commit", "sleep", process="gateway", ms=STALL_MS)
        began = time.monotonic()
        new = late.generate(spec, timeout=120)
        while not node.came_up("gateway").get("gateway.journal.before_commit"):
            assert time.monotonic() < began + 10
            time.sleep(0.02)
        (told,) = running.results()
        assert (told.finish_reason, told.token_ids) == fault_free[0, 0][:2]
        assert client.health().healthy and node.healthy()
        assert time.monotonic() < began + STALL_MS / 2_000, "it waited for the disk"
        new.accepted()
        assert time.monotonic() > began + STALL_MS / 1_000
        assert new.results()[0].token_ids == told.token_ids
    node.clear()
    assert [(p.name, p.restarts) for p in node.look().processes] == restarts
