"""The scheduler process on real rings and sockets: it serves, survives its worker and its gateway, shows
its queues while stopped, idles without using the CPU, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from phalanx.protocol.arena import Arena, arena_name, names
from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import KVStoreConfig, NodeConfig
from phalanx.protocol.link import bind_router, receive_from, send_to
from phalanx.protocol.messages import (
    BusToGateway,
    Contains,
    ContainsReply,
    Done,
    Hello,
    KVRequest,
    Message,
    Put,
    PutDone,
    Sampling,
    SeatLoad,
    Submit,
    Submitted,
    Tokens,
    Welcome,
)
from phalanx.protocol.queues import read_queues
from phalanx.protocol.rundir import BUS_SOCKET, KVSTORE_SOCKET, SUPERVISOR_SOCKET, endpoint, prepare
from phalanx.protocol.service import Socket
from phalanx.protocol.steps import Link, StepPlan
from phalanx.protocol.topology import Seat, Topology
from sim.hash_worker import VOCAB, HashWorker, fault_free
from sim.token_rows import Handles

pytestmark = pytest.mark.process
T = TypeVar("T")
DEADLINE_S = 20.0
LIMIT = 1 << 20


class Bench:
    """A supervisor's board, a gateway's bus and a worker, all played by the test, around one scheduler."""

    def __init__(self, root: Path, store: bool = False) -> None:
        self.run_dir = prepare(root / f"s{uuid.uuid4().hex[:8]}")
        self.config = NodeConfig(run_dir=str(self.run_dir), kvstore=KVStoreConfig(enabled=store))
        self.config.save()
        self.board = Board.create(self.config.node)
        self.supervisor = bind_router(endpoint(self.run_dir, SUPERVISOR_SOCKET), LIMIT)
        self.bus = bind_router(endpoint(self.run_dir, BUS_SOCKET), LIMIT)
        self.decoder = Decoder[BusToGateway](BusToGateway)
        self.heard: list[Message] = []
        self.link: Link | None = None
        self.link_word = 0
        self.worker = HashWorker(1, 40, 8, 4096)
        self.arenas = {
            field: Arena.create(arena_name(self.config.node, field, 1), 4096, "test")
            for field in ("block_arena", "snapshot_arena")
        }
        self.gateway = 1
        self.frozen = False
        self._pipes = (os.pipe(), os.pipe())
        (_, death), (life, _) = self._pipes
        arguments = ["--run-dir", str(self.run_dir), "--name", "scheduler-0", "--incarnation", "1"]
        arguments += ["--index", "3", "--seat", "0", "--death-fd", str(death)]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "phalanx.scheduler_svc",
                *arguments,
                "--life-fd",
                str(life),
            ],
            pass_fds=(death, life),
        )

    def turn(self) -> None:
        """The gateway takes what came, the worker runs what was planned."""
        for identity, frame in receive_from(self.bus, 100):
            message = self.decoder.decode(frame)
            self.heard.append(message)
            if isinstance(message, Hello) or type(message).__name__ == "Ping":
                send_to(self.bus, identity, encode(Welcome(self.gateway)))
        seat = self.board.seats[0]
        if seat.link != self.link_word:
            if self.link is not None:
                self.link.close()
            self.link_word = seat.link
            self.link = Link.attach(self.config.node, 0, seat.link, seat)
            named = {field: arena.name for field, arena in self.arenas.items()}
            self.link.send_result(msgspec.structs.replace(self.worker.hello(), **named))
        plan: StepPlan | None = None
        if self.link is not None and not self.frozen:
            plan = self.link.next_plan()
        if self.link is not None and plan is not None:
            self.link.send_result(self.worker.run(plan))
        else:
            time.sleep(0.0005)  # leaves the CPU to the scheduler; every wait has a deadline

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not in {DEADLINE_S} s; heard {self.heard[-5:]}"
            assert self.process.poll() is None, "the scheduler ended"
            self.turn()

    def send(self, message: Message) -> None:
        assert send_to(self.bus, b"scheduler-0#1", encode(message))

    def publish(self, worker_incarnation: int, state: str = "member") -> None:
        seat = Seat(0, worker_incarnation, 1, state)  # type: ignore[arg-type]
        self.board.publish(Topology(2 * worker_incarnation, (seat,)))

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def accepting(self) -> bool:
        loads = self.of(SeatLoad)
        return bool(loads) and loads[-1].accepting

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.link is not None:
            self.link.close()
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)
        self.bus.close()
        self.supervisor.close()
        self.board.close()
        for arena in self.arenas.values():
            arena.close()
        for name in names(self.config.node):
            Path("/dev/shm", name).unlink()


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, store=getattr(request, "param", False))
    yield made
    made.close()


def submit(number: int, prompt: list[int], attempt: int = 0, max_tokens: int = 30) -> Submit:
    ids = np.array(prompt, np.int32).tobytes()
    sampling = Sampling(seed=number, max_tokens=max_tokens, ignore_eos=True)
    return Submit(number, f"{number:032x}", 0, attempt, ids, sampling)


def outputs(bench: Bench, number: int, attempt: int = 0) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    finish, handles = None, Handles()
    for message in bench.of(Tokens):
        for item in handles.items(message):
            if item.request_id == f"{number:032x}" and item.attempt == attempt:
                tokens[item.offset :] = item.token_ids
                finish = item.finish_reason or finish
    return tokens, finish


def finished(bench: Bench, number: int, attempt: int = 0) -> Callable[[], bool]:
    return lambda: outputs(bench, number, attempt)[1] is not None


def test_serves_and_goes_on_with_a_new_worker_and_gateway(bench: Bench) -> None:
    bench.publish(1)
    bench.until(bench.accepting)
    prompt = [n * 7 % VOCAB for n in range(300)]
    bench.send(submit(1, prompt))
    bench.until(finished(bench, 1))
    assert outputs(bench, 1) == (fault_free(prompt, 1, 30), "length")
    assert Submitted(1, 0, 1) in bench.heard

    # A worker that takes plans and never answers: messages are served all the same.
    bench.frozen = True
    bench.send(submit(2, prompt))
    bench.until(lambda: Submitted(2, 0, 1) in bench.heard)
    held = read_queues(bench.config.node)["requests"]
    assert [(r["request_id"], r["state"]) for r in held] == [(f"{2:032x}", "running")]

    # Its successor starts clean: the sequence is gone, the gateway places it anew.
    old = bench.board.seats[0].link
    bench.worker = HashWorker(2, 40, 8, 4096)
    bench.frozen = False
    bench.publish(2, "loading")
    bench.until(lambda: not bench.accepting())
    bench.publish(2)
    bench.until(bench.accepting)
    assert bench.board.seats[0].link == old + 1
    assert read_queues(bench.config.node)["requests"] == []
    bench.send(submit(2, prompt, attempt=1))
    bench.until(finished(bench, 2, 1))
    assert outputs(bench, 2, 1)[0] == fault_free(prompt, 2, 30)

    # Another gateway: the scheduler introduces itself again.
    greetings = len(bench.of(Hello))
    loads = len(bench.of(SeatLoad))
    bench.gateway = 2
    bench.until(lambda: len(bench.of(Hello)) > greetings and len(bench.of(SeatLoad)) > loads)


def test_queues_are_readable_while_the_scheduler_is_stopped(bench: Bench) -> None:
    bench.publish(1)
    bench.until(bench.accepting)
    bench.send(submit(5, [3] * 200, max_tokens=3000))
    bench.until(lambda: bool(outputs(bench, 5)[0]))
    bench.process.send_signal(signal.SIGSTOP)
    try:
        before = time.monotonic()
        queues = read_queues(bench.config.node)
        assert time.monotonic() - before < 1.0
    finally:
        bench.process.send_signal(signal.SIGCONT)
    (rank,), (request,) = queues["ranks"], queues["requests"]
    assert (rank["slot"], rank["epoch"], rank["total_blocks"], rank["total_slots"]) == (0, 2, 39, 8)
    assert rank["running"] == 1 and rank["waiting"] == 0 and rank["free_slots"] == 7
    assert rank["free_blocks"] == 39 - request["blocks"]
    assert request["phase"] == "decode" and request["prompt_tokens"] == 200
    assert 0 < request["output_tokens"] <= 3000 == request["max_tokens"]
    assert request["age_ms"] > 0


@pytest.mark.timed
def test_idle_costs_next_to_nothing_and_a_stop_leaves_nothing(bench: Bench) -> None:
    bench.publish(1)
    bench.until(bench.accepting)
    before = _cpu_s(bench.process.pid)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:  # a measured span, not a wait for something
        bench.turn()
    assert _cpu_s(bench.process.pid) - before <= 0.06
    bench.process.send_signal(signal.SIGTERM)
    assert bench.process.wait(DEADLINE_S) == 0
    ours = [name for name in names(bench.config.node) if "link" in name or "queue" in name]
    assert ours == []
    assert not bench.of(Done)


@pytest.mark.timed
def test_a_group_that_is_stopped_costs_next_to_nothing_and_goes_on_at_once(bench: Bench) -> None:
    bench.publish(1)
    bench.until(bench.accepting)
    bench.frozen = True
    bench.send(submit(1, [1, 2, 3]))
    bench.until(lambda: read_queues(bench.config.node)["ranks"][0]["running"] == 1)
    before, end = _cpu_s(bench.process.pid), time.monotonic() + 2.5
    while time.monotonic() < end:  # a measured span, not a wait for something
        bench.turn()
        time.sleep(0.02)
    assert _cpu_s(bench.process.pid) - before <= 0.06
    bench.send(submit(2, [1, 2]))
    bench.until(lambda: Submitted(2, 0, 1) in bench.heard)
    bench.frozen = False
    bench.until(finished(bench, 2))
    assert outputs(bench, 1) == (fault_free([1, 2, 3], 1, 30), "length")


@pytest.mark.parametrize("bench", [True], indirect=True)
def test_prompts_go_to_the_store_and_its_death_ends_the_wait(bench: Bench) -> None:
    """A store that dies with puts unanswered costs nothing: the next one gets the next prompt's at once."""
    generation = bench.arenas["block_arena"].bump(0)
    bench.publish(1)
    bench.until(bench.accepting)
    where = endpoint(bench.run_dir, KVSTORE_SOCKET)
    decoder = Decoder[KVRequest](KVRequest)
    for number in range(1, 6):
        store = bind_router(where, LIMIT)
        puts: list[tuple[bytes, Put]] = []

        def take(store: Socket = store, puts: list[tuple[bytes, Put]] = puts) -> bool:
            for peer, frame in receive_from(store, 100):
                message = decoder.decode(frame)
                if isinstance(message, Contains):
                    assert send_to(store, peer, encode(ContainsReply(message.call, 0)))
                else:
                    assert isinstance(message, Put)
                    puts.append((peer, message))
            return len(puts) == 3

        def connected(store: Socket = store) -> bool:
            return send_to(store, b"scheduler-0#1", encode(PutDone(0, False, False)))

        bench.until(connected)
        bench.send(submit(number, [number] * 257, max_tokens=1))
        bench.until(take)
        assert [put.kind for _, put in puts] == ["block", "block", "state"]
        assert [put.handle.generation for _, put in puts] == [generation, generation, 0]
        if number % 2:
            for peer, put in puts:
                assert send_to(store, peer, encode(PutDone(put.call, True, False)))
        bench.until(finished(bench, number))
        store.close()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
