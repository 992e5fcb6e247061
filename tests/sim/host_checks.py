"""What must hold on the simulated host, checked against the truth that the core cannot see."""

import signal
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import (
    BACK_MS_MAX,
    COPY_MS_MAX,
    DRAIN_GRACE_MS,
    FLIP_IDLE_MS,
    GO_ACK_MS,
    HANG_MS,
    RESTART_DELAY_MS,
    RESTART_SERVED_MS,
    RESTART_WINDOW_MS,
    RESTARTS_MAX,
    STALLED_MS,
    STARVED_MS_MAX,
    STEP_END_MS,
    STOP_ACK_MS,
    TERM_GRACE_MS,
)
from phalanx.protocol.messages import (
    Error,
    HistoryEntry,
    Rebalance,
    Rebalanced,
    Restart,
    Restarted,
    Scale,
    Scaled,
)
from phalanx.protocol.placement import Placement, copies, slots_used
from phalanx.protocol.topology import Proposal, Topology
from phalanx.supervisor.ending import NodeStage
from phalanx.supervisor.events import (
    Action,
    Finished,
    Kill,
    Propose,
    Publish,
    Record,
    Reply,
    Resized,
    SetEpoch,
    Spawn,
    Tell,
)
from phalanx.supervisor.history import UNDER_WAY
from phalanx.supervisor.process import Stage

if TYPE_CHECKING:
    from sim.host import Child, Host

_MS = 1_000_000


class Violated(AssertionError):
    """Something happened that must never happen."""


class Checks:
    def __init__(self, host: "Host") -> None:
        self.host = host
        self.spawns: dict[str, list[int]] = defaultdict(list)
        self.incarnations: dict[str, int] = defaultdict(int)
        self.stop_acks: dict[tuple[int, int], int] = {}  # (seat, incarnation) -> odd epoch
        self.go_acks: dict[tuple[int, int], int] = {}
        self.members: dict[int, list[tuple[int, int]]] = {}  # even epoch -> its group
        self.running: list[tuple[int, int]] = []  # the group that ran last
        self.running_epoch = 0
        self.worker_changes = 1  # reasons to move the epoch; the start is the first
        self.deaths: dict[str, int] = defaultdict(int)  # by kind
        self.banned: set[str] = set()  # said that its input is wrong
        self.word_ns = 0  # when the epoch word changed last
        self.go_ns = 0  # when a GO was published last
        self.ranks = host.first_ranks
        self.size_told = host.first_ranks  # to those that start
        self.open: dict[int, tuple[Scale | Restart, int]] = {}  # changes asked for, and when
        self.asked_starts: dict[str, int] = defaultdict(int)
        self.any_change = False
        self.plans: dict[tuple[bytes, int], int] = {}  # asked for by the planner, and when
        self.answered: set[tuple[bytes, int]] = set()
        self.gateway_hurt_ns = 0  # when the last fault struck it
        self.gateway_slept = False  # in whatever way: it may have lost all its time so
        self.gateway_served = False  # some incarnation of it did
        self.stop_ns = 0  # by when the node was told to have drained; 0: it was not told to stop
        self.ended: dict[
            str, tuple[Child, int]
        ] = {}  # who died last under this name, with its code
        self.placements: dict[int, Placement] = {}  # by version, all there ever were
        self.told: dict[int, HistoryEntry] = {}  # of the history, by id

    def require(self, condition: bool, text: str) -> None:
        if not condition:
            story = "\n".join(self.host.story[-40:])
            raise Violated(
                f"seed {self.host.seed}, {self.host.now_ns / 1e9:.3f} s: {text}\n{story}"
            )

    # ------------------------------------------------------------ the truth

    def stop_acked(self, child: "Child", epoch: int) -> None:
        self.stop_acks[child.spec.seat, child.incarnation] = epoch

    def go_acked(self, child: "Child", epoch: int) -> None:
        self.go_acks[child.spec.seat, child.incarnation] = epoch

    def died(self, child: "Child", code: int) -> None:
        self.host.story.append(
            f"{self.host.now_ns / 1e9:.3f} died {child.spec.name}#{child.incarnation} {code}"
        )
        self.deaths[child.spec.kind] += 1
        if not child.killed:
            self.hurt(child)
        self.ended[child.spec.name] = child, code
        if child.spec.kind == "worker":
            self.worker_changes += 1
        newcomer = self.host.core.processes.get(child.spec.name)
        if (
            code == ExitCode.BAD_INPUT
            and child.spec.essential
            and not (newcomer is not None and newcomer.in_hand)
            and not self._has_company(child.spec.name)
        ):
            self.banned.add(child.spec.name)

    def _has_company(self, name: str) -> bool:
        """Whether there are others of its kind, for whose sake the node may go on without it."""
        core = self.host.core
        kind = core.processes[name].spec.kind if name in core.processes else ""
        return core.ready_s >= 0 and sum(p.spec.kind == kind for p in core.processes.values()) > 1

    def hurt(self, child: "Child") -> None:
        """It died by itself, or does not turn any more; some of those go on after a while."""
        if child.spec.kind == "gateway":
            self.gateway_hurt_ns = self.host.now_ns
            patience = (
                child.mood == "deadlocked" and not child.said_ready
            )  # one that starts has much
            self.gateway_slept |= patience or child.mood in ("starved", "deaf", "paging", "asleep")

    def sigkilled(self, child: "Child") -> None:
        supervising = self.host.core.stage in (NodeStage.RUNNING, NodeStage.DRAINING)
        process = self.host.core.processes.get(child.spec.name)
        told = process is not None and process.kill_ns > 0  # to end, and had its time
        if supervising and not told:
            self.require(
                child.mood not in ("starved", "paging"), f"{child.spec.name} was only {child.mood}"
            )
            slept_ms = (self.host.now_ns - child.mood_ns) / _MS
            # A survivor that sleeps is waited for longer than one that does nothing.
            early = child.mood == "asleep" and slept_ms < 4 * STOP_ACK_MS
            self.require(not early, f"{child.spec.name} slept for {slept_ms:.0f} ms only")
            self.require(not self._well(child), f"{child.spec.name} was well: {process}")
        if child.spec.kind == "worker":
            self.worker_changes += 1

    def _well(self, child: "Child") -> bool:
        """A worker that has done all that it should, for some time. One that is told to leave may be late."""
        process = self.host.core.processes.get(child.spec.name)
        asked_to = process is None or process.in_hand or process.leaving
        worker = child.spec.kind == "worker" and child.said_ready and child.mood == "well"
        well_ms = (self.host.now_ns - child.well_ns) / _MS
        return worker and well_ms > STOP_ACK_MS and not child.slow and not asked_to

    # ------------------------------------------------------------ each action

    def action(self, action: Action) -> None:
        match action:
            case Spawn(name, incarnation):
                self._spawn(name, incarnation)
            case SetEpoch(epoch, _, ends_steps):
                self._epoch(epoch, ends_steps)
            case Publish(topology):
                self._publish(topology)
            case Kill(name, incarnation, number):
                self._kill(name, incarnation, number)
            case Reply(_, Scaled() | Restarted() | Error() as message) if (
                action.peer == b"operator"
            ):
                self._replied(message)
            case Reply(peer, Rebalanced() | Error() as message):
                self._plan_answered(peer, message)
            case Propose(Proposal() as proposal):
                self._proposed(proposal)
            case Resized(ranks):
                self.size_told = ranks
            case Tell("stopping"):
                self._stopping()
            case Record(entry):
                self.told[entry.id] = entry
            case Finished():
                self.require(not self.open, f"finished, and never answered {self.open}")
                self.require(self.host.finished is None, "finished twice")

    def _kill(self, name: str, incarnation: int, number: int) -> None:
        child = self.host.children.get(name)
        there = child is not None and child.incarnation == incarnation
        there = there or (name, incarnation) in self.host.never_born
        self.require(there, f"signal for {name}#{incarnation}, which is not there")
        if number == signal.SIGTERM and self.host.core.serving and self.host.word % 2 == 0:
            seat = self.host.core.processes[name].spec.seat
            member = name.startswith("worker") and (seat, incarnation) in self.running
            self.require(not member, f"{name} is told to end while the group needs it")

    # ------------------------------------------------------------ changes that were asked for

    def asked(self, request: Scale | Restart) -> None:
        self.open[request.call] = (request, self.host.now_ns)
        self.any_change = True

    def _replied(self, message: Scaled | Restarted | Error) -> None:
        """Every change is answered once, and the node is as the answer says."""
        host, core = self.host, self.host.core
        self.host.story.append(f"{host.now_ns / 1e9:.3f} {message}")
        self.require(message.call in self.open, f"answered twice: {message}")
        request, _ = self.open.pop(message.call)
        if isinstance(message, Error):
            self.worker_changes += 1  # going back is a change as well
        if isinstance(message, Scaled):
            assert isinstance(request, Scale)
            members = sorted(seat for seat, _ in self.running)
            enough = host.word % 2 == 1 or set(members) <= set(message.seats)
            self.require(enough, f"{message}, but the group has {members}")
            self.ranks = message.ranks
            self.require(message.ranks == request.ranks, f"{request}, {message}")
        if isinstance(message, Scaled | Error) and isinstance(request, Scale):
            refused = isinstance(message, Error) and message.code in (
                "not_ready",
                "shutdown",
                "bad_request",
            )
            if not refused:
                self.require(self.size_told == self.ranks, f"told {self.size_told}: {message}")
                found = sorted(core.workers)
                self.require(len(found) == self.ranks, f"{message}, but the seats are {found}")
                gone = [c.spec.name for c in host.children.values() if self._stays(c)]
                self.require(not gone, f"{message}, but {gone} live")
        if isinstance(message, Restarted):
            self.require(not core.reasons(), f"{message}, but {core.reasons()}")

    def _stays(self, child: "Child") -> bool:
        there = child.spec.name in self.host.core.processes
        return not there and not child.reaped

    def _check_changes(self) -> None:
        """Nothing that was asked for is under way for ever."""
        for request, since_ns in self.open.values():
            waited_s = self.host.awake_ns(since_ns) / 1e9
            self.require(
                waited_s < request.timeout_s + BACK_MS_MAX / 1000,
                f"{request} since {waited_s:.1f} s",
            )
        told = self.host.core.changes.told
        self.require(self.host.core.serving or not told, f"stopping, and under way: {told!r}")
        self.require(bool(told) == bool(self.open), f"under way: {told!r}, open: {self.open}")

    # ------------------------------------------------------------ plans of the planner

    def plan_asked(self, peer: bytes, request: Rebalance) -> None:
        self.plans.setdefault((peer, request.call), self.host.now_ns)

    def _plan_answered(self, peer: bytes, message: Rebalanced | Error) -> None:
        self.require((peer, message.call) in self.plans, f"an answer to nobody: {message}")
        self.host.story.append(f"{self.host.now_ns / 1e9:.3f} plan: {message}")
        self.answered.add((peer, message.call))

    def _proposed(self, proposal: Proposal) -> None:
        host = self.host
        placement = msgspec.msgpack.decode(proposal.placement, type=Placement)
        host.story.append(f"{host.now_ns / 1e9:.3f} proposed: version {placement.version}")
        self.require(proposal.epoch == host.word, f"proposed for {proposal.epoch}, at {host.word}")
        self._one_meaning(placement)

    def _one_meaning(self, placement: Placement) -> None:
        """No version is ever given to two placements."""
        known = self.placements.setdefault(placement.version, placement)
        text = f"version {placement.version} is two placements"
        self.require(known == placement, text)

    def _check_plans(self) -> None:
        """Whoever asks hears the answer in time, however little happens."""
        limit_s = (COPY_MS_MAX + FLIP_IDLE_MS) / 1000
        for call, since_ns in self.plans.items():
            waited_s = (self.host.now_ns - since_ns) / 1e9
            self.require(call in self.answered or waited_s < limit_s, f"plan {call}: {waited_s} s")

    def _spawn(self, name: str, incarnation: int) -> None:
        now_ns, before = self.host.now_ns, self.host.children.get(name)
        self.host.story.append(f"{now_ns / 1e9:.3f} spawn {name}#{incarnation}")
        self.require(before is None or before.reaped, f"two live incarnations of {name}")
        self.require(
            incarnation > self.incarnations[name], f"{name}#{incarnation} was there before"
        )
        self.require(name not in self.banned, f"{name} restarted although its input is wrong")
        self.incarnations[name] = incarnation
        recent = [at for at in self.spawns[name] if at > now_ns - RESTART_WINDOW_MS * _MS]
        served_ns = (
            before.reaped_ns - before.ready_ns if before is not None and before.ready_ns else 0
        )
        if served_ns >= RESTART_SERVED_MS * _MS:
            recent = recent[-1:]  # the count begins anew
        process = self.host.core.processes[name]
        if process.asked_starts > self.asked_starts[name]:  # no failure made it necessary
            self.asked_starts[name] = process.asked_starts
            self.spawns[name] = recent if process.policy.deaths_ns else []
            return
        if process.spec.essential and not self._has_company(name):
            self.require(len(recent) <= RESTARTS_MAX, f"{name} restarted too often")
        if len(recent) >= 2:
            gap_ms = (now_ns - recent[-1]) / _MS
            self.require(gap_ms >= RESTART_DELAY_MS, f"{name} restarted after {gap_ms:.0f} ms")
        self.spawns[name] = [*recent, now_ns]

    def _epoch(self, epoch: int, ends_steps: bool) -> None:
        host = self.host
        self.require(epoch > host.word, f"the epoch went from {host.word} to {epoch}")
        waited_ms, self.word_ns = (host.now_ns - self.word_ns) / _MS, host.now_ns
        if epoch % 2 == 1:
            self.require(ends_steps or host.word % 2 == 0, f"epoch {epoch} spares steps that ended")
            slow = host.word % 2 == 1 and not host.ends_steps and waited_ms >= STEP_END_MS
            reason = self.worker_changes > 0 or bool(self.open) or slow
            self.require(reason, f"epoch {epoch} without a change of membership")
            # Deaths that the core has not heard of yet are reasons still to come.
            self.worker_changes = sum(map(self._unheard, self.host.children.values()))
            return
        self.require(epoch == self.host.word + 1, f"epoch {epoch} after {self.host.word}")
        topology = self.host.topology
        self.require(
            topology is not None and topology.epoch == epoch, f"epoch {epoch} has no topology"
        )
        self.running, self.running_epoch = self.members[epoch], epoch
        for seat, incarnation in self.running:
            ready = self.go_acks.get((seat, incarnation)) == epoch
            self.require(ready, f"epoch {epoch} runs, worker-{seat}#{incarnation} is not ready")

    def _unheard(self, child: "Child") -> bool:
        known = self.host.core.processes.get(child.spec.name)
        if known is None:
            return False  # of a rank that was taken away
        same = known.incarnation == child.incarnation
        return child.spec.kind == "worker" and not child.alive and same and known.alive

    def _publish(self, topology: Topology) -> None:
        group = [(s.seat, s.worker_incarnation) for s in topology.seats if s.state == "member"]
        if topology.epoch < self.host.word:
            return  # information about an epoch that is over: it only tells who is lost
        known = self.members.setdefault(topology.epoch, group)
        self.require(known == group, f"epoch {topology.epoch} has two groups: {known}, {group}")
        if topology.epoch == self.host.word + 1:
            self.go_ns = self.host.now_ns
            self._go(topology, group)

    def _go(self, topology: Topology, group: list[tuple[int, int]]) -> None:
        for seat, incarnation in self.running:
            if (seat, incarnation) in group:
                stopped = self.stop_acks.get((seat, incarnation)) == self.host.word
                self.require(stopped, f"GO {topology.epoch}: worker-{seat} has not stopped")
            else:
                child = self.host.children.get(f"worker-{seat}")
                gone = child is None or child.incarnation != incarnation
                gone = gone or child is not None and (child.killed or not child.alive)
                left = self.stop_acks.get((seat, incarnation), 0) > self.running_epoch
                gone = gone or left  # it was to leave, and has stopped since
                self.require(gone, f"GO {topology.epoch}: lost worker-{seat} was not killed")
        self._check_experts(topology)

    def _check_experts(self, topology: Topology) -> None:
        placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        self._one_meaning(placement)
        self.require(
            list(placement.seats) == topology.members(),
            f"placement for {placement.seats}, group of {topology.members()}",
        )
        for layer in range(len(placement.physical_to_logical)):
            for seat in placement.seats:
                room = self.host.children[f"worker-{seat}"].room
                used = slots_used(placement, seat)
                fits = used <= (room or used)
                self.require(fits, f"GO {topology.epoch}: {used} slots, worker-{seat} has {room}")
            held = all(copies(placement, layer))
            self.require(held, f"GO {topology.epoch}: an expert of layer {layer} has no holder")

    # ------------------------------------------------------------ each event

    def after_event(self) -> None:
        core = self.host.core
        for name, process in core.processes.items():
            if process.stage is Stage.READY:
                child = self.host.children.get(name)
                told = (
                    child is not None
                    and child.incarnation == process.incarnation
                    and child.said_ready
                )
                self.require(
                    told, f"{name}#{process.incarnation} counts as ready but never said so"
                )
                self._check_hang(child)
        self._check_answers()
        self._check_changes()
        self._check_plans()
        if not core.reasons():
            in_group = [seat for seat, _ in self.running]
            told = self.host.core.changes.told
            whole = self.host.word % 2 == 0 and (bool(told) or len(in_group) == self.ranks)
            self.require(whole, f"healthy with seats {in_group} at epoch {self.host.word}")
            held = {
                p.spec.name for p in core.processes.values() if p.in_hand and told[:5] == "scale"
            }
            ready = all(
                p.stage is Stage.READY or p.spec.name in held for p in core.processes.values()
            )
            self.require(ready, "healthy although a process is not ready")

    def _check_hang(self, child: "Child | None") -> None:
        if child is None or not child.alive:
            return
        limits_ms = {"stopped": HANG_MS, "deadlocked": HANG_MS, "asleep": STARVED_MS_MAX}
        if self.host.waited_for(child):
            limits_ms["asleep"] = STALLED_MS + HANG_MS  # it counts from the first look
        if child.mood not in limits_ms:
            return
        if self.host.core.stage is not NodeStage.RUNNING:
            return
        hung_ms = self.host.awake_ns(child.mood_ns) / _MS
        # The last beat is up to 200 ms older or the last progress up to 100 ms younger than the hang.
        late_ms = limits_ms[child.mood] + 400
        self.require(hung_ms < late_ms, f"{child.spec.name} hangs for {hung_ms:.0f} ms")

    def _check_answers(self) -> None:
        """Nobody is waited for without end: a member that does not answer is killed."""
        host = self.host
        if host.word % 2 == 0 or host.core.stage is not NodeStage.RUNNING:
            return
        going = host.topology is not None and host.topology.epoch == host.word + 1
        group = self.members[host.word + 1] if going else self.running
        acks = self.go_acks if going else self.stop_acks
        limit_ms = (GO_ACK_MS if going else STOP_ACK_MS) + 200
        for seat, incarnation in group:
            child = host.children.get(f"worker-{seat}")
            if child is None or child.incarnation != incarnation or child.killed or not child.alive:
                continue
            silent = child.mood == "deaf" and acks.get((seat, incarnation), 0) < host.word
            since_ns = max(self.go_ns, child.progress_ns) if going else self.word_ns
            waited_ms = host.awake_ns(since_ns) / _MS
            text = f"{child.spec.name} is waited for since {waited_ms:.0f} ms"
            self.require(not silent or waited_ms < limit_ms, text)

    # ------------------------------------------------------------ the end

    def told_to_stop(self, drain_ms: int) -> None:
        until_ns = self.host.now_ns + drain_ms * _MS
        self.stop_ns = min(self.stop_ns or until_ns, until_ns)

    def _stopping(self) -> None:
        """The drain is over: the gateway said so by its end, or it had its time and another one's."""
        host = self.host
        gateway = host.children.get("gateway")
        late = host.now_ns >= self.stop_ns + DRAIN_GRACE_MS * _MS
        if late or host.core.failed or gateway is None or not self.stop_ns:
            return
        if not self.gateway_served:
            return  # nobody can have asked for anything
        last, code = self.ended.get("gateway", (None, -1))
        drained = last is gateway and code == ExitCode.OK and gateway.termed
        self.require(drained, f"the drain ends, and gateway#{gateway.incarnation} has not drained")

    def settled(self) -> None:
        """Faults are over: all is well again, or the node was given up as the rules say."""
        finished = self.host.finished
        if finished is None:
            self.require(not self.host.core.reasons(), f"not healed: {self.host.core.reasons()}")
            self._check_history()
            return
        if finished.code == ExitCode.GAVE_UP:
            essential = [name for name, spec in self.host.specs.items() if spec.essential]
            worst = max(len(self.spawns[name]) for name in essential)
            company = any(map(self._has_company, essential))  # who has some is tried for ever
            right = worst == RESTARTS_MAX + 1 or company
            right |= self.any_change and worst <= RESTARTS_MAX
            self.require(right, f"gave up after {worst} starts")
        else:
            bad = finished.code == ExitCode.BAD_INPUT and self.host.plan.bad_input
            self.require(bool(bad), f"ended with {finished.code!r}: {finished.reason}")

    def _check_history(self) -> None:
        """It tells of each end of each process, and of none that it is not over."""
        ends: Counter[str] = Counter()
        for entry in self.told.values():
            ends[entry.process] += entry.deaths
            over = entry.outcome not in ("", UNDER_WAY) and entry.resumed_ms >= 0
            self.require(over, f"all is well, and the history tells: {entry}")
        for name, incarnation in self.incarnations.items():
            child = self.host.children.get(name)
            alive = child is not None and child.incarnation == incarnation and child.alive
            text = f"{name} ended {incarnation - alive} times, the history tells of {ends[name]}"
            self.require(ends[name] == incarnation - alive, text)

    def finished(self) -> None:
        host = self.host
        self.require(host.finished is not None, "the shutdown never ends")
        assert host.finished is not None
        alive = [c.spec.name for c in host.children.values() if not c.reaped]
        self.require(not alive, f"finished with {alive} alive")
        if self.stop_ns:
            late_ms = host.awake_ns(self.stop_ns) / _MS
            limit_ms = DRAIN_GRACE_MS + TERM_GRACE_MS + 700  # two ticks, and what the kernel takes
            self.require(late_ms < limit_ms, f"finished {late_ms:.0f} ms after the drain's limit")
        for name in host.finished.left:
            self.require("does not die" not in name, f"left: {name}")
        last = [entry for entry in self.told.values() if entry.kind == "stop"]
        self.require(len(last) == 1 and last[0].outcome != UNDER_WAY, f"it stopped: {last}")
