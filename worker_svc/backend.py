"""The backend that computes: the model's share of one rank, with its experts spread over the group."""

import json
import time
from collections.abc import Callable

import msgspec
import torch

from phalanx.kernels import registry
from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ConfigError, EpochChanged, NoRoom
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.placement import (
    EMPTY,
    Placement,
    after_joins,
    initial_placement,
    slots_per_rank,
    slots_used,
)
from phalanx.protocol.rundir import write_plan
from phalanx.protocol.service import Service
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.worker_svc.ahead import Ahead
from phalanx.worker_svc.devices import rank_device
from phalanx.worker_svc.engine import Engine
from phalanx.worker_svc.exchange import Exchange, Region, Shape
from phalanx.worker_svc.expert_bits import ExpertBits
from phalanx.worker_svc.experts import GroupExperts
from phalanx.worker_svc.fingerprint import numerics_fingerprint
from phalanx.worker_svc.gpu_room import Undone, done, room_for
from phalanx.worker_svc.gpu_shapes import unsuited
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.host_weights import HostWeights
from phalanx.worker_svc.losses import loss_lines
from phalanx.worker_svc.marks import Marks, event_mark
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.fields import ConfigError as ModelConfigError
from phalanx.worker_svc.model.invariance import check_invariance
from phalanx.worker_svc.model.recorded import RecordedSteps, cuda_graphs
from phalanx.worker_svc.model.shards import CheckpointError
from phalanx.worker_svc.model.threads import set_up_thread
from phalanx.worker_svc.model.truncation import Truncation
from phalanx.worker_svc.model.weights_hash import weights_hash
from phalanx.worker_svc.rebalance import NotReady
from phalanx.worker_svc.spare import spare_slots
from phalanx.worker_svc.warm import warm_up, warm_up_experts


class ModelBackend:
    """Loads on construction, saying how far it is. Raises ConfigError when it cannot run as asked."""

    def __init__(self, service: Service, ahead: Ahead | None = None) -> None:
        """`ahead`: what there is already."""
        config, ahead = service.config, ahead or Ahead()
        set_up_thread(config.worker.threads)
        device = rank_device(config, service.seat)
        registry.prefer(config.worker.kernels)
        self._service, self._seat = service, service.seat
        self._warm = False
        self._warm_for = (0, 0)  # ranks, and expert slots of a layer
        self._phase = ""
        if device.type == "cuda":
            from phalanx.kernels.triton.compiling import watch_compiling

            watch_compiling(self._compile_begins, self._compile_ended)
        worker = config.worker
        self._truncation = Truncation(worker.yoco_truncation, worker.yoco_keep_tokens)
        service.progress("check numerics")
        if (config.exact or device.type == "cpu") and not ahead.checked:
            check_invariance(device)
        service.progress("hash weights")
        self._host = ahead.host or HostWeights.find(config.node, config.model_path)
        self._weights_hash = self._host.weights if self._host else weights_hash(config.model_path)
        where = "made ahead" if ahead.dense else "host" if self._host else "files"
        service.log.info("weights", where=where)
        self.fingerprint = numerics_fingerprint(
            self._weights_hash,
            config.device,
            config.worker.threads,
            self._truncation,
            registry.label() if device.type == "cuda" else "",
        )
        try:
            self._weights = self._load(device, ahead.dense[0] if ahead.dense else None)
        except (ModelConfigError, CheckpointError) as error:
            raise ConfigError(str(error)) from error
        self._marks = Marks(self._alive, event_mark if device.type == "cuda" else None)
        self.bits = ExpertBits(self._weights, self._seat)
        self._experts = GroupExperts(self._weights, self._seat, self._marks.layer, self.bits.rows)
        service.progress("allocate caches")
        self._engine = Engine(
            self._weights,
            self._experts,
            config,
            self._seat,
            service.incarnation,
            json.loads((config.model_path / "config.json").read_text())["eos_token_id"],
            self.fingerprint,
            self._marks.wait,
            service.board.seats[self._seat].blocks if device.type == "cpu" else 0,
            self._tell_repeated,
            ahead.dense[1] if ahead.dense else None,
        )
        service.board.seats[self._seat].blocks = self._engine.sizes.num_blocks
        shape = Shape(
            config.scheduler.max_num_batched_tokens * self._weights.config.num_experts_per_tok,
            self._weights.config.hidden_size,
        )
        newcomer = service.incarnation == 1 and service.board.epoch > 1
        self._region = Region(
            config.node, self._seat, service.incarnation, config.ranks, shape, newcomer=newcomer
        )
        self._exchange: Exchange | None = None
        if device.type == "cuda":
            self._warm_up()
        plan = [*self._engine.sizes.lines(), *self._loss_lines()]
        service.log.info("memory plan", **dict(plan))
        try:
            write_plan(config.run_path, service.seat, plan)
        except OSError as error:  # it is for people
            service.log.warning("memory plan not written", error=str(error))

    @property
    def expert_slots(self) -> int:
        """Of a layer: how many this rank has room for, beside all that it holds."""
        config, gpu = self._service.config, self._engine.sizes.gpu
        room = self._weights.slot_room(config.ranks, gpu.workspace if gpu else 0)
        return min(room, config.worker.expert_slots or room)

    def _loss_lines(self) -> list[tuple[str, str]]:
        experts, held = self._weights.config.n_routed_experts, len(self._weights.slots(0))
        ranks, sizes = self._service.config.ranks, self._engine.sizes
        return loss_lines(
            *(ranks, experts, held, self._spare, self.expert_slots),
            *(sizes.num_blocks - 1, self._service.config.scheduler.max_num_seqs),
        )

    def _warm_up(self) -> None:
        service, rows = self._service, self._service.config.scheduler.max_num_batched_tokens
        with torch.inference_mode():
            warm_up(
                self._engine.model,
                self._weights,
                rows,
                self._alive,
                self._warming,
                service.config.ranks,
            )
            if service.config.records_steps:
                self._record_steps()
        self._warm, self._warm_for = True, (service.config.ranks, len(self._weights.slots(0)))

    def _warming(self, phase: str, fraction: float) -> None:
        if phase != self._phase:
            self._phase = phase
            self._service.log.info("warming up", phase=phase)
        self._service.progress(phase, fraction)

    def _warm_up_group(self, ranks: int, get_on: Callable[[], None]) -> None:
        """Compile what the experts need in this group and did not before, so that no step waits for it."""
        wanted = (ranks, len(self._weights.slots(0)))
        if not self._warm or (ranks <= self._warm_for[0] and wanted[1] == self._warm_for[1]):
            return
        rows, started = self._service.config.scheduler.max_num_batched_tokens, time.monotonic()
        self._warm = False  # what is compiled here is not late
        try:
            with torch.inference_mode():
                warm_up_experts(self._weights, rows, ranks, get_on, lambda phase, share: get_on())
        finally:
            self._warm = True
        self._warm_for = wanted
        self._service.log.info("warm for the group", ranks=ranks, s=time.monotonic() - started)

    def _record_steps(self) -> None:
        service, engine, experts = self._service, self._engine, self._experts
        weights, started = self._weights, time.monotonic()
        num_slots = len(weights.slots(0))  # with more of them, experts lie elsewhere
        recorded = RecordedSteps(
            engine.model,
            experts.own,
            cuda_graphs(),
            engine.rooms(),
            suits=lambda: experts.alone and len(weights.slots(0)) == num_slots,
            launched=self._marks.layer,
            progress=lambda done: service.progress("record steps", done),
        )
        engine.model.recorded = recorded
        service.log.info("steps recorded", rooms=len(recorded), s=time.monotonic() - started)
        if recorded.failure:
            service.log.warning("not all steps recorded", error=recorded.failure)

    def _compile_begins(self, kernel: str) -> None:
        if self._warm:
            self._service.row.phase = ProcessPhase.COMPILING
        self._alive()

    def _compile_ended(self, kernel: str, seconds: float) -> None:
        self._alive()
        if self._warm:
            # Every stream waited for it: a case that `warm_up` does not reach.
            self._service.row.phase = ProcessPhase.BUSY
            self._service.log.warning("kernel compiled while serving", kernel=kernel, s=seconds)

    def _load(self, device: torch.device, dense: Weights | None) -> Weights:
        """Load what the seat holds in the placement that runs, else in that of a full node.

        GO names the placement that counts; whatever differs is loaded then.
        """
        service, config = self._service, self._service.config
        model = dense.config if dense is not None else ModelConfig.load(config.model_path)
        self._truncation.check(model)
        kernels = device.type == "cuda" and config.worker.kernels != "reference"
        if kernels and (why := unsuited(model)):
            raise ConfigError(why)
        topology = service.board.topology()
        slots = self._slots_to_load(model)
        if topology is not None and topology.placement:
            current = msgspec.msgpack.decode(topology.placement, type=Placement)
            coming = {s.seat for s in topology.seats if s.state in ("loading", "joining")}
            placement = after_joins(current, coming | {self._seat}, slots)
        else:
            layers, experts = model.num_hidden_layers, model.n_routed_experts
            placement = initial_placement(layers, experts, range(config.ranks), slots)
        index, used = placement.seats.index(self._seat), slots_used(placement, self._seat)
        self._spare = spare_slots(config, model, device, used)
        backbone = [
            [*layer[index][:used], *[EMPTY] * self._spare]
            for layer in placement.physical_to_logical
        ]
        drafts: list[list[int]] = [[]] * model.draft_stages  # nobody serves from them
        return load_checkpoint(
            config.model_path,
            backbone + drafts,
            held=self._host.shards if self._host else None,
            progress=lambda done, total: service.progress("load weights", done / max(total, 1)),
            device=device,
            dense=dense,
        )

    def _slots_to_load(self, model: ModelConfig) -> int:
        """Of each layer: enough for the loss of any one rank, unless it may be no more. Raises ConfigError."""
        experts, ranks = model.n_routed_experts, self._service.config.ranks
        most = self._service.config.worker.expert_slots or experts
        if most * ranks < experts:
            raise ConfigError(
                f"worker.expert_slots is {most}, and {ranks} ranks need {-(-experts // ranks)} each for the"
                f" {experts} experts of a layer: raise it, or start {-(-experts // most)} ranks"
            )
        return min(slots_per_rank(experts, ranks), most)

    def _alive(self) -> None:
        self._service.row.advance()
        self._service.beat()

    # ------------------------------------------------------------------ steps

    def hello(self) -> WorkerHello:
        return self._engine.hello()

    def reset(self) -> None:
        self._engine.reset()

    def restore(self, plan: StepPlan) -> None:
        self._engine.restore(plan)

    def run(self, plan: StepPlan) -> StepResult:
        self._marks.begin()
        with torch.inference_mode():  # a tenth faster than without gradients alone
            return done(
                lambda: self._engine.run(plan),
                self._tell_repeated,
                may_repeat=self._exchange is None or not self._exchange.peers,
            )

    def _tell_repeated(self, why: str) -> None:
        self._service.log.warning("tried again", why=why)

    def serve(self) -> None:
        self._marks.begin()
        with torch.inference_mode(), room_for("in a step of other ranks"):
            self._experts.serve()

    # ------------------------------------------------------------------ epochs

    def prepare(self, epoch: int, members: list[int], placement: Placement) -> int:
        self._look_for_host_weights()
        self._weights.check_room(slots_used(placement, self._seat))
        loaded = done(lambda: self._load_experts(epoch, placement), self._tell_repeated)
        failpoint("worker.prepare.after_load")
        own = None
        if len(members) > 1:
            own = self._region.enter(epoch, len(members), lambda: self._over(epoch))
            if own is None:
                raise EpochChanged(f"epoch {epoch} will not run")
        self._exchange = exchange = Exchange(self._region, epoch, members, own)
        done(lambda: self._enter_epoch(epoch, placement, exchange), self._tell_repeated)
        return loaded

    def _load_experts(self, epoch: int, placement: Placement) -> int:
        """Hold what the placement has here; how many had to be read. May be begun again.

        That may take long, and somebody who falls meanwhile makes it vain: then the others wait for us to
        say so. What was loaded stays, and is not read again.
        """
        loaded, index = 0, placement.seats.index(self._seat)
        used = slots_used(placement, self._seat)
        with room_for("while experts were loaded", Undone):
            for layer, seats in enumerate(placement.physical_to_logical):
                self._weights.widen(layer, used)
                held = self._weights.slots(layer)
                for slot, expert in enumerate(seats[index][:used]):
                    if expert == EMPTY or held[slot] == expert:
                        continue
                    self._get_on(epoch)
                    matrices = self._weights.load_expert(layer, expert)
                    self._weights.put_expert(layer, slot, expert, matrices)
                    loaded += 1
        return loaded

    def _enter_epoch(self, epoch: int, placement: Placement, exchange: Exchange) -> None:
        """May be begun again."""
        with room_for("while ranks formed a group", Undone):
            self._experts.enter_epoch(placement, exchange)
            self._warm_up_group(len(exchange.peers) + 1, lambda: self._get_on(epoch))

    def _get_on(self, epoch: int) -> None:
        """Say that we do: the supervisor waits for us as long as there is progress. Raises EpochChanged when
        it is for nothing."""
        if self._over(epoch):
            raise EpochChanged(f"epoch {epoch} will not run")
        self._alive()

    def _over(self, epoch: int) -> bool:
        """Whether the group will not come to run that epoch: it has begun to change anew."""
        self._service.beat()
        return self._service.board.epoch != epoch - 1

    def _look_for_host_weights(self) -> None:
        """They were not there yet when this worker started: what is missing now comes from them."""
        if self._host is not None:
            return
        config = self._service.config
        found = HostWeights.find(config.node, config.model_path)
        if found is not None and found.weights == self._weights_hash:
            self._host = found
            self._weights.adopt(found.shards)

    def leave(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def connect(self, group: Group, incarnations: dict[int, int]) -> None:
        assert self._exchange is not None, "an epoch is prepared before it runs"
        self._exchange.connect(group, incarnations)

    # ------------------------------------------------------------------ another placement while it runs

    @property
    def slots(self) -> int:
        layers = range(self._weights.config.num_hidden_layers)
        return min(len(self._weights.slots(layer)) for layer in layers)

    def bring(self, layer: int, slot: int, expert: int) -> None:
        """On a GPU in the order of its stream: behind every step that could have read the slot."""
        if self._weights.slots(layer)[slot] == expert:
            return
        self._look_for_host_weights()
        try:
            with torch.inference_mode(), room_for("while an expert was copied"):
                matrices = self._weights.load_expert(layer, expert)
                self._weights.put_expert(layer, slot, expert, matrices)
        except (NoRoom, MemoryError, OSError, CheckpointError) as error:
            why = str(error) or type(error).__name__
            raise NotReady(f"layer {layer}, expert {expert}: {why}") from error
        self._alive()

    def lay_out(self, placement: Placement, layer: int) -> None:
        try:
            with room_for("while rows were laid out"):
                self._experts.lay_out(placement, layer)
        except NoRoom as error:
            raise NotReady(f"layer {layer}: {error}") from error

    def flip(self) -> None:
        self._experts.flip()

    # ------------------------------------------------------------------ reports

    def take_counts(self) -> tuple[int, int, bytes] | None:
        counts = self._engine.expert_counts
        encoded = counts.cpu().numpy().tobytes()
        counts.zero_()
        return counts.shape[0], counts.shape[1], encoded

    def close(self) -> None:
        self._region.close()
        self._engine.close()
