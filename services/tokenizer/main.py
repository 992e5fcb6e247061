"""A tokenizer process: a client of the gateway's bus that answers Encode and Decode.

The loop answers every Decode at once, because streams wait for it. Encodes run on a thread beside
it: the library works without the interpreter lock, so a prompt of megabytes delays neither a stream
nor the heartbeat.
"""

import threading
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

import zmq

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.errors import DecodeError
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.link import connect_dealer, receive, send
from phalanx.protocol.messages import Decode, Encode, Hello, Ping, Welcome
from phalanx.protocol.rundir import BUS_SOCKET, endpoint
from phalanx.protocol.service import Service, Socket
from phalanx.services.tokenizer.core import (
    EncodeQueue,
    TokenizerCore,
    load_limits,
    load_tokenizer,
)

_MESSAGES_PER_TURN = 64


def serve(service: Service) -> None:
    service.progress("tokenizer")
    model_dir = Path(service.config.model_dir) if service.config.model_dir else None
    core = TokenizerCore(load_tokenizer(model_dir), load_limits(model_dir))
    bus = Bus(service, core)
    service.ready()
    service.loop({bus.socket: bus.take, bus.encoder.answers: bus.forward}, bus.tick)
    bus.close()


class Bus:
    """The conversation with the gateway, across its restarts."""

    def __init__(self, service: Service, core: TokenizerCore) -> None:
        self._service = service
        self._core = core
        self.encoder = EncodeThread(core)
        identity = f"{service.name}#{service.incarnation}"
        self.socket = connect_dealer(endpoint(service.run_dir, BUS_SOCKET), identity)
        self._decoder = Decoder[Welcome | Encode | Decode](Welcome | Encode | Decode)
        self._gateway = 0  # the incarnation that we serve; 0: none has welcomed us yet
        self._greet_ns = 0

    def tick(self, now_ns: int) -> float | None:
        """Hello until a gateway welcomes us, then Ping to learn of a new one."""
        if now_ns >= self._greet_ns:
            self._greet_ns = now_ns + COMMAND_RETRY_MS * 1_000_000
            if self._gateway:
                send(self.socket, encode(Ping(self._service.name)))
            else:
                self._hello()
        return None

    def take(self) -> None:
        for frame in receive(self.socket, _MESSAGES_PER_TURN):
            try:
                message = self._decoder.decode(frame)
            except DecodeError as error:
                self._service.log.error("bad message on the bus", error=str(error))
                continue
            match message:
                case Welcome():
                    self._welcomed(message.gateway_incarnation)
                case Encode():
                    self.encoder.submit(self._gateway, message)
                case Decode():
                    failpoint("tokenizer.decode.before_answer")
                    # A full queue drops the answer: the gateway asks again.
                    send(self.socket, encode(self._core.decode(message)))
                    self._service.beat()  # many at once may take longer than one may be silent

    def forward(self) -> None:
        """Passes on what the thread has finished, except for a gateway that is gone."""
        for gateway, frame in self.encoder.finished():
            if gateway == self._gateway:
                failpoint("tokenizer.encode.before_answer")
                send(self.socket, frame)

    def close(self) -> None:
        self.encoder.close()
        self.socket.close()

    def _welcomed(self, incarnation: int) -> None:
        if incarnation == self._gateway:
            return
        if self._gateway:  # a new gateway answered our Ping: it does not know us yet
            self._hello()
        self._gateway = incarnation
        self.encoder.submit(incarnation, None)

    def _hello(self) -> None:
        service = self._service
        send(self.socket, encode(Hello(service.name, "tokenizer", service.incarnation)))


class EncodeThread:
    """Works off an EncodeQueue. `answers` becomes readable when something is finished."""

    def __init__(self, core: TokenizerCore) -> None:
        context: zmq.Context[Socket] = zmq.Context.instance()
        address = f"inproc://encoded-{uuid4().hex}"
        self.answers: Socket = context.socket(zmq.PAIR)
        self._send: Socket = context.socket(zmq.PAIR)  # used by the thread alone once it runs
        for socket in (self.answers, self._send):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # the gateway bounds how many calls are open
            socket.setsockopt(zmq.RCVHWM, 0)
        self.answers.bind(address)
        self._send.connect(address)
        self._inbox: SimpleQueue[tuple[int, Encode | None]] = SimpleQueue()
        self._queue = EncodeQueue(core)
        self._error: Exception | None = None  # a bug, which has ended the thread
        threading.Thread(target=self._run, name="encode", daemon=True).start()

    def submit(self, gateway: int, request: Encode | None) -> None:
        """Adds a request of this gateway; another gateway than before drops all earlier ones."""
        self._inbox.put((gateway, request))

    def finished(self) -> list[tuple[int, bytes]]:
        """(gateway, answer) of everything finished since the last call. Raises what ended the thread."""
        finished: list[tuple[int, bytes]] = []
        while self.answers.poll(0):
            gateway, frame = self.answers.recv_multipart()
            if self._error is not None:
                raise self._error
            finished.append((int.from_bytes(gateway), frame))
        return finished

    def close(self) -> None:
        """The thread is a daemon: it may be deep in a prompt that nobody waits for any more."""
        self.answers.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - `finished` raises it: the process ends, not only its thread
            self._error = error
            self._send.send_multipart([b"", b""])

    def _serve(self) -> None:
        served = 0
        while True:
            if not len(self._queue) or not self._inbox.empty():
                gateway, request = self._inbox.get()
                if gateway != served:
                    self._queue.forget()
                    served = gateway
                if request is not None:
                    self._queue.add(request)
            elif (answer := self._queue.work()) is not None:
                self._send.send_multipart([served.to_bytes(8), encode(answer)])
