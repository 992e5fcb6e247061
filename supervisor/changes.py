"""Changes that somebody asked for: another number of ranks, or a process replaced. One at a time. Pure.

A change looks at the truth after every event and does the next thing; it keeps no plan that a fault
could overtake. It always ends: with its goal reached, or by its deadline with the node as it was.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phalanx.protocol.errors import Code, ExitCode
from phalanx.protocol.limits import (
    BACK_MS,
    CHANGE_S_MAX,
    KILL_GRACE_MS,
    MAX_SEATS,
    NEWCOMER_STARTS,
    STANDBY_MS,
)
from phalanx.protocol.messages import (
    Error,
    PhaseTime,
    Restart,
    Restarted,
    Scale,
    Scaled,
)
from phalanx.supervisor.events import (
    Action,
    ChangeAsked,
    RenewStandbys,
    Reply,
    Resized,
    Sweep,
    Tell,
)
from phalanx.supervisor.group import GroupPhase
from phalanx.supervisor.hands import Hands
from phalanx.supervisor.process import Process, Stage
from phalanx.supervisor.restart import RestartPolicy

if TYPE_CHECKING:
    from phalanx.supervisor.core import SupervisorCore

_MS = 1_000_000
ALL = "all"
_ANSWERS_MAX = 16
_AGAIN_MS = 60_000
_HOPELESS = (ExitCode.BAD_INPUT, ExitCode.NO_ROOM)  # who ended so would do so again
# Services first, since nobody notices; the gateway last, since its clients have to find the next one.
_RESTART_ORDER = ("eplb", "kvstore", "http", "tokenizer", "scheduler", "worker", "gateway")


@dataclass(slots=True)
class Scaling:
    """From one number of ranks to another. Newcomers join together, in one change of the group, when all
    are ready: until then nothing that runs has noticed them. One that falls meanwhile is started again, and joins
    later."""

    asked: ChangeAsked
    text: str
    begun_ns: int
    deadline_ns: int
    before: int
    coming: frozenset[int]
    going: frozenset[int]
    back: Error | None = None  # it failed: `going` are those that were coming


@dataclass(slots=True)
class Restarting:
    """Process after process: out of the group if it is a worker, SIGTERM, a new one, the node whole."""

    asked: ChangeAsked
    text: str
    begun_ns: int
    deadline_ns: int
    names: list[str]  # the first one is at work
    turn_ns: int = 0  # since when it waits for its successor; 0: it does not
    since_ns: int = 0  # since when; 0: not begun
    incarnation: int = 0  # of the process that is replaced
    done: list[PhaseTime] = field(default_factory=list[PhaseTime])


class Changes:
    """The change under way, if any. Calls into the core, which calls `ask`, `step` and `drop`."""

    def __init__(self, core: "SupervisorCore") -> None:
        self._core, self._hands = core, Hands(core)
        self.now: Scaling | Restarting | None = None
        # Of the changes that ended last: an answer may be lost, and who asks again does so within seconds.
        self._answers: deque[tuple[int, ChangeAsked, Reply]] = deque(maxlen=_ANSWERS_MAX)
        self.retired: dict[str, Process] = {}  # of seats there are no more: incarnations go on

    @property
    def told(self) -> str:
        """What is under way, for people; empty: nothing."""
        return self.now.text if self.now is not None else ""

    def hides(self, process: Process) -> bool:
        """Whether the node is whole without it: a newcomer, or one that goes."""
        return process.in_hand and isinstance(self.now, Scaling)

    # ------------------------------------------------------------ asking

    def ask(self, asked: ChangeAsked, now_ns: int) -> list[Action]:
        request, core = asked.request, self._core
        if self.now is not None and self.now.asked == asked:
            return []  # said again: it is under way
        for ended_ns, before, answer in self._answers:
            if before == asked and now_ns - ended_ns < _AGAIN_MS * _MS:
                return [answer]  # it was lost
        if not 0 < request.timeout_s <= CHANGE_S_MAX:
            text = f"timeout_s is {request.timeout_s}, allowed: above 0, to {CHANGE_S_MAX}"
            return [_refusal(asked, Code.BAD_REQUEST, text)]
        if not core.serving:
            return [_refusal(asked, Code.SHUTDOWN, "the node is stopping")]
        if core.ready_s < 0:
            return [
                _refusal(asked, Code.NOT_READY, "the node is still starting: ask when it is up")
            ]
        if self.now is not None:
            since_s = (now_ns - self.now.begun_ns) / 1e9
            text = f"another change is under way since {since_s:.1f} s ({self.now.text}): ask later"
            return [_refusal(asked, Code.NOT_READY, text)]
        begin = self._scale if isinstance(request, Scale) else self._restart
        actions = begin(asked, now_ns)
        if self.now is not None:
            actions = [Tell("change", text=self.now.text), *actions]
        return actions + self.step(now_ns)

    def step(self, now_ns: int) -> list[Action]:
        """Whatever can be done next."""
        actions: list[Action] = []
        while self.now is not None:
            change = self.now
            more = (self._scaling if isinstance(change, Scaling) else self._restarting)(now_ns)
            actions += more
            if not more or change is not self.now:
                break
        return actions

    def drop(self, now_ns: int) -> list[Action]:
        """The node stops: what is under way ends here, unfinished."""
        change, self.now = self.now, None
        if change is None:
            return []
        text = f"the node stopped during the change ({change.text})"
        actions: list[Action] = [_refusal(change.asked, Code.SHUTDOWN, text)]
        if isinstance(change, Restarting):  # the drain needs it; newcomers it does not
            actions += self._hands.let_go(self._core.processes[change.names[0]], now_ns)
        return actions

    def _end(self, reply: Scaled | Restarted | Error, now_ns: int) -> list[Action]:
        change, self.now = self.now, None
        assert change is not None
        failed = isinstance(reply, Error)
        told = f"{change.text}: {reply.message}" if isinstance(reply, Error) else change.text
        answer = Reply(change.asked.peer, reply)
        self._answers.append((now_ns, change.asked, answer))
        phases = change.done if isinstance(change, Restarting) else []
        outcome = f"failed: {reply.message}" if isinstance(reply, Error) else "done"
        self._core.history.asked_ended(outcome, phases, now_ns)
        return [Tell("change failed" if failed else "changed", text=told), answer]

    # ------------------------------------------------------------ scale

    def _scale(self, asked: ChangeAsked, now_ns: int) -> list[Action]:
        core, request = self._core, asked.request
        assert isinstance(request, Scale)
        before, ranks = len(core.workers), request.ranks
        if not 1 <= ranks <= MAX_SEATS:
            text = f"ranks is {ranks}, allowed: 1 to {MAX_SEATS}"
            return [_refusal(asked, Code.BAD_REQUEST, text)]
        coming, going = self._seats_coming(ranks - before), self._seats_going(before - ranks)
        if len(coming) < ranks - before:
            text = "processes of an earlier size do not die, so their seats cannot be used"
            return [_refusal(asked, Code.NOT_READY, text)]
        if going and (short := core.group.shortage(core.workers.keys() - going)):
            return [_refusal(asked, Code.BAD_REQUEST, f"ranks is {ranks}, but {short}")]
        text = f"scale from {before} to {ranks} ranks"
        deadline_ns = now_ns + int(request.timeout_s * 1e9)
        self.now = Scaling(asked, text, now_ns, deadline_ns, before, coming, going)
        core.history.asked(text, "start" if coming else "leave", now_ns)
        core.placements.resize(ranks)
        actions: list[Action] = [Resized(ranks)] if coming else []  # newcomers read it
        for seat in sorted(coming):
            self._seat_newcomer(seat, now_ns)
        self._hands.hold(self._names(going))
        return actions + (core.group.leave(going, text, now_ns) if going else [])

    def _seats_coming(self, count: int) -> frozenset[int]:
        """Holes first: seats are never renumbered."""
        taken = {*self._core.workers, *(p.spec.seat for p in self.retired.values() if p.exists)}
        free = [seat for seat in range(MAX_SEATS) if seat not in taken]
        return frozenset(free[: max(0, count)])

    def _seats_going(self, count: int) -> frozenset[int]:
        """Who is not in the group first, so that a sick rank can be dropped; then the highest seats."""
        group = self._core.group
        order = sorted(self._core.workers, key=lambda seat: (seat in group.members, -seat))
        return frozenset(order[: max(0, count)])

    def _seat_newcomer(self, seat: int, now_ns: int) -> None:
        core = self._core
        core.group.have(seat)
        for kind in ("worker", "scheduler"):
            like = next(p.spec for p in core.processes.values() if p.spec.kind == kind)
            spec = replace(
                like, name=f"{kind}-{seat}", index=like.index - like.seat + seat, seat=seat
            )
            process = self.retired.pop(spec.name, None) or Process(spec, RestartPolicy())
            process.policy = RestartPolicy(gives_up=spec.essential)
            process.start_anew(now_ns)
            process.in_hand = True
            core.processes[spec.name] = process
            if kind == "worker":
                core.workers[seat] = process

    def _names(self, seats: Iterable[int]) -> list[str]:
        return [f"{kind}-{seat}" for seat in sorted(seats) for kind in ("worker", "scheduler")]

    def _scaling(self, now_ns: int) -> list[Action]:
        change = self.now
        assert isinstance(change, Scaling)
        if change.coming:
            return self._come(change, now_ns)
        return self._go(change, now_ns)

    def _come(self, change: Scaling, now_ns: int) -> list[Action]:
        core, group = self._core, self._core.group
        newcomers = [core.processes[name] for name in self._names(change.coming)]
        for process in newcomers:
            if process.stage is Stage.DOWN:
                return self._newcomer_fell(change, process, now_ns)
        if now_ns >= change.deadline_ns:
            late = [p for p in newcomers if p.stage is not Stage.READY]
            missing = ", ".join(f"{p.spec.name} ({p.detail or 'starting'})" for p in late)
            text = f"not ready in time: {missing or 'the group did not change'}"
            return self._go_back(change, Code.TIME_LIMIT, text, now_ns)
        if any(process.stage is not Stage.READY for process in newcomers):
            return []
        if new := [seat for seat in sorted(change.coming) if group.seats[seat].state == "loading"]:
            core.history.asked_goes_on("join", now_ns)
            actions: list[Action] = []
            for seat in new:
                actions += group.ready(seat, core.workers[seat].fingerprint, now_ns)
            return actions
        if group.phase is not GroupPhase.RUNNING or not group.members.keys() >= change.coming:
            return []
        for process in newcomers:
            process.in_hand = False
        return self._end(self._scaled(change, now_ns), now_ns)

    def _newcomer_fell(self, change: Scaling, process: Process, now_ns: int) -> list[Action]:
        """It is started again, unless it said that this is of no use, or has fallen too often."""
        delay_ns, deaths = process.policy.delay_ns(now_ns), len(process.policy.deaths_ns)
        of_no_use = process.leaving or process.code in _HOPELESS
        if delay_ns is None or of_no_use or deaths >= NEWCOMER_STARTS:
            times = "" if of_no_use else f" (tried {deaths} times)"
            text = f"{process.spec.name} could not be started: {process.ended}{times}"
            return self._go_back(change, Code.INTERNAL, text, now_ns)
        process.stage, process.due_ns = Stage.WAITING, now_ns + delay_ns
        return self._core.lives.spawn_due(now_ns)

    def _go_back(self, change: Scaling, code: Code, why: str, now_ns: int) -> list[Action]:
        request = change.asked.request
        text = f"{why}; the node has {change.before} ranks as before"
        change.back = Error(request.call, code, text)
        change.going, change.coming = change.coming, frozenset()
        change.deadline_ns = now_ns + BACK_MS * _MS
        self._hands.hold(self._names(change.going))
        self._core.placements.resize(change.before)
        self._core.history.asked_goes_on("go back", now_ns)
        cause = f"{change.text} failed"
        return [
            Tell("change failed", text=f"{change.text}: {why}: going back"),
            Resized(change.before),
            *self._core.group.leave(change.going, cause, now_ns),
        ]

    def _go(self, change: Scaling, now_ns: int) -> list[Action]:
        core, group = self._core, self._core.group
        late = now_ns >= change.deadline_ns
        leavers = [core.processes[name] for name in self._names(change.going)]
        actions: list[Action] = []
        if not group.members.keys().isdisjoint(change.going):
            if not late:
                return []
            if change.back is None:
                return self._stay(change, leavers, now_ns)
            for process in leavers:
                why, since_ns = "did not leave in time", change.deadline_ns
                actions += core.lives.lose(process, why, "asked", since_ns, now_ns)
        core.history.asked_goes_on("go back" if change.back else "end", now_ns)
        for process in leavers:
            actions += self._hands.finish_off(process, now_ns)
        there = [process for process in leavers if process.exists]
        # One that not even SIGKILL ends is left to the kernel: its seat is not used again.
        stuck = all(now_ns >= p.kill_ns + KILL_GRACE_MS * _MS for p in there if p.kill_ns)
        if actions or (there and not stuck):
            return actions
        return self._retire(change, leavers, now_ns)

    def _stay(self, change: Scaling, leavers: list[Process], now_ns: int) -> list[Action]:
        """Time is up before anybody has left: nothing has happened yet."""
        self._core.placements.resize(change.before)
        actions: list[Action] = []
        for process in leavers:
            actions += self._hands.let_go(process, now_ns)
        text = f"the group did not change in time; the node has {change.before} ranks as before"
        return actions + self._end(Error(change.asked.request.call, Code.TIME_LIMIT, text), now_ns)

    def _retire(self, change: Scaling, leavers: list[Process], now_ns: int) -> list[Action]:
        core = self._core
        core.history.over([p.spec.name for p in leavers], "not started again", now_ns)
        for process in leavers:
            self.retired[process.spec.name] = core.processes.pop(process.spec.name)
        for seat in change.going:
            del core.workers[seat]
            core.group.vacate(seat)
        reply = change.back or self._scaled(change, now_ns)
        resized: list[Action] = [] if change.back else [Resized(len(core.workers))]
        return [*core.group.publish(), Sweep(), *resized, *self._end(reply, now_ns)]

    def _scaled(self, change: Scaling, now_ns: int) -> Scaled:
        seats, seconds = tuple(sorted(self._core.workers)), (now_ns - change.begun_ns) / 1e9
        call = change.asked.request.call
        return Scaled(call, change.before, len(seats), seats, round(seconds, 3))

    # ------------------------------------------------------------ restart

    def replaces(self, name: str) -> bool:
        """Whether somebody asked for another incarnation of this process, and it is its turn."""
        return isinstance(self.now, Restarting) and self.now.names[:1] == [name]

    def _restart(self, asked: ChangeAsked, now_ns: int) -> list[Action]:
        request = asked.request
        assert isinstance(request, Restart)
        names, unknown = self._chosen(request.names)
        if unknown or not names:
            known = ", ".join((ALL, *self._core.processes))
            text = f"no process is called {' or '.join(map(repr, unknown)) or 'so'}; there are: {known}"
            if "supervisor" in unknown:
                text = "the supervisor cannot replace itself: stop the node and start it again"
            return [_refusal(asked, Code.BAD_REQUEST, text)]
        shown = ALL if ALL in request.names else ", ".join(names)
        deadline_ns = now_ns + int(request.timeout_s * 1e9)
        self.now = Restarting(asked, f"restart {shown}", now_ns, deadline_ns, names)
        self._core.history.asked(self.now.text, "", now_ns)
        self._core.standbys = dict.fromkeys(self._core.standbys, False)
        return [RenewStandbys()]  # it is perhaps asked for because of what was installed meanwhile

    def _chosen(self, wanted: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """(processes in the order of their turn, words that name none)."""
        known = self._core.processes
        chosen: set[str] = set()
        unknown: list[str] = []
        for word in wanted:
            # The whole name first: worker-1 is not worker-10.
            found = [n for n in known if n == word] or [
                n for n in known if word and n.startswith(word)
            ]
            chosen.update(known if word == ALL else found)
            if not found and word != ALL:
                unknown.append(word)
        order = sorted(
            chosen, key=lambda n: (_RESTART_ORDER.index(known[n].spec.kind), known[n].spec.index)
        )
        return order, unknown

    def _restarting(self, now_ns: int) -> list[Action]:
        core, change = self._core, self.now
        assert isinstance(change, Restarting)
        process = core.processes[change.names[0]]
        if now_ns >= change.deadline_ns:
            why = f"time is up ({'; '.join(core.missing()) or 'not begun'})"
            return self._give_up(change, process, Code.TIME_LIMIT, why, now_ns)
        if not change.since_ns:
            return self._begin(change, process, now_ns)
        if process.incarnation > change.incarnation:
            return self._await_whole(change, process, now_ns)
        if process.stage is Stage.DOWN and process.in_hand:
            process.start_anew(now_ns)
            return core.lives.spawn(process, now_ns)
        if process.spec.kind == "worker" and process.spec.seat in core.group.members:
            return []
        return self._hands.finish_off(process, now_ns)

    def _begin(self, change: Restarting, process: Process, now_ns: int) -> list[Action]:
        """Only a node that is whole but for it loses a process; and one that is down anyway is started at once."""
        others = self._core.missing(but=process.spec.name)
        if process.alive and (others or self._waits(change, process, now_ns)):
            return []
        change.since_ns, change.incarnation = now_ns, process.incarnation
        process.in_hand = process.stage is not Stage.WAITING
        if process.spec.kind == "worker":
            self._core.group.forgive(process.spec.seat)
        if process.stage is Stage.WAITING:  # its next start was put off after many deaths
            process.start_anew(now_ns)
        actions: list[Action] = [Tell("restarting", process.spec.name)]
        if process.alive and process.spec.kind == "worker":
            seat = {process.spec.seat}
            actions += self._core.group.leave(seat, f"{process.spec.name} restarts", now_ns)
        return actions

    def _waits(self, change: Restarting, process: Process, now_ns: int) -> bool:
        """For the successor to have imported everything: streams wait for less then."""
        if self._core.standbys.get(process.spec.standby, True):
            return False
        change.turn_ns = change.turn_ns or now_ns
        return now_ns - change.turn_ns < STANDBY_MS * _MS

    def _await_whole(self, change: Restarting, process: Process, now_ns: int) -> list[Action]:
        """One that falls is started again under the usual rules, as long as that may be of use."""
        name, stage = process.spec.name, process.stage
        fallen = process.incarnation - change.incarnation - process.exists
        waits_in_vain = stage is Stage.WAITING and process.code in _HOPELESS
        of_no_use = stage is Stage.DOWN or waits_in_vain
        if of_no_use or fallen >= NEWCOMER_STARTS:
            times = f" {fallen} times, the last time" if fallen > 1 else ""
            text = f"the new {name} died{times}: {process.ended}"
            return self._give_up(change, process, Code.INTERNAL, text, now_ns)
        if process.stage is not Stage.READY or self._core.missing():
            return []
        seconds = round((now_ns - change.since_ns) / 1e9, 3)
        change.done.append(PhaseTime("restart", name, seconds))
        change.names.pop(0)
        change.since_ns = change.turn_ns = 0
        if change.names:
            return [Tell("restarted", name)]
        return self._end(Restarted(change.asked.request.call, tuple(change.done)), now_ns)

    def _give_up(
        self, change: Restarting, process: Process, code: Code, why: str, now_ns: int
    ) -> list[Action]:
        """What has been begun goes on by itself, under the usual rules; the rest is left alone."""
        text = f"{why}; not replaced: {', '.join(change.names)}"
        if change.done:
            text += f"; replaced: {', '.join(phase.process for phase in change.done)}"
        actions = self._hands.let_go(process, now_ns)
        return actions + self._end(Error(change.asked.request.call, code, text), now_ns)


def _refusal(asked: ChangeAsked, code: Code, text: str) -> Reply:
    return Reply(asked.peer, Error(asked.request.call, code, text))
