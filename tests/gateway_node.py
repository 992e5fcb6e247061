"""A real gateway process with schedulers and tokenizers played by a thread of the test."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import GatewayConfig, NodeConfig, SchedulerConfig
from phalanx.protocol.errors import ArenaError
from phalanx.protocol.link import seal, unseal
from phalanx.protocol.messages import (
    BusFromGateway,
    Drain,
    FromSupervisor,
    HealthUpdate,
    Hello,
    Message,
    Ping,
    Progress,
    Ready,
    TopologyChanged,
    ToSupervisor,
    Welcome,
)
from phalanx.protocol.rundir import BUS_SOCKET, SUPERVISOR_SOCKET, endpoint, prepare
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.client import Client
from sim.gateway_fakes import EOS, VOCAB, FakeScheduler, FakeTokenizer

STEP_S = 0.002


class Peer:
    """One service on the bus."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        run_dir: Path,
        hello: Hello,
        role: FakeScheduler | FakeTokenizer,
    ) -> None:
        self.hello, self.role, self.gateway = hello, role, 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"{hello.name}#{hello.incarnation}".encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(endpoint(run_dir, BUS_SOCKET))
        self.say(hello)

    def say(self, message: Message) -> None:
        with suppress(zmq.Again):
            self.socket.send(seal(encode(message)), zmq.NOBLOCK)

    def serve(self, decoder: "Decoder[BusFromGateway]") -> None:
        while True:
            try:
                frame = unseal(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            assert frame is not None, "nothing damages frames here"
            message = decoder.decode(frame)
            if isinstance(message, Welcome) and message.gateway_incarnation != self.gateway:
                if self.gateway:
                    self.say(self.hello)
                self.gateway = message.gateway_incarnation
            for reply in self.role.on(message):
                self.say(reply)


class GatewayNode:
    """`with GatewayNode() as node:` a run directory with a gateway that is ready to serve."""

    def __init__(
        self,
        *,
        ranks: int = 2,
        slots: int = 64,
        gateway: GatewayConfig = GatewayConfig(),  # noqa: B008
        step_s: float = STEP_S,
        module: str = "phalanx.services.gateway",
    ) -> None:
        self.run_dir = prepare(Path(tempfile.mkdtemp(prefix="phgw")))
        model_dir = self.run_dir / "model"
        model_dir.mkdir()
        text = {"vocab_size": VOCAB, "max_position_embeddings": 100_000}
        config = {"eos_token_id": EOS, "text_config": text}
        (model_dir / "config.json").write_bytes(msgspec.json.encode(config))
        self.config = NodeConfig(
            run_dir=str(self.run_dir),
            model="fake",
            model_dir=str(model_dir),
            ranks=ranks,
            gateway=gateway,
            scheduler=SchedulerConfig(max_num_seqs=slots),
        )
        self.config.save()
        self._slots, self._step_s, self._module = slots, step_s, module
        self._context: zmq.Context[Any] = zmq.Context()
        self.board = Board.create(self.config.node)
        seats = tuple(Seat(seat, 1, 1, "member") for seat in range(ranks))
        self.board.publish(Topology(2, seats))
        self._supervisor: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._supervisor.setsockopt(zmq.LINGER, 0)
        self._supervisor.bind(endpoint(self.run_dir, SUPERVISOR_SOCKET))
        self.incarnation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._life = -1
        self._ready: set[int] = set()
        self.phases: list[str] = []  # of starts, as gateways told them
        self._to_supervisor: list[Message] = []
        self.pause = threading.Event()  # set: ranks stand still
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="services")

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._end.set()
        self._thread.join()
        self._context.destroy(linger=0)
        with suppress(ArenaError):
            self.board.close()
        for name in Path("/dev/shm").glob(f"ph-{self.config.node}-*"):
            name.unlink()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # --- the gateway's process ---

    def start(self, file_bytes_max: int = resource.RLIM_INFINITY) -> None:
        """With `file_bytes_max` it finds a disk that takes little more, until `prlimit` says otherwise."""
        self.incarnation += 1
        life_read, self._life = os.pipe()
        death_read, death_write = os.pipe()
        arguments = {
            "--run-dir": self.run_dir,
            "--name": "gateway",
            "--incarnation": self.incarnation,
            "--index": 0,
            "--death-fd": death_write,
            "--life-fd": life_read,
        }
        command = [sys.executable, "-P", "-m", self._module]
        command += [str(part) for pair in arguments.items() for part in pair]
        self.process = subprocess.Popen(command, pass_fds=(life_read, death_write))
        limits = (file_bytes_max, resource.RLIM_INFINITY)  # long before it has imported anything
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits)
        for fd in (life_read, death_write, death_read):
            os.close(fd)
        incarnation, process = self.incarnation, self.process
        wait_for(
            lambda: incarnation in self._ready or process.poll() is not None,
            "the gateway is ready, or has crashed",
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        os.close(self._life)

    def terminate(self, drain_ms: int) -> None:
        assert self.process is not None
        self.tell(Drain(drain_ms))
        wait_for(lambda: not self._to_supervisor, "the drain was sent")
        self.process.send_signal(signal.SIGTERM)

    def tell(self, message: FromSupervisor) -> None:
        """The supervisor's word to the gateway."""
        self._to_supervisor.append(message)

    def client(self, **options: Any) -> Client:
        return Client(self.run_dir, **options)

    def log(self) -> str:
        return (self.run_dir / "logs" / "gateway.log").read_text()

    # --- the others, in a thread ---

    def _serve(self) -> None:
        peers = [self._scheduler(seat) for seat in range(self.config.ranks)]
        peers += [self._tokenizer(f"tokenizer-{i}") for i in range(2)]
        decoder = Decoder[BusFromGateway](BusFromGateway)
        poller = zmq.Poller()
        for socket in (self._supervisor, *(peer.socket for peer in peers)):
            poller.register(socket, zmq.POLLIN)
        step_at = greet_at = 0.0
        while not self._end.is_set():
            poller.poll(int(self._step_s * 1000))
            self._supervise()
            for peer in peers:
                peer.serve(decoder)
            now = time.monotonic()
            if now >= greet_at:
                greet_at = now + 0.1
                for peer in peers:
                    peer.say(Ping(peer.hello.name) if peer.gateway else peer.hello)
                    if isinstance(peer.role, FakeScheduler):
                        peer.say(peer.role.load())
            if now >= step_at and not self.pause.is_set():
                step_at = now + self._step_s
                for peer in peers:
                    if isinstance(peer.role, FakeScheduler):
                        for message in peer.role.step():
                            peer.say(message)
        for peer in peers:
            peer.socket.close()
        self._supervisor.close()

    def _scheduler(self, seat: int) -> Peer:
        role = FakeScheduler(seat, 1, slots=self._slots)
        role.worker, role.member = 1, True
        hello = Hello(f"scheduler-{seat}", "scheduler", 1, seat)
        return Peer(self._context, self.run_dir, hello, role)

    def _tokenizer(self, name: str) -> Peer:
        return Peer(self._context, self.run_dir, Hello(name, "tokenizer", 1), FakeTokenizer())

    def _supervise(self) -> None:
        decoder = Decoder[ToSupervisor](ToSupervisor)
        while True:
            try:
                identity, frame = self._supervisor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            body = unseal(frame)
            assert body is not None
            message = decoder.decode(body)
            if isinstance(message, Progress):
                self.phases.append(message.phase)
            if isinstance(message, Ready):
                self._ready.add(message.incarnation)
                self._send(identity, HealthUpdate(True, 2, ()))
                self._send(identity, TopologyChanged(2))
        while self._to_supervisor:
            self._send(f"gateway#{self.incarnation}".encode(), self._to_supervisor[0])
            self._to_supervisor.pop(0)

    def _send(self, identity: bytes, message: Message) -> None:
        self._supervisor.send_multipart([identity, seal(encode(message))])


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)
