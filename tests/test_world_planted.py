"""The simulator of the whole system must find bugs, else it tests nothing: each of these is planted in one
part, and some run has to fail within a stated number of seeds."""

import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from e2e.draws import drawn
from phalanx.protocol.messages import Attach, ClientMessage, DecodedItem, Final, TokensItem
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.protocol.topology import Seat as SeatOfTopology
from phalanx.scheduler_svc import core as scheduler_core
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.seat import SeatLink
from phalanx.scheduler_svc.state import Sequence as SchedulerSequence
from phalanx.services.client_core import ClientCore
from phalanx.services.gateway.admission import Settings
from phalanx.services.gateway.attempts import Attempts
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.entries import Note, Op, Produced, Recovered, Scored
from phalanx.services.gateway.lives import Lives
from phalanx.services.gateway.moves import Moves
from phalanx.services.gateway.placement import Placement
from phalanx.services.gateway.recovery import Recovery
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.seats import Seat
from phalanx.services.gateway.streams import End, Place, Stream
from phalanx.supervisor.changes import Changes
from phalanx.supervisor.ending import Ending
from phalanx.supervisor.events import AcksSeen, Action, Kill, Noticed, Send
from phalanx.supervisor.group import Group, GroupPhase
from phalanx.supervisor.lives import Lives as ProcessLives
from phalanx.supervisor.process import Process
from phalanx.worker_svc.slots import Slots
from sim.gateway_fakes import accept_what_is_not_durable
from sim.gateway_world import Disk
from sim.hash_worker import HashWorker
from sim.host import Child
from sim.world import World
from sim.world_faults import Faults
from sim.world_node import Node
from sim.world_wires import Weather
from sim.world_worker import MemoryLink, Region, WorkerBody

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
PLANTED: list[tuple[Plant, range]] = []


def planted(seeds: int, first: int = 0) -> Callable[[Plant], Plant]:
    """It must be found within so many seeds; `first` is for the rare ones, which would take long."""

    def note(plant: Plant) -> Plant:
        PLANTED.append((plant, range(first, first + seeds)))
        return plant

    return note


# ---------------------------------------------------------------- supervisor


@planted(seeds=10)
def go_without_all_acks(patch: Patch) -> None:
    def advance(self: Group, now_ns: int) -> list[Action]:
        if len(self.waiting) > 1:
            return []
        self.waiting.clear()
        return self._run(now_ns) if self.phase is GroupPhase.GOING else self._try_go(now_ns)

    patch.setattr(Group, "_advance", advance)


@planted(seeds=20)
def believes_acks_of_another_epoch(patch: Patch) -> None:
    def acks(self: Group, seen: AcksSeen, now_ns: int) -> list[Action]:
        acknowledged = seen.stop if self.phase is GroupPhase.STOPPING else seen.go
        if seen.seat not in self.waiting or not acknowledged:
            return []
        del self.waiting[seen.seat]
        return self._advance(now_ns)

    patch.setattr(Group, "acks", acks)


@planted(seeds=20)
def peers_are_not_told_of_a_loss(patch: Patch) -> None:
    """They wait for its rows for ever."""
    right = Group.lost

    def lost(self: Group, seat: int, cause: str, detected_ms: float, now_ns: int) -> list[Action]:
        if self.phase is GroupPhase.RUNNING and len(self.members) > 1:
            self.seats[seat].state = "lost"
            self.members.pop(seat, None)
            return self.publish()
        return right(self, seat, cause, detected_ms, now_ns)

    patch.setattr(Group, "lost", lost)


@planted(seeds=40)
def does_not_kill_who_hangs(patch: Patch) -> None:
    def lose(
        self: ProcessLives, process: Process, why: str, by: Noticed, since_ns: int, now_ns: int
    ) -> list[Action]:
        return self._dying(process, why, by, since_ns, now_ns) if process.alive else []

    patch.setattr(ProcessLives, "lose", lose)


@planted(seeds=20)
def who_shall_leave_is_told_to_end_at_once(patch: Patch) -> None:
    """Not when the group runs without it."""

    def leave(self: Group, seats: Collection[int], cause: str, now_ns: int) -> list[Action]:
        for seat in seats:
            self.members.pop(seat, None)
        return []

    patch.setattr(Group, "leave", leave)


@planted(seeds=40, first=20)
def a_gateway_that_is_replaced_drains(patch: Patch) -> None:
    """It refuses who comes meanwhile, and is killed over streams that go on."""
    right = Changes._finish_off

    def finish_off(self: Changes, process: Process, now_ns: int) -> list[Action]:
        actions = right(self, process, now_ns)
        if any(isinstance(action, Send) for action in actions):
            return [Kill(process.spec.name, process.incarnation, signal.SIGTERM)]
        return actions

    patch.setattr(Changes, "_finish_off", finish_off)


@planted(seeds=20, first=240)
def a_gateway_that_dies_while_it_drains_is_let_go(patch: Patch) -> None:
    """Nobody is told how its streams end."""
    patch.setattr(Ending, "has_drained", lambda self, process, code: process.drains)


@planted(seeds=20, first=1101)
def a_successor_that_drains_waits_for_no_reader(patch: Patch) -> None:
    """All has ended, but who reads does not know."""
    patch.setattr(Core, "drained", lambda self, now_ns: self.idle)


# ---------------------------------------------------------------- worker


@planted(seeds=100, first=80)
def receives_into_the_old_region(patch: Patch) -> None:
    """What a dying peer stored for an earlier epoch counts in this one."""

    def fresh_region(self: WorkerBody) -> Region:
        return self.region

    patch.setattr(WorkerBody, "fresh_region", fresh_region)


@planted(seeds=80, first=20)
def who_waits_for_rows_does_not_look_at_the_epoch(patch: Patch) -> None:
    """Survivors of a loss do not acknowledge STOP, and are taken for lost as well."""
    right = WorkerBody._advance

    def advance(self: WorkerBody) -> bool:
        running = self.running
        assert running is not None
        missing = any(
            running.region.flags.get(peer, 0) != running.number[1] for peer in running.peers
        )
        return False if running.phase == "exchange" and missing else right(self)

    patch.setattr(WorkerBody, "_advance", advance)


@planted(seeds=40)
def an_abandoned_step_commits(patch: Patch) -> None:
    right = HashWorker.run

    def run(self: HashWorker, plan: StepPlan, *, abandon: bool = False) -> StepResult:
        if abandon and plan.seen >= self.aborted:
            right(self, plan)
            return StepResult(plan.seq, aborted=True)
        return right(self, plan, abandon=abandon)

    patch.setattr(HashWorker, "run", run)


# ---------------------------------------------------------------- scheduler


@planted(seeds=60)
def no_fence(patch: Patch) -> None:
    """Blocks of an ended sequence come back while its step is in flight."""

    def release(self: Scheduler, sequences: list[SchedulerSequence]) -> None:
        for sequence in sequences:
            self.rank.leave(sequence)
        self.rank.free(sequences)
        self.table.remove(sequences)

    patch.setattr(Scheduler, "_release", release)


@planted(seeds=60, first=20)
def one_link_for_all_workers(patch: Patch) -> None:
    """The next worker finds the plans that the last one did not run."""

    def follow(self: SeatLink, seat: SeatOfTopology) -> bool:
        before, self._worker = self._worker, seat.worker_incarnation
        was_gone, self._gone = self._gone, seat.state in ("lost", "absent")
        return before not in (0, self._worker) or (self._gone and not was_gone)

    patch.setattr(SeatLink, "follow", follow)


@planted(seeds=20)
def an_abandoned_step_is_not_planned_again(patch: Patch) -> None:
    patch.setattr(scheduler_core, "retract", lambda rank, flight: None)


# ---------------------------------------------------------------- gateway and its journal


@planted(seeds=5)
def accepts_before_the_journal_has_synced(patch: Patch) -> None:
    right = Core.take_ops

    def take(self: Core) -> tuple[int, list[Op]]:
        accept_what_is_not_durable(self)
        return right(self)

    patch.setattr(Core, "take_ops", take)


@planted(seeds=20)
def tokens_that_come_twice_count_twice(patch: Patch) -> None:
    def extend(self: Stream, offset: int, token_ids: Sequence[int]) -> bool:
        if offset > len(self.tokens):
            return False
        self.tokens.extend(token_ids)
        return True

    patch.setattr(Stream, "extend", extend)


@planted(seeds=40)
def a_final_without_tokens_is_lost(patch: Patch) -> None:
    right = Attempts._take

    def take(
        self: Attempts, stream: Stream, place: Place, seat: Any, item: TokensItem, now_ns: int
    ) -> bool:
        if item.finish_reason is not None and item.offset == len(stream.tokens):
            return False
        return right(self, stream, place, seat, item, now_ns)

    patch.setattr(Attempts, "_take", take)


@planted(seeds=40)
def commands_are_said_once(patch: Patch) -> None:
    """In weather that loses every fifth message."""
    right = Weather.__init__

    def init(self: Weather, rng: Random) -> None:
        right(self, rng)
        self.lost = 0.2

    patch.setattr(Weather, "__init__", init)
    patch.setattr(Attempts, "_repeat", lambda self, stream, place, seat, now_ns: None)


@planted(seeds=60)
def an_aborted_request_comes_back_to_life(patch: Patch) -> None:
    right = Lives.recover

    def recover(self: Lives, one: Recovered, now_ns: int) -> None:
        finals = {i: final for i, final in one.finals.items() if final.finish_reason != "abort"}
        right(self, Recovered(one.entry, finals, one.produced, one.scored), now_ns)

    patch.setattr(Lives, "recover", recover)


@planted(seeds=60)
def resumes_at_the_beginning(patch: Patch) -> None:
    """The next rank is not told what there is; what it makes is taken for the continuation."""
    right = Attempts._take

    def take(
        self: Attempts, stream: Stream, place: Place, seat: Any, item: TokensItem, now_ns: int
    ) -> bool:
        base = self.__dict__.setdefault("bases", {}).setdefault(
            (stream.number, place.attempt), len(stream.tokens)
        )
        moved = msgspec.structs.replace(item, offset=item.offset + base)
        return right(self, stream, place, seat, moved, now_ns)

    patch.setattr(Attempts, "_take", take)
    patch.setattr(Stream, "outputs", lambda self: b"")


@planted(seeds=60)
def tells_an_abort_before_it_is_on_disk(patch: Patch) -> None:
    right = Lives._abort

    def abort(self: Lives, request: Request, end: End, now_ns: int) -> None:
        right(self, request, end, now_ns)
        request.held = False
        self._delivery.offer(request)

    patch.setattr(Lives, "_abort", abort)


@planted(seeds=40, first=696_557_890_600)
def clients_know_a_gateway_by_its_incarnation(patch: Patch) -> None:
    """The first one of the next node has that of the first one of this."""

    right = Core.__init__

    def core(self: Core, settings: Settings, recovered: Sequence[Recovered], now_ns: int) -> None:
        right(self, replace(settings, life=settings.incarnation), recovered, now_ns)

    patch.setattr(Core, "__init__", core)


@planted(seeds=60)
def forgets_finals_of_the_last_life(patch: Patch) -> None:
    """Every sequence of an open request begins anew after a restart, for a reader that had its end."""
    right = Lives.recover

    def recover(self: Lives, one: Recovered, now_ns: int) -> None:
        right(self, Recovered(one.entry, {}, one.produced, one.scored), now_ns)

    patch.setattr(Lives, "recover", recover)


@planted(seeds=100)
def tokens_of_a_lost_place_are_the_streams_of_another(patch: Patch) -> None:
    """Handles are not cleared when a scheduler is another one: rows go to whom the old one meant."""
    right = Placement._replace_scheduler

    def replace(self: Placement, seat: Seat, peer: bytes, incarnation: int) -> None:
        kept = dict(seat.handles)
        right(self, seat, peer, incarnation)
        seat.handles.update(kept)

    def unplace(self: Attempts, stream: Stream) -> None:
        place = stream.place
        if place is not None:
            self._calls.pop(place.call, None)
            self._seats.by_number[place.seat].streams.pop(stream.number, None)
            stream.place = None

    patch.setattr(Placement, "_replace_scheduler", replace)
    patch.setattr(Attempts, "unplace", unplace)


@planted(seeds=20)
def tells_before_it_is_in_the_log(patch: Patch) -> None:
    right = Stream.note

    def note(self: Stream) -> list[Produced | Scored]:
        fresh = right(self)
        self.logged, self.scores_logged, self.end_logged = self.noted, self.scores_noted, True
        return fresh

    patch.setattr(Stream, "note", note)


@planted(seeds=80, first=140)
def the_log_lacks_the_scores_of_prompts(patch: Patch) -> None:
    """Whoever asked for them and comes again after the death of the gateway cannot be told."""
    right = Stream.note

    def note(self: Stream) -> list[Produced | Scored]:
        self.scores_logged = self.num_scores
        return [op for op in right(self) if isinstance(op, Produced)]

    patch.setattr(Stream, "note", note)
    patch.setattr(Disk, "has", lambda self, message: True)


@planted(seeds=60, first=15)
def the_log_is_not_read(patch: Patch) -> None:
    def recover(self: Stream, produced: object, scored: object) -> None:
        self.logged = 0

    patch.setattr(Stream, "recover", recover)


@planted(seeds=80, first=100)
def the_log_is_told_beyond_a_stop_string(patch: Patch) -> None:
    """It holds what a rank made before it was told to stop; only the text says where the end is."""

    def show(self: Stream, item: DecodedItem, flush: bool) -> None:
        if self.recorded is None:
            right(self, item, flush)
        else:
            self.shown.extend(item.pieces)
            self.final = msgspec.structs.replace(self.recorded, offset=len(self.shown))

    right = Stream.show
    patch.setattr(Stream, "show", show)


@planted(seeds=60)
def what_is_made_again_ends_anew(patch: Patch) -> None:
    """Not as it ended before, for whoever reads it again."""

    def come_to(self: Stream, recorded: Final) -> None:
        self.finish(End("length"), recorded.offset)

    patch.setattr(Stream, "_come_to", come_to)


@planted(seeds=20)
def drafts_pass_unseen(patch: Patch) -> None:
    patch.setattr(Slots, "_passed", lambda self, rows, tokens, status: np.ones(len(tokens), bool))


@planted(seeds=40)
def a_worker_takes_any_link(patch: Patch) -> None:
    """Also one with plans for the worker before it, whose scheduler hangs."""
    _hang_schedulers_of_dead_workers(patch)
    patch.setattr(MemoryLink, "taken", False)


def _hang_schedulers_of_dead_workers(patch: Patch) -> None:
    """The faults are all of this kind, which is rare among those at random."""

    def victims(self: Faults, node: Node, kind: str) -> list[Child]:
        seat = self.rng.randrange(self.world.shape.ranks)
        names = (f"scheduler-{seat}", f"worker-{seat}")
        known = [node.children[name] for name in names if name in node.children]
        return [child for child in known if child.alive]

    def hit(self: Faults, node: Node, child: Child, kind: str) -> None:
        if child.spec.kind == "worker":
            node.die(child, -9)
        elif child.mood == "well":
            node.afflict(child, "stopped")

    patch.setattr(Faults, "_victims", victims)
    patch.setattr(Faults, "_hit", hit)


def test_a_worker_needs_no_scheduler_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _hang_schedulers_of_dead_workers(monkeypatch)
    for seed in range(10):
        World(seed).run()


@planted(seeds=20, first=5050)
def who_waits_at_a_full_rank_stays_there(patch: Patch) -> None:
    """Though another rank has room, for instance because it came back empty."""
    patch.setattr(Moves, "ask", lambda self, now_ns: None)


@planted(seeds=40)
def who_comes_back_is_not_placed_again(patch: Patch) -> None:
    right = Placement.enqueue

    def enqueue(self: Placement, stream: Stream, resumed: bool = False) -> None:
        if not stream.handed_back:
            right(self, stream, resumed)

    patch.setattr(Placement, "enqueue", enqueue)


@planted(seeds=80, first=140)
def a_token_too_few_is_left_to_the_successor(patch: Patch) -> None:
    """No stream changes by it: what was delivered is made again."""
    right = Core.take_notes

    def take(self: Core) -> list[Note]:
        notes = right(self)
        return notes[:-1] if notes and isinstance(notes[-1], Produced) else notes

    patch.setattr(Core, "take_notes", take)


@planted(seeds=40, first=100)
def a_token_too_many_is_left_to_the_successor(patch: Patch) -> None:
    right = Stream.recall

    def recall(self: Stream, produced: Sequence[Produced], scored: Sequence[Scored] = ()) -> None:
        right(self, produced, scored)
        self.tokens += self.tokens[-1:]

    patch.setattr(Stream, "recall", recall)


@planted(seeds=40)
def recovers_nothing(patch: Patch) -> None:
    """What no scheduler runs after a restart is never run again."""
    patch.setattr(Recovery, "free", lambda self, fingerprint, now_ns: ())


# ---------------------------------------------------------------- client


@planted(seeds=60)
def a_client_attaches_at_the_beginning(patch: Patch) -> None:
    right = ClientCore._send

    def send(self: ClientCore, message: ClientMessage) -> None:
        if isinstance(message, Attach):
            message = Attach(message.call, message.request_id)
        right(self, message)

    patch.setattr(ClientCore, "_send", send)


@planted(seeds=60)
def a_client_does_not_notice_another_gateway(patch: Patch) -> None:
    patch.setattr(ClientCore, "_repeat", lambda self, flow, now_ns: None)


# Four of them in every run, drawn anew (`PLANT_SEED` repeats them); `make soak` looks for all (`none`).
_DRAWN = drawn("PLANT_SEED", 4, len(PLANTED))


@pytest.mark.parametrize(
    "plant, seeds",
    [
        pytest.param(*one, id=one[0].__name__, marks=() if at in _DRAWN else pytest.mark.soak)
        for at, one in enumerate(PLANTED)
    ],
)
def test_bug_is_found(plant: Plant, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(_fails(seed) for seed in seeds), f"not found in {len(seeds)} runs"


def _fails(seed: int) -> bool:
    try:
        World(seed).run()
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return True
    return False
