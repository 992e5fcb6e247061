"""What fills the host's copy of the weights may die or hang: it is tried again, people are told, and nobody waits."""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from supervisor.node import until

from phalanx.protocol import arena
from phalanx.protocol.log import Logger
from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor import weights as module
from phalanx.supervisor.weights import WeightsKeeper

HELD = ["sh", "-c", """echo '{"held": true, "bytes": 1}'"""]


class ListLog:
    def __init__(self) -> None:
        self.said: list[dict[str, object]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.said.append({"event": event, **fields})

    info = warning


@pytest.fixture
def log() -> ListLog:
    return ListLog()


@pytest.fixture
def keeper(
    tmp_path: Path, log: ListLog, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightsKeeper]:
    (tmp_path / LOG_DIR).mkdir()
    monkeypatch.setattr(module, "_AGAIN_NS", 10**12)
    read, write = os.pipe()
    node = f"w{uuid.uuid4().hex[:8]}"
    made = WeightsKeeper(tmp_path, node, read, cast(Logger, log))
    made._delay_ns = 10**12
    yield made
    made.close()
    assert arena.names(node) == []
    os.close(read)
    os.close(write)


def looks_until_it_is_over(keeper: WeightsKeeper) -> int:
    def over() -> bool:
        keeper.look(time.monotonic_ns())
        return keeper._filler is None

    until(over)
    return time.monotonic_ns()


def test_a_filler_that_is_killed_is_told_and_tried_again(
    keeper: WeightsKeeper, log: ListLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, mostly, when memory is short."""
    monkeypatch.setattr(module, "_FILLER", ["sh", "-c", "kill -9 $$"])
    keeper.start()
    now_ns = looks_until_it_is_over(keeper)
    assert "ended by SIGKILL" in keeper.missing and not keeper._path.exists()
    keeper.look(now_ns + 10**11)
    assert keeper._filler is None, "not at once"

    keeper.look(now_ns + 10**12)
    now_ns = looks_until_it_is_over(keeper)
    keeper.look(now_ns + 10**12)
    assert keeper._filler is None, "the second time after twice as long"
    monkeypatch.setattr(module, "_FILLER", HELD)
    keeper.look(now_ns + 2 * 10**12)
    looks_until_it_is_over(keeper)
    assert keeper.missing == "" and keeper._path.exists()
    assert [said["event"] for said in log.said[:2]] == ["host weights are not held"] * 2
    assert log.said[2] == {"event": "host weights are held", "bytes": 1}


def test_a_copy_that_lost_its_name_is_found_by_it_again(
    keeper: WeightsKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILLER", HELD)
    keeper.start()
    looks_until_it_is_over(keeper)
    keeper._path.unlink()
    keeper.look(time.monotonic_ns())
    assert os.path.samestat(keeper._path.stat(), os.fstat(keeper._fd))


def test_a_filler_that_hangs_is_ended(
    keeper: WeightsKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILLER", ["sh", "-c", "exec sleep 300"])
    monkeypatch.setattr(module, "_STILL_NS", 10**9)
    keeper.start()
    assert keeper._filler is not None
    pid = keeper._filler.pid
    looks_until_it_is_over(keeper)
    assert "no progress" in keeper.missing

    def reaped() -> bool:
        keeper.look(time.monotonic_ns())
        return not Path(f"/proc/{pid}").exists()

    until(reaped)


def test_one_that_the_kernel_keeps_does_not_keep_the_node(
    keeper: WeightsKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads from a disk that is gone: the node ends, answers whoever asked, and removes its sockets."""
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    monkeypatch.setattr(module, "_FILLER", ["sh", "-c", "exec sleep 300"])
    keeper.start()
    filler = keeper._filler
    assert filler is not None
    kill = filler.kill
    monkeypatch.setattr(filler, "kill", lambda: None)
    keeper.close()
    assert not keeper._path.exists() and filler.poll() is None
    kill()
    filler.wait(10)
