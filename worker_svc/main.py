"""The worker process: one GPU's (or CPU's) share of the model, stepping in lockstep with its peers.

Its whole life is the loop in `Worker.run`. It sleeps on one doorbell, rung by its scheduler (a
plan), its peers (a posted step, expert rows) and the supervisor (the epoch, the topology).
"""

import json

import msgspec
import torch

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.codec import encode
from phalanx.protocol.errors import ArenaError, ConfigError, EpochChanged
from phalanx.protocol.limits import BEAT_PERIOD_MS
from phalanx.protocol.link import connect_dealer, send
from phalanx.protocol.messages import ExpertCounts
from phalanx.protocol.placement import (
    EMPTY,
    Placement,
    after_join,
    initial_placement,
    slots_per_rank,
)
from phalanx.protocol.rundir import EPLB_SOCKET, endpoint
from phalanx.protocol.service import Service
from phalanx.protocol.steps import Link, StepPlan, StepResult
from phalanx.protocol.topology import Topology
from phalanx.worker_svc.engine import Engine
from phalanx.worker_svc.exchange import Exchange, Shape
from phalanx.worker_svc.experts import GroupExperts
from phalanx.worker_svc.fingerprint import numerics_fingerprint
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.fields import ConfigError as ModelConfigError
from phalanx.worker_svc.model.invariance import check_invariance
from phalanx.worker_svc.model.shards import CheckpointError
from phalanx.worker_svc.model.tensors import num_experts

_COUNTS_EVERY_STEPS = 64  # steps between two reports of expert counts


def serve(service: Service) -> None:
    """Load, say so, and run until told to stop."""
    torch.set_num_threads(service.config.worker.threads)
    torch.set_grad_enabled(False)
    try:
        worker = Worker(service)
    except (ModelConfigError, CheckpointError) as error:
        raise ConfigError(str(error)) from error
    service.ready(worker.fingerprint)
    worker.run()
    worker.close()


class Worker:
    def __init__(self, service: Service) -> None:
        self.service, self.board = service, service.board
        self.seat, self.row = service.seat, service.board.seats[service.seat]
        self.row.worker_incarnation = service.incarnation
        config = service.config
        service.progress("check numerics")
        check_invariance()
        service.progress("hash weights")
        model_dir = config.model_path
        self.fingerprint = numerics_fingerprint(model_dir, config.device, config.worker.threads)
        self.weights = self._load()
        self.experts = GroupExperts(self.weights, self.seat, self._alive)
        service.progress("allocate caches")
        eos = json.loads((model_dir / "config.json").read_text())["eos_token_id"]
        self.engine = Engine(
            self.weights,
            self.experts,
            config,
            self.seat,
            service.incarnation,
            eos,
            self.fingerprint,
        )
        self.shape = Shape(
            config.scheduler.max_num_batched_tokens * self.weights.config.num_experts_per_tok,
            self.weights.config.hidden_size,
        )
        self.link: Link | None = None
        self._link_number = 0
        self.group: Group | None = None
        self.exchange: Exchange | None = None
        self._stopped_at = 0  # the odd epoch acknowledged last
        self._prepared: Topology | None = None  # the topology that we are ready to run
        self.eplb = connect_dealer(endpoint(config.run_path, EPLB_SOCKET))
        self._steps_counted = 0
        for name, value in self.engine.sizes.lines():
            service.log.info("memory plan", item=name, size=value)

    def _load(self) -> Weights:
        """Load what the seat holds in the placement that runs, else in that of a full node.

        GO names the placement that counts; whatever differs is loaded then.
        """
        service, config = self.service, self.service.config
        model = ModelConfig.load(config.model_path)
        topology = self.board.topology()
        placement = initial_placement(
            model.num_hidden_layers,
            model.n_routed_experts,
            range(config.ranks),
            slots_per_rank(model.n_routed_experts, config.ranks),
        )
        if topology is not None and topology.placement:
            current = msgspec.msgpack.decode(topology.placement, type=Placement)
            placement = current if self.seat in current.seats else after_join(current, self.seat)
        index = placement.seats.index(self.seat)
        backbone = [[max(e, 0) for e in layer[index]] for layer in placement.physical_to_logical]
        drafts = [
            list(range(num_experts(model, model.num_hidden_layers + stage)))
            for stage in range(model.draft_stages)
        ]
        return load_checkpoint(
            config.model_path,
            backbone + drafts,
            progress=lambda done, total: service.progress("load weights", done / max(total, 1)),
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Step while there is work anywhere in the group, sleep otherwise, obey every epoch."""
        while not self.service.stopping:
            heard = self.row.bell.value
            self.service.beat()
            if not self._turn():
                self.row.bell.wait(heard, BEAT_PERIOD_MS)

    def _turn(self) -> bool:
        """One look at the world. False when there was nothing to do."""
        epoch = self.board.epoch
        if epoch % 2 == 1:
            return self._obey_stop(epoch)
        self._adopt_link()
        if self.group is None or self.group.epoch != epoch:
            return self._enter(epoch)
        plan = self.link.next_plan() if self.link is not None else None
        if plan is None and not self.group.peer_waits():
            self.service.row.phase = ProcessPhase.READY
            return False
        self._step(plan)
        return True

    def _step(self, plan: StepPlan | None) -> None:
        assert self.group is not None
        self.service.row.phase = ProcessPhase.BUSY
        try:
            self.group.enter(plan is not None, 0)
            if plan is None:
                self.experts.serve()
            else:
                result = self.engine.run(plan)
                self._answer(result)
        except EpochChanged:
            if plan is not None:
                self._answer(StepResult(plan.seq, aborted=True))
            return
        self.row.steps_run += 1
        self._report_counts()

    def _answer(self, result: StepResult) -> None:
        assert self.link is not None
        self.link.send_result(result)

    def _adopt_link(self) -> None:
        """Take up the link that the scheduler published last: a new scheduler, or its answer to us."""
        number = self.row.link
        if number in (0, self._link_number):
            return
        try:
            link = Link.attach(self.service.config.node, self.seat, number, self.row)
        except ArenaError as error:  # its scheduler died meanwhile; the next one publishes again
            self.service.log.warning("link gone", link=number, error=str(error))
            return
        if self.link is not None:
            self.link.close()
        self.link, self._link_number = link, number
        self.engine.reset()
        link.send_result(self.engine.hello())
        self.service.log.info("link adopted", scheduler=number >> 32, number=number & 0xFFFFFFFF)

    # ------------------------------------------------------------------ epochs

    def _obey_stop(self, epoch: int) -> bool:
        """No step is in flight here: acknowledge STOP, then prepare for the topology that follows."""
        if self._stopped_at != epoch:
            self._stopped_at = epoch
            self.row.stop_ack = epoch
            self.board.supervisor_bell.ring()
            return True
        topology = self.board.topology()
        if topology is None or topology.epoch != epoch + 1 or self._prepared == topology:
            return False
        self._prepare(topology)
        self._prepared = topology
        if self._is_member(topology):
            self.row.go_ack = topology.epoch
            self.board.supervisor_bell.ring()
        return True

    def _is_member(self, topology: Topology) -> bool:
        me = topology.seat(self.seat)
        return (
            me is not None
            and me.state == "member"
            and me.worker_incarnation == self.service.incarnation
        )

    def _prepare(self, topology: Topology) -> None:
        """Hold the experts that the placement wants and make the receive region of the new epoch."""
        self.group = None
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None
        if not self._is_member(topology):
            return
        self.service.row.phase = ProcessPhase.LOADING
        placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        loaded = 0
        index = placement.seats.index(self.seat)
        for layer, seats in enumerate(placement.physical_to_logical):
            held = self.weights.slots(layer)
            for slot, expert in enumerate(seats[index]):
                if expert != EMPTY and held[slot] != expert:
                    matrices = self.weights.load_expert(layer, expert)
                    self.weights.put_expert(layer, slot, expert, matrices)
                    loaded += 1
            self._alive()
        self.exchange = Exchange(
            self.service.config.node,
            self.seat,
            self.service.incarnation,
            topology.epoch,
            topology.members(),
            self.shape,
        )
        self.experts.enter_epoch(placement, self.exchange)
        self.service.log.info("prepared", epoch=topology.epoch, experts_loaded=loaded)

    def _enter(self, epoch: int) -> bool:
        """The epoch word became even: join, if it is the epoch that we prepared for."""
        topology = self._prepared
        if topology is None or topology.epoch != epoch or self.exchange is None:
            return False
        group = Group(self.board, self.seat, topology.members(), epoch, self.service.beat)
        incarnations = {seat.seat: seat.worker_incarnation for seat in topology.seats}
        try:
            self.exchange.connect(group, incarnations)
        except ArenaError as error:  # a peer died since: its STOP is on the way
            self.service.log.warning("peer region gone", epoch=epoch, error=str(error))
            return False
        self.group = group
        self.service.row.phase = ProcessPhase.READY
        self.service.log.info("epoch", epoch=epoch, members=group.members)
        return True

    # ------------------------------------------------------------------ reports

    def _alive(self) -> None:
        self.service.row.advance()
        self.service.beat()

    def _report_counts(self) -> None:
        """Tell the planner which experts our rows chose. Losing a report costs nothing."""
        self._steps_counted += 1
        if self._steps_counted < _COUNTS_EVERY_STEPS:
            return
        counts = self.engine.expert_counts
        layers, experts = counts.shape
        message = ExpertCounts(
            self.seat, self.board.epoch, self._steps_counted, layers, experts, counts.tobytes()
        )
        send(self.eplb, encode(message))
        counts[:] = 0
        self._steps_counted = 0

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
        if self.link is not None:
            self.link.close()
        self.engine.close()
        self.eplb.close()
