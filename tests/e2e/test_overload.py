"""A machine with far more work than it has processors is slow; nobody on it is dead."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from e2e.field import specs
from phalanx.services.client import Client
from phalanx.testing.node import Node

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timed]

BUSY_S = 15


def test_no_healthy_process_is_called_dead_under_eightfold_overload(
    start_node: Callable[..., Node],
) -> None:
    node = start_node(2)
    fault_free = node.run(specs(16))
    before = node.look()
    code = f"import time; end = time.monotonic() + {BUSY_S}\nwhile time.monotonic() < end: pass"
    count = 8 * len(os.sched_getaffinity(0))
    looks, over = list[tuple[str, ...]](), threading.Event()

    def watch() -> None:
        with Client(node.run_dir) as client:
            while not over.wait(0.05):
                looks.append(client.health().reasons)

    watcher = threading.Thread(target=watch)
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        ends = time.monotonic() + BUSY_S
        watcher.start()
        while time.monotonic() < ends:
            assert node.run(specs(16), timeout=240) == fault_free
    finally:
        over.set()
        watcher.join()
        for process in busy:
            process.wait(120)
    assert looks and set(looks) == {()}, "a busy healthy node is never called anything else"
    after = node.look()
    assert after.epoch == before.epoch and after.epochs == before.epochs
    assert {p.name: p.pid for p in after.processes} == {p.name: p.pid for p in before.processes}
