"""A placement that the planner wants, given to the group while it runs: proposed, copied, run by all at once. Pure.

One at a time. The workers copy what they lack beside their steps and flip together, in a round for which all
of them are ready; this only watches, and ends it: applied when every member runs it, withdrawn when somebody
cannot get ready, and overtaken by any change of the group, which never waits for it. Then the placement that
some survivor runs is the one in force (`GroupPlacements.settle`).
"""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import COPY_MS, COPY_MS_MAX, FLIP_IDLE_MS, FLIP_STEPS
from phalanx.protocol.messages import Error, Rebalanced, RebalanceRecord, RebalanceTotals
from phalanx.protocol.placement import Placement, moves
from phalanx.protocol.topology import Proposal
from phalanx.supervisor.events import Action, PlacementWords, Propose, RebalanceAsked, Reply, Tell
from phalanx.supervisor.group import GroupPhase
from phalanx.supervisor.placements import objection

if TYPE_CHECKING:
    from phalanx.supervisor.core import SupervisorCore

_MS = 1_000_000
RECORDS_MAX = 200  # remembered for `phalanx eplb history`


class Phase(Enum):
    COPYING = "copying"  # some rank lacks copies
    FLIPPING = "waiting for a step"  # all have them: they run it from the next round on
    WITHDRAWING = "withdrawing"  # until every rank has let go of it, or all run it all the same


@dataclass(slots=True)
class Rebalancing:
    """The one under way."""

    asked: RebalanceAsked
    placement: Placement
    moved: int
    begun_ns: int
    moved_ns: int  # when it last got on: another expert copied, another step taken
    phase: Phase = Phase.COPYING
    copied_ns: int = 0  # when all ranks were ready
    steps: int = 0  # of the group, when all ranks were ready
    why: str = ""  # it is withdrawn
    # Of all members, as seen last; empty: not since it got here.
    words: tuple[PlacementWords, ...] = ()

    @property
    def told(self) -> str:
        return f"version {self.placement.version}, {self.moved} copies: {self.phase.value}"

    def note(self, words: tuple[PlacementWords, ...], now_ns: int) -> None:
        if self._progress(words) != self._progress(self.words):
            self.moved_ns = now_ns
        self.words = words

    def _progress(self, words: tuple[PlacementWords, ...]) -> list[tuple[int, ...]]:
        """What says that it gets on: copies, then steps."""
        if self.phase is Phase.FLIPPING:
            return [(seen.steps,) for seen in words]
        return [(seen.copied, seen.ready) for seen in words]

    def taken(self) -> int:
        """Steps since all ranks were ready, of the one that has taken most."""
        return max(seen.steps for seen in self.words) - self.steps


class Rebalances:
    """The plan that is being applied, if any. Calls into the core, which calls `ask`, `seen` and `step`."""

    def __init__(self, core: "SupervisorCore") -> None:
        self._core = core
        self.now: Rebalancing | None = None
        self._answer: tuple[RebalanceAsked, Reply] | None = None  # of the one that ended last
        self.records: list[RebalanceRecord] = []
        self.totals = RebalanceTotals()

    @property
    def told(self) -> str:
        """What is under way, for people; empty: nothing."""
        return self.now.told if self.now is not None else ""

    # ------------------------------------------------------------ asking

    def ask(self, asked: RebalanceAsked, now_ns: int) -> list[Action]:
        if self.now is not None and self.now.asked.same(asked):
            return []  # said again: it is under way
        if self._answer is not None and self._answer[0].same(asked):
            return [self._answer[1]]  # the answer was lost
        request, core = asked.request, self._core
        proposed = self._judge(asked)
        if not isinstance(proposed, Placement):
            code, why = proposed
            return [
                Tell("plan refused", text=why),
                Reply(asked.peer, Error(request.call, code, why)),
            ]
        running = core.placements.current
        assert running is not None
        moved = sum(len(loads) for loads in moves(running, proposed).values())
        placement = core.placements.propose(proposed)
        self.now = Rebalancing(asked, placement, moved, now_ns, now_ns)
        text = f"{self.now.told}, balance {request.before:.3f} to {request.after:.3f}"
        proposal = Proposal(core.group.epoch, msgspec.msgpack.encode(placement))
        return [Tell("rebalance", text=text), Propose(proposal, tuple(core.group.members))]

    def _judge(self, asked: RebalanceAsked) -> Placement | tuple[Code, str]:
        """The placement, or why it cannot be proposed now."""
        core, request = self._core, asked.request
        if not core.serving:
            return Code.SHUTDOWN, "the node is stopping"
        if self.now is not None:
            return Code.NOT_READY, f"another plan is being applied ({self.told})"
        if core.group.phase is not GroupPhase.RUNNING or core.changes.told:
            text = core.changes.told or "the group is changing"
            return Code.NOT_READY, f"{text}: ask when that is over"
        if request.epoch != core.group.epoch:
            text = (
                f"the plan is for epoch {request.epoch}, the group is in epoch {core.group.epoch}"
            )
            return Code.NOT_READY, text
        try:
            proposed = msgspec.msgpack.decode(request.placement, type=Placement)
        except msgspec.MsgspecError as error:
            return Code.BAD_REQUEST, f"no placement: {error}"
        running = core.placements.current
        if running is None:
            return Code.NOT_READY, "no placement runs"
        room = {s.seat: s.expert_slots for s in core.group.seats if s.expert_slots}
        slots = {seat: min(n, room.get(seat, n)) for seat, n in asked.slots if n}
        text = objection(running, proposed, {**room, **slots})
        return (Code.BAD_REQUEST, text) if text else proposed

    # ------------------------------------------------------------ watching

    def seen(self, words: tuple[PlacementWords, ...], now_ns: int) -> None:
        """What all members have written. Words of others than these incarnations are not theirs."""
        members = self._core.group.members
        theirs = {seen.seat: seen.incarnation for seen in words} == members
        if self.now is not None and theirs:
            self.now.note(words, now_ns)

    def step(self, now_ns: int) -> list[Action]:
        """Whatever follows from what was seen, from the group, and from the time."""
        change, group = self.now, self._core.group
        if change is None:
            return []
        if group.epoch != change.asked.request.epoch:
            return self._overtaken(change, now_ns)
        words, version = change.words, change.placement.version
        if not words:
            return []  # we have not looked yet
        if all(seen.run == version for seen in words):
            return self._adopt(change, now_ns)
        if change.phase is Phase.WITHDRAWING:
            kept = all(seen.ready == seen.run for seen in words)
            if not kept or any(seen.run == version for seen in words):
                return []
            self._core.placements.forget()
            return self._end("withdrawn", change, now_ns)
        if not self._core.serving:
            return self._withdraw(change, "the node is stopping")
        if change.phase is Phase.COPYING:
            return self._copying(change, words, now_ns)
        if change.taken() >= FLIP_STEPS and not any(seen.run == version for seen in words):
            text = f"all ranks were ready and took {change.taken()} steps without it"
            return self._withdraw(change, text)
        if now_ns - change.moved_ns > FLIP_IDLE_MS * _MS:
            return self._withdraw(change, f"no step was taken for {FLIP_IDLE_MS / 1000:g} s")
        return []

    def _copying(
        self, change: Rebalancing, words: tuple[PlacementWords, ...], now_ns: int
    ) -> list[Action]:
        late = [seen.seat for seen in words if seen.ready != change.placement.version]
        if not late:
            change.phase, change.copied_ns, change.moved_ns = Phase.FLIPPING, now_ns, now_ns
            change.steps = max(seen.steps for seen in words)
            return [Tell("copied", text=change.told)]
        still_ms, all_ms = (now_ns - change.moved_ns) / _MS, (now_ns - change.begun_ns) / _MS
        if still_ms <= COPY_MS and all_ms <= COPY_MS_MAX:
            return []
        names = ", ".join(f"worker-{seat}" for seat in late)
        text = f"{names} did not get its copies within {min(still_ms, all_ms) / 1000:.0f} s"
        if still_ms <= COPY_MS:
            text = f"{names} had not all copies after {all_ms / 1000:.0f} s"
        return self._withdraw(change, f"{text}: its log says what it lacks")

    # ------------------------------------------------------------ its end

    def _withdraw(self, change: Rebalancing, why: str) -> list[Action]:
        """A round may be under way in which all flip: it ends when every rank has said which it runs."""
        change.phase, change.why, change.words = Phase.WITHDRAWING, why, ()
        seats = tuple(self._core.group.members)
        return [Tell("rebalance withdrawn", text=f"{change.told}: {why}"), Propose(None, seats)]

    def _adopt(self, change: Rebalancing, now_ns: int) -> list[Action]:
        """Every member runs it: from here on it is where experts lie."""
        core = self._core
        if change.phase is Phase.COPYING:  # it was quicker than we looked
            change.copied_ns = now_ns
        core.group.placement = core.placements.adopt()
        return [Propose(None), *core.group.publish(), *self._end("applied", change, now_ns)]

    def _overtaken(self, change: Rebalancing, now_ns: int) -> list[Action]:
        """The group changes, or has: which placement it goes on from is decided when it settles."""
        placements = self._core.placements
        if placements.proposed is not None:
            return []
        runs = placements.adopted == change.placement.version
        change.why = "; ".join(filter(None, (change.why, "the group changed meanwhile")))
        return [Propose(None), *self._end("applied" if runs else "withdrawn", change, now_ns)]

    def _end(self, outcome: str, change: Rebalancing, now_ns: int) -> list[Action]:
        self.now = None
        request, version = change.asked.request, change.placement.version
        applied = outcome == "applied"
        copied_ns = change.copied_ns
        record = RebalanceRecord(
            *(version, request.epoch, outcome, change.why, change.moved),
            *(request.before, request.after, request.plan_ms),
            round((copied_ns - change.begun_ns) / _MS, 3) if copied_ns else -1.0,
            round((now_ns - copied_ns) / _MS, 3) if copied_ns and applied else -1.0,
        )
        self.records = [*self.records[-RECORDS_MAX + 1 :], record]
        totals = self.totals
        self.totals = RebalanceTotals(
            totals.applied + applied,
            totals.withdrawn + (not applied),
            totals.moved + change.moved * applied,
        )
        reply: Rebalanced | Error = Rebalanced(request.call, version, change.moved)
        if not applied:
            reply = Error(request.call, Code.NOT_READY, change.why)
        answer = Reply(change.asked.peer, reply)
        self._answer = change.asked, answer
        took = f"copied in {record.copy_ms:.0f} ms, flipped in {record.flip_ms:.0f} ms"
        text = f"version {version}: {took if applied else change.why}"
        return [Tell("rebalanced" if applied else "rebalance ended", text=text), answer]
