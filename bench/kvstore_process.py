"""A KV store process alone, with the few essentials of a supervisor around it, and a caller with an arena.

The benchmark and the tests of real processes use it; a node never does.
"""

import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from phalanx.kvstore_svc.layout import Buffer
from phalanx.protocol.arena import Arena, Handle, arena_name
from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import KVStoreConfig, NodeConfig
from phalanx.protocol.limits import BUS_MESSAGE_BYTES_MAX
from phalanx.protocol.link import bind_router, connect_dealer, receive_from
from phalanx.protocol.messages import (
    Contains,
    ContainsReply,
    Get,
    GetDone,
    KVReply,
    KVRequest,
    KVStats,
    Put,
    Ready,
    ToSupervisor,
)
from phalanx.protocol.rundir import KVSTORE_SOCKET, LOG_DIR, SUPERVISOR_SOCKET, endpoint, prepare

DEADLINE_S = 20


class StoreProcess:
    """`with StoreProcess(path) as store`: a run directory below `home`; `start`, `kill`, `stop` its store.

    Keyword arguments are fields of `KVStoreConfig`.
    """

    _numbers = count()

    def __init__(self, home: Path, **kvstore: Any) -> None:
        self.run_dir = prepare(home / f"kv{os.getpid()}-{next(self._numbers)}")
        options = {"max_bytes": 256 << 20, "free_floor_bytes": 0, **kvstore}
        self.config = NodeConfig(run_dir=str(self.run_dir), kvstore=KVStoreConfig(**options))
        self.config.save()
        self.board = Board.create(self.config.node)
        self.supervisor = bind_router(endpoint(self.run_dir, SUPERVISOR_SOCKET), 1 << 20)
        self.child: subprocess.Popen[bytes] | None = None
        self.incarnation = 0
        self._ends: list[int] = []

    def start(self) -> None:
        self.incarnation += 1
        death_read, death_write = os.pipe()
        life_read, life_write = os.pipe()
        options = {
            "run-dir": self.run_dir,
            "name": "kvstore",
            "incarnation": self.incarnation,
            "index": 0,
            "death-fd": death_write,
            "life-fd": life_read,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.kvstore_svc", *arguments],
            pass_fds=(death_write, life_read),
        )
        for descriptor in (death_write, life_read):
            os.close(descriptor)
        self._ends += [death_read, life_write]
        self.wait_ready()

    def wait_ready(self) -> None:
        decoder = Decoder[ToSupervisor](ToSupervisor)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert self.child is not None and self.child.poll() is None, self.log()
            self.supervisor.poll(100)
            for _, frame in receive_from(self.supervisor, 100):
                message = decoder.decode(frame)
                if isinstance(message, Ready) and message.incarnation == self.incarnation:
                    return
        raise AssertionError(f"not ready after {DEADLINE_S} s: {self.log()}")

    def kill(self) -> None:
        assert self.child is not None
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(DEADLINE_S)
        self.child = None

    def stop(self) -> int:
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        code = self.child.wait(DEADLINE_S)
        self.child = None
        return code

    def log(self) -> str:
        path = self.run_dir / LOG_DIR / "kvstore.log"
        return path.read_text() if path.exists() else "no log"

    def log_events(self, event: str) -> list[dict[str, Any]]:
        lines = [msgspec.json.decode(line) for line in self.log().splitlines()]
        return [line for line in lines if line["event"] == event]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.child is not None:
            self.kill()
        for descriptor in self._ends:
            os.close(descriptor)
        self.supervisor.close()
        self.board.close()


class Caller:
    """A scheduler or worker: regions of one size in an arena of its own, calls over a DEALER."""

    def __init__(
        self, store: StoreProcess, *, nbytes: int, regions: int = 8, incarnation: int = 1
    ) -> None:
        self.size = nbytes
        name = arena_name(store.config.node, "caller", incarnation)
        self.arena = Arena.create(name, nbytes * regions)
        self.socket = connect_dealer(endpoint(store.run_dir, KVSTORE_SOCKET))
        self._decoder = Decoder[KVReply](KVReply, BUS_MESSAGE_BYTES_MAX)
        self._call = 0

    def region(self, region: int, nbytes: int | None = None) -> Handle:
        return self.arena.handle(region * self.size, nbytes or self.size, region=region)

    def send(self, message: KVRequest) -> None:
        self.socket.send(encode(message))

    def receive(self, timeout_s: float = DEADLINE_S) -> Any:
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        return self._decoder.decode(self.socket.recv())

    def ask(self, message: KVRequest) -> Any:
        """The answer to this very call; others are dropped."""
        self.send(message)
        while True:
            if (reply := self.receive()).call == message.call:
                return reply

    def next_call(self) -> int:
        self._call += 1
        return self._call

    def put(self, key: bytes, data: Buffer, *, region: int = 0, **options: Any) -> Any:
        return self.ask(self.put_message(key, data, region=region, **options))

    def put_message(self, key: bytes, data: Buffer, *, region: int = 0, **options: Any) -> Put:
        handle = self.region(region, len(data))
        self.arena.data[handle.offset : handle.offset + len(data)] = data
        options.setdefault("begun_ns", time.monotonic_ns())
        return Put(self.next_call(), key, options.pop("kind", "block"), handle, **options)

    def get(self, key: bytes, *, region: int = 0) -> tuple[GetDone, bytes]:
        handle = self.region(region)
        self.arena.data[handle.offset : handle.offset + self.size] = b"\xee" * self.size
        done = self.ask(Get(self.next_call(), key, handle))
        return done, bytes(self.arena.data[handle.offset : handle.offset + done.nbytes])

    def contains(self, *keys: bytes) -> int:
        reply: ContainsReply = self.ask(Contains(self.next_call(), keys))
        return reply.prefix

    def stats(self) -> Any:
        return self.ask(KVStats(self.next_call()))

    def close(self) -> None:
        self.socket.close()
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
