"""/dev/shm is full. A start says what it lacks; when a rank falls, the others serve on, and it comes back once there is
room.

The node has a /dev/shm of its own, which something greedy fills to the last page and keeps filled.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from e2e.node import PHALANX, Node, wait_for
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.messages import Sampling
from phalanx.protocol.rundir import is_running
from phalanx.services.client import Spec
from phalanx.supervisor.lock import FAILED_FILE

pytestmark = [pytest.mark.process, pytest.mark.soak]  # minutes on a busy machine

_ALONE = ["unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",))]
_SPECS = [Spec("Once upon a time", Sampling(seed=seed, max_tokens=40)) for seed in range(6)]


class Greedy:
    """Takes whatever is free there, for good."""

    def __init__(self, shm: Path) -> None:
        self._path, self._over = shm / "greedy", threading.Event()
        self._thread = threading.Thread(target=self._fill)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._path.unlink()

    def _fill(self) -> None:
        at = 0
        with self._path.open("wb", buffering=0) as file:
            while not self._over.wait(0.002):
                for size in (64 << 10, 4 << 10):
                    with contextlib.suppress(OSError):
                        while True:
                            os.posix_fallocate(file.fileno(), at, size)
                            at += size


def alone(size: str) -> list[str]:
    """What a command is given to so that it has a /dev/shm of its own, which has this size."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return [*_ALONE, "sh", "-c", mount, "sh"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not in /dev/shm, where `TMPDIR` may be: it is mounted over."""
    if subprocess.run([*alone("1m"), "true"], check=False).returncode != 0:
        pytest.skip("no mount namespaces here")
    made = Path(tempfile.mkdtemp(prefix="phe2e", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    node = Node(folder)
    config = node.run_dir / "few-blocks.json"
    config.write_text(json.dumps({"worker": {"num_blocks": 200}}))
    up = [*PHALANX, "up", "--ranks", "3", "--detach", "--config", config, "--run-dir", node.run_dir]
    subprocess.run([*alone("200m"), *up], check=True, stdout=subprocess.DEVNULL)
    yield node
    subprocess.run([*PHALANX, "down", "--run-dir", node.run_dir, "--timeout", "1"], check=False)
    print((node.run_dir / "logs" / "supervisor.log").read_text()[-8000:])


@pytest.mark.parametrize(
    ("device", "size", "fits"),
    [
        ("null", "64k", False),
        ("null", "8m", False),
        ("null", "20m", None),
        ("null", "22m", None),
        ("null", "25m", None),
        ("cpu", "30m", False),
        ("cpu", "60m", None),
    ],
)
def test_a_start_finds_room_or_says_what_it_lacks(
    folder: Path, device: str, size: str, fits: bool | None
) -> None:
    """Wherever it finds none; `fits`: None where that depends on the machine. Nobody dies of a page that is not there."""
    node = Node(folder)
    up = [*PHALANX, "up", "--ranks", "2", "--device", device, "--detach", "--run-dir", folder]
    done = subprocess.run([*alone(size), *up], capture_output=True, text=True, check=False)
    print(done.stderr)
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert "SIGBUS" not in logs
    if done.returncode == 0:
        assert fits is None and node.healthy()
        try:
            assert [reason for reason, _, _ in node.run(_SPECS).values()] == ["length"] * 6
        finally:
            assert node.stop() == {"stopped": True, "left": []}
        return
    assert done.returncode == ExitCode.UNHEALTHY and not fits
    reason = json.loads((folder / FAILED_FILE).read_text())["reason"]
    assert "/dev/shm has" in reason and "needs" in reason and "free some space" in reason
    assert reason in done.stderr and not list(folder.glob("*.sock")) and not is_running(folder)


def reasons(node: Node) -> str:
    return next(p.detail for p in node.look().processes if p.name == "supervisor")


def test_ranks_that_fall_wait_for_room_and_the_others_serve(node: Node) -> None:
    pids = node.pids()
    before = node.run(_SPECS)

    def fall() -> None:
        os.kill(pids["worker-1"], signal.SIGKILL)

    with Greedy(Path(f"/proc/{pids['supervisor']}/root/dev/shm")):
        assert node.run(_SPECS, fall) == before
        wait_for(lambda: "worker-1 is down: no room" in reasons(node), 120, "said so")
        told = reasons(node)
        assert "no room: /dev/shm has 0 MiB free, arena" in told
        assert "needs 4 MiB" in told and "free some space" in told and "the next time in" in told
        now = node.pids()
        survivors = ("worker-0", "worker-2", "scheduler-0", "scheduler-2", "gateway")
        assert {n: now[n] for n in survivors} == {n: pids[n] for n in survivors}
        # A rank that runs loses its scheduler: its streams go on with the last one.
        assert node.run(_SPECS, lambda: os.kill(pids["scheduler-0"], signal.SIGKILL)) == before
        wait_for(lambda: "scheduler-0 is down: no room" in reasons(node), 120, "said so")
    node.wait_healthy(180)
    assert {r.slot: r.incarnation for r in node.look().ranks if r.slot != 1} == {0: 1, 2: 1}
    (history,) = node("epochs")
    groups = [record for record in history if record["kind"] == "group"]
    assert [record["survivors"] for record in groups] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "starts in vain: no room: /dev/shm has" in groups[-1]["cause"]
    (fell,) = [record for record in history if record["process"] == "scheduler-0"]
    assert fell["deaths"] > 1 and "NO_ROOM: no room: /dev/shm has" in fell["ended"]
    assert fell["decided"].startswith("no room to start") and fell["outcome"] == "ready"
    assert node.run(_SPECS) == before
