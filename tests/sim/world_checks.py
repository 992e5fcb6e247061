"""What must hold in the whole system, beyond what the supervisor's and the schedulers' simulators check."""

from typing import TYPE_CHECKING

import msgspec

from phalanx.protocol.placement import Placement
from phalanx.protocol.topology import Topology
from phalanx.supervisor.ending import NodeStage
from sim.host_checks import Checks
from sim.scheduler_checks import check_clean
from sim.world_body import MS
from sim.world_faults import STRUCK_UNTIL_MS

if TYPE_CHECKING:
    from sim.host import Child
    from sim.world_gateway import GatewayBody
    from sim.world_node import Node
    from sim.world_worker import WorkerBody


class WorldChecks(Checks):
    host: "Node"  # type: ignore[assignment]

    def __init__(self, host: "Node") -> None:
        super().__init__(host)
        self.versions: dict[tuple[int, int], int] = {}  # of the placement, by epoch and step

    def sigkilled(self, child: "Child") -> None:
        super().sigkilled(child)
        supervising = self.host.core.stage in (NodeStage.RUNNING, NodeStage.DRAINING)
        hard = child.mood != "well" or child.afflicted or self.host.plan.slow_answer
        process = self.host.core.processes.get(child.spec.name)
        told = process is not None and process.kill_ns > 0  # to end, and had its time
        self.require(
            bool(hard) or told or not supervising, f"{child.spec.name} is killed, and was well"
        )

    def step_begins(self, body: "WorkerBody") -> None:
        """All members post their step before anyone computes: whoever is in this epoch runs the same."""
        node = self.host
        for peer in body.outboxes:
            other = node.worker(peer)
            if other is None or other.epoch != body.epoch:
                continue  # it is dead, or obeys the next STOP
            self.require(other.members == body.members, f"{body.name} and {peer} differ in members")
            self.require(
                other.incarnation == body.incarnations[peer],
                f"{body.name} steps with another worker-{peer} than the topology says",
            )

        version = self.versions.setdefault((body.epoch, body.step), body.placement.version)
        same = version == body.placement.version
        self.require(
            same, f"step {body.step} runs {version}, at {body.name} {body.placement.version}"
        )
        self._one_meaning(body.placement)
        for layer, slot, expert in body.places(body.placement):
            found = body.slots.get((layer, slot))
            text = f"{body.name} has {found} where layer {layer} has {expert}, in slot {slot}"
            self.require(found == expert, text)

    def _check_experts(self, topology: Topology) -> None:
        """Survivors load what is lost, and nothing that one of them still runs."""
        super()._check_experts(topology)
        node = self.host
        group = [(s.seat, s.worker_incarnation) for s in topology.seats if s.state == "member"]
        bodies = [node.worker(seat) for seat, n in self.running if (seat, n) in group]
        survivors = [body for body in bodies if body is not None and body.epoch]
        if topology.epoch != self.running_epoch + 2 or node.least_room:
            return  # another GO came between, or they may be dealt anew
        before, now = {seat for seat, _ in self.running}, set(topology.members())
        if len(before - now) > 1 or now - before:
            return  # one loss, or join, is worked out after the other: the next may undo it
        placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        kept = {(layer, expert) for b in survivors for layer, _, expert in b.places(b.placement)}
        for body in survivors:
            known = {(layer, expert) for layer, _, expert in body.places(body.placement)}
            for layer, _, expert in body.places(placement):
                needless = (layer, expert) in kept and (layer, expert) not in known
                text = f"{body.name} loads expert {expert} of layer {layer}, which others run"
                self.require(not needless, f"GO {topology.epoch}: {text}")

    def whole(self) -> None:
        """Healed: every seat is a member, every process runs."""
        node = self.host
        self.require(node.core.stage is NodeStage.RUNNING, "the node is stopping")
        self.require(not node.core.reasons(), f"not healed: {node.core.reasons()}")
        topology = node.topology
        self.require(
            topology is not None and topology.members() == sorted(node.core.workers),
            f"not every seat is a member: {topology}",
        )
        self.require(len(node.core.workers) == self.ranks, f"{self.ranks} ranks were asked for")
        self.require(not node.core.changes.told, f"under way: {node.core.changes.told}")

    def ends_told(self) -> None:
        """The node was told to stop, and has: every sequence has its end on disk, and a reader that reads got it."""
        world, deaths = self.host.world, self.deaths["gateway"]
        struck_late = self.gateway_hurt_ns > self.stop_ns + STRUCK_UNTIL_MS * MS
        unborn = any(name == "gateway" for name, _ in self.host.never_born)
        if not self.gateway_served:
            return  # nobody could ask it for anything: it is left to the next start
        if struck_late or unborn or deaths > 4 or self.gateway_slept or world.disk_was_full:
            return
        for request_id, entry in world.disk.entries.items():
            ends = world.disk.finals.get(request_id, {})
            self.require(len(ends) == entry.n, f"{request_id} has {len(ends)} of {entry.n} ends")
        told = {reading.flow.request_id for reading in world.readings if reading.flow.done}
        for reading in world.readings:
            client, flow = reading.client, reading.flow
            poor = client.dead or client.lossy or client.stalled_once or client.is_heir
            if flow.accepted and not poor:  # of two readers of one request the later one counts
                self.require(flow.request_id in told, f"nobody told how {flow.request_id} ended")

    def drained(self) -> None:
        """Nothing runs any more, and nothing is held by anyone."""
        node = self.host
        for scheduler in node.schedulers():
            core = scheduler.core
            self.require(
                not core.sequences and not core.busy,
                f"{scheduler.name} still has {list(core.sequences)}",
            )
            self.require(core.store is None or not core.store.holders(), "the store holds blocks")
            check_clean(core)
        gateway = node.gateway
        self.require(gateway is not None, "there is no gateway")
        assert gateway is not None
        idle = self.idle_seats()
        self.require(not idle, f"the gateway gives nothing to the seats {idle} of a whole node")
        left = what_is_left(gateway)
        self.require(not left, f"the gateway still has {left}")

    def idle_seats(self) -> list[int]:
        """Those that could be given nothing now, though somebody sits there."""
        node = self.host
        seats = node.gateway.core._placement.seats if node.gateway is not None else None
        usable = seats.usable(node.now_ns) if seats is not None else []
        return sorted(node.core.workers.keys() - usable)


def what_is_left(body: "GatewayBody") -> str:
    """What a gateway still has to do, named; empty when nothing is open."""
    gateway = body.core
    admission, placement, texts = gateway._admission, gateway._placement, gateway._texts
    seats = placement.seats.by_number.values()
    left = {
        "clients to feed": not gateway.idle,
        "journal writes": not body.journal.idle,
        "pending requests": admission.pending or admission._by_call,
        "sequences to recover": gateway._recovery,
        "open sequences": admission.sequences or admission.nbytes,
        "abort calls": gateway._lives._abort_calls,
        "replays": not gateway._reruns.idle,
        "streams at seats": any(seat.streams or seat.handles for seat in seats),
        "aborts to repeat": placement.attempts._aborts or placement.attempts._aborting,
        "unanswered submits": placement.attempts._calls,
        "texts": texts._dirty or texts._encodes,
        "tokenizer calls": any(t.calls or t.busy for t in texts._pool.values()),
    }
    return ", ".join(name for name, there in left.items() if there)
