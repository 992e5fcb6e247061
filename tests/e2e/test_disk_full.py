"""The disk of the run directory is full to the last byte: a rank falls, the gateway falls, nothing is lost."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.node import PHALANX, Node, wait_for
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Sampling
from phalanx.services.client import Client, Spec, Stream

pytestmark = [pytest.mark.process, pytest.mark.soak]  # minutes on a busy machine

_SPECS = [
    Spec("The sea " * 40, Sampling(seed=seed, max_tokens=60, ignore_eos=True)) for seed in range(4)
]


class Greedy:
    """Takes whatever is free in a directory, for good."""

    def __init__(self, directory: Path) -> None:
        self._path, self._over, self._full = directory / "greedy", False, threading.Event()
        self._thread = threading.Thread(target=self._fill)

    def start(self) -> None:
        self._thread.start()
        assert self._full.wait(60)

    def stop(self) -> None:
        self._over = True
        self._thread.join()
        self._path.unlink()

    def _fill(self) -> None:
        at = 0
        with self._path.open("wb", buffering=0) as file:
            while not self._over:
                for size in (64 << 10, 4 << 10):
                    with contextlib.suppress(OSError):
                        while True:
                            os.posix_fallocate(file.fileno(), at, size)
                            at += size
                self._full.set()
                time.sleep(0.005)


@pytest.fixture
def node() -> Iterator[Node]:
    run_dir = Path(tempfile.mkdtemp(prefix="phe2e"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200m", "tmpfs", str(run_dir)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        run_dir.rmdir()
        pytest.skip("a file system of its own needs root")
    node = Node(run_dir)
    try:
        node.start(2)
        yield node
    finally:
        down = [*PHALANX, "down", "--run-dir", str(run_dir), "--timeout", "1"]
        subprocess.run(down, check=False, capture_output=True)
        print((run_dir / "logs" / "supervisor.log").read_text()[-8000:])
        subprocess.run(["umount", "--lazy", str(run_dir)], check=True)
        shutil.rmtree(run_dir)


def reasons(node: Node) -> tuple[str, ...]:
    with Client(node.run_dir) as client:
        return client.health().reasons


def test_a_rank_and_the_gateway_fall_while_the_disk_is_full(node: Node) -> None:
    before = node.run(_SPECS)
    pids = node.pids()
    greedy = Greedy(node.run_dir)

    def fall() -> None:
        greedy.start()
        os.kill(pids["worker-1"], signal.SIGKILL)
        assert ask() is None
        os.kill(pids["gateway"], signal.SIGKILL)
        os.kill(pids["kvstore"], signal.SIGKILL)
        # A new gateway finds out by writing, and the journal's own files may have room for some requests.
        accepted: list[Stream] = []
        while (stream := ask()) is not None:
            accepted.append(stream)
            assert len(accepted) < 100, "the disk is full"
        if accepted:
            os.kill(node.pids()["gateway"], signal.SIGKILL)
        for stream in accepted:
            assert stream.results()[0].token_ids == before[0, 0][1]

    def ask() -> Stream | None:
        """The stream if it was accepted; None if it was refused, as it should be on a full disk."""
        try:
            stream = client.generate(_SPECS[0], timeout=120)
            stream.accepted()
        except Refused as refusal:
            assert re.search("the journal cannot be written .*full", str(refusal))
            assert refusal.code == Code.OVERLOADED and refusal.retry_after_ms > 0
            return None
        return stream

    try:
        with Client(node.run_dir) as client:
            assert node.run(_SPECS, fall) == before, "what was accepted before is served"
        wait_for(lambda: len(reasons(node)) == 1, 180, "whole but for the disk")
        assert f"{node.run_dir}/journal.sqlite cannot be written" in reasons(node)[0]
        print(reasons(node))
    finally:
        greedy.stop()
    node.wait_healthy()
    assert node.run(_SPECS) == before
    now = node.pids()
    assert now["worker-0"] == pids["worker-0"] and now["worker-1"] != pids["worker-1"]
