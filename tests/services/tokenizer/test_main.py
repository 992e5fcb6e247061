"""The tokenizer process: streams and heartbeat go on during a long encode, and no answer outlives its gateway."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import pytest

from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import NodeConfig, node_name
from phalanx.protocol.limits import BUS_MESSAGE_BYTES_MAX
from phalanx.protocol.link import bind_router, receive_from, send_to
from phalanx.protocol.messages import (
    BusFromGateway,
    BusToGateway,
    ChatMessage,
    Decode,
    Decoded,
    DecodeItem,
    Encode,
    Encoded,
    EncodeFailed,
    Hello,
    Ping,
    Progress,
    Ready,
    Welcome,
)
from phalanx.protocol.rundir import BUS_SOCKET, SUPERVISOR_SOCKET, endpoint, prepare
from phalanx.protocol.service import Service
from phalanx.services.model_limits import ModelLimits
from phalanx.services.tokenizer.core import EncodeQueue, TokenizerCore, load_tokenizer
from phalanx.services.tokenizer.main import Bus, EncodeThread

pytestmark = pytest.mark.process

ROW = 5
DEADLINE_S = 30
TOKENIZER = load_tokenizer(None)
LONG = "Long prompts take their time. " * 60_000  # 1.8 MB: more than a second of work


class Node:
    """This test as supervisor and gateway of one tokenizer process."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = prepare(run_dir)
        NodeConfig(run_dir=str(run_dir)).save()
        self.board = Board.create(node_name(run_dir))
        self.supervisor = bind_router(endpoint(run_dir, SUPERVISOR_SOCKET), BUS_MESSAGE_BYTES_MAX)
        self.bus = bind_router(endpoint(run_dir, BUS_SOCKET), BUS_MESSAGE_BYTES_MAX)
        self.peer = b""
        self._decoder = Decoder[BusToGateway](BusToGateway)
        self._life_read, self._life_write = os.pipe()
        death_read, death_write = os.pipe()
        os.close(death_read)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.services.tokenizer"]
            + ["--run-dir", str(run_dir), "--name", "tokenizer-0", "--incarnation", "7"]
            + ["--index", str(ROW), "--death-fd", str(death_write)]
            + ["--life-fd", str(self._life_read)],
            pass_fds=(death_write, self._life_read),
        )
        os.close(death_write)

    def send(self, message: BusFromGateway) -> None:
        assert send_to(self.bus, self.peer, encode(message))

    def next(self) -> BusToGateway:
        """The next message on the bus, Pings left out."""
        while self.bus.poll(DEADLINE_S * 1000):
            [(self.peer, frame)] = receive_from(self.bus, 1)
            message = self._decoder.decode(frame)
            if not isinstance(message, Ping):
                return message
        raise TimeoutError("the tokenizer says nothing")

    def welcome(self, incarnation: int) -> None:
        assert self.next() == Hello("tokenizer-0", "tokenizer", 7)
        self.send(Welcome(incarnation))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._life_read)
        os.close(self._life_write)
        self.supervisor.close()
        self.bus.close()
        self.board.arena.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / f"tok{uuid4().hex[:12]}")
    yield node
    node.close()


def ids(text: str) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in TOKENIZER.encode(text).ids)


def test_it_starts_quickly_and_says_so(node: Node) -> None:
    decoder = Decoder[Progress | Ready](Progress | Ready)
    start = time.monotonic()
    while node.supervisor.poll(DEADLINE_S * 1000):
        [(_, frame)] = receive_from(node.supervisor, 1)
        if isinstance(message := decoder.decode(frame), Ready):
            assert message == Ready("tokenizer-0", 7)
            break
    assert time.monotonic() - start < 10  # about 0.3 s on an idle machine
    assert "torch" not in Path(f"/proc/{node.process.pid}/maps").read_text()


def test_text_chat_and_ids_are_answered(node: Node) -> None:
    node.welcome(1)
    node.send(Encode(1, prompt="Hello, 世界"))
    assert node.next() == Encoded(1, ids("Hello, 世界"))
    node.send(Encode(2, messages=(ChatMessage("user", "Hi"),)))
    reply = node.next()
    assert isinstance(reply, Encoded)
    assert reply.call == 2
    assert reply.token_ids[:4] == bytes(4)  # begin of sentence
    node.send(Encode(3, messages=(ChatMessage("alien", "Hi"),)))
    assert isinstance(node.next(), EncodeFailed)
    node.send(Decode(4, (DecodeItem(9, tuple(TOKENIZER.encode("Hi").ids), b"", flush=True),)))
    reply = node.next()
    assert isinstance(reply, Decoded)
    assert "".join(reply.items[0].pieces) == "Hi"


def test_streams_and_heartbeat_go_on_during_a_long_encode(node: Node) -> None:
    node.welcome(1)
    node.send(Encode(1, prompt=LONG))
    node.send(Encode(2, prompt="short"))
    assert node.next() == Encoded(2, ids("short"))
    row = node.board.processes[ROW]
    beat = row.beat_ns
    for call in range(3, 13):
        node.send(Encode(1, prompt=LONG))  # as a gateway repeats what is not answered yet
        node.send(Decode(call, (DecodeItem(1, (50,), b""),)))
        reply = node.next()
        assert isinstance(reply, Decoded)  # not the Encoded: that takes seconds
        assert reply.call == call
    assert row.beat_ns > beat
    reply = node.next()
    assert isinstance(reply, Encoded)
    assert (reply.call, reply.token_ids) == (1, ids(LONG))
    node.send(Encode(14, prompt="next"))
    assert node.next() == Encoded(14, ids("next"))  # the repeats were one command


def test_an_answer_for_a_dead_gateway_never_reaches_its_successor(node: Node) -> None:
    node.welcome(1)
    node.send(Encode(1, prompt=LONG))
    node.send(Welcome(2))  # what a new gateway answers to the Ping of a stranger
    assert node.next() == Hello("tokenizer-0", "tokenizer", 7)
    node.send(Welcome(2))
    node.send(Encode(1, prompt="another first call"))
    assert node.next() == Encoded(1, ids("another first call"))
    node.send(Encode(2, prompt="and a second"))
    assert node.next() == Encoded(2, ids("and a second"))


def test_garbage_on_the_bus_does_no_harm(node: Node) -> None:
    node.welcome(1)
    for frame in (b"", b"\xc1", b"garbage", encode(Ping("gateway"))):
        assert send_to(node.bus, node.peer, frame)
    node.send(Encode(1, prompt="still here"))
    assert node.next() == Encoded(1, ids("still here"))


def test_it_stops_when_told_even_in_the_middle_of_a_prompt(node: Node) -> None:
    node.welcome(1)
    node.send(Encode(1, prompt=LONG))
    node.send(Decode(2, ()))
    assert node.next() == Decoded(2, ())
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(DEADLINE_S) == 0


def test_it_gives_a_sign_of_life_between_any_two_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that waits in the socket may be more work than one may be silent for."""
    events: list[str] = []

    def decode(core: TokenizerCore, request: Decode) -> Decoded:
        events.append("answer")
        return Decoded(request.call, ())

    monkeypatch.setattr(TokenizerCore, "decode", decode)
    run_dir = prepare(tmp_path)
    router = bind_router(endpoint(run_dir, BUS_SOCKET), BUS_MESSAGE_BYTES_MAX)
    service = SimpleNamespace(
        name="tokenizer-0",
        incarnation=1,
        run_dir=run_dir,
        beat=lambda: events.append("sign of life"),
    )
    bus = Bus(cast(Service, service), TokenizerCore(TOKENIZER, ModelLimits("tiny", 512, 1000, 1)))
    bus.tick(1)
    assert router.poll(DEADLINE_S * 1000)
    ((peer, _),) = receive_from(router, 1)
    for call in range(3):
        assert send_to(router, peer, encode(Decode(call, ())))
    while events.count("answer") < 3:
        assert bus.socket.poll(DEADLINE_S * 1000)
        bus.take()
    assert events == ["answer", "sign of life"] * 3
    bus.close()
    router.close()


def test_what_a_bug_raises_in_the_encode_thread_is_raised_where_answers_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(queue: EncodeQueue) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(EncodeQueue, "work", work)
    thread = EncodeThread(TokenizerCore(TOKENIZER, ModelLimits("tiny", 512, 1000, 1)))
    thread.submit(1, Encode(1, "text"))
    assert thread.answers.poll(DEADLINE_S * 1000)
    with pytest.raises(RuntimeError, match="a bug"):
        thread.finished()
    thread.close()
    thread._send.close()
