"""The smaller services: tokenizers with their queue of encodes, the KV store's copies, the planner."""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from phalanx.eplb_svc.core import EplbCore
from phalanx.protocol.kvkeys import state_key
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import (
    Contains,
    ContainsReply,
    Decode,
    Encode,
    Encoded,
    Error,
    ExpertCounts,
    Get,
    GetDone,
    Hello,
    KVReply,
    KVRequest,
    Ping,
    Put,
    PutDone,
    Rebalanced,
    Welcome,
)
from sim.gateway_fakes import FakeTokenizer
from sim.hash_worker import VOCAB
from sim.world_body import MS, Body
from sim.world_scheduler import SchedulerBody

if TYPE_CHECKING:
    from sim.host import Child
    from sim.world_node import Node

RETRY_NS = COMMAND_RETRY_MS * MS


class TokenizerBody(Body):
    """As `services/tokenizer/main.py`: decodes at once, encodes in a thread, and what that finishes for
    a gateway that is known to be gone is dropped."""

    def __init__(self, node: "Node", child: "Child") -> None:
        super().__init__(node, child)
        self.up, self.peer = node.connect(self)
        self._tokenizer = FakeTokenizer(VOCAB)
        self._gateway = 0
        self._greet_ns = 0
        self._encodes: deque[tuple[int, Encode]] = deque()
        self._encoding = False
        self.wake(0)

    def turn(self) -> None:
        if self.now_ns >= self._greet_ns:
            self._greet_ns = self.now_ns + RETRY_NS
            if self._gateway:
                self.up.send(Ping(self.name))
            else:
                self._hello()
        while self.inbox:
            match self.inbox.popleft():
                case Welcome(incarnation):
                    self._welcomed(incarnation)
                case Encode() as message:
                    self._encodes.append((self._gateway, message))
                    self._encode_next()
                case Decode() as message:
                    for answer in self._tokenizer.on(message):
                        self.up.send(answer)
                case (int() as gateway, Encoded() as answer):
                    if gateway == self._gateway:
                        self.up.send(answer)
        self.wake(max(MS, self._greet_ns - self.now_ns))

    def _welcomed(self, incarnation: int) -> None:
        if incarnation == self._gateway:
            return
        if self._gateway:
            self._hello()
        self._gateway = incarnation
        self._encodes.clear()

    def _hello(self) -> None:
        self.up.send(Hello(self.name, "tokenizer", self.incarnation))

    def _encode_next(self) -> None:
        if not self._encoding and self._encodes:
            self._encoding = True
            gateway, message = self._encodes.popleft()
            slow = self.world.faulty and self.node.rng.random() < 0.1
            took_ns = self.node.ms(0.1, 400 if slow else 4)
            self.later(took_ns, lambda: self._encoded(gateway, message))

    def _encoded(self, gateway: int, message: Encode) -> None:
        self._encoding = False
        for answer in self._tokenizer.on(message):
            self.take((gateway, answer))
        self._encode_next()


class StoreBody(Body):
    """Copies what it is given, some time later, if that is still there."""

    def asked(self, scheduler: SchedulerBody, request: KVRequest) -> None:
        match request:
            case Put():
                most_ms, then = 200 if self.world.faulty else 30, self._copy
            case Contains():
                most_ms, then = 20, self._look
            case Get():
                most_ms, then = 40, self._fill
            case _:
                raise AssertionError(f"not for a store: {request}")
        self.later(self.node.ms(0.2, most_ms), lambda: then(scheduler, request))  # type: ignore[arg-type]

    def _look(self, scheduler: SchedulerBody, asked: Contains) -> None:
        keys, kept = asked.keys, self.world.stored
        prefix = next((i for i, key in enumerate(keys) if key not in kept), len(keys))
        ends = (i + 1 for i in reversed(range(prefix)) if state_key(keys[i]) in kept)
        self._answer(scheduler, ContainsReply(asked.call, prefix, next(ends, 0)))

    def _fill(self, scheduler: SchedulerBody, get: Get) -> None:
        staged, found = self.node.staged[get.handle.arena], self.world.stored.get(get.key)
        good = staged.generations[get.handle.region] == get.handle.generation
        if not good or found is None or self.node.rng.random() < 0.02:
            self._answer(scheduler, GetDone(get.call, False, reason="gone"))
            return
        staged.record(get.handle.offset)[:] = found
        self._answer(scheduler, GetDone(get.call, True, get.handle.nbytes))

    def _copy(self, scheduler: SchedulerBody, put: Put) -> None:
        handle = put.handle
        worker = self.node.worker_of_arena(handle.arena)
        if worker is None or handle.generation != worker.generation:
            self._answer(scheduler, PutDone(put.call, False, False, "stale handle"))
            return
        if self.now_ns > put.deadline_ns:
            self._answer(scheduler, PutDone(put.call, False, False, "too late"))
            return
        place = handle.offset // handle.nbytes
        found = worker.hash.blocks[place] if put.kind == "block" else worker.hash.snapshots[place]
        expected = self.world.keyed_at(put.key)
        whole = found.copy()
        if put.kind == "state":
            found = found[(expected >> 20) % worker.hash.ring]
        self.node.require(
            bool(np.array_equal(found, expected)), "the store copied what its key does not say"
        )
        self.world.stored[put.key] = whole
        self._answer(scheduler, PutDone(put.call, True, False))

    def _answer(self, scheduler: SchedulerBody, answer: KVReply) -> None:
        if scheduler.alive:
            scheduler.take(answer)

    def turn(self) -> None:
        pass


class PlannerBody(Body):
    """The real planner core on the counts that workers report."""

    def __init__(self, node: "Node", child: "Child") -> None:
        super().__init__(node, child)
        self.core = EplbCore(node.world.shape.eplb)
        self.wake(0)

    def turn(self) -> None:
        if self.node.topology is not None:
            self.core.on_topology(self.node.topology)
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Rebalanced | Error):
                self.core.on_answer(message, self.now_ns)
                continue
            assert isinstance(message, ExpertCounts)
            problem = self.core.on_counts(message)
            self.node.require(problem is None, f"counts are refused: {problem}")
        self.core.tick(self.now_ns, {})
        if (asked := self.core.take_ask(self.now_ns)) is not None:
            self.node.ask_for_a_plan(self, asked)
        self.wake(MS if self.core.busy else 100 * MS)
