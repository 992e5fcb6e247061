"""The supervisor's decisions as stories: what happens, and what it does. Virtual time, no processes."""

import signal
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import pytest

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.config import HttpConfig, KVStoreConfig, NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import (
    BUSY_SILENCE_MS,
    GO_ACK_MS,
    HAND_OVER_MS,
    HANG_MS,
    RESTART_SERVED_MS,
    RESTARTS_MAX,
    START_DEADLINE_MS,
    STARVED_MS_MAX,
    STEP_END_MS,
    STOP_ACK_MS,
    TROUBLE_MS,
)
from phalanx.protocol.messages import HandOver, HealthUpdate, Restart, Scale, TopologyChanged
from phalanx.protocol.topology import Topology
from phalanx.supervisor.core import SupervisorCore
from phalanx.supervisor.ending import NodeStage
from phalanx.supervisor.events import (
    AcksSeen,
    Action,
    BecameReady,
    ChangeAsked,
    Event,
    FilesMissing,
    Finished,
    Inspect,
    Inspected,
    Kill,
    Observed,
    PipeClosed,
    Progressed,
    Publish,
    Reaped,
    Send,
    SetEpoch,
    Spawn,
    Spawned,
    Tell,
    Troubled,
)
from phalanx.supervisor.group import GroupPhase
from phalanx.supervisor.lives import describe_end
from phalanx.supervisor.placements import GroupPlacements
from phalanx.supervisor.process import Stage
from phalanx.supervisor.processes import process_table
from phalanx.supervisor.status import status

MS = 1_000_000
A = TypeVar("A")


@dataclass
class Story:
    """A core and its clock. Actions of all events are kept until `take`."""

    ranks: int = 3
    http: bool = False
    now_ns: int = 5_000_000_000
    actions: list[Action] = field(default_factory=list[Action])
    silent: set[str] = field(default_factory=set[str])  # processes that do not beat

    def __post_init__(self) -> None:
        self.config = NodeConfig(
            run_dir="/tmp/story",
            ranks=self.ranks,
            tokenizers=1,
            kvstore=KVStoreConfig(),
            http=HttpConfig(enabled=self.http),
        )
        table = process_table(self.config)
        self.core = SupervisorCore(table, GroupPlacements(2, 6, self.ranks))
        self.actions += self.core.tick(self.now_ns)

    def feed(self, *events: Event) -> "Story":
        for event in events:
            self.actions += self.core.handle(event, self.now_ns)
        return self

    def wait(self, ms: int) -> "Story":
        """Time passes in ticks; whoever is not `silent` beats."""
        end_ns = self.now_ns + ms * MS
        while self.now_ns < end_ns:
            self.now_ns = min(self.now_ns + 100 * MS, end_ns)
            for name, process in self.core.processes.items():
                if process.alive and name not in self.silent:
                    beat = Observed(name, process.incarnation, self.now_ns, 0, ProcessPhase.READY)
                    self.feed(beat)
            self.actions += self.core.tick(self.now_ns)
        return self

    def take(self, kind: type[A]) -> list[A]:
        """The actions of one kind since the last `take` of any kind."""
        taken: list[A] = [action for action in self.actions if isinstance(action, kind)]
        self.actions = []
        return taken

    def ready(self, *names: str, fingerprint: str = "n") -> "Story":
        for name in names:
            incarnation = self.core.processes[name].incarnation
            self.feed(BecameReady(name, incarnation, fingerprint))
        return self

    def acks(self, stop: int = 0, go: int = 0, seats: tuple[int, ...] | None = None) -> "Story":
        for seat in range(self.ranks) if seats is None else seats:
            incarnation = self.core.workers[seat].incarnation
            self.feed(AcksSeen(seat, incarnation, stop, go))
        return self

    def dies(self, name: str, code: int = -9, reaped: bool = True) -> "Story":
        incarnation = self.core.processes[name].incarnation
        self.feed(PipeClosed(name, incarnation, self.now_ns))
        return self.feed(Reaped(name, incarnation, code)) if reaped else self

    @property
    def epoch(self) -> int:
        return self.core.group.epoch


def kept_out(story: Story) -> list[int]:
    """Seats of which the topology says so."""
    published = story.core.group.published
    assert published is not None
    return [seat.seat for seat in published.seats if seat.kept_out]


def running(ranks: int = 3, http: bool = False) -> Story:
    story = Story(ranks, http)
    story.ready(*story.core.processes).acks(go=2)
    assert not story.core.reasons()
    story.actions.clear()
    return story


# ---------------------------------------------------------------- start


def test_everything_starts_at_once_and_the_group_forms_when_all_workers_are_ready() -> None:
    story = Story()
    assert {a.name for a in story.take(Spawn)} == set(story.core.processes)
    story.ready("worker-0", "worker-1")
    assert story.take(Publish) == [] and story.epoch == 1
    story.ready("worker-2")
    published = story.take(Publish)
    assert [p.topology.epoch for p in published] == [2]
    story.acks(go=2, seats=(0, 2))
    assert story.take(SetEpoch) == []
    story.acks(go=2, seats=(1,))
    assert story.take(SetEpoch) == [SetEpoch(2, (0, 1, 2))]


def test_start_says_what_it_waits_for() -> None:
    story = Story(1).ready("worker-0", "gateway")
    assert story.core.reasons()[0] == "scheduler-0 is starting"
    story.feed(Progressed("scheduler-0", 1, "load", 0.5))
    assert story.core.reasons()[0] == "scheduler-0 is starting: load"


def test_bad_input_ends_the_node_at_once_with_its_reason() -> None:
    story = Story().ready("gateway")
    story.feed(Reaped("worker-1", 1, ExitCode.BAD_INPUT, "no such checkpoint"))
    assert story.core.failed == "worker-1: exit code 2 BAD_INPUT: no such checkpoint"
    assert Spawn("worker-1", 2) not in story.actions
    assert Send("gateway", 1, HandOver(HAND_OVER_MS)) in story.actions
    for name in story.core.processes:
        story.feed(Reaped(name, story.core.processes[name].incarnation, 0))
    story.actions += story.core.tick(story.now_ns)
    (finished,) = story.take(Finished)
    assert finished.code == ExitCode.BAD_INPUT


def test_a_worker_with_other_numerics_does_not_join() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.ready("worker-1", fingerprint="other")
    assert story.epoch == 4 and story.core.group.members.keys() == {0, 2}
    assert Kill("worker-1", 2, signal.SIGKILL) in story.actions
    story.feed(Reaped("worker-1", 2, -9)).wait(10_000)
    assert story.core.processes["worker-1"].incarnation == 2, "a restart would not help"
    assert any("fingerprint is other, the group's is n" in why for why in story.core.reasons())
    assert kept_out(story) == [1], "nobody waits for it"


def test_workers_that_differ_at_the_start_fail_the_node() -> None:
    story = Story().ready("worker-0").ready("worker-1", fingerprint="other")
    assert story.core.code == ExitCode.UNHEALTHY
    assert story.core.failed == "worker-1: its numerics fingerprint is other, the group's is n"


# ---------------------------------------------------------------- the two phases


def test_death_of_a_worker_stops_goes_and_lets_its_replacement_join() -> None:
    story = running()
    story.feed(PipeClosed("worker-1", 1, story.now_ns))
    kinds = [type(action) for action in story.actions]
    assert kinds.index(SetEpoch) < kinds.index(Tell), "the group stops before anything slower"
    assert story.actions[0] == Kill("worker-1", 1, signal.SIGKILL)
    assert story.take(SetEpoch) == [SetEpoch(3, (0, 2))]

    story.acks(stop=3, seats=(0, 2))
    (published,) = story.take(Publish)
    states = {s.seat: s.state for s in published.topology.seats}
    assert states == {0: "member", 1: "lost", 2: "member"} and published.topology.epoch == 4

    story.acks(go=4, seats=(0, 2))
    assert SetEpoch(4, (0, 2)) in story.actions
    told = [a.name for a in story.take(Send) if a.message == TopologyChanged(4)]
    assert set(told) == {"gateway", "scheduler-0", "scheduler-1", "scheduler-2"}
    assert story.core.reasons() == ["worker-1 is down: died"], "its restart waits for the reaping"

    story.feed(Reaped("worker-1", 1, -9))
    assert Spawn("worker-1", 2) in story.actions, "the first restart is immediate"
    story.ready("worker-1")
    assert story.epoch == 5
    story.acks(stop=5, seats=(0, 2))
    assert story.core.group.members == {0: 1, 1: 2, 2: 1}
    story.acks(go=6)
    assert story.epoch == 6 and story.core.reasons() == []
    causes = [(r.epoch, r.cause, r.survivors) for r in story.core.group.records]
    assert causes == [
        (2, "start", (0, 1, 2)),
        (4, "worker-1 died", (0, 2)),
        (6, "worker-1 joined", (0, 1, 2)),
    ]


def test_second_death_during_stop_is_part_of_the_same_change() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0,)).dies("worker-2")
    assert story.epoch == 3
    story.acks(go=4, seats=(0,))
    assert story.epoch == 4 and story.core.group.members.keys() == {0}
    assert story.core.group.records[-1].cause == "worker-1 died; worker-2 died"


def test_death_during_go_begins_again_with_the_next_odd_number() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0,))
    story.ready("worker-1").dies("worker-0")
    assert story.epoch == 5, "4 was never used"
    story.acks(stop=3, seats=(2,))
    assert story.core.group.waiting.keys() == {2}, "an answer to the old STOP is none to this one"
    story.acks(stop=5, seats=(2,))
    story.acks(go=4, seats=(2,)).acks(go=6, seats=(1,))
    assert story.epoch == 5
    story.acks(go=6, seats=(2,))
    assert story.epoch == 6 and story.core.group.members == {1: 2, 2: 1}


def test_death_of_the_joiner_in_its_own_go() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.ready("worker-1").acks(stop=5, seats=(0, 2)).acks(go=6, seats=(0, 2))
    assert story.epoch == 5
    story.dies("worker-1")
    assert story.epoch == 7
    story.acks(stop=7, seats=(0, 2)).acks(go=8, seats=(0, 2))
    assert story.epoch == 8 and story.core.group.members == {0: 1, 2: 1}


def test_ready_during_go_joins_right_after_it() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2))
    story.ready("worker-1")
    assert story.core.group.members == {0: 1, 2: 1}
    story.acks(go=4, seats=(0, 2))
    assert [e.epoch for e in story.take(SetEpoch)][-2:] == [4, 5]


def joining() -> Story:
    """worker-1 fell, its successor is ready: the members are told to stop."""
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    assert [action.ends_steps for action in story.take(SetEpoch)] == [True, True]
    story.actions.clear()
    story.ready("worker-1")
    assert story.take(SetEpoch) == [SetEpoch(5, (0, 1, 2), ends_steps=False)]
    return story


def test_who_joins_or_leaves_ends_no_step() -> None:
    story = joining().acks(stop=5, seats=(0, 2))
    story.actions.clear()
    story.acks(go=6)
    assert story.take(SetEpoch) == [SetEpoch(6, (0, 1, 2))]
    story.actions += story.core.group.leave([2], "scale", story.now_ns)
    assert story.take(SetEpoch)[-1] == SetEpoch(7, (0, 1, 2), ends_steps=False)


def test_a_death_while_steps_are_finished_ends_them() -> None:
    """They wait for rows that will not come."""
    story = joining().acks(stop=5, seats=(0,))
    story.actions.clear()
    story.dies("worker-2")
    assert story.take(SetEpoch) == [SetEpoch(7, (0, 1))]
    story.acks(stop=5, seats=(0,))
    assert story.core.group.waiting.keys() == {0}
    story.acks(stop=7, seats=(0,)).acks(go=8, seats=(0, 1))
    assert story.epoch == 8
    assert story.core.group.records[-1].cause == "worker-1 joined; worker-2 died"


def test_a_step_that_takes_long_is_not_waited_for() -> None:
    """Nor is anybody lost over it who answers then."""
    story = joining().wait(STEP_END_MS - 50)
    assert story.epoch == 5
    story.wait(150)
    assert story.epoch == 7 and story.take(SetEpoch)[-1] == SetEpoch(7, (0, 1, 2))
    story.wait(STOP_ACK_MS - 400).acks(stop=7, seats=(0, 2)).acks(go=8)
    assert story.core.group.members == {0: 1, 1: 2, 2: 1}
    assert story.core.group.records[-1].cause == "worker-1 joined"


def test_a_newcomer_with_little_room_does_not_stop_those_who_run() -> None:
    """Ranks share experts evenly: with one that holds one of six, three hold three. Without it two hold all."""
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.feed(BecameReady("worker-1", 2, "n", 1))
    story.acks(stop=5, seats=(0, 2)).acks(go=6, seats=(0, 2))
    assert story.epoch == 6 and story.core.group.members == {0: 1, 2: 1}
    assert story.core.reasons() == ["worker-1 has not joined yet"]
    assert kept_out(story) == [1]
    story.dies("worker-1").wait(300).ready("worker-1")
    assert kept_out(story) == [], "its successor may have more"
    story.acks(stop=7, seats=(0, 2)).acks(go=8)
    assert story.epoch == 8 and story.core.group.members == {0: 1, 1: 3, 2: 1}


def test_who_follows_one_that_was_kept_out_joins_after_the_change_under_way() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    story.feed(BecameReady("worker-1", 2, "n", 1))
    story.acks(stop=5, seats=(0, 2)).acks(go=6, seats=(0, 2))
    story.dies("worker-1").dies("worker-2").acks(stop=7, seats=(0,))
    assert story.core.group.phase is GroupPhase.GOING
    story.wait(300).ready("worker-1").acks(go=8, seats=(0,))
    story.acks(stop=9, seats=(0,)).acks(go=10, seats=(0, 1))
    assert story.core.group.members == {0: 1, 1: 3}


def test_a_stopped_group_goes_on_when_nobody_need_be_waited_for() -> None:
    story = Story(2)
    story.ready("gateway").feed(
        BecameReady("worker-0", 1, "n", 3), BecameReady("worker-1", 1, "n", 3)
    )
    story.acks(go=2).dies("worker-1").acks(stop=3, seats=(0,))
    assert story.core.group.phase is GroupPhase.STOPPED
    story.core.group.has_room(0, 6)
    story.dies("worker-1").acks(go=4, seats=(0,))
    assert story.epoch == 4 and story.core.group.members == {0: 1}


def test_no_answer_to_stop_is_a_loss_too() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0,))
    story.wait(300).feed(Inspected("worker-2", 1, "S", 0)).wait(STOP_ACK_MS - 400)
    assert story.core.group.members.keys() == {0, 2}
    story.wait(200)
    assert Kill("worker-2", 1, signal.SIGKILL) in story.actions
    assert story.core.group.members.keys() == {0}


def test_no_answer_to_go_is_a_loss_too() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0,))
    story.wait(300).feed(Inspected("worker-2", 1, "S", 0)).wait(GO_ACK_MS - 200)
    assert Kill("worker-2", 1, signal.SIGKILL) in story.actions
    assert story.epoch == 5


def test_the_last_member_dies_and_the_first_replacement_goes_on_alone() -> None:
    story = running(1)
    story.dies("worker-0")
    assert story.epoch == 3
    (published,) = story.take(Publish)[:1]
    assert published.topology.epoch == 2, "information, no GO"
    assert published.topology.members() == []
    story.ready("worker-0").acks(go=4)
    assert story.epoch == 4 and story.core.reasons() == []


def test_death_of_a_service_does_not_move_the_epoch() -> None:
    story = running()
    for name in ("scheduler-1", "gateway", "tokenizer-0", "kvstore", "eplb"):
        story.dies(name).ready(name)
    assert story.epoch == 2 and story.take(SetEpoch) == []
    topology = story.core.group.published
    assert isinstance(topology, Topology)
    assert [s.scheduler_incarnation for s in topology.seats] == [1, 2, 1]


def test_the_death_of_a_scheduler_is_told_before_the_next_one_is_started() -> None:
    """Its streams go elsewhere meanwhile: also when the restart is put off."""
    story = running()
    story.dies("scheduler-0").ready("scheduler-0")
    story.actions.clear()
    story.dies("scheduler-0", reaped=False)
    (published,) = story.take(Publish)
    assert published.topology.seats[0].scheduler_incarnation == 3
    story.feed(Reaped("scheduler-0", 2, -9)).wait(1000)
    assert [(a.name, a.incarnation) for a in story.take(Spawn)] == [("scheduler-0", 3)]
    assert story.core.group.published == published.topology


def test_members_see_one_topology_an_epoch() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0, 2))
    story.actions.clear()
    story.dies("scheduler-0")
    assert story.take(Publish) == [], "between GO and the even word nothing else is published"
    story.acks(go=4, seats=(0, 2))
    (published,) = story.take(Publish)
    assert published.topology.epoch == 4
    assert published.topology.seats[0].scheduler_incarnation == 2


# ---------------------------------------------------------------- restarts


def test_restarts_back_off_and_end_in_giving_up() -> None:
    story = running()
    delays: list[float] = []
    for _ in range(RESTARTS_MAX):
        before = story.core.processes["tokenizer-0"].incarnation
        died_ns = story.now_ns
        story.dies("tokenizer-0")
        while story.core.processes["tokenizer-0"].incarnation == before:
            story.wait(100)
        delays.append((story.now_ns - died_ns) / MS)
    assert delays == [0, 100, 200, 400, 800, 1600, 3200, 5000]
    story.dies("tokenizer-0", code=70)
    assert story.core.code == ExitCode.GAVE_UP
    assert story.core.failed.startswith("tokenizer-0 died 9 times within a minute")


def test_who_has_served_for_a_while_is_started_again_at_once_however_often() -> None:
    """It is not given up either: with each such life the count begins anew."""
    story = running()
    delays: list[float] = []
    for number in range(2 * RESTARTS_MAX):
        process = story.core.processes["tokenizer-0"]
        died_ns, before = story.now_ns, process.incarnation
        story.dies("tokenizer-0")
        while process.incarnation == before:
            story.wait(100)
        delays.append((story.now_ns - died_ns) / MS)
        if number != 3:
            story.ready("tokenizer-0").wait(RESTART_SERVED_MS - 200 * (number == 2))
    assert delays == [0, 0, 0, 100, 200, *[0] * 11]
    for _ in range(RESTARTS_MAX):
        story.dies("tokenizer-0").wait(5000)
    assert not story.core.failed
    story.dies("tokenizer-0")
    assert story.core.code == ExitCode.GAVE_UP


def test_other_numerics_do_not_end_a_node_whose_other_rank_is_about_to_be_back() -> None:
    story = running(2)
    story.dies("worker-1").acks(stop=3, seats=(0,)).acks(go=4, seats=(0,))
    story.dies("worker-0", reaped=False).ready("worker-1", fingerprint="other")
    assert not story.core.failed, "the other one is not reaped yet"
    story.feed(Reaped("worker-0", 1, -9)).wait(100).ready("worker-0")
    story.acks(go=6, seats=(0,))
    assert [text for text in story.core.reasons() if "worker-0" in text] == []
    story.dies("worker-0").wait(200).ready("worker-0", fingerprint="other")
    assert story.core.failed, "none is left that could be one of the group"


GPU_GONE = "rank 1 needs a GPU of its own and this machine shows 1"


def lose_rank_1(story: Story) -> None:
    story.dies("worker-1").acks(stop=3, seats=(0,)).acks(go=4, seats=(0,))


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.INTERNAL])
def test_a_rank_that_cannot_start_any_more_does_not_end_those_that_run(code: int) -> None:
    """Its GPU is gone for good, say: the node ended, within a second or after nine deaths."""
    story = running(2)
    lose_rank_1(story)
    for _ in range(3 * RESTARTS_MAX):
        story.feed(Reaped("worker-1", story.core.processes["worker-1"].incarnation, code, GPU_GONE))
        (told,) = story.core.reasons()
        assert told.startswith("worker-1 is") and not story.core.failed
        story.wait(5000)
    story.feed(Reaped("worker-1", story.core.processes["worker-1"].incarnation, code, GPU_GONE))
    (told,) = story.core.reasons()
    assert told.startswith("worker-1 is down: exit code") and told.endswith(GPU_GONE)
    assert kept_out(story) == [1], "what fits only there does not wait for it"
    story.dies("worker-0").wait(5000)
    story.feed(Reaped("worker-1", story.core.processes["worker-1"].incarnation, code, GPU_GONE))
    assert not story.core.failed, "the other one is on its way back"
    story.ready("worker-0").acks(go=6, seats=(0,)).wait(5000)
    story.ready("worker-1").acks(stop=7).acks(go=8)
    assert not story.core.reasons() and kept_out(story) == []


def test_a_node_none_of_whose_ranks_can_start_is_given_up() -> None:
    story = running(2)
    lose_rank_1(story)
    story.feed(Reaped("worker-1", 2, ExitCode.BAD_INPUT, GPU_GONE))
    story.dies("worker-0")
    assert not story.core.failed
    story.feed(Reaped("worker-0", 2, ExitCode.BAD_INPUT, "no such checkpoint"))
    assert story.core.failed == "worker-0: exit code 2 BAD_INPUT: no such checkpoint"


def test_so_is_one_whose_ranks_cannot_hold_all_experts_without_it() -> None:
    story = Story(2)
    for seat in range(2):
        story.feed(BecameReady(f"worker-{seat}", 1, "n", 3))
    story.ready("gateway", *(n for n in story.core.processes if "worker" not in n)).acks(go=2)
    assert not story.core.reasons()
    lose_rank_1(story)
    assert story.core.group.phase is GroupPhase.STOPPED
    story.feed(Reaped("worker-1", 2, ExitCode.BAD_INPUT, GPU_GONE))
    assert story.core.code == ExitCode.BAD_INPUT


def falls_joining(story: Story, stands_ms: int) -> float:
    """Rank 2 is ready, and falls in the middle of its GO. Returns after how many seconds the next one is started."""
    worker = story.core.workers[2]
    story.ready("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1)).wait(stands_ms)
    assert story.core.group.phase is GroupPhase.GOING
    died_ns, before = story.now_ns, worker.incarnation
    story.dies("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1))
    assert story.core.group.phase is GroupPhase.RUNNING
    while worker.incarnation == before:
        story.wait(100)
    return (story.now_ns - died_ns) / 1e9


def without_rank_2() -> Story:
    story = running().dies("worker-2").acks(stop=3, seats=(0, 1)).acks(go=4, seats=(0, 1))
    return story.wait(1000)


def test_a_rank_that_falls_each_time_it_joins_stops_the_others_ever_less_often() -> None:
    """Its device cannot be reached by its peers, say: each of its joins was a stop of all streams, one after another."""
    story = without_rank_2()
    assert [falls_joining(story, 200) for _ in range(4)] == [0.1, 0.8, 2.4, 6.4]
    assert [falls_joining(story, GO_ACK_MS - 100) for _ in range(3)] == [331.2, 600, 600]
    assert not story.core.failed
    worker = story.core.workers[2]
    # It joins after all, and serves: what comes later is as if nothing had been.
    story.ready("worker-2").acks(stop=story.epoch).acks(go=story.epoch + 1).wait(RESTART_SERVED_MS)
    story.dies("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1))
    assert worker.stage is Stage.STARTING
    assert falls_joining(story, 200) == 0.1


def test_who_falls_when_it_joins_is_there_at_once_when_the_others_cannot_do_without_it() -> None:
    story = without_rank_2()
    for _ in range(2):
        falls_joining(story, GO_ACK_MS - 100)
    story.ready("worker-2").dies("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1))
    worker = story.core.workers[2]
    assert worker.stage is Stage.WAITING and kept_out(story) == [2]
    assert "the next start is put off by 79.6 s, since 2 of its workers in a row" in worker.detail
    story.dies("worker-0").dies("worker-1").wait(100)
    assert worker.stage is Stage.STARTING


def test_an_operator_starts_it_when_he_likes() -> None:
    story = without_rank_2()
    for _ in range(2):
        falls_joining(story, GO_ACK_MS - 100)
    story.ready("worker-2").dies("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1))
    story.feed(ChangeAsked(b"me", Restart(7, ("worker-2",), 60.0))).wait(100)
    assert story.core.workers[2].stage is Stage.STARTING


NO_SPACE = "no room: /dev/shm has 3 MiB free, arena x needs 9 MiB"


@pytest.mark.parametrize("name", ["worker-1", "scheduler-1"])
def test_a_process_without_room_is_tried_for_ever_and_says_what_it_needs(name: str) -> None:
    story = running()
    process = story.core.processes[name]
    story.dies(name).acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    delays: list[float] = []
    for _ in range(3 * RESTARTS_MAX):
        assert process.stage is Stage.STARTING
        ended_ns, before = story.now_ns, process.incarnation
        story.feed(Reaped(name, before, ExitCode.NO_ROOM, NO_SPACE))
        (told,) = story.core.reasons()
        assert told.startswith(f"{name} is down: {NO_SPACE} (tried {len(delays) + 1} times, ")
        while process.incarnation == before:
            story.wait(100)
        assert story.core.reasons() == [f"{name} is starting (before: {NO_SPACE})"]
        delays.append((story.now_ns - ended_ns) / MS)
    assert delays[:6] == [500, 1000, 2000, 4000, 8000, 8000] and delays[-1] == 8000
    story.ready(name)
    if name == "worker-1":
        story.acks(stop=5).acks(go=6)
        cause = story.core.group.records[-1].cause
        assert cause == f"worker-1 joined (after 24 starts in vain: {NO_SPACE})"
    assert story.core.reasons() == []
    story.dies(name)
    assert not story.core.failed, "its starts in vain were no deaths"


def test_a_node_that_finds_no_room_at_its_start_says_so_and_ends() -> None:
    story = Story()
    story.feed(Reaped("worker-1", 1, ExitCode.NO_ROOM, NO_SPACE))
    assert story.core.failed == f"worker-1: {NO_SPACE}"
    assert story.core.code == ExitCode.UNHEALTHY


def test_the_node_outlives_a_kvstore_that_cannot_stay_up() -> None:
    story = running()
    for _ in range(30):
        story.dies("kvstore", code=70).wait(5000)
    assert story.core.stage is NodeStage.RUNNING
    assert story.core.processes["kvstore"].incarnation > 25
    story.dies("kvstore", code=int(ExitCode.BAD_INPUT))
    assert story.core.stage is NodeStage.RUNNING, "its directory went bad while the node serves"


def test_old_deaths_are_forgiven() -> None:
    story = running()
    for _ in range(3 * RESTARTS_MAX):
        story.dies("gateway")
        assert story.core.processes["gateway"].stage is Stage.STARTING
        story.wait(61_000)
    assert story.core.failed == ""


def test_a_life_that_was_asked_to_end_does_not_make_the_next_one_long() -> None:
    """One that dies while it starts has not served, however long the one before it had."""
    story = running().dies("gateway").ready("gateway").wait(2 * RESTART_SERVED_MS)
    story.core.standbys.clear()
    for _ in range(3):
        story.dies("gateway").wait(1000)
    story.ready("gateway").wait(RESTART_SERVED_MS)
    story.feed(ChangeAsked(b"me", Restart(1, ("gateway",), 60.0)))
    story.dies("gateway", ExitCode.OK)
    deaths = list(story.core.processes["gateway"].policy.deaths_ns)
    assert len(deaths) == 3
    story.dies("gateway")
    assert story.core.processes["gateway"].policy.deaths_ns == [*deaths, story.now_ns]


def test_a_signal_without_a_name_ends_a_process_as_any_other() -> None:
    """The supervisor crashed over its name, and the node ended."""
    story = running().dies("worker-1", code=-40).acks(stop=3, seats=(0, 2))
    assert story.core.processes["worker-1"].ended == "ended by signal 40"
    story.acks(go=4, seats=(0, 2)).ready("worker-1").acks(stop=5).acks(go=6)
    assert not story.core.reasons()


def test_who_is_ready_and_shall_go_does_not_stop_the_group_once_more() -> None:
    story = running().dies("worker-1").acks(stop=3, seats=(0, 2)).ready("worker-1")
    assert story.core.group.phase is GroupPhase.GOING, "it comes next"
    story.feed(ChangeAsked(b"me", Scale(1, 2, 60.0))).acks(go=4, seats=(0, 2))
    assert story.core.group.phase is GroupPhase.RUNNING and story.epoch == 4
    assert not story.core.reasons()


def test_a_spawn_that_fails_is_a_death() -> None:
    story = running()
    story.dies("gateway")
    story.feed(Reaped("gateway", 2, ExitCode.INTERNAL, "no room for a process"))
    story.wait(100)
    assert story.core.processes["gateway"].incarnation == 3


def test_late_words_of_a_dead_incarnation_change_nothing() -> None:
    story = running()
    story.dies("scheduler-0")
    story.feed(
        BecameReady("scheduler-0", 1),
        PipeClosed("scheduler-0", 1, story.now_ns),
        Reaped("scheduler-0", 1, 0),
        Progressed("scheduler-0", 1, "load"),
    )
    process = story.core.processes["scheduler-0"]
    assert (process.incarnation, process.stage) == (2, Stage.STARTING)


# ---------------------------------------------------------------- hangs


def hung(story: Story, name: str) -> bool:
    return not story.core.processes[name].alive


def test_a_silent_process_is_looked_at_then_killed() -> None:
    story = running()
    story.silent.add("worker-1")
    story.wait(600)
    assert Inspect("worker-1", 1) in story.actions
    story.feed(Inspected("worker-1", 1, "S", 0)).wait(HANG_MS - 700)
    assert not hung(story, "worker-1")
    story.wait(200)
    assert hung(story, "worker-1") and story.epoch == 3
    assert story.core.processes["worker-1"].detail.startswith("hung: no sign of life for 1")
    story.acks(stop=3, seats=(0, 2)).acks(go=4, seats=(0, 2))
    assert story.core.group.records[-1].detected_ms >= HANG_MS


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_worker_that_hangs_is_killed_within_one_and_a_half_seconds(state: str) -> None:
    """That is what people are told, whatever the limits are called. The loop looks every 100 ms."""
    story = running()
    story.silent = {"worker-1"}
    silent_ns = story.now_ns
    while not hung(story, "worker-1"):
        looks = [action for action in story.wait(100).take(Inspect) if action.name == "worker-1"]
        story.feed(*(Inspected(look.name, look.incarnation, state, 0) for look in looks))
        assert story.now_ns - silent_ns <= 1500 * MS


@pytest.mark.parametrize("state", ["T", "S", "R"])
def test_health_names_a_silent_worker_within_a_second(state: str) -> None:
    story = running()
    story.silent = {"worker-1"}
    silent_ns = story.now_ns
    while story.core.reasons() == []:
        looks = [action for action in story.wait(100).take(Inspect) if action.name == "worker-1"]
        story.feed(*(Inspected(look.name, look.incarnation, state, 0) for look in looks))
    assert 400 * MS < story.now_ns - silent_ns <= 1000 * MS
    (told,) = story.core.reasons()
    assert told.startswith("worker-1 gives no sign of life for ") and told.endswith(f" {state}")
    assert not hung(story, "worker-1") and story.epoch == 2, "nothing is done about it yet"
    story.silent.clear()
    story.wait(100)
    assert story.core.reasons() == []


def test_a_stopped_process_is_hung_even_while_it_loads() -> None:
    story = Story()
    story.silent.add("worker-1")
    story.wait(20_000).feed(Inspected("worker-1", 1, "S", 0)).wait(100)
    story.feed(Inspected("worker-1", 1, "T", 0)).wait(HANG_MS - 100)
    assert not hung(story, "worker-1"), "its silence before was that of a load"
    story.feed(Inspected("worker-1", 1, "T", 0)).wait(200)
    assert hung(story, "worker-1")


def test_a_quiet_load_is_not_a_hang() -> None:
    story = Story()
    story.silent.add("worker-1")
    story.wait(600).feed(Inspected("worker-1", 1, "R", 0)).wait(20_000)
    assert not hung(story, "worker-1")


def test_a_worker_that_compiles_a_kernel_in_a_step_is_not_hung() -> None:
    story = running()
    story.silent.add("worker-1")
    story.feed(Observed("worker-1", 1, story.now_ns, 1, ProcessPhase.COMPILING)).wait(600)
    story.feed(Inspected("worker-1", 1, "R", 0)).wait(20_000)
    assert not hung(story, "worker-1") and story.epoch == 2
    story.feed(Observed("worker-1", 1, story.now_ns, 2, ProcessPhase.BUSY)).wait(600)
    story.feed(Inspected("worker-1", 1, "S", 0)).wait(HANG_MS)
    assert hung(story, "worker-1")


def test_a_start_that_beats_but_gets_nowhere_ends() -> None:
    story = Story()
    story.ready(*(name for name in story.core.processes if name != "worker-1"))
    story.wait(START_DEADLINE_MS - 100)
    assert not hung(story, "worker-1")
    story.wait(200)
    assert hung(story, "worker-1") and not hung(story, "worker-0")


def test_a_start_that_reports_progress_is_not_cut() -> None:
    story = Story()
    for percent in range(10):
        story.feed(Progressed("worker-1", 1, "load", percent / 10)).wait(START_DEADLINE_MS // 2)
    assert not hung(story, "worker-1")


def starve(story: Story, name: str, ms: int) -> None:
    """Silent, and all the time runnable without a CPU."""
    story.silent.add(name)
    for waited_ms in range(0, ms, 100):
        story.wait(100).feed(Inspected(name, 1, "R", waited_ms * MS))


def test_a_starved_process_is_not_a_hung_one() -> None:
    story = running()
    starve(story, "worker-1", STARVED_MS_MAX - 500)
    assert not hung(story, "worker-1")
    story.silent.clear()
    story.wait(1000).silent.add("worker-1")
    story.wait(600).feed(Inspected("worker-1", 1, "S", 0)).wait(HANG_MS - 400)
    assert hung(story, "worker-1"), "what it waited before is not counted again"


def test_what_nobody_could_see_is_not_held_against_a_process() -> None:
    """The supervisor had no CPU either, and looked late; what it then sees is a process that waits for one,
    and does so still."""
    story = running()
    story.silent.add("worker-1")
    story.wait(HANG_MS - 200).feed(Inspected("worker-1", 1, "R", 0))
    story.wait(300).feed(Inspected("worker-1", 1, "R", 290 * MS)).wait(200)
    assert not hung(story, "worker-1")
    story.feed(Inspected("worker-1", 1, "S", 290 * MS)).wait(HANG_MS)
    assert hung(story, "worker-1")


def test_a_busy_loop_is_a_hang() -> None:
    story = running()
    story.silent.add("worker-1")
    for _ in range(3):
        story.wait(300).feed(Inspected("worker-1", 1, "R", 0))
    assert not hung(story, "worker-1")
    for _ in range(6):
        story.wait(200).feed(Inspected("worker-1", 1, "R", 0))
    assert hung(story, "worker-1")


def test_starvation_ends_too() -> None:
    story = running()
    starve(story, "worker-1", STARVED_MS_MAX + 300)
    assert hung(story, "worker-1")


def test_a_starved_survivor_may_answer_late() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0,))
    starve(story, "worker-2", 3000)
    assert not hung(story, "worker-2")
    story.acks(stop=3, seats=(2,)).acks(go=4, seats=(0, 2))
    assert story.epoch == 4


def test_waiting_for_a_disk_is_not_a_hang() -> None:
    story = running()
    story.silent.add("kvstore")
    story.wait(600).feed(Inspected("kvstore", 1, "D", 0)).wait(20_000)
    assert not hung(story, "kvstore")


def test_one_long_call_of_a_service_is_not_a_hang_but_ends() -> None:
    story = running()
    story.silent.add("tokenizer-0")
    story.wait(600).feed(Inspected("tokenizer-0", 1, "R", 0)).wait(BUSY_SILENCE_MS - 1000)
    assert not hung(story, "tokenizer-0")
    story.wait(600)
    assert hung(story, "tokenizer-0")


def test_a_long_prefill_counts_as_progress() -> None:
    story = running()
    story.silent.add("worker-1")
    for layer in range(100):
        story.feed(Observed("worker-1", 1, 1, layer, ProcessPhase.BUSY))
        story.wait(1000)
    assert not hung(story, "worker-1")


def test_busy_for_ever_without_progress_is_a_hang() -> None:
    story = running()
    story.silent.add("worker-1")
    for _ in range(BUSY_SILENCE_MS // 100 + 2):
        story.feed(Observed("worker-1", 1, story.now_ns, 7, ProcessPhase.BUSY)).wait(100)
    assert hung(story, "worker-1")
    assert story.core.processes["worker-1"].detail.startswith("stuck: busy without progress")


@pytest.mark.parametrize("loads", [False, True])
def test_our_own_pause_is_not_their_silence(loads: bool) -> None:
    """A paused container: every beat is old when it goes on, and some go on a little later."""
    story = Story() if loads else running()
    if loads:
        story.silent = set(story.core.processes)
        story.wait(20_000)
    story.now_ns += 60_000 * MS
    story.actions += story.core.tick(story.now_ns)
    for state in "TS":
        for name in story.core.processes:
            story.feed(Inspected(name, 1, state, 0))
        story.wait(100)
    story.wait(5000)
    assert not any(hung(story, name) for name in story.core.processes)


def tick_late(story: Story) -> None:
    """We get a CPU only now and then; whoever is not silent beats."""
    story.now_ns += 700 * MS
    for name, process in story.core.processes.items():
        if process.alive and name not in story.silent:
            phase = ProcessPhase.READY
            story.feed(Observed(name, process.incarnation, story.now_ns, 0, phase))
    story.actions += story.core.tick(story.now_ns)


def test_a_supervisor_that_is_always_late_finds_a_hung_process_all_the_same() -> None:
    story = running()
    story.silent.add("worker-1")
    for _ in range(HANG_MS // 100):
        assert not hung(story, "worker-1")
        tick_late(story)
        for look in story.take(Inspect):
            state = "T" if look.name == "worker-1" else "S"
            story.feed(Inspected(look.name, look.incarnation, state, 0))
    tick_late(story)
    assert [name for name in story.core.processes if hung(story, name)] == ["worker-1"]


def test_a_supervisor_that_is_always_late_waits_for_no_answer_for_ever() -> None:
    story = running()
    story.dies("worker-1").acks(stop=3, seats=(0,))
    story.silent.add("worker-2")
    for _ in range(50):
        tick_late(story)
        for look in story.take(Inspect):
            story.feed(Inspected(look.name, look.incarnation, "S", 0))
    assert hung(story, "worker-2")


# ---------------------------------------------------------------- health


def test_health_names_processes_and_is_sent_on_every_change() -> None:
    story = running()
    story.dies("worker-1", reaped=False)
    updates = [a.message for a in story.take(Send)]
    (update,) = [m for m in updates if isinstance(m, HealthUpdate)]
    assert not update.healthy
    assert update.reasons == (
        "worker-1 is down: died",
        "the group is changing, waiting for worker-0, worker-2",
    )


def test_a_new_gateway_is_told_how_things_stand() -> None:
    story = running()
    story.dies("gateway")
    story.actions.clear()
    story.ready("gateway")
    sent = [a.message for a in story.take(Send)]
    assert TopologyChanged(2) in sent
    assert [m for m in sent if isinstance(m, HealthUpdate)][-1] == HealthUpdate(True, 2, ())


def test_status_names_what_is_outside_the_promise() -> None:
    exact = NodeConfig()
    assert exact.inexact == ()
    worker = msgspec.structs.replace(exact.worker, yoco_truncation="compact")
    (reason,) = msgspec.structs.replace(exact, worker=worker).inexact
    assert "yoco_truncation is compact" in reason


def test_status_lists_live_processes_only() -> None:
    story = running()
    story.dies("worker-1").dies("worker-1")
    assert story.core.processes["worker-1"].stage is Stage.WAITING
    reply = status(story.core, story.config, 77, 5, story.now_ns)
    names = [p.name for p in reply.processes]
    assert names[0] == "supervisor" and "worker-1" not in names and "worker-0" in names
    assert (reply.call, reply.healthy, reply.epoch) == (5, False, 3)
    assert [(r.slot, r.state, r.incarnation) for r in reply.ranks][1] == (1, "lost", 2)


@pytest.mark.parametrize(
    "code, text",
    [(-9, "ended by SIGKILL"), (70, "exit code 70 INTERNAL"), (1, "exit code 1")],
)
def test_ends_are_described_for_people(code: int, text: str) -> None:
    assert describe_end(code, "") == text
    assert describe_end(code, "why") == f"{text}: why"


def test_deleted_files_are_told_until_they_are_back() -> None:
    story = running()
    assert story.core.reasons() == []
    story.feed(FilesMissing(("x.sock is gone",)))
    assert story.core.reasons() == ["x.sock is gone"] and story.core.missing() == []
    assert any(
        not update.message.healthy
        for update in story.take(Send)
        if isinstance(update.message, HealthUpdate)
    )
    story.feed(FilesMissing(()))
    assert story.core.reasons() == []


def test_health_tells_what_a_process_cannot_do_until_it_can() -> None:
    story = running()
    full = "the journal j.sqlite cannot be written (disk full; 0 bytes are free there)"
    story.feed(Troubled("gateway", 1, full))
    assert story.core.reasons() == [full] and story.core.missing() == []
    (update,) = [a.message for a in story.take(Send) if isinstance(a.message, HealthUpdate)]
    assert not update.healthy and update.reasons == (full,)
    story.feed(Troubled("gateway", 1, ""))
    assert story.core.reasons() == []
    story.feed(Troubled("gateway", 1, full)).wait(TROUBLE_MS - 200)
    assert story.core.reasons() == [full]
    story.wait(400)
    assert story.core.reasons() == [], "the word that it is over may get lost"
    story.feed(Troubled("gateway", 1, full)).dies("gateway").wait(200).ready("gateway")
    assert story.core.reasons() == [], "its successor has not said so"
    story.feed(Troubled("gateway", 1, full))
    assert story.core.reasons() == []


def test_a_node_is_up_though_one_of_its_processes_lacks_something() -> None:
    story = Story()
    names = list(story.core.processes)
    story.feed(*(Spawned(name, 1, 7) for name in names), Troubled("gateway", 1, "no disk"))
    story.ready(*names).acks(go=2)
    assert story.core.ready_s >= 0 and story.core.reasons() == ["no disk"]
