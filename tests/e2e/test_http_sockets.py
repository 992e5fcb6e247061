"""HTTP as sockets see it: a reader that takes nothing, a port that is taken."""

import json
import re
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.node import Node, rss, wait_for
from phalanx.protocol.limits import CLIENT_STALL_MS
from phalanx.protocol.messages import Restart, Restarted
from phalanx.supervisor.ask import ask

pytestmark = pytest.mark.process

ASK: Any = {"model": "random-tiny", "messages": [{"role": "user", "content": "Hello"}], "seed": 5}
ROOM = 64 << 20


@pytest.fixture(scope="module")
def node(start_node: Callable[..., Node]) -> Node:
    return start_node(1, "--device", "null", "--http", 0)


@pytest.fixture(scope="module")
def at(node: Node) -> tuple[str, int]:
    found = json.loads((node.run_dir / "http.json").read_text())
    return found["host"], found["port"]


def answer(at: tuple[str, int]) -> Any:
    url = f"http://{at[0]}:{at[1]}/v1/chat/completions"
    body = ASK | {"max_tokens": 50, "ignore_eos": True}
    return httpx.post(url, json=body, timeout=60).json()["choices"]


def metric(at: tuple[str, int], name: str) -> float:
    told = httpx.get(f"http://{at[0]}:{at[1]}/metrics", timeout=30).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", told, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_port_that_is_taken_is_told_and_harms_nobody(node: Node, at: tuple[str, int]) -> None:
    calm = answer(at)
    with tempfile.TemporaryDirectory(prefix="ph", dir="/tmp") as folder:
        second = Node(Path(folder))
        second("up", "--ranks", 1, "--device", "null", "--detach", "--http", at[1], code=2)
        reason = json.loads((second.run_dir / "failed.json").read_text())["reason"]
        assert f"port {at[1]}: [Errno 98]" in reason and "choose another with --http" in reason
        assert second.names() == []
        assert not list(second.run_dir.glob("*.sock"))
    assert answer(at) == calm and node.healthy()


def test_a_restart_finishes_the_replies_that_have_begun(node: Node, at: tuple[str, int]) -> None:
    """New requests are refused meanwhile, with words."""
    url = f"http://{at[0]}:{at[1]}/v1/chat/completions"
    # With log-probabilities it is more than the kernel takes: it ends as soon as it is read, not before.
    body = ASK | {"max_tokens": 6000, "n": 2, "stream": True, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 5}
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        calm = [line for line in reply.iter_lines() if line.startswith("data: ")]
    restart: Future[Restarted] | None = None
    asking = ThreadPoolExecutor(1)
    got: list[str] = []
    refused = httpx.Response(200)
    slow = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)])
    with (
        httpx.Client(transport=slow, timeout=120) as client,
        client.stream("POST", url, json=body) as reply,
    ):
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            got.append(line)
            if restart is None:
                question = Restart(time.monotonic_ns(), ("http",), 60.0)
                restart = asking.submit(ask, node.run_dir, question, Restarted, 60.0)
            if refused.status_code == 200:
                refused = httpx.post(url, json=ASK | {"max_tokens": 1}, timeout=60)
    assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
    assert restart is not None and restart.result(60)
    asking.shutdown()
    assert spoken(got) == spoken(calm) and got[-1] == "data: [DONE]"
    assert answer(at), "at the same address"


def spoken(lines: list[str]) -> dict[int, str]:
    """What each choice said."""
    said: dict[int, str] = defaultdict(str)
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            said[choice["index"]] += (delta.get("reasoning_content") or "") + (
                delta.get("content") or ""
            )
    return said


@pytest.mark.soak
def test_a_reader_that_takes_nothing_loses_its_stream_and_its_place(
    node: Node, at: tuple[str, int]
) -> None:
    calm = answer(at)
    body = json.dumps(ASK | {"max_tokens": 8000, "n": 8, "stream": True, "ignore_eos": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    process = node.process("http")
    assert process is not None
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(at)
        stalled.sendall((head + body).encode())
        assert stalled.recv(12) == b"HTTP/1.1 200"
        began, held = time.monotonic(), rss(process.pid)
        assert metric(at, "phalanx_http_running") == 1
        while metric(at, "phalanx_http_running"):
            assert answer(at) == calm, "others are served"
            assert time.monotonic() < began + 3 * CLIENT_STALL_MS / 1000
            time.sleep(0.5)
        assert time.monotonic() > began + CLIENT_STALL_MS / 1000
        ended = 'phalanx_http_requests_total{path="/v1/chat/completions",status="408"}'
        assert metric(at, ended) == 1
        assert rss(process.pid) < held + ROOM
        wait_for(node.whole, 20, "nothing runs for it")
    now = node.process("http")
    assert now is not None and now.pid == process.pid and node.healthy()
