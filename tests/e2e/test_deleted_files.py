"""Somebody tidies the run directory under a running node: sockets come back, and streams go on."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from e2e.node import Node, wait_for
from phalanx.protocol import arena
from phalanx.protocol.config import node_name
from phalanx.protocol.messages import Sampling
from phalanx.protocol.rundir import (
    HTTP_FILE,
    LOCK_FILE,
    PID_FILE,
    SUPERVISOR_SOCKET,
    is_running,
)
from phalanx.services.client import Client, Spec
from phalanx.supervisor.ask import NoAnswer

pytestmark = pytest.mark.process

SPECS = [Spec("The sea", Sampling(seed=seed, max_tokens=400, ignore_eos=True)) for seed in range(8)]


@pytest.fixture(scope="module")
def quick(start_node: Callable[..., Node]) -> Node:
    return start_node(2, "--inject", "--device", "null", "--http", 0)


def test_deleted_sockets_come_back_and_no_stream_notices(quick: Node) -> None:
    before = quick.run(SPECS)
    sockets = sorted(path.name for path in quick.run_dir.glob("*.sock"))
    assert len(sockets) == 5
    told: list[str] = []
    over = threading.Event()

    def watch() -> None:
        with Client(quick.run_dir) as client:
            while not over.wait(0.01):
                told.extend(client.health().reasons)

    thread = threading.Thread(target=watch)
    thread.start()

    def tidy() -> None:
        for _ in range(3):
            for path in quick.run_dir.glob("*.sock"):
                path.unlink()
            # New clients need not wait for the file: whoever connects is served once it is there.
            with Client(quick.run_dir) as late:
                assert late.generate(SPECS[0], timeout=60).results()[0].token_ids == before[0, 0][1]
            wait_for(lambda: len(list(quick.run_dir.glob("*.sock"))) == 5, 10, "all bound anew")

    try:
        assert quick.run(SPECS, tidy) == before
    finally:
        over.set()
        thread.join()
    quick.wait_healthy()
    assert {f"{quick.run_dir}/kvstore.sock is gone: kvstore binds it anew"} <= set(told)
    assert {p.incarnation for p in quick.look().processes} == {1}, "nobody was started again"
    # Who starts now finds them, too.
    for process in ("tokenizer-0", "scheduler-1", "worker-1"):
        quick.inject("kill", process)
    quick.wait_healthy()
    assert quick.run(SPECS) == before


def test_a_node_whose_shared_memory_lost_all_its_names_heals_and_ends_well(quick: Node) -> None:
    """systemd-logind does so when a user's last session ends (RemoveIPC): who starts finds nothing by name."""
    before = quick.run(SPECS)
    taken = arena.names(node_name(quick.run_dir))
    stay = {name for name in taken if "-tokens-" not in name}  # the gateway begins another of these

    def tidy() -> None:
        for name in taken:
            (arena.SHM / name).unlink()

    assert len(taken) > 4 and quick.run(SPECS, tidy) == before
    wait_for(lambda: stay <= set(arena.names(node_name(quick.run_dir))), 10, "names")
    for process in ("worker-1", "scheduler-0", "gateway"):
        quick.inject("kill", process)
    quick.wait_healthy()
    assert quick.run(SPECS) == before
    assert all(p.restarts < 5 for p in quick.look().processes), "each came up at once"


def test_a_deleted_lock_comes_back(quick: Node) -> None:
    (quick.run_dir / LOCK_FILE).unlink()
    wait_for(lambda: is_running(quick.run_dir), 10, "locked again")
    assert quick.look().healthy
    quick("up", "--ranks", 1, code=4)


def test_a_question_that_nobody_answers_names_the_socket_that_is_gone(
    quick: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pid = quick.run_dir / SUPERVISOR_SOCKET, quick.pids()["supervisor"]
    os.kill(pid, signal.SIGSTOP)
    try:
        path.unlink()
        monkeypatch.setattr("phalanx.testing.node._ANSWER_S", 0.5)
        with pytest.raises(NoAnswer, match=f"its socket {path} is gone"):
            quick.look()
        monkeypatch.undo()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(path.exists, 20, "bound anew")
    quick.wait_healthy()


def test_a_cleaner_that_takes_everything_costs_no_later_start(quick: Node) -> None:
    """Who starts later reads the configuration; and a lock file that somebody made is not the node's."""
    lock, config = quick.run_dir / LOCK_FILE, quick.run_dir / "config.json"
    small = [config, quick.run_dir / PID_FILE, quick.run_dir / HTTP_FILE]
    texts = [path.read_text() for path in small]
    for path in small:
        path.unlink()
    lock.unlink()
    lock.touch()
    wait_for(lambda: all(path.exists() for path in small), 20, "written anew")
    assert [path.read_text() for path in small] == texts
    wait_for(lambda: is_running(quick.run_dir), 20, "locked anew")
    quick("restart", "eplb", "http")
    quick.wait_healthy()
    assert small[-1].read_text() == texts[-1], "its clients find it at the same port"


def test_a_deleted_journal_is_written_anew_and_nothing_is_lost(quick: Node) -> None:
    before = quick.run(SPECS)
    journal = quick.run_dir / "journal.sqlite"

    def tidy() -> None:
        for path in quick.run_dir.glob("journal.sqlite*"):
            path.unlink()
        wait_for(journal.exists, 10, "written anew")
        with Client(quick.run_dir) as client:
            wait_for(lambda: client.health().healthy, 10, "with all that is open")
        quick.inject("kill", "gateway")

    assert quick.run(SPECS, tidy) == before
    quick.wait_healthy()
