"""A supervisor that hangs is the one process that no supervisor names."""

import os
import signal
import time

import pytest
from lateness import Lateness

from e2e.node import Node, wait_for
from phalanx.protocol.messages import StatusQuery, StatusReply
from phalanx.services.client import Client
from phalanx.supervisor.ask import NoAnswer, ask
from phalanx.supervisor.main import TICK_MS

pytestmark = pytest.mark.process


def test_a_stopped_supervisor_is_named_within_a_second_and_forgiven_when_it_goes_on(
    node: Node,
) -> None:
    node.wait_healthy()
    pid = node.pids()["supervisor"]
    with Client(node.run_dir) as client:
        wait_for(lambda: client.health().healthy, 10, "healthy")
        with Lateness() as lateness:
            os.kill(pid, signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                wait_for(lambda: not client.health().healthy, 20, "the supervisor named")
                named_ms = (time.monotonic() - stopped) * 1000
                (reason,) = client.health().reasons
                assert "the supervisor gives no sign of life" in reason and "state T" in reason
                with pytest.raises(NoAnswer, match=f"kill -CONT {pid}"):
                    ask(node.run_dir, StatusQuery(1), StatusReply, 0.2)
                (row,) = client.generate("Hello", max_tokens=4, ignore_eos=True).results()
                assert len(row.token_ids) == 4, "streams go on"
            finally:
                os.kill(pid, signal.SIGCONT)
        assert named_ms < lateness.bound_ms(TICK_MS), "a second, on a machine without load"
        wait_for(lambda: client.health().healthy, 10, "healthy again")
    node.wait_healthy()
