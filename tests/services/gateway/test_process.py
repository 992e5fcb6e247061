"""The real gateway process: killed, drained, fed with garbage, asked by thousands at once."""

import asyncio
import sqlite3
import stat
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from gateway_node import GatewayNode, wait_for

from e2e.node import rss
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import GatewayConfig
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.limits import CLIENT_STALL_MS, MESSAGE_BYTES_MAX
from phalanx.protocol.messages import (
    Accepted,
    ClientReply,
    Delta,
    Final,
    Generate,
    HandOver,
    Sampling,
)
from phalanx.protocol.rundir import CLIENT_SOCKET, JOURNAL_FILE, endpoint
from phalanx.protocol.seeds import derive_seed
from phalanx.services.client import Client, GatewaySilent, NoNode, RequestTimeout, Result, Spec
from phalanx.services.client_async import AsyncClient
from phalanx.services.gateway.ending import LAST_WORDS_NS
from phalanx.services.gateway.validate import sampling_for
from sim.gateway_fakes import Expected, token_at
from sim.gateway_world import MODEL, expected, prompt_of

pytestmark = pytest.mark.process


@pytest.fixture
def node() -> Iterator[GatewayNode]:
    with GatewayNode() as node:
        yield node


@pytest.fixture
def slow_node() -> Iterator[GatewayNode]:
    with GatewayNode(step_s=0.02) as node:
        yield node


def right(spec: Spec, seed: int, index: int = 0) -> Expected:
    prompt = prompt_of(spec)
    sampling = sampling_for(spec.sampling, len(prompt) // 4, MODEL, None, 256, seed)
    return expected(msgspec.structs.replace(sampling, seed=derive_seed(seed, index)), prompt)


def check(spec: Spec, result: Result) -> None:
    want = right(spec, result.seed, result.index)
    assert result.error == ""
    assert (result.token_ids, result.text) == (want.tokens, want.text)
    assert result.finish_reason == want.reason


def many(count: int, max_tokens: int) -> list[Spec]:
    return [
        Spec([1 + i % 60, i // 100], Sampling(seed=i, max_tokens=max_tokens)) for i in range(count)
    ]


def test_a_stream_text_and_its_end(node: GatewayNode) -> None:
    spec = Spec("Hello, world", Sampling(seed=5, max_tokens=30, stop=(".",)), n=3)
    with node.client() as client:
        stream = client.generate(spec, timeout=20)
        parts = list(stream)
        results = stream.results()
    for result in results:
        check(spec, result)
    assert [r.index for r in results] == [0, 1, 2]
    for index in range(3):
        mine = [p for p in parts if p.index == index]
        assert [isinstance(p, Final) for p in mine] == [False] * (len(mine) - 1) + [True]
        offset = 0
        for part in mine[:-1]:
            assert isinstance(part, Delta) and part.offset == offset
            offset += len(part.token_ids)
        assert mine[-1].offset == offset


def test_five_thousand_at_once_over_one_connection(node: GatewayNode) -> None:
    specs = many(5_000, 12)
    with node.client() as client:
        started = time.monotonic()
        seen = dict(client.generate_many(specs, timeout=120))
        print(f"5,000 requests in {time.monotonic() - started:.1f} s")
        for position, spec in enumerate(specs):
            check(spec, seen[position])
        assert client.stats().open_requests == 0


def test_kill_9_under_load_loses_and_doubles_nothing(slow_node: GatewayNode) -> None:
    node = slow_node
    specs = many(120, 40)
    got: dict[int, Result] = {}
    with node.client() as client:
        kills = 0
        for position, result in client.generate_many(specs, timeout=120):
            assert position not in got
            got[position] = result
            if len(got) in (5, 40, 80):
                node.kill()
                node.start()
                kills += 1
        assert kills == 3
        for position, spec in enumerate(specs):
            check(spec, got[position])
        assert client.stats().gateway_incarnation == 4


def test_a_stream_goes_on_in_place_across_a_gateways_death(slow_node: GatewayNode) -> None:
    node, spec = slow_node, Spec([3, 4], Sampling(seed=11, max_tokens=80, stop_token_ids=()))
    with node.client() as client:
        stream = client.generate(spec, timeout=60, ignore_eos=True)
        tokens: list[int] = []
        for part in stream:
            if isinstance(part, Delta):
                assert part.offset == len(tokens)
                tokens.extend(part.token_ids)
                if 3 <= len(tokens) <= 6 and node.incarnation == 1:
                    node.kill()
                    node.start()
        (result,) = stream.results()
        assert result.token_ids == tuple(tokens)
        check(spec, result)


def test_another_client_takes_a_request_over_by_id_and_offset(slow_node: GatewayNode) -> None:
    node, spec = slow_node, Spec([8, 8], Sampling(seed=2, max_tokens=60))
    with node.client() as first, node.client() as second:
        stream = first.generate(spec, timeout=30)
        parts = iter(stream)
        head = next(parts)
        assert isinstance(head, Delta)
        node.kill()
        node.start()
        other = second.attach(stream.request_id, [head.offset + len(head.token_ids)], timeout=30)
        (rest,) = other.results()
    want = right(spec, 2)
    assert head.token_ids + rest.token_ids == want.tokens
    assert head.text + rest.text == want.text


def test_a_finished_request_can_be_read_again_after_a_restart(node: GatewayNode) -> None:
    spec = Spec([8, 9], Sampling(seed=2, max_tokens=25, stop=(".",)))
    with node.client() as client:
        (before,) = client.generate(spec, timeout=30).results()
        node.kill()
        node.start()
        (after,) = client.attach(before.request_id, timeout=30).results()
        assert (after.token_ids, after.text) == (before.token_ids, before.text)
        (end,) = client.attach(before.request_id, [len(before.token_ids)], timeout=30).results()
        assert (end.token_ids, end.finish_reason) == ((), before.finish_reason)


def test_the_same_key_is_the_same_request(slow_node: GatewayNode) -> None:
    spec = Spec([1], Sampling(max_tokens=30), key="mine")
    with slow_node.client() as one, slow_node.client() as two:
        first = one.generate(spec, timeout=20).accepted()
        again = two.generate(spec, timeout=20)
        (result,) = again.results()
        assert (again.request_id, again.seed) == (first.request_id, first.seed)
        check(spec, result)
        with pytest.raises(Refused, match="already used"):
            two.generate([2], max_tokens=30, key="mine", timeout=20).results()


def test_abort_ends_each_sequence_once_and_stays_ended(slow_node: GatewayNode) -> None:
    node, spec = slow_node, Spec([1], Sampling(seed=3, max_tokens=500, ignore_eos=True), n=3)
    node.pause.set()
    with node.client() as client:
        stream = client.generate(spec, timeout=30).accepted()
        stream.abort()
        parts = list(stream)
        assert [type(p) for p in parts] == [Final] * 3
        assert {p.finish_reason for p in parts if isinstance(p, Final)} == {"abort"}
        assert {p.offset for p in parts} == {0}
        client.abort(stream.request_id)  # late is as good
        node.kill()
        node.start()
        node.pause.clear()
        results = client.attach(stream.request_id, timeout=20).results()
        assert [(r.finish_reason, r.token_ids) for r in results] == [("abort", ())] * 3
        with pytest.raises(Refused) as refused:
            client.abort("0" * 32)
        assert refused.value.code is Code.UNKNOWN_REQUEST


def test_garbage_gets_one_error_and_keeps_its_connection(node: GatewayNode) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint(node.run_dir, CLIENT_SOCKET))
        garbage: list[tuple[bytes, int]] = [
            (b"", 0),
            (b"\xc1\xff\x00", 0),
            (b"\x92" * 1000, 0),
            (msgspec.msgpack.encode(["Health", 3]), 0),
            (msgspec.msgpack.encode({"type": "Nonsense", "call": 4}), 4),
            (msgspec.msgpack.encode({"type": "Generate", "call": 5, "n": "many"}), 5),
            (msgspec.msgpack.encode({"type": "Generate", "call": 6, "prompt": b"\xff\xfe"}), 6),
            (b"\x83\xa4type\xa8Generate\xa4call\x07\xa6prompt\xa2\xed\xa0", 0),
            (msgspec.msgpack.encode({"type": "Generate", "call": 8}), 8),
        ]
        for frame, call in garbage:
            socket.send(frame)
            assert socket.poll(5_000)
            answer = msgspec.msgpack.decode(socket.recv())
            assert (answer["type"], answer["call"]) == ("Error", call), frame
            assert answer["code"] == "bad_request"
        socket.send_multipart([b"a", b"b", b""])  # no message has several frames
        assert socket.poll(5_000)
        assert msgspec.msgpack.decode(socket.recv())["type"] == "Error"
        socket.send(msgspec.msgpack.encode({"type": "Health", "call": 9}))
        assert socket.poll(5_000)
        assert msgspec.msgpack.decode(socket.recv())["healthy"] is True


def test_a_message_beyond_the_limit_is_refused_before_it_is_sent(node: GatewayNode) -> None:
    with node.client() as client:
        with pytest.raises(Refused, match=str(MESSAGE_BYTES_MAX)) as refused:
            client.generate("x" * 100_000_000)
        assert refused.value.code is Code.TOO_LARGE
        with pytest.raises(Refused, match="not valid Unicode"):
            client.generate("\ud800")
        with pytest.raises(Refused, match="cannot be sent"):
            client.generate([2**70])
        with pytest.raises(Refused, match="no text"):
            client.generate([1.5])  # type: ignore[list-item]
        assert len(client.generate([1], max_tokens=2, seed=1, timeout=10).results()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 2**31 - 1},
        {"max_tokens": 10**18},
        {"temperature": float("nan")},
        {"logit_bias": {-1: 1.0}},
        {"stop_token_ids": [64]},
    ],
)
def test_a_bad_request_gets_its_error_from_the_node(
    node: GatewayNode, wrong: dict[str, Any]
) -> None:
    with node.client() as client:
        with pytest.raises(Refused) as refused:
            client.generate([1], timeout=10, **wrong).results()
        assert refused.value.code is Code.BAD_REQUEST
        assert client.stats().open_requests == 0


@pytest.mark.timed
def test_health_answers_at_once_under_load(node: GatewayNode) -> None:
    worst = 0.0
    with node.client() as busy, node.client() as asking:
        for i, _ in enumerate(busy.generate_many(many(2_000, 20), timeout=120)):
            if i % 100 == 0:
                started = time.monotonic()
                assert asking.health().healthy
                worst = max(worst, time.monotonic() - started)
    print(f"slowest health answer {worst * 1000:.1f} ms")
    # The goal is 100 ms; four processes share this machine's two cores with other work.
    assert worst < 0.5


def test_a_drain_lets_streams_end_and_tells_the_rest(slow_node: GatewayNode) -> None:
    node = slow_node
    with node.client() as client, node.client() as late:
        short = client.generate([1], seed=1, max_tokens=20, ignore_eos=True, timeout=30).accepted()
        long = client.generate([1], seed=1, max_tokens=9_000, ignore_eos=True, timeout=30)
        long.accepted()
        node.terminate(drain_ms=1_500)
        wait_for(lambda: not late.health().healthy, "health says so")
        with pytest.raises(Refused) as refused:
            late.generate([1], timeout=5).results()
        assert refused.value.code is Code.SHUTDOWN
        assert short.results()[0].finish_reason in ("length", "stop")
        (cut,) = long.results()
        assert (cut.finish_reason, cut.code) == ("abort", Code.SHUTDOWN)
        assert len(cut.token_ids) > 20
        assert node.process is not None and node.process.wait(10) == 0


def test_overload_is_refused_and_a_patient_client_gets_through() -> None:
    with GatewayNode(gateway=GatewayConfig(max_open_requests=4)) as node, node.client() as client:
        node.pause.set()
        open_ones = [client.generate([1], seed=i, max_tokens=5).accepted() for i in range(4)]
        with pytest.raises(Refused) as refused:
            client.generate([1], timeout=5).results()
        assert refused.value.code is Code.OVERLOADED and refused.value.retry_after_ms > 0
        node.pause.clear()
        for stream in open_ones:
            stream.results()
        specs = many(12, 5)
        for position, result in client.generate_many(specs, timeout=60):
            check(specs[position], result)


def test_waiting_has_an_end(slow_node: GatewayNode, tmp_path: Path) -> None:
    with pytest.raises(NoNode, match="phalanx up"):
        Client(tmp_path)
    node = slow_node
    node.pause.set()
    with node.client(silence_s=1.0) as client:
        stream = client.generate([1], timeout=0.3)
        with pytest.raises(RequestTimeout):
            stream.results()
        wait_for(lambda: client.stats().open_requests == 0, "the timed out request was aborted")
        node.kill()
        with pytest.raises(GatewaySilent):
            client.generate([1], timeout=30).results()
        with pytest.raises(GatewaySilent):
            client.health(timeout=0.2)
        node.start()
        node.pause.clear()
        assert len(client.generate([1], seed=1, max_tokens=3, timeout=30).results()) == 1


def test_the_journal_is_private_and_an_unreadable_one_is_moved_aside(node: GatewayNode) -> None:
    path = node.run_dir / JOURNAL_FILE
    for part in node.run_dir.glob(f"{JOURNAL_FILE}*"):
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
    node.kill()
    for part in node.run_dir.glob(f"{JOURNAL_FILE}*"):
        part.unlink()
    path.write_bytes(b"SQLite format 3\x00" + b"\x00garbage" * 4096)
    node.start()
    assert "moved aside" in node.log()
    assert len(list(node.run_dir.glob(f"{JOURNAL_FILE}.unreadable-*"))) == 1
    with node.client() as client:
        assert len(client.generate([1], seed=1, max_tokens=3, timeout=30).results()) == 1
    node.kill()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM requests").fetchone() == (1,)
    db.close()


def test_asyncio_client(slow_node: GatewayNode) -> None:
    node = slow_node

    async def story() -> None:
        async with AsyncClient(node.run_dir) as client:
            life = (await client.health()).gateway_life
            specs = many(60, 25)
            streams = [client.generate(spec, timeout=60) for spec in specs]
            await streams[0].accepted()
            restart = asyncio.get_running_loop().run_in_executor(None, _restart, node)
            results = await asyncio.gather(*(stream.results() for stream in streams))
            await restart
            for spec, (result,) in zip(specs, results, strict=True):
                check(spec, result)
            endless = client.generate([1], max_tokens=5_000, ignore_eos=True, timeout=60)
            async for part in endless:
                endless.abort()
                last = part
            assert isinstance(last, Final) and last.finish_reason == "abort"
            assert (await client.health()).gateway_life != life
            assert (await client.stats()).gateway_incarnation == 2
            assert (await client.stats()).open_requests == 0
            with pytest.raises(Refused):
                await client.abort("0" * 32)
            with pytest.raises(Refused):
                await client.generate([], timeout=5).results()
            with pytest.raises(RequestTimeout):
                await client.generate([1], max_tokens=5_000, ignore_eos=True, timeout=0.2).results()

    asyncio.run(story())


def _restart(node: GatewayNode) -> None:
    node.kill()
    node.start()


class Stalling:
    """A client that reads when the test says so, and has no room to speak of meanwhile."""

    def __init__(self, node: GatewayNode, prompts: range, max_tokens: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.connect(endpoint(node.run_dir, CLIENT_SOCKET))
        self._decoder = Decoder[ClientReply](ClientReply)
        self.specs = {
            call: Spec([call], Sampling(seed=call, max_tokens=max_tokens, ignore_eos=True))
            for call in prompts
        }
        for call, spec in self.specs.items():
            ask = Generate(call, prompt_token_ids=(call,), sampling=spec.sampling)
            self._socket.send(encode(ask))
        self.calls: dict[str, int] = {}  # request id -> call
        self.tokens: dict[int, list[int]] = {call: [] for call in prompts}
        self.finals: dict[int, Final] = {}

    def read(self, quiet_s: float) -> None:
        """All that comes, until every stream has ended or nothing comes any more. No stream has a gap."""
        while len(self.finals) < len(self.specs) and self._socket.poll(int(quiet_s * 1000)):
            message = self._decoder.decode(self._socket.recv())
            match message:
                case Accepted():
                    self.calls[message.request_id] = message.call
                case Delta():
                    tokens = self.tokens[self.calls[message.request_id]]
                    assert message.offset == len(tokens)
                    tokens += message.token_ids
                case Final():
                    self.finals[self.calls[message.request_id]] = message
                case _:
                    raise AssertionError(message)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.soak
def test_a_stalled_client_has_no_gap_or_is_cancelled_with_a_reason_and_others_go_on() -> None:
    """Half a minute in which nothing is read: sockets fill up, and more gathers than they hold."""
    with (
        GatewayNode(step_s=0.02) as node,
        node.client() as reader,
        closing(Stalling(node, range(2, 32), 4_000)) as short,
        closing(Stalling(node, range(32, 62), 4_000)) as long,
    ):
        assert node.process is not None
        steady = Spec([1], Sampling(seed=1, max_tokens=3_000, ignore_eos=True))
        running = reader.generate(steady, timeout=300)
        running.accepted()
        time.sleep(CLIENT_STALL_MS / 1000 - 10)
        held = rss(node.process.pid)
        short.read(60)
        for call in short.specs:
            assert short.finals[call].finish_reason == "length"
            assert short.tokens[call] == rightly(call, 4_000)
        time.sleep(CLIENT_STALL_MS / 1000)
        (result,) = running.results()
        assert list(result.token_ids) == rightly(1, 3_000)
        assert rss(node.process.pid) < held + (64 << 20)
        long.read(2)
        assert long.finals == {}, "it was given up, and what waited for it is gone"
        assert sum(map(len, long.tokens.values())) > 1_000, "so much waited in sockets"
        for request_id, call in long.calls.items():
            assert long.tokens[call] == rightly(call, len(long.tokens[call]))
            (result,) = reader.attach(request_id, timeout=20).results()
            assert (result.finish_reason, result.code) == ("abort", Code.SLOW_CLIENT)


def rightly(seed: int, count: int) -> list[int]:
    """The first tokens of a stream of the test above."""
    prompt = array("i", [seed]).tobytes()
    return [token_at(derive_seed(seed, 0), prompt, at) for at in range(count)]


@pytest.mark.timed
def test_a_hand_over_does_not_wait_for_a_client_that_reads_nothing(node: GatewayNode) -> None:
    """It reads on from the successor; everybody else would wait with it."""
    took_s = [_hand_over(node, 0)]
    while min(took_s) > LAST_WORDS_NS / 1e9 and len(took_s) < 3:  # a busy machine
        node.start()
        took_s.append(_hand_over(node, len(took_s)))
    assert min(took_s) < LAST_WORDS_NS / 1e9


def _hand_over(node: GatewayNode, attempt: int) -> float:
    """How long it takes while somebody has streams and reads nothing."""
    with closing(zmq.Context.instance().socket(zmq.DEALER)) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.RCVHWM, 1)
        reader.connect(endpoint(node.run_dir, CLIENT_SOCKET))
        sampling = Sampling(seed=1, max_tokens=4000, ignore_eos=True)
        for call in range(1, 9):
            key = f"{attempt}-{call}"
            reader.send(encode(Generate(call, key=key, prompt_token_ids=(1,), sampling=sampling)))
        with node.client() as client:
            wait_for(lambda: client.stats().accepted >= 8, "all are accepted")
        time.sleep(2.5)  # more than its sockets hold
        node.tell(HandOver(1000))
        started = time.monotonic()
        assert node.process is not None and node.process.wait(20) == 0
        return time.monotonic() - started
