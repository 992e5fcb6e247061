"""The simulator must find bugs, else it tests nothing: each core here has one planted, and a violation has
to show within a stated number of seeds."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec
import pytest

from e2e.draws import drawn
from phalanx.protocol.errors import Code, ExitCode
from phalanx.protocol.patience import Patience
from phalanx.supervisor.changes import Changes, Scaling
from phalanx.supervisor.core import SupervisorCore
from phalanx.supervisor.ending import Ending
from phalanx.supervisor.events import (
    AcksSeen,
    Action,
    BecameReady,
    ChangeAsked,
    Event,
    Noticed,
    Reaped,
    Resized,
)
from phalanx.supervisor.group import Group, GroupPhase
from phalanx.supervisor.history import History
from phalanx.supervisor.lives import Lives
from phalanx.supervisor.placements import GroupPlacements
from phalanx.supervisor.process import Process
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.restart import RestartPolicy
from sim.host import Host
from sim.host_checks import Violated

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: list[tuple[Plant, range]] = []  # with the seeds within which it must be found


def planted(seeds: int, first: int = 0) -> Callable[[Plant], Plant]:
    """`first` is where it was found when last looked for: it spares every run the search."""

    def note(plant: Plant) -> Plant:
        PLANTED.append((plant, range(first, first + seeds)))
        return plant

    return note


@planted(seeds=10)
def believes_stale_acks(patch: pytest.MonkeyPatch) -> None:
    def acks(self: Group, seen: AcksSeen, now_ns: int) -> list[Action]:
        acknowledged = seen.stop if self.phase is GroupPhase.STOPPING else seen.go
        if seen.seat not in self.waiting or not acknowledged:
            return []
        del self.waiting[seen.seat]
        return self._advance(now_ns)

    patch.setattr(Group, "acks", acks)


@planted(seeds=10)
def does_not_kill_the_lost_one(patch: pytest.MonkeyPatch) -> None:
    def lose(
        self: Lives, process: Process, why: str, by: Noticed, since_ns: int, now_ns: int
    ) -> list[Action]:
        return self._dying(process, why, by, since_ns, now_ns) if process.alive else []

    patch.setattr(Lives, "lose", lose)


@planted(seeds=10)
def goes_before_all_have_answered(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Group, now_ns: int) -> list[Action]:
        if len(self.waiting) > 1:
            return []
        self.waiting.clear()
        return self._run(now_ns) if self.phase is GroupPhase.GOING else self._try_go(now_ns)

    patch.setattr(Group, "_advance", advance)


@planted(seeds=40)
def restarts_without_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RestartPolicy, "delay_ns", lambda self, now_ns: 0)


@planted(seeds=10)
def restarts_without_backoff(patch: pytest.MonkeyPatch) -> None:
    right = RestartPolicy.delay_ns

    def delay_ns(self: RestartPolicy, now_ns: int) -> int | None:
        return None if right(self, now_ns) is None else 0

    patch.setattr(RestartPolicy, "delay_ns", delay_ns)


@planted(seeds=40)
def repeats_the_epoch_after_a_death_in_go(patch: pytest.MonkeyPatch) -> None:
    right = Group._stop

    def stop(self: Group, *args: Any, **kwargs: Any) -> list[Action]:
        if self.phase is GroupPhase.GOING:
            self.epoch -= 2  # so that the right code arrives at the same odd number
        return right(self, *args, **kwargs)

    patch.setattr(Group, "_stop", stop)


@planted(seeds=40)
def hears_the_dead(patch: pytest.MonkeyPatch) -> None:
    right = SupervisorCore._dispatch

    def dispatch(self: SupervisorCore, event: Event, now_ns: int) -> list[Action]:
        if isinstance(event, BecameReady):
            return self.lives.ready(self.processes[event.name], event, now_ns)
        return right(self, event, now_ns)

    patch.setattr(SupervisorCore, "_dispatch", dispatch)


@planted(seeds=10)
def restarts_before_the_old_one_is_reaped(patch: pytest.MonkeyPatch) -> None:
    right = Lives._dying

    def dying(
        self: Lives, process: Process, why: str, by: Noticed, since_ns: int, now_ns: int
    ) -> list[Action]:
        actions = right(self, process, why, by, since_ns, now_ns)
        return actions + self.spawn(process, now_ns)

    patch.setattr(Lives, "_dying", dying)


@planted(seeds=20)
def takes_a_starved_process_for_hung(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Patience, "inspected", lambda self, *found: None)
    patch.setattr(
        Patience,
        "exhausted",
        lambda self, now_ns, limit_ms, *others: self.silent_ms(now_ns) > limit_ms,
    )


@planted(seeds=20)
def never_looks_for_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SupervisorCore, "_find_hung", lambda self, now_ns: [])


@planted(seeds=150, first=50)
def waits_for_ever_for_an_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "overdue", lambda self, now_ns: [])


@planted(seeds=40)
def forgets_who_became_ready_during_go(patch: pytest.MonkeyPatch) -> None:
    right = Group.ready

    def ready(self: Group, seat: int, fingerprint: str, now_ns: int) -> list[Action]:
        if self.phase is GroupPhase.GOING:
            return []
        return right(self, seat, fingerprint, now_ns)

    patch.setattr(Group, "ready", ready)


@planted(seeds=150, first=51)
def waits_for_the_dead_in_stop(patch: pytest.MonkeyPatch) -> None:
    right = Group.lost

    def lost(self: Group, seat: int, *more: Any) -> list[Action]:
        if self.phase is GroupPhase.STOPPING and seat in self.members:
            self.seats[seat].state = "lost"
            del self.members[seat]
            return []
        return right(self, seat, *more)

    patch.setattr(Group, "lost", lost)


@planted(seeds=10)
def moves_the_epoch_for_a_scheduler(patch: pytest.MonkeyPatch) -> None:
    right = Lives._dying

    def dying(
        self: Lives, process: Process, why: str, by: Noticed, since_ns: int, now_ns: int
    ) -> list[Action]:
        actions = right(self, process, why, by, since_ns, now_ns)
        if process.spec.kind == "scheduler" and self._core.group.phase is GroupPhase.RUNNING:
            actions += self._core.group._stop("scheduler died", 0.0, now_ns)
        return actions

    patch.setattr(Lives, "_dying", dying)


@planted(seeds=100, first=20)
def restarts_after_bad_input(patch: pytest.MonkeyPatch) -> None:
    right = Lives.reaped

    def reaped(self: Lives, process: Process, event: Reaped, now_ns: int) -> list[Action]:
        if event.code == ExitCode.BAD_INPUT:
            event = Reaped(event.name, event.incarnation, ExitCode.INTERNAL, event.detail)
        return right(self, process, event, now_ns)

    patch.setattr(Lives, "reaped", reaped)


@planted(seeds=10)
def is_always_healthy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SupervisorCore, "reasons", lambda self: [])


@planted(seeds=40)
def publishes_between_stop_and_go(patch: pytest.MonkeyPatch) -> None:
    """Gives members another topology for the same epoch."""

    def publish(self: Group) -> list[Action]:
        if self.phase is GroupPhase.FORMING:
            return []
        return self._publish(self.epoch + self.epoch % 2)

    patch.setattr(Group, "publish", publish)


@planted(seeds=40)
def never_kills_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ending, "kill_all", lambda self, now_ns: self._finish(now_ns))


@planted(seeds=20)
def a_gateway_that_dies_while_it_drains_is_let_go(patch: pytest.MonkeyPatch) -> None:
    """Nobody is told how its streams end."""
    patch.setattr(Ending, "has_drained", lambda self, process, code: process.drains)


@planted(seeds=60)
def a_drain_knows_no_limit(patch: pytest.MonkeyPatch) -> None:
    right = Ending.shut_down

    def shut_down(self: Ending, drain_ms: int, now_ns: int) -> list[Action]:
        return right(self, drain_ms + 60_000, now_ns)

    patch.setattr(Ending, "shut_down", shut_down)


@planted(seeds=10)
def forgets_experts_of_the_lost(patch: pytest.MonkeyPatch) -> None:
    right = GroupPlacements.settle

    def settle(
        self: GroupPlacements, rooms: Mapping[int, int], runs: Collection[int] = ()
    ) -> bytes | None:
        if self.current is not None and len(rooms) < len(self.current.seats):
            return msgspec.msgpack.encode(self.current)
        return right(self, rooms, runs)

    patch.setattr(GroupPlacements, "settle", settle)


@planted(seeds=400, first=450)
def never_gives_a_scale_up(patch: pytest.MonkeyPatch) -> None:
    right = Changes._scale

    def scale(self: Changes, asked: ChangeAsked, now_ns: int) -> list[Action]:
        actions = right(self, asked, now_ns)
        if self.now is not None:
            self.now.deadline_ns += 10**12
        return actions

    patch.setattr(Changes, "_scale", scale)


@planted(seeds=120)
def forgets_the_change_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Changes, "drop", lambda self, now_ns: [])


@planted(seeds=40)
def does_not_tell_the_old_size_when_going_back(patch: pytest.MonkeyPatch) -> None:
    right = Changes._go_back

    def go_back(self: Changes, change: Scaling, code: Code, why: str, now_ns: int) -> list[Action]:
        return [a for a in right(self, change, code, why, now_ns) if not isinstance(a, Resized)]

    patch.setattr(Changes, "_go_back", go_back)


@planted(seeds=40, first=23)
def ends_leavers_before_the_group_lets_them_go(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Group, seats: Collection[int], cause: str, now_ns: int) -> list[Action]:
        for seat in seats:
            self.members.pop(seat, None)
        return []

    patch.setattr(Group, "leave", leave)


@planted(seeds=120)
def fails_the_node_over_a_newcomer(patch: pytest.MonkeyPatch) -> None:
    right = Lives.reaped

    def reaped(self: Lives, process: Process, event: Reaped, now_ns: int) -> list[Action]:
        process.in_hand = False
        return right(self, process, event, now_ns)

    patch.setattr(Lives, "reaped", reaped)
    patch.setattr(Lives, "_others_serve", lambda self, process: False)


@planted(seeds=40)
def tells_nothing_of_schedulers(patch: pytest.MonkeyPatch) -> None:
    right = History.fell

    def fell(self: History, spec: ProcessSpec, *args: Any) -> None:
        if spec.kind != "scheduler":
            right(self, spec, *args)

    patch.setattr(History, "fell", fell)


@planted(seeds=40)
def never_tells_that_a_rank_is_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "follow", lambda self, records, now_ns: None)


# Four of them in every run, drawn anew (`PLANT_SEED` repeats them); `make soak` looks for all (`none`).
_DRAWN: Final = drawn("PLANT_SEED", 4, len(PLANTED))


@pytest.mark.parametrize(
    "plant, seeds",
    [
        pytest.param(*one, id=one[0].__name__, marks=() if at in _DRAWN else pytest.mark.soak)
        for at, one in enumerate(PLANTED)
    ],
)
def test_bug_is_found(plant: Plant, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violated, KeyError)):  # a core that crashes is found as well
        for seed in seeds:
            Host(seed).run()
