"""A model of the worker process around the hash worker: links, lockstep over the board, the exchange, and
STOP and GO. It follows `worker_svc/rank.py` and `group.py`, which need real time and shared memory."""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import msgspec

from phalanx.protocol.messages import ExpertCounts
from phalanx.protocol.placement import EMPTY, Placement
from phalanx.protocol.steps import Link, StepPlan, StepResult
from phalanx.protocol.topology import Topology
from sim.hash_worker import HashWorker
from sim.world_body import MS, Body

if TYPE_CHECKING:
    from sim.host import Child, Row
    from sim.world_node import Node

COUNTS_EVERY_STEPS = 8
Stamp = tuple[int, int, int]  # worker incarnation, epoch, step


class MemoryLink(Link):
    """The two rings of a seat, as queues."""

    def __init__(self, node: "Node", seat: int) -> None:
        self._node, self._seat = node, seat
        self.plans: deque[StepPlan] = deque()
        self.results: deque[object] = deque()
        self._taken = False

    def send_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._node.ring_worker(self._seat)

    def next_plan(self) -> StepPlan | None:
        return self.plans.popleft() if self.plans else None

    @property
    def taken(self) -> bool:
        return self._taken

    def send_result(self, result: object) -> None:
        self._taken = True
        self.results.append(result)
        self._node.ring_scheduler(self._seat)

    def next_result(self) -> object:  # type: ignore[override]
        return self.results.popleft() if self.results else None

    def close(self) -> None:
        self._node.forget_link(self)


@dataclass(eq=False)
class Running:
    """A step under way at one rank."""

    plan: StepPlan | None
    number: tuple[int, int]  # epoch and step
    region: "Region"  # where it receives
    peers: dict[int, int]  # with their incarnations
    since_ns: int
    phase: str = "post"  # then "compute", "exchange", "tail"

    def behind(self, node: "Node") -> list[int]:
        """The peers that it waits for."""
        if self.phase == "post":
            return [peer for peer in self.peers if node.posted[peer] < self.number]
        if self.phase == "exchange":
            flags = self.region.flags
            return [peer for peer in self.peers if flags.get(peer, 0) != self.number[1]]
        return []


@dataclass(eq=False)
class Region:
    """Where peers store for one epoch: the newest step of each, and what came with it."""

    flags: dict[int, int] = field(default_factory=dict[int, int])
    rows: dict[int, Stamp] = field(default_factory=dict[int, Stamp])


class WorkerBody(Body):
    def __init__(self, node: "Node", child: "Child") -> None:
        super().__init__(node, child)
        self.seat = child.spec.seat
        shape = node.world.shape
        num_blocks = shape.num_blocks + (self.seat % 3) * shape.uneven
        most = node.world.model.max_positions
        self.hash = HashWorker(
            child.incarnation, num_blocks, shape.num_slots, most, **node.world.ring
        )
        self.hash.staging = node.staged
        self.generation = 0  # of its arenas: grows with each scheduler
        self.arena = f"kv-{self.seat}-{child.incarnation}"
        self.snapshots = f"snap-{self.seat}-{child.incarnation}"
        self.link: MemoryLink | None = None
        self.link_number = 0
        self.prepared: Topology | None = None
        self.region = Region()
        self.epoch = 0  # that it runs
        self.members: list[int] = []
        self.outboxes: dict[int, Region] = {}
        self.incarnations: dict[int, int] = {}
        self.slots: dict[tuple[int, int], int] = {}  # what lies in its memory, by layer and slot
        self.next: Placement | None = None  # that is proposed, once it is taken up
        self.refused = 0  # the version of one that it cannot copy
        self.step = 1  # the next one
        self.running: Running | None = None
        self.steps_counted = 0

    def turn(self) -> None:
        self.node.look(self.child)

    # ------------------------------------------------------------ steps

    def look(self) -> None:
        """One look at the world while the epoch word is even, or a step is under way."""
        if self.running is not None and not self._advance():
            return
        word = self.node.word
        if word % 2 == 1:
            self.node.obey_stop(self)
            return
        self._adopt_link()
        if self.epoch != word and not self._enter(word):
            return
        self._consider()
        if not self.alive:
            return
        plan = self._next_plan()
        if plan is not None or self._peer_waits():
            self._post(plan)

    def _next_plan(self) -> StepPlan | None:
        while self.link is not None and (plan := self.link.next_plan()) is not None:
            if plan.seen >= self.hash.aborted:
                return plan
            self.link.send_result(self.hash.run(plan))  # made without knowing of an abandoned one
        return None

    def _peer_waits(self) -> bool:
        return any(self.node.posted[peer] >= (self.epoch, self.step) for peer in self.outboxes)

    def _post(self, plan: StepPlan | None) -> None:
        peers = {peer: self.incarnations[peer] for peer in self.outboxes}
        step = (self.epoch, self.step)
        self.running = Running(plan, step, self.region, peers, self.now_ns)
        posted = self.node.posted
        self.node.votes[self.seat, self.step % 2] = self.row.ready
        posted[self.seat] = number = (self.epoch, self.step)
        # Everyone's bell is rung; who waits for others as well goes on sleeping, and is spared here.
        last = all(posted[peer] >= number for peer in self.outboxes)
        for peer in self.outboxes:
            body = self.node.worker(peer)
            if body is not None and (last or body.running is None):
                body.wake()
        self.wake(0)

    def _advance(self) -> bool:
        """Whether the step under way is over: committed, or abandoned because the epoch moved."""
        running = self.running
        assert running is not None
        epoch, _ = running.number
        if running.phase in ("compute", "tail"):
            return False  # it looks at nothing before that is done
        if not running.behind(self.node):
            if running.phase == "post":
                running.phase = "compute"
                self._flip()
                self.node.checks.step_begins(self)
                self.later(self.node.step_ns(running.plan), lambda: self._store(running))
            else:
                running.phase = "tail"
                self.later(self.node.step_ns() // 4, lambda: self._commit(running))
            return False
        if self.node.word == epoch or self._may_finish(running):
            return False
        self._abandon(running)
        return True

    def _may_finish(self, running: Running) -> bool:
        """Nobody fell, and none that we wait for has stopped without this step."""
        odd = running.number[0] + 1
        if running.phase != "exchange" or self.node.word != odd or self.node.ends_steps:
            return False
        return all(self.node.rows[peer].stop != odd for peer in running.behind(self.node))

    def _store(self, running: Running) -> None:
        """Our rows go to the peers' regions."""
        if self.node.world.is_poison(running.plan):
            self.node.die(self.child, -11)
            return
        self.store()
        running.phase = "exchange"
        self.wake(0)

    def store(self) -> None:
        for peer, region in self.outboxes.items():
            region.rows[self.seat] = (self.incarnation, self.epoch, self.step)
            region.flags[self.seat] = self.step
            flags = region.flags.values()
            if len(flags) == len(self.outboxes) and all(flag == self.step for flag in flags):
                self.node.ring_worker(peer)

    def _commit(self, running: Running) -> None:
        for peer, incarnation in running.peers.items():
            stamp = (incarnation, *running.number)
            found = running.region.rows.get(peer)
            self.node.require(
                found == stamp, f"{self.name} computed with rows {found}, not with {stamp}"
            )
        if running.plan is not None:
            assert self.link is not None
            self.link.send_result(self.hash.run(running.plan))
        self.step += 1
        self.running = None
        self.row.steps += 1
        self.node.world.steps += 1
        self.node.gets_on(self.child)
        self._count()
        self.wake(0)

    def _abandon(self, running: Running) -> None:
        self.running = None
        if running.plan is None:
            return
        assert self.link is not None
        if running.phase == "post":
            self.hash.aborted = running.plan.seq
            self.link.send_result(StepResult(running.plan.seq, aborted=True))
        else:
            self.link.send_result(self.hash.run(running.plan, abandon=True))

    def _adopt_link(self) -> None:
        number = self.node.seats[self.seat].link
        if number in (0, self.link_number):
            return
        link = self.node.links.get((self.seat, number))
        if link is None:
            return
        self.link_number = number
        if link.taken:
            return  # by the worker before us
        self.link = link
        self.hash.reset()
        self.generation += 1
        hello = msgspec.structs.replace(
            self.hash.hello(), block_arena=self.arena, snapshot_arena=self.snapshots
        )
        link.send_result(hello)

    # ------------------------------------------------------------ epochs

    def is_member(self, topology: Topology) -> bool:
        me = topology.seat(self.seat)
        return me is not None and me.state == "member" and me.worker_incarnation == self.incarnation

    def prepare(self, topology: Topology) -> None:
        """Ready to run that epoch: a receive region of its own, experts loaded."""
        self.epoch, self.outboxes, self.prepared, self.next = 0, {}, topology, None
        placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        self.slots.update({(layer, slot): e for layer, slot, e in self.places(placement)})
        self.region = self.fresh_region()
        self.node.regions[self.seat, self.incarnation] = (topology.epoch, self.region)

    def fresh_region(self) -> Region:
        return Region()

    def _enter(self, epoch: int) -> bool:
        topology = self.prepared
        if topology is None or topology.epoch != epoch or not self.is_member(topology):
            return False
        members = topology.members()
        self.incarnations = {seat.seat: seat.worker_incarnation for seat in topology.seats}
        outboxes = {}
        for peer in members:
            if peer != self.seat:
                known = self.node.regions.get((peer, self.incarnations[peer]))
                if known is None or known[0] != epoch:
                    return False  # it died since: its STOP is on the way
                outboxes[peer] = known[1]
        self.epoch, self.members, self.outboxes, self.step = epoch, members, outboxes, 1
        self.placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        return True

    # ------------------------------------------------------------ a placement that is proposed

    @property
    def row(self) -> "Row":
        return self.node.rows[self.seat]

    def places(self, placement: Placement) -> list[tuple[int, int, int]]:
        """(layer, slot, expert) of all that it holds for us."""
        index = placement.seats.index(self.seat)
        return [
            (layer, slot, expert)
            for layer, rows in enumerate(placement.physical_to_logical)
            for slot, expert in enumerate(rows[index])
            if expert != EMPTY
        ]

    def proposed(self) -> Placement | None:
        """What is proposed to the group that we are in, and not run by it yet."""
        proposal = self.node.proposal
        if proposal is None or proposal.epoch != self.epoch:
            return None
        placement = msgspec.msgpack.decode(proposal.placement, type=Placement)
        return None if placement.version == self.row.run else placement

    def _consider(self) -> None:
        """Between two steps: take up what is proposed, let go of what no longer is."""
        placement = self.proposed()
        if placement is None or (self.next is not None and placement.version != self.next.version):
            self.next, self.row.ready = None, self.row.run
        if placement is None or self.next is not None or placement.version == self.refused:
            return
        if self.node.rng.random() < self.node.world.shape.cannot_copy:
            self.refused = placement.version
            return
        self.next = placement
        here = self.places(self.placement)
        lacking = [place for place in self.places(placement) if place not in here]
        self._copy(placement, lacking)

    def _copy(self, placement: Placement, lacking: list[tuple[int, int, int]]) -> None:
        """One expert after the other, beside the steps."""
        if self.next is not placement or self.node.dies_now(self.child):
            return
        if lacking:
            layer, slot, expert = lacking[0]

            def copied() -> None:
                if self.next is placement:
                    self.slots[layer, slot] = expert
                    self.row.copied += 1
                    self._copy(placement, lacking[1:])

            self.later(self.node.rng.randrange(*self.node.world.shape.copy_ns), copied)
        elif self.still_proposed(placement):
            self.row.ready = placement.version
            self.node.dies_now(self.child)

    def still_proposed(self, placement: Placement) -> bool:
        found = self.proposed()
        return found is not None and found.version == placement.version

    def _flip(self) -> None:
        """The round is complete: if everyone was ready for the next placement, this step is its first."""
        votes = {self.node.votes[seat, self.step % 2] for seat in self.members}
        (version,) = votes if len(votes) == 1 else (self.row.run,)
        if version != self.row.run:
            assert self.next is not None and self.next.version == version
            self.placement, self.next, self.row.run = self.next, None, version
            self.node.world.flips += 1

    def died(self) -> None:
        # Stores that the device has begun arrive even so.
        computing = self.running is not None and self.running.phase == "compute"
        if computing and self.node.rng.random() < 0.5:
            self.node.after(self.node.rng.randrange(5 * MS), self.store)

    # ------------------------------------------------------------ reports

    def _count(self) -> None:
        self.steps_counted += 1
        if self.steps_counted < COUNTS_EVERY_STEPS:
            return
        self.steps_counted = 0
        layers, experts = self.node.num_layers, self.node.num_experts
        rng = self.node.rng
        hot = Random(f"{self.node.seed} {self.now_ns // self.node.world.shape.loads_ns}")
        weights = [hot.paretovariate(1.0) for _ in range(layers * experts)]
        counts = [int(rng.uniform(0.8, 1.2) * min(40.0, weight) * 20) for weight in weights]
        message = ExpertCounts(
            self.seat,
            self.node.word,
            COUNTS_EVERY_STEPS,
            layers,
            experts,
            b"".join(count.to_bytes(8, "little") for count in counts),
        )
        self.node.to_eplb(message)
