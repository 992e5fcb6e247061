"""Nobody waits at a full rank while another one could serve it.

Looked at from outside, every few milliseconds of virtual time, in the cores themselves: which sequences wait because
their rank has no room, and which ranks have some. The clock of a sequence runs while both are so; it stands still, but is
not set back, on its way from one rank to another. So one that is handed to and fro shows as well.
"""

from typing import TYPE_CHECKING

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.scheduler_svc.blocks import blocks_for
from phalanx.scheduler_svc.prefill import may_start
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Sequence
from phalanx.services.gateway.seats import Need
from sim.world_body import MS

if TYPE_CHECKING:
    from sim.world import World
    from sim.world_gateway import GatewayBody
    from sim.world_node import Node
    from sim.world_scheduler import SchedulerBody

LOOK_NS = 10 * MS
LIMIT_NS = 1_000 * MS
Name = tuple[str, int]


class Waits:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._since: dict[Name, int] = {}
        self.longest_ns = 0
        self._look()

    def _look(self) -> None:
        world, node = self._world, self._world.node
        gateway = node.gateway if node is not None and not node.gone else None
        if node is None or gateway is None or not gateway.awake:
            self._since.clear()  # nobody who could move it
        else:
            self._look_at(node, gateway)
        if not world.over:
            world.clock.after(LOOK_NS, self._look)

    def _look_at(self, node: "Node", gateway: "GatewayBody") -> None:
        now_ns, since = self._world.now_ns, dict[Name, int]()
        ranks = [one for one in node.schedulers() if _serves(node, gateway, one)]
        for body in ranks:
            rank = body.core.rank
            for sequence in _waits_for_room(rank, self._world.shape.config):
                need = Need(blocks_for(sequence.num_tokens), rank.blocks_in_the_end(sequence))
                stream = gateway.core._find(*sequence.key)
                if stream is None or stream.pin is not None or stream.place is None:
                    continue
                if (stream.place.seat, stream.place.attempt) != (body.seat, sequence.attempt):
                    continue
                if any(
                    other is not body
                    and other.seat not in gateway.core._placement.seats.closed_for(stream)
                    and self._fits(other, need, stream.num_tokens_max)
                    for other in ranks
                ):
                    since[sequence.key] = self._since.get(sequence.key, now_ns)
        for key, first_ns in self._since.items():
            stream = gateway.core._find(*key)
            open_ = stream is not None and stream.final is None and stream.end is None
            if open_ and stream is not None and stream.place is None:
                since.setdefault(key, first_ns + LOOK_NS)  # on its way
        for key, first_ns in since.items():
            self.longest_ns = max(self.longest_ns, now_ns - first_ns)
            node.require(
                now_ns - first_ns < LIMIT_NS, f"{key} waits at a full rank, others have room"
            )
        self._since = since

    def _fits(self, body: "SchedulerBody", need: Need, tokens_max: int) -> bool:
        rank, config = body.core.rank, self._world.shape.config
        total = rank.pool.total
        if rank.num_waiting or not rank.free_slots or rank.num_running >= config.max_num_seqs:
            return False
        if tokens_max > total * BLOCK_SIZE:
            return False
        if not rank.num_running:
            return need.now <= rank.pool.free
        used = rank.pool.used + need.now
        if used <= config.prefill_watermark * total and used + rank.num_running <= total:
            return True
        return rank.pool.used + rank.reserved + need.in_the_end <= total


def _serves(node: "Node", gateway: "GatewayBody", body: "SchedulerBody") -> bool:
    """Its processes are well, and the gateway knows."""
    worker = node.worker(body.seat)
    seat = gateway.core._placement.seats.by_number.get(body.seat)
    well = body.awake and body.core.accepting and worker is not None and worker.awake
    return well and seat is not None and seat.takes(gateway.now_ns)


def _waits_for_room(rank: Rank, config: SchedulerConfig) -> list[Sequence]:
    """What waits there, if nothing of it may start."""
    waiting = [one for one in rank.waiting if rank.leader_of(one) is None]
    if not waiting:
        return []
    room = may_start(rank, waiting[0], config.max_num_seqs, config.prefill_watermark)
    return [] if room else waiting
