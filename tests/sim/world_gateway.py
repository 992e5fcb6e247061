"""The gateway process: the real core, and its journal as a log of which only what was synced survives."""

from typing import TYPE_CHECKING

from phalanx.protocol.messages import (
    BusFromGateway,
    ClientReply,
    Drain,
    HandOver,
    HealthUpdate,
    Submit,
)
from phalanx.services.gateway.admission import Settings
from phalanx.services.gateway.ending import Ending
from phalanx.services.gateway.entries import Accept, Finish, Op, Produced
from phalanx.services.model_limits import ModelLimits
from sim.gateway_world import Disk
from sim.hash_worker import EOS, MAX_MODEL_LEN, VOCAB
from sim.world_body import MS, Body

if TYPE_CHECKING:
    from sim.host import Child
    from sim.world_node import Node

MODEL = ModelLimits("sim", VOCAB, MAX_MODEL_LEN, EOS)
DEFAULT_MAX_TOKENS = 20


class JournalThread:
    """Writes and syncs what has gathered as one commit, and tells then; a crash loses what is not synced,
    or, if it comes between the sync and the telling, nothing that anyone was told of."""

    def __init__(self, gateway: "GatewayBody", disk: Disk) -> None:
        self.gateway, self.disk = gateway, disk
        self.gathered: list[tuple[int, list[Op]]] = []
        self._late: list[Op] = []  # could not be written, for the next try
        self._written: list[Op] = []  # on its way to the disk
        self._again = False  # something of it could not be written before
        self._busy = False

    @property
    def idle(self) -> bool:
        return not self.gathered and not self._busy

    def submit(self, number: int, ops: list[Op]) -> None:
        self.gathered.append((number, ops))
        self._begin()

    def _begin(self) -> None:
        if self._busy or not self.gathered:
            return
        self._busy = True
        number = self.gathered[-1][0]
        ops = self._written = self._late + [op for _, batch in self.gathered for op in batch]
        self.gathered, self._late, self._again = [], [], bool(self._late)
        rng = self.gateway.node.rng
        slow = self.gateway.world.faulty and rng.random() < 0.05
        whole_ns = rng.randint(1, 300 if slow else 10) * MS
        self.gateway.node.after(whole_ns * 2 // 3, lambda: self._synced(number, ops, whole_ns // 3))

    def _synced(self, number: int, ops: list[Op], rest_ns: int) -> None:
        if not self.gateway.alive:
            return
        failure = "disk full" if self.disk.full else ""
        if failure:
            self._late = [op for op in ops if not isinstance(op, Accept)]
        else:
            self._apply(ops)
        self._written, self._again = [], False
        self.gateway.node.after(rest_ns, lambda: self._told(number, failure))

    def close(self) -> None:
        """What was submitted is written before it ends."""
        if not self.disk.full:
            self._apply(self._written + [op for _, batch in self.gathered for op in batch])

    def _apply(self, ops: list[Op]) -> None:
        for op in ops:
            self._check_one_end(op)
            self.disk.apply(op)
            if isinstance(op, Produced):
                self.gateway.world.note_logged(op)

    def _check_one_end(self, op: Op) -> None:
        """Whatever has ended in the journal stays as it ended."""
        if isinstance(op, Finish):
            known = self.disk.finals.get(op.final.request_id, {}).get(op.final.index, op.final)
            same = (known.finish_reason, known.offset) == (op.final.finish_reason, op.final.offset)
            self.gateway.node.require(same, f"the journal gets {op.final} after {known}")

    def _told(self, number: int, failure: str) -> None:
        self._busy = False
        if self.gateway.alive:
            self.gateway.take((number, failure))
            self._begin()

    @property
    def failing(self) -> bool:
        return self.disk.full or bool(self._late) or self._again


class GatewayBody(Body):
    def __init__(self, node: "Node", child: "Child") -> None:
        super().__init__(node, child)
        world, config = self.world, self.world.shape.config
        # As the shell has it; in other runs so many that schedulers refuse some.
        capacity = 4 * config.max_num_seqs
        if world.seed % 2:
            capacity = min(capacity, config.max_waiting)
        settings = Settings(
            world.model,
            self.incarnation,
            world.now_ns,
            world.shape.max_open,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            keep_undelivered_s=600,
            seat_capacity=capacity,
            draw=node.rng.getrandbits,
            scrub_every_s=world.shape.scrub_every_s,
            logged=world.shape.logged,
        )
        recovered = world.disk.recovered()
        if not world.shape.logged:
            recovered = world.memory.recovered(recovered)
        self.core = world.make_gateway(settings, recovered, self.now_ns)
        world.memory.begin(self.core)
        self.journal = JournalThread(self, world.disk)
        self._topology_version = 0
        self.ending = Ending(self.core)
        self.told_final: dict[tuple[bytes, str], list[bool]] = {}
        node.gateway_is_up(self)
        self.wake(0)

    def told(self, message: object) -> None:
        if isinstance(message, HealthUpdate):
            self.core.on_health(message)
        elif isinstance(message, Drain):
            self.ending.drain(self.now_ns + message.timeout_ms * MS)
        elif isinstance(message, HandOver):
            self.ending.hand_over(self.now_ns + message.timeout_ms * MS)
        self.wake()

    def turn(self) -> None:
        self._look_at_topology()
        while self.inbox:
            match self.inbox.popleft():
                case ("client", identity, message):
                    self.core.on_client(identity, message, self.now_ns)
                case ("bus", peer, message):
                    self.core.on_bus(peer, message, self.now_ns)
                case (number, failure):
                    self.core.on_journal(number, failure, self.now_ns)
        self._tick()
        if self.ending.begun and self.ending.ends_all(self.now_ns):
            self._tick()
        if self.ending.begun and self.ending.over(self.now_ns) and self.journal.idle:
            if not self.ending.hands_over:
                self.world.memory.lose()
            self.journal.close()
            self.node.leave(self.child)
            return
        self.wake(self.core.wait_ns(self.now_ns) + MS)

    def _tick(self) -> None:
        self.core.turn(self.now_ns)
        self.world.memory.write(self.core)
        for peer, message in self.core.take_bus():
            if isinstance(message, Submit) and not self.world.shape.logged:
                self.world.memory.check(message)
            if not self.node.to_service(peer, message):
                self.core.on_unroutable(peer, message, self.now_ns)
        number, ops = self.core.take_ops()
        if ops:
            self.journal.submit(number, ops)
        self.core.deliver(self._send_client, self.now_ns)
        if (report := self.core.take_scrub_report()) is not None:
            found = report.scrubbed.findings
            self.node.require(not found, f"the scrubber doubts ranks that are well: {found}")

    def _send_client(self, identity: bytes, message: ClientReply) -> bool:
        return self.world.to_client(self, identity, message)

    def _look_at_topology(self) -> None:
        if self._topology_version != self.node.topology_version:
            self._topology_version = self.node.topology_version
            assert self.node.topology is not None
            self.core.on_topology(self.node.topology, self.now_ns)

    def died(self) -> None:
        self.world.memory.killed(self.core, self.now_ns)

    def terminate(self) -> None:
        """SIGTERM, to which the supervisor's Drain belongs."""
        if not self.ending.hands_over:
            self.ending.signal(self.now_ns)
        self.wake()


BusMessage = tuple[bytes, BusFromGateway]
