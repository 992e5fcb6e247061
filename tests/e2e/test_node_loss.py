"""Every process of a node is killed at once while streams run; `up` again, and each goes on as it would have."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from e2e.node import Node, assert_whole, wait_for
from phalanx.protocol.messages import Delta, Final
from phalanx.services.client import Client, Stream

pytestmark = pytest.mark.process

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "seed": 4, "max_tokens": 40, "ignore_eos": True},
    {"prompt": "The sea", "seed": 5, "max_tokens": 24, "ignore_eos": True, "logprobs": 2},
    {"prompt": "A harbour", "seed": 6, "max_tokens": 16, "ignore_eos": True, "n": 2},
]


def whole(stream: Stream) -> list[tuple[tuple[int, ...], str, Any]]:
    return [(r.token_ids, r.text, r.logprobs) for r in stream.results()]


def kill_everything(node: Node) -> None:
    pids = node.pids()
    for pid in pids.values():  # the supervisor first: nobody is to be restarted
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()), 10, "gone")


def test_streams_go_on_after_the_loss_of_the_whole_node(start_node: Callable[..., Node]) -> None:
    node = start_node(2)
    with Client(node.run_dir) as client:
        right = [whole(client.generate(**request)) for request in REQUESTS]
    with Client(node.run_dir) as staying, Client(node.run_dir) as leaving:
        streams = [staying.generate(**request) for request in REQUESTS]
        other = leaving.generate(**REQUESTS[0])
        events = iter(other)
        have: list[int] = []
        while len(have) < 5:
            event = next(events)
            assert isinstance(event, Delta)
            have += event.token_ids
        for stream in streams:
            stream.accepted()
        kill_everything(node)
        node.start(2)
        # One client stays and is connected again by itself; of another only the tokens are left.
        with Client(node.run_dir) as coming:
            more = list(coming.attach(other.request_id, have=[have], timeout=120))
        assert [whole(stream) for stream in streams] == right
    finals = [event for event in more if isinstance(event, Final)]
    rest = [token for event in more if isinstance(event, Delta) for token in event.token_ids]
    assert (tuple(have + rest), len(finals)) == (right[0][0][0], 1)
    with Client(node.run_dir) as stranger:
        (final,) = stranger.attach(other.request_id, have=[[*have[:-1], have[-1] + 1]], timeout=60)
    assert isinstance(final, Final)
    assert (final.code, final.offset) == ("stream_changed", len(have))
    assert_whole(node)
