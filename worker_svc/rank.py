"""The life of a rank's worker, whatever computes its steps: epochs, links, lockstep.

It sleeps on one doorbell, rung by its scheduler (a plan), its peers (a posted step, expert rows) and
the supervisor (the epoch, the topology). What a step does is the backend's business.
"""

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from phalanx.protocol import faults
from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.codec import encode
from phalanx.protocol.errors import ArenaError, EpochChanged
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import BEAT_PERIOD_MS
from phalanx.protocol.link import connect_dealer, send
from phalanx.protocol.messages import ExpertCounts, ExpertReport
from phalanx.protocol.placement import Placement
from phalanx.protocol.rundir import EPLB_SOCKET, endpoint
from phalanx.protocol.service import Service
from phalanx.protocol.steps import Link, StepPlan, StepResult, ToScheduler, WorkerHello
from phalanx.protocol.topology import Topology
from phalanx.worker_svc.agreement import Agreement
from phalanx.worker_svc.ballot import Next
from phalanx.worker_svc.group import Group, nobody
from phalanx.worker_svc.hand import PATIENCE_NS, Hand
from phalanx.worker_svc.rebalance import Experts, Rebalance
from phalanx.worker_svc.scrub import Scrub

if TYPE_CHECKING:
    from phalanx.worker_svc.expert_bits import ExpertBits  # torch

_COUNTS_EVERY_STEPS = 64  # steps between two reports of expert counts


class Backend(Experts, Protocol):
    """What computes: the model on a device, or nothing at all (`null.py`)."""

    @property
    def bits(self) -> "ExpertBits | None":
        """Of the experts that it holds, for the scrubber; None: it computes nothing."""

    def hello(self) -> WorkerHello: ...

    def reset(self) -> None:
        """Forget every sequence; weights and pools stay."""

    def restore(self, plan: StepPlan) -> None:
        """Bring in what the plan's new sequences have from the KV store. Raises ArenaError when that is gone."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute, sample and commit. EpochChanged passes through, with nothing committed."""

    def serve(self) -> None:
        """A placeholder step: nothing of ours, but whatever peers need of us. May raise EpochChanged."""

    def prepare(self, epoch: int, members: list[int], placement: Placement) -> int:
        """Be ready to run `epoch`: hold the experts of the placement, have a receive region.

        Returns how many experts were loaded for it. Raises EpochChanged when the group comes to change anew
        meanwhile, and that epoch will not run: whoever waits for our STOP need not wait for the rest.
        """

    def leave(self) -> None:
        """The epoch ended, or goes on without us: let go of its buffers."""

    def connect(self, group: Group, incarnations: dict[int, int]) -> None:
        """The prepared epoch runs: reach the peers. Raises ArenaError when one is gone already."""

    def take_counts(self) -> tuple[int, int, bytes] | None:
        """(layers, experts, int64 counts) since the last call; None when there is nothing to plan by."""

    def close(self) -> None: ...


class Rank:
    def __init__(self, service: Service, backend: Backend) -> None:
        self._service, self._board, self._backend = service, service.board, backend
        self._seat, self._row = service.seat, service.board.seats[service.seat]
        self._row.worker_incarnation = service.incarnation
        self._row.placement_slots = backend.slots
        self._link: Link | None = None
        self._link_number = 0
        self._unread = ""  # the staging arena that could not be read last
        self._hand = Hand()  # what came through the link and is not done yet
        self._agreement: Agreement | None = None  # of the epoch that we are in
        self._stopped_at = 0  # the odd epoch acknowledged last
        self._prepared: Topology | None = None  # the topology that we are ready to run
        self._placement: Placement | None = None  # that it begins with
        self._rebalance: Rebalance | None = None  # of the epoch that we are in
        self._scrub = self._make_scrub()
        identity = f"{service.name}#{service.incarnation}"
        self._eplb = connect_dealer(endpoint(service.run_dir, EPLB_SOCKET), identity)
        self._steps_counted = 0

    def run(self) -> None:
        """Step while there is work anywhere in the group, sleep otherwise, obey every epoch."""
        while not self._service.stopping:
            heard = self._row.bell.value
            self._service.beat()
            if not self._turn():
                patience = PATIENCE_NS / 1e6 if self._hand.waits else BEAT_PERIOD_MS
                if self._scrub is not None and self._agreement is not None:
                    patience = self._scrub.wait_ms(time.monotonic_ns(), patience)
                self._row.bell.wait(heard, patience)

    def _turn(self) -> bool:
        """One look at the world. False when there was nothing to do."""
        epoch = self._board.epoch
        if epoch % 2 == 1:
            return self._obey_stop(epoch)
        self._adopt_link()
        if self._agreement is None or self._agreement.group.epoch != epoch:
            return self._enter(epoch)
        assert self._rebalance is not None
        moved = self._rebalance.turn()
        if self._scrub is not None and not moved:
            moved = self._scrub.turn(time.monotonic_ns())
        self._flip_bits()
        if not self._agreement.due():
            self._service.row.phase = ProcessPhase.READY
            return moved
        self._round(self._agreement, self._rebalance)
        return True

    def _read(self) -> int:
        """Take what the scheduler sent, up to the plan to be run next. Returns the time in ns."""
        now_ns, hand = time.monotonic_ns(), self._hand
        while self._link is not None and hand.plan is None and hand.prompt is None:
            message = self._link.next_plan()
            if message is None:
                break
            answer = hand.take(message, now_ns)
            if answer is not None:
                self._answer(answer)
            elif isinstance(message, StepPlan):
                self._restore(message)
        return now_ns

    def _restore(self, plan: StepPlan) -> None:
        """Copy what the plan in hand builds on, before anybody waits for it in a step."""
        try:
            self._backend.restore(plan)
        except ArenaError as error:
            # It was removed, or this process may open no more files; or its scheduler ended.
            if self._unread != plan.staging:  # once for each: one plan may follow the other
                self._unread = plan.staging
                self._service.log.warning("nothing is restored from here", error=str(error))
            for answer in self._hand.abandon():
                self._answer(msgspec.structs.replace(answer, unrestored=True))

    def _round(self, agreement: Agreement, rebalance: Rebalance) -> None:
        """Vote and, if that is what it comes to, take a step."""
        self._service.row.phase = ProcessPhase.BUSY
        if faults.active is not None:
            faults.active.slow()
        hand = self._hand
        try:
            failpoint("worker.step.before_enter")
            next_ = self._reach(agreement)
            rebalance.follow()
            if next_ is Next.NOTHING:
                return
            failpoint("worker.step.after_enter")
            plan = hand.prompt if next_ is Next.PROMPT else hand.plan
            if plan is None:
                self._backend.serve()
            else:
                result = self._backend.run(plan)
                failpoint("worker.step.after_commit")
                self._answer(result)
                failpoint("worker.step.after_result")
        except EpochChanged:
            for answer in hand.abandon():
                self._answer(answer)
            return
        hand.done(next_ is Next.PROMPT, time.monotonic_ns())
        self._row.steps_run += 1
        self._service.row.advance()
        self._report_counts()

    @staticmethod
    def _reach(agreement: Agreement) -> Next:
        rounds, group = agreement.reach(), agreement.group
        try:
            while True:
                awaited = next(rounds)  # the peers' votes, or what our scheduler says to a call
                group.wait(awaited, "vote", group.behind if awaited == group.complete else nobody)
        except StopIteration as end:
            next_: Next = end.value
            return next_

    def _answer(self, message: ToScheduler) -> None:
        assert self._link is not None
        self._link.send_result(message)

    def _adopt_link(self) -> None:
        """Take up the link that the scheduler published last: a new scheduler, or its answer to us."""
        number = self._row.link
        if number in (0, self._link_number):
            return
        try:
            link = Link.attach(self._service.config.node, self._seat, number, self._row)
        except ArenaError as error:  # its scheduler died meanwhile; the next one publishes again
            self._service.log.warning("link gone", link=number, error=str(error))
            return
        if link.taken:
            # By the worker before us, whose unread plans are not for us. Its scheduler hangs or is dead:
            # once it knows of us, or the next one does, there is another link.
            link.close()
            self._link_number = number
            return
        if self._link is not None:
            self._link.close()
        self._link, self._link_number = link, number
        self._hand.reset(time.monotonic_ns())
        self._backend.reset()
        failpoint("worker.link.before_hello")
        link.send_result(self._backend.hello())
        self._service.log.info("link adopted", scheduler=number >> 32, number=number & 0xFFFFFFFF)

    # ------------------------------------------------------------------ epochs

    def _obey_stop(self, epoch: int) -> bool:
        """No step is in flight here: acknowledge STOP, then prepare for the topology that follows."""
        if self._stopped_at != epoch:
            failpoint("worker.stop.before_ack")
            self._stopped_at = epoch
            self._row.stop_ack = epoch
            self._board.supervisor_bell.ring()
            if self._agreement is not None:  # a peer may wait for us in a step that we never began
                self._agreement.group.ring_peers()
            failpoint("worker.stop.after_ack")
            return True
        self._read()  # what was planned ahead comes back, so that there is a new plan when the group goes on
        topology = self._board.topology()
        if topology is None or topology.epoch != epoch + 1 or self._prepared == topology:
            return False
        self._prepared = None
        try:
            self._prepare(topology)
        except EpochChanged as over:
            self._service.log.info("not prepared", why=str(over))
            return True
        self._prepared = topology
        if self._is_member(topology):
            failpoint("worker.go.before_ack")
            self._row.go_ack = topology.epoch
            self._board.supervisor_bell.ring()
            failpoint("worker.go.after_ack")
        return True

    def _is_member(self, topology: Topology) -> bool:
        me = topology.seat(self._seat)
        return (
            me is not None
            and me.state == "member"
            and me.worker_incarnation == self._service.incarnation
        )

    def _prepare(self, topology: Topology) -> None:
        self._agreement = self._rebalance = None
        if self._scrub is not None:
            self._scrub.leave()
        self._backend.leave()
        if not self._is_member(topology):
            return
        self._service.row.phase = ProcessPhase.LOADING
        failpoint("worker.prepare.before")
        placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        loaded = self._backend.prepare(topology.epoch, topology.members(), placement)
        self._placement = placement
        self._row.placement_slots = self._backend.slots
        self._row.placement_run = self._row.placement_ready = placement.version
        self._service.log.info("prepared", epoch=topology.epoch, experts_loaded=loaded)

    def _enter(self, epoch: int) -> bool:
        """The epoch word became even: join, if it is the epoch that we prepared for."""
        topology = self._prepared
        if topology is None or topology.epoch != epoch or not self._is_member(topology):
            return False
        members, beat, placement = topology.members(), self._service.beat, self._placement
        assert placement is not None
        group = Group(self._board, self._seat, members, epoch, beat, placement.version)
        incarnations = {seat.seat: seat.worker_incarnation for seat in topology.seats}
        failpoint("worker.connect.before")
        try:
            self._backend.connect(group, incarnations)
        except ArenaError as error:  # a peer died since: its STOP is on the way
            self._service.log.warning("peer region gone", epoch=epoch, error=str(error))
            return False
        failpoint("worker.connect.after")
        config = self._service.config.scheduler
        self._agreement = Agreement(config, group, self._hand, self._read, self._answer)
        self._rebalance = Rebalance(self._board, group, placement, self._backend, self._service.log)
        if self._scrub is not None:
            self._scrub.begin_epoch({seat: incarnations[seat] for seat in members})
        self._hand.begin_epoch(time.monotonic_ns())
        self._service.row.phase = ProcessPhase.READY
        self._service.log.info("epoch", epoch=epoch, members=group.members)
        return True

    # ------------------------------------------------------------------ experts' bits

    def _make_scrub(self) -> Scrub[Any] | None:
        service, every_s = self._service, self._service.config.worker.scrub_every_s
        if self._backend.bits is None or not every_s:
            return None

        def say(report: ExpertReport) -> None:
            send(service.supervisor, encode(report))

        return Scrub(
            self._backend.bits,
            every_s,
            self._seat,
            service.incarnation,
            say,
            lambda: self._row.doubted,
        )

    def _flip_bits(self) -> None:
        """Of experts, on purpose."""
        if faults.active is None or self._backend.bits is None:
            return
        for wanted in faults.active.bitflips():
            flipped = self._backend.bits.flip(wanted)
            self._service.log.warning("bit flipped on purpose", slots=flipped)

    # ------------------------------------------------------------------ reports

    def _report_counts(self) -> None:
        """Tell the planner which experts our rows chose. Losing a report costs nothing."""
        self._steps_counted += 1
        if self._steps_counted < _COUNTS_EVERY_STEPS:
            return
        if (counts := self._backend.take_counts()) is not None:
            layers, experts, encoded = counts
            message = ExpertCounts(
                self._seat, self._board.epoch, self._steps_counted, layers, experts, encoded
            )
            send(self._eplb, encode(message))
        self._steps_counted = 0

    def close(self) -> None:
        if self._scrub is not None:
            self._scrub.close()
        self._backend.leave()
        if self._link is not None:
            self._link.close()
        self._backend.close()
        self._eplb.close()
