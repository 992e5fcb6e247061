"""The life of one process: started, ready, lost, reaped, and whether and when the next one is started. Pure."""

import signal
from typing import TYPE_CHECKING

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import RESTART_DELAY_MS_MAX, RESTART_WINDOW_MS
from phalanx.protocol.messages import PhaseTime
from phalanx.protocol.patience import Patience
from phalanx.supervisor.events import (
    Action,
    BecameReady,
    Kill,
    Noticed,
    Progressed,
    Reaped,
    Spawn,
    Sweep,
    Tell,
)
from phalanx.supervisor.group import GroupPhase
from phalanx.supervisor.process import Process, Stage

if TYPE_CHECKING:
    from phalanx.supervisor.core import SupervisorCore

_MS = 1_000_000


class Lives:
    """Of all processes. Calls into the core, which calls what is public here."""

    def __init__(self, core: "SupervisorCore") -> None:
        self._core = core

    def spawn_due(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for process in self._core.processes.values():
            due_ns = max(process.due_ns, self._put_off_until_ns(process))
            if process.stage is Stage.WAITING and now_ns >= due_ns:
                actions += self.spawn(process, now_ns)
        return actions

    def _put_off_until_ns(self, process: Process) -> int:
        """0: it is not, or the others cannot do without it any more."""
        pause_ns = self._core.group.pause_ns(process.spec.seat) if process.put_off_ns else 0
        return process.put_off_ns + pause_ns if pause_ns else 0

    def spawn(self, process: Process, now_ns: int) -> list[Action]:
        process.incarnation += 1
        process.stage, process.phase = Stage.STARTING, ProcessPhase.NONE
        process.life, process.progress_ns, process.silent = Patience(now_ns), now_ns, ""
        process.trouble = "", now_ns
        process.policy.ready_ns = 0
        process.awaits = process.awaited_ns = 0
        process.pid = process.beat_ns = process.progress = process.kill_ns = process.put_off_ns = 0
        process.drains = False
        process.detail, process.step, process.fraction = "starting", ("start", now_ns), -1.0
        spec = process.spec
        published: list[Action] = []
        if spec.kind == "worker":
            self._core.group.loading(spec.seat, process.incarnation)
            published = self._core.group.publish()
        elif spec.kind == "scheduler":
            self._core.group.seats[spec.seat].scheduler_incarnation = process.incarnation
            published = self._core.group.publish()
        self._core.history.starts(spec.name, now_ns)
        return [Spawn(spec.name, process.incarnation), *published]

    def progressed(self, process: Process, event: Progressed, now_ns: int) -> list[Action]:
        if process.stage is not Stage.STARTING:
            return []
        process.life, process.detail = Patience(now_ns), event.phase
        process.fraction = event.fraction
        process.progress_ns = now_ns
        if event.phase != process.step[0]:
            self._end_step(process, now_ns)
            process.step = (event.phase, now_ns)
            self._core.history.gets_on(process.spec.name, event.phase, now_ns)
        return [Tell("progress", process.spec.name, event.phase, event.fraction)]

    def _end_step(self, process: Process, now_ns: int) -> None:
        """Account for one phase of a first start (`phases` of `phalanx up`)."""
        name, since_ns = process.step
        if process.incarnation == 1:
            seconds = round((now_ns - since_ns) / 1e9, 3)
            self._core.phases.append(PhaseTime(name, process.spec.name, seconds))

    def ready(self, process: Process, event: BecameReady, now_ns: int) -> list[Action]:
        if process.stage is not Stage.STARTING:
            return []
        self._end_step(process, now_ns)
        process.stage, process.life, process.detail = Stage.READY, Patience(now_ns), ""
        process.progress_ns, process.served, process.hopeless = now_ns, True, False
        spec = process.spec
        note = f" (after {process.policy.roomless} starts in vain: {process.lacks})"
        note = note if process.lacks else ""
        process.policy.roomless, process.lacks = 0, ""
        process.policy.ready_ns = now_ns
        self._core.history.ready(spec.name, event.note, now_ns)
        actions: list[Action] = [Tell("ready", spec.name, f"incarnation {process.incarnation}")]
        if spec.kind == "worker" and self._core.supervising:
            fingerprint, expected = event.fingerprint, self._expected_fingerprint(spec.seat)
            if fingerprint != expected and expected:
                return actions + self._refuse(process, fingerprint, expected, now_ns)
            process.fingerprint = fingerprint
            self._core.group.has_room(spec.seat, event.expert_slots)
            if self._core.changes.hides(process):
                return actions  # newcomers join together
            self._core.group.seats[spec.seat].note = note
            actions += self._core.group.ready(spec.seat, fingerprint, now_ns)
            actions += self._end_if_short(now_ns)
        elif spec.kind == "gateway":
            actions += self._core.send_health()
            actions += self._core.notify()
            actions += self._core.ending.gateway_is_ready(process, now_ns)
        return actions

    def _end_if_short(self, now_ns: int) -> list[Action]:
        """All first workers are there, and have no room for all experts: nobody else will come."""
        complete = all(worker.stage is Stage.READY for worker in self._core.workers.values())
        forming = self._core.group.phase is GroupPhase.FORMING and complete
        short = self._core.group.shortage() if forming else ""
        return self._core.fail(ExitCode.BAD_INPUT, short, now_ns) if short else []

    def _expected_fingerprint(self, seat: int) -> str:
        """What the seat's worker must have: the group's, or while it forms that of the first ready one."""
        others = [
            s.fingerprint for s in self._core.group.seats if s.seat != seat and s.state == "joining"
        ]
        return self._core.group.fingerprint or next(iter(others), "")

    def _refuse(self, process: Process, found: str, expected: str, now_ns: int) -> list[Action]:
        """Its numbers would differ from its peers': it must not join, and a restart would not help."""
        why = f"its numerics fingerprint is {found}, the group's is {expected}"
        actions = self.lose(process, why, "fingerprint", now_ns, now_ns)
        self._core.history.decided(process.spec.name, "not started again")
        process.leaving = True
        actions += self._core.group.refused(process.spec.seat)
        others = [worker for worker in self._core.workers.values() if worker is not process]
        if self._core.ready_s < 0 or all(w.leaving or w.stage is Stage.DOWN for w in others):
            actions += self._core.fail(ExitCode.UNHEALTHY, f"{process.spec.name}: {why}", now_ns)
        return actions

    def lose(
        self, process: Process, why: str, by: Noticed, since_ns: int, now_ns: int
    ) -> list[Action]:
        """The process is dead or as good as dead. Killing it again is harmless: it is not reaped yet."""
        if not process.alive:
            return []
        if process.kill_ns and why == "died":
            why, by = "ended as asked", "asked"
        kill = Kill(process.spec.name, process.incarnation, signal.SIGKILL)
        return [kill, *self._dying(process, why, by, since_ns, now_ns)]

    def _dying(
        self, process: Process, why: str, by: Noticed, since_ns: int, now_ns: int
    ) -> list[Action]:
        name, spec = process.spec.name, process.spec
        process.stage, process.detail = Stage.DYING, why
        detected_ms = (now_ns - since_ns) / _MS
        # One that drains ends when everybody has got what is due to him: its exit code tells whether that was so.
        if not (process.drains and why == "died"):
            self._tell(process, why, by, detected_ms, now_ns)
        actions: list[Action] = []
        if spec.kind == "worker" and self._core.supervising:
            stuck_ns = process.awaited_ns if by in ("heartbeat", "progress") else 0
            cause = f"{name} {why}"
            actions = self._core.group.lost(spec.seat, cause, detected_ms, now_ns, stuck_ns)
        elif spec.kind == "scheduler" and self._core.supervising:
            # Its streams need not wait until it is reaped and the next one is started.
            seat = self._core.group.seats[spec.seat]
            seat.scheduler_incarnation = process.incarnation + 1
            seat.scheduler_left = process.kill_ns > 0
            actions = self._core.group.publish()
        unasked = self._core.supervising and not process.kill_ns
        return [*actions, Tell("lost" if unasked else "gone", name, why)]

    def _tell(
        self, process: Process, why: str, by: Noticed, detected_ms: float, now_ns: int
    ) -> None:
        if self._core.supervising and not process.leaving:
            end = process.spec, process.incarnation, why, by, detected_ms, now_ns
            self._core.history.fell(*end)

    def reaped(self, process: Process, event: Reaped, now_ns: int) -> list[Action]:
        if not process.exists:
            return []
        # The pidfd may speak before the death pipe; there is nobody left to kill.
        told: tuple[str, Noticed] = (
            ("ended as asked", "asked") if process.kill_ns else ("died", "exit")
        )
        actions = self._dying(process, *told, now_ns, now_ns) if process.alive else []
        name, spec, history = process.spec.name, process.spec, self._core.history
        why = describe_end(event.code, event.detail)
        process.leaving |= self._core.ending.has_drained(process, event.code)
        if process.drains and process.detail == "died":
            self._tell(process, "died", "exit", 0.0, now_ns)
        history.reaped(name, why, now_ns)
        if process.detail != "died":
            why = f"{process.detail} ({why})"
        process.stage, process.detail, process.pid = Stage.DOWN, why, 0
        process.code, process.ended = event.code, why
        actions += [Sweep(), Tell("ended", name, why)]
        if not self._core.supervising or process.leaving or self._core.failed:
            if self._core.supervising and process.leaving:
                history.over([name], "not started again", now_ns)
            return actions + self._core.ending.step(now_ns)
        if process.in_hand:
            history.decided(name, f"asked for: {self._core.changes.told}")
            return actions
        if event.code == ExitCode.NO_ROOM:
            return actions + self._await_room(process, event.detail or why, now_ns)
        delay_ns, others = process.policy.delay_ns(now_ns), ""
        bad_input = event.code == ExitCode.BAD_INPUT and (spec.essential or self._core.ready_s < 0)
        if bad_input or delay_ns is None:
            process.hopeless = True
            if not self._others_serve(process):
                return actions + self._give_up(process, bad_input, why, now_ns)
            delay_ns, others = RESTART_DELAY_MS_MAX * _MS, "; others do its work"
            if spec.kind == "worker":  # what fits only there does not wait for it any more
                actions += self._core.group.refused(spec.seat)
        process.stage, process.due_ns = Stage.WAITING, now_ns + delay_ns
        if spec.kind == "worker":
            # Of a node that has never been whole nobody is disturbed, and somebody waits for what comes of it.
            pause_ns = self._core.group.pause_ns(spec.seat) if self._core.ready_s >= 0 else 0
            process.put_off_ns = now_ns if pause_ns else 0
            if pause_ns > RESTART_WINDOW_MS * _MS:  # what fits only there does not wait so long
                actions += self._core.group.refused(spec.seat)
            if pause_ns > delay_ns:
                delay_ns = pause_ns
                others = f", since {self._core.group.seats[spec.seat].stood}"
                process.detail = (
                    f"{why}; the next start is put off by {pause_ns / 1e9:.1f} s{others}"
                )
        wait = f"after {delay_ns / _MS:g} ms" if delay_ns else "at once"
        history.decided(name, f"restart {wait}{others}")
        return actions + (self.spawn(process, now_ns) if delay_ns == 0 else [])

    def _others_serve(self, process: Process) -> bool:
        """Whether others of its kind do its work, or will: a rank whose device is gone does not end those that
        run. What cannot be told before the node has been whole."""
        kind, stopped = process.spec.kind, self._core.group.phase is GroupPhase.STOPPED
        serve = not (kind == "worker" and stopped)  # those that are there do not hold all experts
        alike = [p for p in self._core.processes.values() if p.spec.kind == kind and not p.leaving]
        return self._core.ready_s >= 0 and any(
            serve if other.stage is Stage.READY else other.comes
            for other in alike
            if other is not process
        )

    def _give_up(self, process: Process, bad_input: bool, why: str, now_ns: int) -> list[Action]:
        """The node cannot do without it."""
        name = process.spec.name
        if bad_input:
            process.leaving = True  # a change that is dropped now must not start it again
            return self._core.fail(ExitCode.BAD_INPUT, f"{name}: {why}", now_ns)
        deaths = len(process.policy.deaths_ns)
        text = f"{name} died {deaths} times within a minute, last: {why}"
        return self._core.fail(ExitCode.GAVE_UP, text, now_ns)

    def _await_room(self, process: Process, lacks: str, now_ns: int) -> list[Action]:
        """Shared memory is full, or a GPU's. A node that has never run says so and ends; one that runs goes on with
        what it has, and tries again until there is room."""
        if self._core.ready_s < 0:
            return self._core.fail(ExitCode.UNHEALTHY, f"{process.spec.name}: {lacks}", now_ns)
        delay_ns = process.policy.room_delay_ns()
        process.stage, process.due_ns, process.lacks = Stage.WAITING, now_ns + delay_ns, lacks
        tries = process.policy.roomless
        process.detail = f"{lacks} (tried {tries} times, the next time in {delay_ns / 1e9:g} s)"
        self._core.history.decided(process.spec.name, f"no room to start: {process.detail}")
        return []


def describe_end(code: int, detail: str) -> str:
    """How a process ended, for people."""
    if code < 0:
        how = f"ended by {_signal_name(-code)}"
    else:
        named = {member.value: member.name for member in ExitCode}
        how = f"exit code {code}" + (f" {named[code]}" if code in named else "")
    return f"{how}: {detail}" if detail else how


def _signal_name(number: int) -> str:
    """Those for real-time use have none but the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
