"""The decisions of the supervisor: start, restart, give up, the group's epochs, health, shutdown.

Pure: events and the time go in, actions come out. `main.py` is the shell that carries them out.
"""

from collections.abc import Sequence
from typing import assert_never

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import (
    HAND_OVER_MS,
    HANG_MS,
    HEALTH_REPEAT_MS,
    STOP_ACK_MS,
    TROUBLE_MS,
)
from phalanx.protocol.messages import (
    HealthUpdate,
    PhaseTime,
    TopologyChanged,
)
from phalanx.supervisor.blame import awaited
from phalanx.supervisor.changes import Changes
from phalanx.supervisor.ending import Ending, NodeStage
from phalanx.supervisor.events import (
    AcksSeen,
    Action,
    BecameReady,
    Began,
    ChangeAsked,
    Event,
    FilesMissing,
    Inspect,
    Inspected,
    KillAsked,
    Observed,
    PipeClosed,
    PlacementsSeen,
    Progressed,
    Publish,
    Reaped,
    RebalanceAsked,
    ScrubHeard,
    Send,
    SetEpoch,
    ShutdownAsked,
    Spawned,
    StandbyEnded,
    StandbySeen,
    Stranded,
    Tell,
    Troubled,
)
from phalanx.supervisor.group import Group, GroupPhase, Placements, SeatRecord
from phalanx.supervisor.history import History
from phalanx.supervisor.lives import Lives
from phalanx.supervisor.process import Process, Stage
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.rebalance import Rebalances
from phalanx.supervisor.restart import RestartPolicy
from phalanx.supervisor.scrubs import Scrubs

_MS = 1_000_000
# Healthy processes beat far more often; one that is silent for this long is looked at.
_INSPECT_AFTER_MS = HANG_MS // 3
_GAP_COUNTS_MS = 100  # of a time in which we did not run: as much as between two looks


class SupervisorCore:
    def __init__(self, table: Sequence[ProcessSpec], placements: Placements) -> None:
        self.processes = {
            spec.name: Process(spec, RestartPolicy(gives_up=spec.essential)) for spec in table
        }
        self.workers = {p.spec.seat: p for p in self.processes.values() if p.spec.kind == "worker"}
        seats = [SeatRecord(seat) for seat in range(len(self.workers))]
        self.placements = placements
        self.group = Group(seats, placements)
        self.history = History(self.group)
        self.lives = Lives(self)
        self.changes = Changes(self)
        self.rebalances = Rebalances(self)
        self.ending = Ending(self)
        self.code, self.failed = ExitCode.OK, ""
        self.phases: list[PhaseTime] = []
        self.started_ns = 0
        self.scrubs = Scrubs()
        self.standbys: dict[str, bool] = {}  # successors that are to be there: whether they wait
        self._files: tuple[str, ...] = ()
        self.ready_s = -1.0  # from the first tick to the first time that all was well
        self._ticked_ns = 0
        self._health: tuple[bool, int, tuple[str, ...]] = (False, -1, ())
        self._health_said_ns = 0

    # ------------------------------------------------------------ entry points

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        actions = self._dispatch(event, now_ns)
        if isinstance(event, PlacementsSeen):
            actions += self.rebalances.step(now_ns)
        if not actions and isinstance(event, Observed | Inspected | AcksSeen | PlacementsSeen):
            return []  # frequent, and nothing that others see has changed
        actions += self.changes.step(now_ns)
        actions += self.rebalances.step(now_ns)
        return actions + self._after(actions, now_ns)

    def tick(self, now_ns: int) -> list[Action]:
        """Everything that time alone makes happen. Call it at least every 100 ms."""
        self.started_ns = self.started_ns or now_ns
        if now_ns - self._ticked_ns > _INSPECT_AFTER_MS * _MS:
            self._forgive(now_ns - self._ticked_ns - _GAP_COUNTS_MS * _MS, now_ns)
        self._ticked_ns = now_ns
        actions: list[Action] = []
        if self.supervising:
            actions += self.lives.spawn_due(now_ns)
            self._look_at_waits(now_ns)
            actions += self._find_hung(now_ns)
            self._forget_troubles(now_ns)
            if now_ns - self._health_said_ns >= HEALTH_REPEAT_MS * _MS:
                actions += self.send_health()
                self._health_said_ns = now_ns
            actions += self.group.hurry(now_ns)
            for seat, why, since_ns in self.group.overdue(now_ns):
                worker = self.workers[seat]
                actions += self.lives.lose(worker, why, "acknowledgement", since_ns, now_ns)
        actions += self.changes.step(now_ns)
        actions += self.rebalances.step(now_ns)
        actions += self.ending.step(now_ns)
        return actions + self._after(actions, now_ns)

    def _forget_troubles(self, now_ns: int) -> None:
        """The word that one is over may have been lost."""
        for process in self.processes.values():
            text, heard_ns = process.trouble
            if text and now_ns - heard_ns > TROUBLE_MS * _MS:
                process.trouble = "", now_ns

    def _forgive(self, gap_ns: int, now_ns: int) -> None:
        """We ourselves did not run for a while (a paused container, a loaded machine): what looks like
        the children's silence is perhaps our own, so that time does not count. What they were silent before
        does: one that is often late finds a hung process all the same. A sign of life since then is not moved
        beyond now: what follows it counts."""
        for process in self.processes.values():
            process.life.skip(gap_ns, now_ns)
            process.progress_ns = min(process.progress_ns + gap_ns, now_ns)
            if process.awaited_ns:
                process.awaited_ns = min(process.awaited_ns + gap_ns, now_ns)
        for patience in self.group.waiting.values():
            patience.skip(gap_ns, now_ns)

    @property
    def awaits_acks(self) -> bool:
        """Whether milliseconds count: the group is stopped until somebody answers on the board."""
        return bool(self.group.waiting) and self.supervising

    def _dispatch(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case AcksSeen():
                return self.group.acks(event, now_ns) if self.supervising else []
            case Began(before, silent_ms):
                self.history.began(before, silent_ms, now_ns)
                return []
            case Stranded(count, name):
                self.history.moved(name, count)
                fallen = self.processes.get(name)
                if fallen is None or fallen.spec.kind == "worker":
                    self.group.moved(count)
                return []
            case ScrubHeard(report):
                return list(self.scrubs.hear(report))
            case StandbySeen(name, ready):
                self.standbys[name] = ready
                if ready:
                    self.history.ready(name, "", now_ns)
                return []
            case StandbyEnded(name, how, delay_ms):
                self.standbys[name] = False
                self.history.standby_ended(name, how, delay_ms, now_ns)
                return []
            case FilesMissing(told):
                self._files = told
                return []
            case ChangeAsked():
                return self.changes.ask(event, now_ns)
            case RebalanceAsked():
                return self.rebalances.ask(event, now_ns)
            case PlacementsSeen(words):
                self.rebalances.seen(words, now_ns)
                return []
            case ShutdownAsked():
                return self.ending.shut_down(event.drain_ms, now_ns)
            case KillAsked():
                return self.ending.kill_all(now_ns)
        process = self.processes.get(event.name) or self.changes.retired.get(event.name)
        if process is None or event.incarnation != process.incarnation:
            return []  # a late word of an incarnation that is gone
        match event:
            case Spawned():
                process.pid = event.pid
                if event.standby:
                    self.history.forked(event.name, event.standby)
                return []
            case BecameReady():
                return self.lives.ready(process, event, now_ns)
            case Progressed():
                return self.lives.progressed(process, event, now_ns)
            case PipeClosed():
                return self.lives.lose(process, "died", event.by, event.seen_ns, now_ns)
            case Reaped():
                return self.lives.reaped(process, event, now_ns)
            case Observed():
                advanced = process.observed(event, now_ns)
                if process.spec.kind == "worker" and advanced:
                    self.group.gets_on(process.spec.seat, now_ns)
                if process.spec.kind == "worker" and process.phase is ProcessPhase.COMPILING:
                    self.group.compiles(process.spec.seat, now_ns)
                return []
            case Inspected():
                return self._inspected(process, event, now_ns)
            case Troubled():
                process.trouble = event.text, now_ns
                return []
            case _:
                assert_never(event)

    def _after(self, actions: list[Action], now_ns: int) -> list[Action]:
        """What follows from any change: tell those who must know."""
        told: list[Action] = []
        self.history.follow(self.group.records, now_ns)
        if any(isinstance(action, SetEpoch | Publish) for action in actions):
            told += self.notify()
        reasons = tuple(self.reasons())
        if self.ready_s < 0 and not self.missing():
            self.ready_s = (now_ns - self.started_ns) / 1e9
            text = f"{self.ready_s:.2f} s"
            told.append(Tell("node ready", text=text, phases=tuple(self.phases)))
            self.history.whole(self.phases, now_ns)
        health = (not reasons, self.group.epoch, reasons)
        if health != self._health:
            self._health = health
            if self.supervising:  # else each process that ends, as it shall, would be a reason more
                text = "; ".join(reasons)
                told.append(Tell("unhealthy" if reasons else "healthy", text=text))
            told += self.send_health()
        return told + self.history.take()

    def ready_names(self) -> set[str]:
        return {name for name, p in self.processes.items() if p.stage is Stage.READY}

    @property
    def stage(self) -> NodeStage:
        return self.ending.stage

    @property
    def serving(self) -> bool:
        """Nobody has told the node to stop."""
        return self.stage is NodeStage.RUNNING

    @property
    def supervising(self) -> bool:
        return self.ending.supervising

    # ------------------------------------------------------------ hang detection

    def _inspected(self, process: Process, event: Inspected, now_ns: int) -> list[Action]:
        found = event.state, event.waited_ns, event.asleep_ns
        process.life.inspected(*found, now_ns)
        if process.spec.kind == "worker" and process.spec.seat in self.group.waiting:
            late = self.group.waiting[process.spec.seat]
            late.inspected(*found, now_ns)
        return []

    def _look_at_waits(self, now_ns: int) -> None:
        """Note since when which ranks keep the group waiting."""
        running = self.group.phase is GroupPhase.RUNNING
        members = [self.workers[seat] for seat in self.group.members] if running else []
        # Who waits beats every few ms; what a silent one said last is no excuse.
        beats = {w.spec.seat: w.life.silent_ms(now_ns) < HANG_MS for w in members}
        late = awaited({w.spec.seat: w.awaits * beats[w.spec.seat] for w in members if w.alive})
        for seat, worker in self.workers.items():
            worker.awaited_ns = (worker.awaited_ns or now_ns) if seat in late else 0

    def _find_idle(self, now_ns: int) -> list[Action]:
        """A rank that lives and does not come, of several the one that is waited for longest, of those who wait in a
        circle the one that joined last: when it is gone the others go on."""
        idle = [worker for worker in self.workers.values() if worker.idle_while_awaited(now_ns)]
        seats = self.group.seats
        for worker in sorted(idle, key=lambda w: (w.awaited_ns, -seats[w.spec.seat].member_ns))[:1]:
            why = worker.idle_while_awaited(now_ns)
            return self.lives.lose(worker, why, "progress", worker.awaited_ns, now_ns)
        return []

    def _find_hung(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for process in self.processes.values():
            if not process.alive:
                continue
            found = process.hung(now_ns)
            process.silent = process.silent or process.suspect(now_ns)
            if found is not None:
                by, why = found
                since_ns = process.progress_ns if by == "progress" else process.life.since_ns
                actions += self.lives.lose(process, why, by, since_ns, now_ns)
            elif self._worth_a_look(process, now_ns):
                actions.append(Inspect(process.spec.name, process.incarnation))
        return actions + self._find_idle(now_ns)

    def _worth_a_look(self, process: Process, now_ns: int) -> bool:
        if process.life.silent_ms(now_ns) > _INSPECT_AFTER_MS:
            return True
        late = self.group.waiting.get(process.spec.seat) if process.spec.kind == "worker" else None
        return late is not None and late.silent_ms(now_ns) > STOP_ACK_MS / 4

    # ------------------------------------------------------------ health

    def reasons(self) -> list[str]:
        """Why the node is not healthy, naming processes; empty when it is."""
        troubles = [p.trouble[0] for p in self.processes.values() if p.alive and p.trouble[0]]
        found = self.scrubs.told(self.worker_incarnations())
        return [*self.missing(), *self._files, *troubles, *found]

    def missing(self, but: str = "") -> list[str]:
        """What keeps the node from working as a whole; `but`: that this one is kept out of the group does not count."""
        reasons = [
            f"the node is stopping: {self.failed}" if self.failed else "the node is stopping"
        ]
        if self.stage is NodeStage.RUNNING:
            reasons.clear()
        for process in self.processes.values():
            if process.stage is not Stage.READY and not self.changes.hides(process):
                what = "is" if process.alive else "is down:"
                reasons.append(f"{process.spec.name} {what} {process.told}")
            elif process.silent:
                reasons.append(f"{process.spec.name} gives {process.silent}")
        waiting = [f"worker-{seat}" for seat in self.group.waiting]
        match self.group.phase:
            case GroupPhase.RUNNING:
                out = [s.seat for s in self.group.seats if s.state not in ("member", "lost")]
                names = [f"worker-{seat}" for seat in out if self._up(seat)]
                reasons += [f"{name} has not joined yet" for name in names if name != but]
            case GroupPhase.STOPPING | GroupPhase.GOING:
                reasons.append(f"the group is changing, waiting for {', '.join(waiting)}")
            case GroupPhase.STOPPED:
                reasons.append(f"the group is stopped: {self.group.shortage()}")
            case GroupPhase.FORMING:
                reasons.append("the group is forming")
        return reasons

    def worker_incarnations(self) -> dict[int, int]:
        return {seat: worker.incarnation for seat, worker in self.workers.items()}

    def _up(self, seat: int) -> bool:
        worker = self.workers.get(seat)
        ready = worker is not None and worker.stage is Stage.READY
        return worker is not None and ready and not self.changes.hides(worker)

    def send_health(self) -> list[Action]:
        healthy, epoch, reasons = self._health
        update = HealthUpdate(healthy, max(epoch, 0), reasons)
        return [
            Send(p.spec.name, p.incarnation, update)
            for p in self.processes.values()
            if p.spec.kind == "gateway" and p.stage is Stage.READY
        ]

    def notify(self) -> list[Action]:
        changed = TopologyChanged(self.group.epoch)
        return [
            Send(p.spec.name, p.incarnation, changed)
            for p in self.processes.values()
            if p.spec.kind in ("gateway", "scheduler") and p.alive
        ]

    # ------------------------------------------------------------ the end

    def fail(self, code: ExitCode, reason: str, now_ns: int) -> list[Action]:
        """The node cannot go on: end it at once; streams are told, then everything stops."""
        if self.failed:
            return []
        self.code, self.failed = code, reason
        return [Tell("failed", text=reason), *self.ending.shut_down(HAND_OVER_MS, now_ns)]
