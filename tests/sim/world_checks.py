"""What must hold in the whole system, beyond what the supervisor's and the schedulers' simulators check."""

from typing import TYPE_CHECKING

from phalanx.supervisor.core import NodeStage
from sim.host_checks import Checks
from sim.scheduler_checks import check_clean

if TYPE_CHECKING:
    from sim.host import Child
    from sim.world_gateway import GatewayBody
    from sim.world_node import Node
    from sim.world_worker import WorkerBody


class WorldChecks(Checks):
    host: "Node"  # type: ignore[assignment]

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
                other.placement == body.placement, f"{body.name} and {peer} differ in placement"
            )
            self.require(
                other.incarnation == body.incarnations[peer],
                f"{body.name} steps with another worker-{peer} than the topology says",
            )

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
        left = what_is_left(gateway)
        self.require(not left, f"the gateway still has {left}")


def what_is_left(body: "GatewayBody") -> str:
    """What a gateway still has to do, named; empty when nothing is open."""
    gateway = body.core
    admission, placement, texts = gateway._admission, gateway._placement, gateway._texts
    seats = placement.seats.by_number.values()
    left = {
        "clients to feed": not gateway.idle,
        "journal writes": not body.journal.idle,
        "pending requests": admission.pending or admission._by_call,
        "sequences to recover": gateway._recovering,
        "open sequences": admission.sequences or admission.nbytes,
        "abort calls": gateway._abort_calls,
        "replays": not gateway._replays.idle,
        "streams at seats": any(seat.streams or seat.handles for seat in seats),
        "aborts to repeat": placement._aborts or placement._aborting,
        "unanswered submits": placement._calls,
        "texts": texts._dirty or texts._encodes,
        "tokenizer calls": any(t.calls or t.busy for t in texts._pool.values()),
    }
    return ", ".join(name for name, there in left.items() if there)
