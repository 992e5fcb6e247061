"""One life of a node: the supervisor's core over processes that each run a body, and what connects them.

It ends when the supervisor dies, and everything with it, or when the supervisor gives up or is told to.
"""

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.limits import HANG_MS
from phalanx.protocol.messages import (
    BusFromGateway,
    BusToGateway,
    ExpertCounts,
    KVRequest,
    Rebalance,
    Restart,
    Scale,
)
from phalanx.protocol.steps import StepPlan
from phalanx.supervisor.events import (
    Action,
    Finished,
    Observed,
    Publish,
    RebalanceAsked,
    Reply,
    Send,
    Spawn,
    Sweep,
)
from sim.clock import Act
from sim.hash_worker import Staged
from sim.host import Child, Host, Plan
from sim.world_body import MS, Body
from sim.world_checks import WorldChecks
from sim.world_gateway import GatewayBody
from sim.world_scheduler import SchedulerBody
from sim.world_services import PlannerBody, StoreBody, TokenizerBody
from sim.world_wires import Wire
from sim.world_worker import MemoryLink, Region, WorkerBody

if TYPE_CHECKING:
    from sim.world import World

BODIES: dict[str, type[Body]] = {
    "worker": WorkerBody,
    "scheduler": SchedulerBody,
    "gateway": GatewayBody,
    "tokenizer": TokenizerBody,
    "kvstore": StoreBody,
    "eplb": PlannerBody,
}


@dataclass
class Bell:
    ring: Act


@dataclass
class SeatWords:
    """What the link bookkeeping uses of a seat's words on the board."""

    bell: Bell
    link: int = 0


@dataclass(eq=False)
class Line:
    """The connection of one service to the gateway."""

    body: Body
    up: Wire[BusToGateway]
    down: Wire[BusFromGateway]
    gone: bool = False


@dataclass(eq=False)
class Node(Host):
    world: "World" = None  # type: ignore[assignment]
    gone: bool = False  # the supervisor is dead, and everything with it
    topology_version: int = 0
    bodies: dict[str, Body] = field(default_factory=dict[str, Body])
    workers: dict[int, WorkerBody] = field(default_factory=dict[int, WorkerBody])  # by seat
    lines: dict[bytes, Line] = field(default_factory=dict[bytes, Line])
    posted: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    # The placement version that each seat voted with, in rounds of odd and of even numbers.
    votes: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    seats: dict[int, SeatWords] = field(default_factory=dict[int, SeatWords])
    links: dict[tuple[int, int], MemoryLink] = field(
        default_factory=dict[tuple[int, int], MemoryLink]
    )
    # By (seat, worker incarnation): the epoch that it is ready for, and where it receives.
    regions: dict[tuple[int, int], tuple[int, Region]] = field(
        default_factory=dict[tuple[int, int], tuple[int, Region]]
    )

    def __post_init__(self) -> None:
        self.num_layers, self.num_experts = 2, 6
        super().__post_init__()
        self.checks: WorldChecks = WorldChecks(self)
        self.staged: dict[str, Staged] = {}  # schedulers' staging arenas, by name
        self.faults_end_ns = self.world.faults_end_ns
        self._tick()

    def _chance(self) -> random.Random:
        return self.world.rng

    def _draw_config(self) -> NodeConfig:
        return self.world.shape.node_config()

    def _draw_plan(self) -> Plan:
        return self.world.shape.draw_plan(self.rng, sorted(self.specs))

    def require(self, condition: bool, text: str) -> None:
        self.checks.require(condition, text)

    def after(self, delay_ns: int, act: Act) -> None:
        """Unless this life is over by then."""
        self.clock.after(delay_ns, lambda: None if self.gone else act())

    def step_ns(self, plan: StepPlan | None = None) -> int:
        """How long one part of a step takes at one rank."""
        return self.rng.randint(*self.world.shape.step_ns)

    # ------------------------------------------------------------ what the supervisor does

    def _do(self, action: Action) -> None:
        if isinstance(action, Spawn):
            self._have_seat(self.core.processes[action.name].spec.seat)
        super()._do(action)
        match action:
            case Publish():
                self.topology_version += 1
            case Send(name, incarnation, message):
                body = self.bodies.get(name)
                if body is not None and body.incarnation == incarnation:
                    self.after(self.ms(0.05, 3), lambda: body.told(message) if body.alive else None)
            case Reply(peer, message) if peer.startswith(b"eplb#"):
                planner = self.bodies.get("eplb")
                if planner is not None and peer == b"eplb#%d" % planner.incarnation:
                    self._send(lambda: planner.take(message) if planner.alive else None)
            case Sweep():
                for seat, incarnation in list(self.regions):
                    child = self.children.get(f"worker-{seat}")
                    if child is None or child.incarnation != incarnation or not child.alive:
                        del self.regions[seat, incarnation]
                for seat, number in list(self.links):
                    child = self.children.get(f"scheduler-{seat}")
                    if child is None or child.incarnation != number >> 32 or not child.alive:
                        del self.links[seat, number]
            case Finished():
                self.world.node_ended(self, action)
            case _:
                pass

    def _have_seat(self, seat: int) -> None:
        """The board has words for every seat there may be."""
        if seat >= 0 and seat not in self.seats:
            self.posted[seat] = (0, 0)
            self.seats[seat] = SeatWords(Bell(lambda: self.ring_worker(seat)))

    def _hand_over(self, child: Child | None, incarnation: int) -> None:
        """Its body is told, as of everything that is sent."""

    @property
    def can_change(self) -> bool:
        """Whether it would not refuse to at once."""
        here = not self.gone and self.finished is None
        return here and self.core.serving and self.core.ready_s >= 0 and not self.core.changes.told

    def ask_for_a_change(self) -> None:
        """Somebody wants more ranks, or fewer, or fresh processes."""
        self._ask_for_a_change()

    def _draw_change(self, call: int) -> Scale | Restart:
        rng, ranks = self.rng, len(self.core.workers)
        timeout_s = rng.choice((0.2, 10.0, 60.0, 60.0))
        if rng.random() < 0.5:
            wanted = rng.choice((ranks - 1, ranks + 1, ranks + 2, rng.randint(1, 8)))
            return Scale(call, max(1, wanted), timeout_s)
        kinds = ("all", "worker", "scheduler", "gateway", "gateway", "tokenizer", "eplb")
        return Restart(
            call,
            (rng.choice((*kinds, "kvstore") if "kvstore" in self.specs else kinds),),
            timeout_s,
        )

    def _become_ready(self, child: Child) -> None:
        super()._become_ready(child)
        if child.said_ready and child.body is None:
            child.body = BODIES[child.spec.kind](self, child)
            self.bodies[child.spec.name] = child.body
            if isinstance(child.body, WorkerBody):
                self.workers[child.spec.seat] = child.body
            if isinstance(child.body, GatewayBody) and child.termed:
                child.body.terminate()

    def _signal(self, child: Child | None, incarnation: int, number: int) -> None:
        body = child.body if child is not None else None
        if number != 9 and isinstance(body, GatewayBody) and body.incarnation == incarnation:
            body.child.termed = True
            if body.awake and self.rng.random() >= self.plan.ignores_term:
                body.terminate()
            return
        here = child is not None and child.incarnation == incarnation and child.alive
        if number != 9 and child is not None and here and child.spec.kind == "gateway":
            child.termed = True
            if self.rng.random() < 0.3:
                self.die(child, -number)  # it does not listen to signals yet
            return
        super()._signal(child, incarnation, number)

    def leave(self, child: Child) -> None:
        """It ends by itself, as it should."""
        self.die(child, 0)

    def die(self, child: Child, code: int) -> None:
        was_alive = child.alive
        super().die(child, code)
        if was_alive and child.body is not None:
            self._lose_body(child.body, code == 0)

    def _lose_body(self, body: Body, cleanly: bool) -> None:
        body.died()
        line = next((line for line in self.lines.values() if line.body is body), None)
        if line is not None:
            line.up.sender_died()
            line.down.receiver_died()
            self.after(self.ms(0, 5), lambda: setattr(line, "gone", True))
        if isinstance(body, GatewayBody):
            self.world.gateway_died(cleanly)
            for line in self.lines.values():
                line.down.sender_died()
                line.up.receiver_died()
        if isinstance(body, StoreBody):
            for scheduler in self.schedulers():
                scheduler.losses += 1
                self.after(self.ms(0, 5), scheduler.store_lost)

    def _fed(self, child: Child) -> None:
        super()._fed(child)
        if child.body is not None:
            child.body.wake(0)

    def supervisor_dies(self) -> None:
        """Every child holds the read end of a pipe whose other end has just closed."""
        self.story.append(f"{self.now_ns / 1e9:.3f} the supervisor dies")
        for child in self.children.values():
            if child.alive:
                child.alive = False
                if isinstance(child.body, GatewayBody):
                    self.world.gateway_died()
        self.gone = True

    # ------------------------------------------------------------ workers

    def ring_worker(self, seat: int) -> None:
        body = self.worker(seat)
        if body is not None:
            body.wake()

    def ring_scheduler(self, seat: int) -> None:
        body = self.bodies.get(f"scheduler-{seat}")
        if body is not None:
            body.wake()

    def worker(self, seat: int) -> WorkerBody | None:
        body = self.workers.get(seat)
        return body if body is not None and body.alive else None

    def look(self, child: Child) -> None:
        self._look(child)

    def _look(self, child: Child) -> None:
        body = child.body
        if isinstance(body, WorkerBody) and body.awake and not child.preparing:
            if not self._falls_in_a_step():
                body.look()
            else:
                self.die(child, -11)

    def _falls_in_a_step(self) -> bool:
        return self._faulty and self.rng.random() < self.world.shape.step_death

    def _observe(self, child: Child) -> Observed:
        seen, body = super()._observe(child), child.body
        if not child.alive or not isinstance(body, WorkerBody) or body.running is None:
            return seen
        awaits = sum(1 << peer for peer in body.running.behind(self))
        phase = ProcessPhase.WAITING if awaits else ProcessPhase.BUSY
        return replace(seen, phase=phase, awaits=awaits)

    def waited_for(self, child: Child) -> bool:
        """Of peers in a step: it fell asleep in the middle of its own, or before that one."""
        if self.word % 2 == 1 or child.spec.kind != "worker":
            return False
        steps = [body.running for body in self.workers.values() if body.awake and body.running]
        soon_ns = child.mood_ns + HANG_MS * MS
        return any(
            step.number[0] == self.word
            and step.since_ns <= soon_ns
            and child.spec.seat in step.behind(self)
            for step in steps
        )

    def obey_stop(self, body: WorkerBody) -> None:
        """The epoch word is odd and no step is under way."""
        row = self.rows[body.seat]
        before = row.stop
        super()._look(body.child)
        for peer in body.outboxes if row.stop != before else ():
            self.ring_worker(peer)  # it may wait for this one in a step that this one never began

    def _prepared(self, child: Child, epoch: int) -> None:
        body, topology = child.body, self.topology
        assert isinstance(body, WorkerBody)
        if child.alive and topology is not None and topology.epoch == epoch:
            body.prepare(topology)
        super()._prepared(child, epoch)

    # ------------------------------------------------------------ links and arenas

    def make_link(self, node: str, seat: int, number: int, row: object) -> MemoryLink:
        link = self.links[seat, number] = MemoryLink(self, seat)
        return link

    def forget_link(self, link: MemoryLink) -> None:
        self.links = {key: known for key, known in self.links.items() if known is not link}

    def generations(self, seat: int) -> tuple[int, int]:
        worker = self.worker(seat)
        generation = worker.generation if worker is not None else 0
        return generation, generation

    def worker_of_arena(self, arena: str) -> WorkerBody | None:
        """Arenas outlive their owner a little; what was in them is as good as before."""
        for body in self.bodies.values():
            if isinstance(body, WorkerBody) and arena in (body.arena, body.snapshots):
                return body if body.alive else None
        return None

    # ------------------------------------------------------------ messages

    def connect(self, body: Body) -> tuple[Wire[BusToGateway], bytes]:
        """The service's socket to the gateway, under its identity."""
        peer = f"{body.name}#{body.incarnation}".encode()
        world = self.world

        def up(message: BusToGateway) -> None:
            gateway = self.gateway
            if gateway is not None and not self.gone:
                gateway.take(("bus", peer, message))

        def down(message: BusFromGateway) -> None:
            if body.alive and not self.gone:
                body.take(message)

        wires = (
            Wire(world.clock, world.rng, world.weather, up),
            Wire(world.clock, world.rng, world.weather, down),
        )
        self.lines[peer] = Line(body, *wires)
        if self.gateway is None:
            wires[0].receiver_died()
        return wires[0], peer

    def to_service(self, peer: bytes, message: BusFromGateway) -> bool:
        """False when it is gone, or not connected to this gateway yet."""
        line = self.lines.get(peer)
        if line is None or line.gone:
            return False
        line.down.send(message)
        return True

    @property
    def gateway(self) -> GatewayBody | None:
        body = self.bodies.get("gateway")
        return body if isinstance(body, GatewayBody) and body.alive else None

    def gateway_is_up(self, body: GatewayBody) -> None:
        self.bodies["gateway"] = body
        for line in self.lines.values():
            if line.body.alive:
                line.up.receiver_back()
        self.world.gateway_is_up(body)

    def schedulers(self) -> list[SchedulerBody]:
        return [
            body for body in self.bodies.values() if isinstance(body, SchedulerBody) and body.alive
        ]

    def ask_store(self, scheduler: SchedulerBody, request: KVRequest) -> bool:
        store = self.bodies.get("kvstore")
        if not isinstance(store, StoreBody) or not store.alive:
            return False
        store.asked(scheduler, request)
        return True

    def to_eplb(self, message: ExpertCounts) -> None:
        body = self.bodies.get("eplb")
        if body is not None and body.alive:
            self.after(self.ms(0.05, 2), lambda: body.take(message) if body.alive else None)

    def _send(self, arrive: Act) -> None:
        """A message between the planner and the supervisor."""
        for _ in range(self.world.weather.times()):
            self.after(self.ms(0.05, 3), arrive)

    def ask_for_a_plan(self, planner: Body, request: Rebalance) -> None:
        peer = b"eplb#%d" % planner.incarnation
        slots = tuple((seat, 0) for seat in self.core.group.members)
        self.checks.plan_asked(peer, request)

        def arrive() -> None:
            if not self.gone and self.finished is None:
                self.feed(RebalanceAsked(peer, request, slots))

        self._send(arrive)

    def dies_now(self, child: Child) -> bool:
        return self._dies_now(child)
