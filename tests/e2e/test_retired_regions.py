"""A dying worker may store into its peers' memory until it is gone: what it hits is in no use any more."""

import os
import threading
from collections.abc import Iterable

import pytest

from e2e.field import specs
from phalanx.protocol import arena
from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.board import Board
from phalanx.protocol.config import node_name
from phalanx.testing.node import Node

pytestmark = [pytest.mark.process, pytest.mark.slow]


def inodes(names: Iterable[str]) -> set[int]:
    return {(arena.SHM / name).stat().st_ino for name in names}


def test_stores_into_the_regions_of_an_old_epoch_change_no_token(phalanx_node: Node) -> None:
    """The receive regions of both ranks are kept mapped, as a dying peer has them, and overwritten without
    end from the moment that the survivor has acknowledged STOP until the lost rank is back in its place."""
    node, requests = phalanx_node, specs(24)
    fault_free = node.run(requests)
    survivor = node.pids()["worker-0"]
    board = Board.attach(node_name(node.run_dir))
    topology = board.topology()
    assert topology is not None and topology.members() == [0, 1]
    names = [
        arena_name(
            node_name(node.run_dir), f"xch{s.seat}", f"{s.worker_incarnation}.{topology.epoch}"
        )
        for s in topology.seats
    ]
    regions = [Arena.attach(name) for name in names]
    files = inodes(names)
    enough, rounds = threading.Event(), [0]

    def scribble() -> None:
        while board.seats[0].stop_ack <= topology.epoch and not enough.wait(0.0001):
            pass
        while True:
            for region in regions:
                region.data[:] = os.urandom(4096) * (region.nbytes // 4096)
            rounds[0] += 1
            if enough.wait(0.05 if rounds[0] > 10 else 0.0):
                break

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        assert node.run(requests, lambda: node.inject("kill", "worker-1")) == fault_free
        node.wait_healthy()
        assert node.pids()["worker-0"] == survivor, "it never waited for what was overwritten"
        now = [name for name in node.names() if arena.kind_of(name).startswith("xch")]
        assert len(now) == len(names) and not inodes(now) & files, "other memory, not another name"
        before = rounds[0]
        assert node.run(requests) == fault_free
        assert rounds[0] > before > 0
        assert node.pids()["worker-0"] == survivor
    finally:
        enough.set()
        thread.join()
        for region in regions:
            region.close()
        board.close()
