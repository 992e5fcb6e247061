"""The KV store's process: questions from the socket, bytes through shared memory, records on disk.

A disk that cannot be opened never stops the node: puts are declined, gets miss, and it is tried again.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from phalanx.kvstore_svc import events
from phalanx.kvstore_svc.arenas import Arenas
from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.disk import read_cleared, remove_segments, sync_names, write_cleared
from phalanx.kvstore_svc.engine import Engine, Reply, new_wake
from phalanx.kvstore_svc.layout import Kind
from phalanx.protocol.codec import Decoder, call_of, encode
from phalanx.protocol.errors import Code, DecodeError
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import BUS_MESSAGE_BYTES_MAX
from phalanx.protocol.link import bind_router, receive_from, send_to
from phalanx.protocol.messages import (
    Contains,
    ContainsReply,
    Error,
    Get,
    GetDone,
    KVClear,
    KVCleared,
    KVReply,
    KVRequest,
    KVStats,
    KVStatsReply,
    Put,
    PutDone,
)
from phalanx.protocol.rundir import KVSTORE_SOCKET, endpoint
from phalanx.protocol.service import Service

MESSAGES_PER_TURN = 256
LOOK_NS = 100_000_000  # leases, lifetimes, cap and floor are looked at this often
REOPEN_NS = 2_000_000_000  # a disk that could not be opened is tried again this often
CLEAR_S = 0.5  # for what is being written when everything is to be forgotten
DRAIN_NS = 1_500_000_000  # for sealing at a clean stop; less than the time from SIGTERM to SIGKILL
ANSWERS_MAX = 16_384  # remembered, for calls that come twice
_KINDS = {"block": Kind.BLOCK, "state": Kind.STATE}


def serve(service: Service) -> None:
    store = Store(service)
    service.ready()
    # `wake` is a file descriptor: ZeroMQ's poller takes those too.
    handlers: dict[Any, Callable[[], None]] = {store.socket: store.take, store.wake: store.work}
    service.loop(handlers, store.tick, drained=store.drained)
    store.close()


class Store:
    """The conversation with schedulers and workers; answers may go out turns after their question."""

    def __init__(self, service: Service) -> None:
        self._service, self._log = service, service.log
        config = service.config.kvstore
        self._config = StoreConfig(config.max_bytes, config.free_floor_bytes)
        self._config.check()
        self._arenas = Arenas(service.config.node)
        self._decoder = Decoder[KVRequest](KVRequest)
        self._look_ns = self._reopen_ns = self._drain_ns = 0
        self._off = ""
        self._cleared_ns = -1  # CLOCK_MONOTONIC; what was begun by then is not taken
        self._answers: dict[events.Call, PutDone | GetDone | KVCleared] = {}  # oldest first
        self.wake = new_wake()
        service.progress("recover")
        self.engine = self._open(lambda fraction: service.progress("recover", fraction))
        self.socket = bind_router(endpoint(service.run_dir, KVSTORE_SOCKET), BUS_MESSAGE_BYTES_MAX)

    def take(self) -> None:
        """Messages are there: a batch of them, so that their writes go out together."""
        batch: list[events.Event] = []
        for peer, frame in receive_from(self.socket, MESSAGES_PER_TURN):
            try:
                message = self._decoder.decode(frame)
            except DecodeError as error:
                self._send(peer, Error(call_of(frame), Code.BAD_REQUEST, str(error)))
                continue
            if self.engine is None:
                self._send(peer, self._without_disk(message))
            else:
                self._sort(self.engine, peer, message, batch)
        self._turn(batch)

    def work(self) -> None:
        """Disk work is done."""
        self._turn([])

    def tick(self, now_ns: int) -> float | None:
        if now_ns < self._look_ns:
            return None
        self._look_ns = now_ns + LOOK_NS
        if self.engine is None and now_ns >= self._reopen_ns:
            self._reopen_ns = now_ns + REOPEN_NS
            self.engine = self._open(lambda fraction: self._service.beat())
        self._turn([events.HolderGone(name) for name in self._arenas.end_leases()])
        self._report()
        return None

    def drained(self, now_ns: int) -> bool:
        """Told to stop: seal what is open, which spares the next start a scan, within the time left."""
        if self.engine is None:
            return True
        if not self._drain_ns:
            self._drain_ns = now_ns + DRAIN_NS
            self.engine.core.close()
            self._turn([])
        return self.engine.idle or now_ns >= self._drain_ns

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close(timeout_s=0.1)
        self._arenas.close()
        self.socket.close()
        os.close(self.wake)

    # ---------------------------------------------------------------- one turn

    def _sort(
        self, engine: Engine, peer: bytes, message: KVRequest, batch: list[events.Event]
    ) -> None:
        """Answer a question at once, or turn it into an event of the batch."""
        if isinstance(message, Put | Get | KVClear) and (
            known := self._answers.get((peer, message.call))
        ):
            # It came twice. Its memory may be in other use by now: say it again, copy nothing.
            self._send(peer, known)
            return
        match message:
            case Put() if message.begun_ns <= self._cleared_ns:
                reason = "it was begun before the store was cleared"
                self._send(peer, PutDone(message.call, stored=False, durable=False, reason=reason))
            case Put():
                call = (peer, message.call)
                self._arenas.expect(call, message.handle, message.deadline_ns)
                batch.append(_put(call, message))
            case Get():
                call = (peer, message.call)
                self._arenas.expect(call, message.handle)
                handle = message.handle
                batch.append(events.Get(call, message.key, handle.nbytes, handle.arena))
            case Contains():
                # Puts of this very batch count: they are in order before the question.
                self._turn(batch)
                batch.clear()
                found = engine.core.prefix(message.keys, engine.now_ns())
                self._send(peer, ContainsReply(message.call, *found))
            case KVStats():
                self._send(peer, self._stats(engine, message.call))
            case KVClear(call):
                self._turn(batch)
                batch.clear()
                cleared = KVCleared(call, len(engine.core.index))
                self._clear(engine)
                self._remember((peer, call), cleared)
            case _:
                assert_never(message)

    def _turn(self, batch: list[events.Event]) -> None:
        if self.engine is not None:
            for reply in self.engine.turn(batch):
                self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        _, call = reply.call
        self._arenas.forget(reply.call)
        answer: PutDone | GetDone
        match reply:
            case events.PutReply():
                failpoint("kvstore.put.before_answer")
                answer = PutDone(call, reply.stored, reply.durable, reply.reason)
            case events.GetReply():
                answer = GetDone(call, reply.found, reply.nbytes, reply.reason)
            case _:
                assert_never(reply)
        self._remember(reply.call, answer)

    def _remember(self, call: events.Call, answer: PutDone | GetDone | KVCleared) -> None:
        """Say it, and again if it is asked for again."""
        self._answers[call] = answer
        if len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]
        self._send(call[0], answer)

    def _send(self, peer: bytes, message: KVReply) -> None:
        # A peer that is gone or does not read loses the answer; it repeats what it still wants.
        send_to(self.socket, peer, encode(message))

    # ---------------------------------------------------------------- the disk comes and goes

    def _open(self, progress: Callable[[float], None]) -> Engine | None:
        directory = self._service.config.kv_dir
        try:
            engine = Engine(
                directory, self._config, self._arenas, progress=progress, wake=self.wake
            )
        except OSError as error:
            self._log.error("caching is off", directory=str(directory), error=str(error))
            self._off = f"{directory}: {error.strerror}"
            return None
        found = engine.recovery
        self._cleared_ns = max(self._cleared_ns, read_cleared(directory, time.monotonic_ns()))
        self._log.info(
            "store open",
            records=len(engine.core.index),
            segments=len(found.found),
            scanned=found.scanned,
            discarded=found.discarded,
            direct=engine.disk.direct,
        )
        return engine

    def _clear(self, engine: Engine) -> None:
        """Whoever asks for a record from here on hears that there is none, also if this process is killed now."""
        self._cleared_ns = time.monotonic_ns()
        self._keep_cleared(engine.disk.directory)
        remove_segments(engine.disk.directory)
        for reply in engine.close(CLEAR_S):
            self._answer(reply)
        self._service.beat()
        remove_segments(engine.disk.directory)
        self._keep_cleared(engine.disk.directory)  # now there is room for it, if there was none
        self._log.info("store cleared")
        self.engine = self._open(lambda fraction: self._service.beat())

    def _keep_cleared(self, directory: Path) -> None:
        """For the next store process, since who computes now may outlive this one; and for one after a loss of power."""
        try:
            write_cleared(directory, self._cleared_ns)
            sync_names(directory)
        except OSError as error:
            self._log.warning("a crash may undo that the store was cleared", error=str(error))

    def _without_disk(self, message: KVRequest) -> KVReply:
        match message:
            case Put(call):
                return PutDone(call, stored=False, durable=False, reason=self._off)
            case Get(call):
                return GetDone(call, found=False, reason=self._off)
            case Contains(call):
                return ContainsReply(call, 0)
            case KVStats(call):
                return KVStatsReply(call, 0, 0, 0, 0, 0, 0, caching=False)
            case KVClear(call):
                text = f"the store has no disk ({self._off}), so nothing of it can be forgotten"
                return Error(call, Code.NOT_READY, text)
            case _:
                assert_never(message)

    def _stats(self, engine: Engine, call: int) -> KVStatsReply:
        s = engine.core.stats(engine.now_ns())
        return KVStatsReply(
            call,
            s.records,
            s.bytes,
            s.hits,
            s.misses,
            s.corrupt,
            s.evicted,
            caching=not s.off,
            puts=s.puts,
        )

    def _report(self) -> None:
        """Tell the operator when caching stops and when it works again."""
        if self.engine is None:
            return
        off = self.engine.core.writer.off
        if off != self._off:
            self._off = off
            self._log.warning("caching is off", reason=off) if off else self._log.info(
                "caching is on"
            )


def _put(call: events.Call, message: Put) -> events.Put:
    return events.Put(
        call,
        message.key,
        _KINDS[message.kind],
        message.handle.nbytes,
        message.ack == "disk",
        message.ttl_s,
        message.handle.arena,
    )
