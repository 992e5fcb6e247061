"""A scheduler process: the real core and the real link bookkeeping, in a loop like that of its shell."""

from typing import TYPE_CHECKING

import msgspec

from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import Get, Hello, Ping, Submit, Tokens, Welcome
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepResult, WorkerHello
from phalanx.protocol.topology import Seat
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import (
    GatewayChanged,
    Membership,
    Staging,
    StoreArenas,
    StoreLost,
    WorkerLost,
)
from phalanx.scheduler_svc.main import not_sent
from phalanx.scheduler_svc.seat import SeatLink
from sim.hash_worker import SPARE, WINDOW, Staged
from sim.scheduler_checks import Onlooker
from sim.world_body import MS, Body

if TYPE_CHECKING:
    from sim.host import Child
    from sim.world_node import Node

PING_NS = 1_000 * MS
RETRY_NS = COMMAND_RETRY_MS * MS


class SchedulerBody(Body):
    def __init__(self, node: "Node", child: "Child") -> None:
        super().__init__(node, child)
        self.seat = child.spec.seat
        shape = self.world.shape
        rows = 2 * shape.config.max_waiting + shape.config.max_num_seqs
        buffer = memoryview(bytearray(queue_bytes(rows)))
        columns = QueueTable.create(buffer, rows, self.seat, self.incarnation)
        self.core = Scheduler(
            shape.config, self.seat, self.incarnation, columns, store_enabled=shape.store
        )
        self.onlooker = Onlooker(self.core)
        row = node.seats[self.seat]
        self.links = SeatLink(row, "sim", self.seat, self.incarnation, node.make_link)
        self.up, self.peer = node.connect(self)
        self.losses = 0  # of the store, that it has not heard of yet
        self._topology_version = 0
        self._gateway: int | None = None
        self._stagings = 0
        self._hello_due_ns = 0
        self.wake(0)

    def told(self, message: object) -> None:
        self.wake()  # TopologyChanged only wakes the loop

    def turn(self) -> None:
        self._watch_topology()
        self._greet()
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Welcome):
                self._welcomed(message)
            else:
                self._handle(message)
        for result in self.links.receive():
            if isinstance(result, StepResult):
                self.onlooker.done(result.seq)
            else:
                self.onlooker.new_worker()
            self._handle(result)
            if isinstance(result, WorkerHello):
                generations = self.node.generations(self.seat)
                self._handle(StoreArenas(*generations, self._new_staging()))
        self._act()
        due_ns = min(self._hello_due_ns - self.now_ns, int(self.core.wait_ms(self.now_ns) * 1e6))
        # A worker's hello wakes us here; the shell looks for it now and then.
        self.wake(max(due_ns, MS))

    def _handle(self, event: object) -> None:
        if isinstance(event, Submit) and self.world.shape.inexact:
            event = salted(event)
        self.onlooker.takes(event)
        self.core.handle(event, self.now_ns)

    def _act(self) -> None:
        actions = self.core.step(self.now_ns)
        for plan in actions.plans:
            self.onlooker.planned(plan)
            self.links.send(plan)
        for message in actions.gateway:
            if isinstance(message, Tokens):
                self.onlooker.said(message)
            self.up.send(message)
        away = False
        if not self.losses:
            self.core.store_stands()
        for request in self.core.store_step(self.now_ns):
            if isinstance(request, Get):
                staged = self.node.staged[request.handle.arena]
                staged.generations[request.handle.region] = request.handle.generation
            if not self.node.ask_store(self, request):
                self._handle(not_sent(request))
                away = True
        if away:
            self._act()
        self.onlooker.check()

    def _new_staging(self) -> Staging:
        self._stagings += 1
        blocks, states = self.world.staging
        name = f"stage{self.seat}-{self.incarnation}.{self._stagings}"
        self.node.staged[name] = Staged(blocks, states, self.world.ring.get("ring", WINDOW + SPARE))
        return Staging(name, 0, blocks, states)

    def store_lost(self) -> None:
        self.losses -= 1
        self.take(StoreLost())

    # ------------------------------------------------------------ as in the shell

    def _greet(self) -> None:
        if self.now_ns < self._hello_due_ns:
            return
        if self._gateway is None:
            self._hello()
            self._hello_due_ns = self.now_ns + RETRY_NS
        else:
            self.up.send(Ping(self.name))
            self._hello_due_ns = self.now_ns + PING_NS

    def _hello(self) -> None:
        self.up.send(Hello(self.name, "scheduler", self.incarnation, self.seat))

    def _welcomed(self, welcome: Welcome) -> None:
        if self._gateway == welcome.gateway_incarnation:
            return
        if self._gateway is not None:
            self._hello()
        self._gateway = welcome.gateway_incarnation
        self._hello_due_ns = self.now_ns + PING_NS
        self._handle(GatewayChanged())

    def _watch_topology(self) -> None:
        if self._topology_version == self.node.topology_version:
            return
        self._topology_version = self.node.topology_version
        topology = self.node.topology
        assert topology is not None
        seat = topology.seat(self.seat) or Seat(self.seat, 0, 0, "absent")
        if self.links.follow(seat) and self.core.worker is not None:
            self._handle(WorkerLost())
            self.onlooker.new_worker()
        self._handle(Membership(topology.epoch, seat.state == "member"))


def salted(submit: Submit) -> Submit:
    """What it makes depends on who takes it up, and when."""
    seed = submit.sampling.seed or 0
    sampling = msgspec.structs.replace(submit.sampling, seed=seed ^ submit.attempt)
    return msgspec.structs.replace(submit, sampling=sampling)
