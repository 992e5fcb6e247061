"""Faults on purpose: a request becomes the right signals to real processes, and is refused unless enabled."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor.node import TestNode, until

from phalanx.protocol.errors import Code, ConfigError
from phalanx.protocol.fault_table import Fault
from phalanx.protocol.messages import Error, Inject, Injected
from phalanx.protocol.placement import initial_placement
from phalanx.supervisor.events import Kill
from phalanx.supervisor.inject import KINDS, MS_MAX, Injector, SetFaults, targets

LIVING = {"gateway": 1, "worker-0": 1, "worker-1": 4, "worker-10": 1, "scheduler-0": 2}
MS = 1_000_000


def injector(enabled: bool = True) -> Injector:
    return Injector(enabled, random.Random(1))


def hit(kind: str, target: str) -> tuple[str, ...]:
    return targets(kind, target, list(LIVING), random.Random(1))


def test_targets_are_names_prefixes_or_one_at_random() -> None:
    assert hit("kill", "worker-1") == ("worker-1",), "not worker-10"
    assert hit("kill", "worker") == ("worker-0", "worker-1", "worker-10")
    drawn = {targets("kill", "random:worker", list(LIVING), random.Random(i)) for i in range(99)}
    assert drawn == {("worker-0",), ("worker-1",), ("worker-10",)}


@pytest.mark.parametrize("target", ["", "random:", "nobody", "worker-3"])
def test_a_target_that_names_nothing_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="there are"):
        hit("kill", target)


def test_a_signal_for_the_supervisor_is_refused_with_what_to_do_and_all_spares_it() -> None:
    with pytest.raises(ConfigError, match="pid from phalanx status"):
        hit("kill", "supervisor")
    names = [*LIVING, "supervisor"]
    for kind in ("kill", "stop", "drop"):
        assert targets(kind, "all", names, random.Random(1)) == tuple(LIVING), kind


def test_a_refusal_names_the_option_and_the_limits() -> None:
    for request, told in (
        (Inject(1, "slow", "gateway"), "slow needs --ms: how long at a time, 1 to 600000"),
        (Inject(1, "drop", "gateway", rate=2), "--rate is 2, allowed: above 0, at most 1"),
        (
            Inject(1, "list", "nobody"),
            f"no process is called 'nobody' or begins so; there are: {', '.join(sorted(LIVING))}",
        ),
    ):
        reply, actions = injector().handle(request, LIVING, 0)
        assert isinstance(reply, Error) and reply.message == told and actions == []


def test_clear_lets_go_on_what_was_stopped_and_list_shows_it() -> None:
    one = injector()
    one.handle(Inject(1, "stop", "worker-1", 500), LIVING, 0)
    one.handle(Inject(2, "stop", "gateway"), LIVING, 0)
    one.handle(Inject(3, "drop", "gateway", rate=0.2, only="Tokens"), LIVING, 0)

    def armed(now_ns: int, living: dict[str, int] = LIVING) -> tuple[str, ...]:
        reply, actions = one.handle(Inject(4, "list", "all"), living, now_ns)
        assert isinstance(reply, Injected) and actions == []
        return reply.armed

    assert armed(0) == ("gateway: stop", "gateway: drop Tokens rate 0.2", "worker-1: stop")
    assert armed(0, {**LIVING, "worker-1": 5})[-1] != "worker-1: stop", "its replacement runs"
    reply, actions = one.handle(Inject(5, "clear", "worker"), LIVING, 0)
    assert isinstance(reply, Injected)
    assert Kill("worker-1", 4, signal.SIGCONT) in actions
    assert Kill("gateway", 1, signal.SIGCONT) not in actions
    assert one.due(600 * MS) == [], "it goes on already"
    assert armed(0) == ("gateway: stop", "gateway: drop Tokens rate 0.2")
    one.handle(Inject(6, "cont", "gateway"), LIVING, 0)
    assert armed(0) == ("gateway: drop Tokens rate 0.2",)


def test_list_tells_how_often_each_fault_acts_yet_and_a_spent_one_gives_its_place() -> None:
    came_up = {("worker-1", 0): 0, ("worker-1", 1): 0}
    one = Injector(True, random.Random(1), LIVING, lambda name, slot: came_up[name, slot])
    name = "worker.load.after"
    point = Inject(1, "failpoint", "worker-1", only=name, action="kill", count=2, nth=3)
    one.handle(point, LIVING, 0)
    one.handle(Inject(2, "drop", "worker-1", count=5), LIVING, 0)

    def armed() -> tuple[str, ...]:
        reply, _ = one.handle(Inject(4, "list", "worker-1"), LIVING, 0)
        assert isinstance(reply, Injected)
        return reply.armed

    late = f"worker-1: failpoint {name} kill from the 3. time on"
    assert armed() == (
        f"{late} (passed 0 times) 2 of 2 times left",
        "worker-1: drop 5 of 5 times left",
    )
    came_up = {("worker-1", 0): 3, ("worker-1", 1): 4}
    assert armed() == (
        f"{late} (passed 3 times) 1 of 2 times left",
        "worker-1: drop 1 of 5 times left",
    )
    came_up = {("worker-1", 0): 9, ("worker-1", 1): 5}
    assert armed() == ()
    _, (written,) = one.handle(Inject(5, "slow", "worker-1", 7), LIVING, 0)
    assert isinstance(written, SetFaults)
    assert written.faults == (Fault(0, "slow", ms=7),) and written.fresh == (0,)


def test_only_workers_lose_a_gpu() -> None:
    assert hit("gpu-loss", "worker-0") == ("worker-0",)
    with pytest.raises(ConfigError, match="scheduler-0"):
        hit("gpu-loss", "scheduler-0")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("kill", signal.SIGKILL),
        ("stop", signal.SIGSTOP),
        ("cont", signal.SIGCONT),
        ("gpu-loss", signal.SIGKILL),
    ],
)
def test_a_fault_is_a_signal_to_this_incarnation(kind: str, number: int) -> None:
    reply, kills = injector().handle(Inject(7, kind, "worker-1"), LIVING, 0)
    assert reply == Injected(7, ("worker-1",))
    assert kills == [Kill("worker-1", 4, number)]


def test_listing_hurts_nothing() -> None:
    reply, kills = injector().handle(Inject(7, "list", "w"), LIVING, 0)
    assert reply == Injected(7, ("worker-0", "worker-1", "worker-10")) and kills == []


def test_a_stopped_process_goes_on_in_time_and_once() -> None:
    faults = injector()
    faults.handle(Inject(1, "stop", "worker-1", 50), LIVING, 0)
    assert faults.wait_ms(0, 100) <= 51 and faults.due(49 * MS) == []
    assert faults.due(50 * MS) == [Kill("worker-1", 4, signal.SIGCONT)]
    assert faults.due(99 * MS) == [] and faults.wait_ms(0, 100) == 100


def test_nothing_happens_unless_enabled() -> None:
    for kind in KINDS:
        reply, kills = injector(False).handle(Inject(3, kind, "worker"), LIVING, 0)
        assert isinstance(reply, Error) and reply.code is Code.NOT_READY and kills == []
        assert "phalanx up --inject" in reply.message


@pytest.mark.parametrize(
    "wrong",
    [
        Inject(3, "melt", "worker"),
        Inject(3, "stop", "worker", MS_MAX + 1),
        Inject(3, "stop", "worker", -1),
        Inject(3, "kill", "worker", 5),
        Inject(3, "kill", "worker", rate=0.5),
        Inject(3, "drop", "worker", rate=0.0),
        Inject(3, "drop", "supervisor"),
        Inject(3, "delay", "worker"),
        Inject(3, "slow", "worker", 5, only="Tokens"),
        Inject(3, "drop", "gateway", only="Token"),
        Inject(3, "diskfull", "worker-0"),
        Inject(3, "drop", "worker", action="kill"),
        Inject(3, "bitflip", "worker", only="layer 3"),
        Inject(3, "bitflip", "gateway"),
        Inject(3, "failpoint", "worker", only="worker.nowhere", action="kill"),
        Inject(3, "failpoint", "worker", only="worker.load.after", action="melt"),
        Inject(3, "failpoint", "worker", only="worker.load.after", action="sleep"),
    ],
)
def test_nonsense_is_refused(wrong: Inject) -> None:
    reply, kills = injector().handle(wrong, LIVING, 0)
    assert isinstance(reply, Error) and reply.code is Code.BAD_REQUEST and kills == []


def rows(*requests: Inject, now_ns: int = 0) -> dict[str, tuple[Fault, ...]]:
    """What is written for whom after these requests, the last one at `now_ns`."""
    faults, written = Injector(True, random.Random(1), LIVING), dict[str, tuple[Fault, ...]]()
    for request in requests:
        reply, actions = faults.handle(request, LIVING, now_ns * (request is requests[-1]))
        assert isinstance(reply, Injected), reply
        for action in actions:
            if isinstance(action, SetFaults):  # `clear` sends SIGCONT, too
                written[action.name] = action.faults
    return written


def test_a_process_is_told_what_to_do_wrong_to_itself() -> None:
    delay = Inject(1, "delay", "gateway", ms=30, rate=0.5, count=9, only="Tokens")
    drop = Inject(1, "drop", "gateway", ms=30)
    found = rows(delay, drop)["gateway"]
    assert found == (
        Fault(0, "delay", "Tokens", 0.5, 9, 30),
        Fault(1, "drop", ms=30, until_ns=30 * MS),
    )
    assert rows(delay, drop, Inject(1, "drop", "gateway"), now_ns=31 * MS)["gateway"] == (
        found[0],
        Fault(1, "drop"),
    ), "what is over gives its place"
    assert rows(delay, drop, Inject(1, "clear", "all"))["gateway"] == ()


def test_a_bit_is_flipped_once() -> None:
    (fault,) = rows(Inject(1, "bitflip", "all", only="3.17"))["worker-10"]
    assert fault == Fault(0, "bitflip", "3.17", count=1)


def test_a_bit_is_flipped_where_the_expert_is() -> None:
    """One that is nowhere, or at no worker that was named, would be flipped without a word."""
    placement = initial_placement(4, 6, (0, 1, 10), 2)
    one = Injector(True, random.Random(1), LIVING, placement=lambda: placement)

    def hit_by(target: str, only: str) -> tuple[str, ...] | str:
        reply, actions = one.handle(Inject(1, "bitflip", target, only=only), LIVING, 0)
        if isinstance(reply, Error):
            assert not actions and reply.code is Code.BAD_REQUEST
            return reply.message
        assert isinstance(reply, Injected) and len(actions) == len(reply.injected)
        return reply.injected

    assert hit_by("all", "3.2") == hit_by("worker-1", "3.2") == ("worker-1",)
    assert hit_by("worker-0", "3.2") == "expert 2 of layer 3 is not at worker-0, it is at worker-1"
    whole = "the model has layers 0 to 3 with experts 0 to 5"
    assert hit_by("all", "99.99") == f"--only is '99.99': {whole}"
    assert hit_by("all", "4.0") == f"--only is '4.0': {whole}"
    assert hit_by("all", "") == ("worker-0", "worker-1", "worker-10")


def test_a_failpoint_is_armed_in_processes_that_pass_it() -> None:
    wanted = Inject(1, "failpoint", "all", only="worker.load.after", action="stop", nth=2)
    assert set(rows(wanted)) == {"worker-0", "worker-1", "worker-10"}
    (fault,) = rows(wanted)["worker-0"]
    assert (fault.name, fault.action, fault.nth) == ("worker.load.after", "stop", 2)
    own = Inject(1, "failpoint", "supervisor", only="supervisor.spawn.before", action="kill")
    assert set(rows(own)) == {"supervisor"}
    with pytest.raises(AssertionError, match="no process"):
        rows(Inject(1, "failpoint", "gateway", only="worker.load.after", action="kill"))


def test_disks_fill_where_there_are_some() -> None:
    assert set(rows(Inject(1, "diskfull", "all", 100))) == {"gateway"}


def test_a_repeated_request_does_nothing_again() -> None:
    faults, kill = injector(), Inject(1, "kill", "worker-1")
    reply, actions = faults.answer(b"a", kill, LIVING, 0)
    assert faults.answer(b"a", kill, LIVING, 0) == (reply, [])
    assert faults.answer(b"b", kill, LIVING, 0) == (reply, actions)


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    made = TestNode(tmp_path_factory.mktemp("inject") / f"inj{os.getpid()}")
    made.environment = {"NODE_FAULTS": "1"}
    made.start()
    yield made
    made.stop()


@pytest.mark.process
def test_a_killed_worker_is_replaced_and_the_others_stay(living: TestNode) -> None:
    before = {p.name: p.incarnation for p in living.wait_healthy().processes}
    assert living.ask(Inject(5, "gpu-loss", "worker-1")) == Injected(5, ("worker-1",))
    until(lambda: living.process("worker-1").incarnation == before["worker-1"] + 1)
    after = {p.name: p.incarnation for p in living.wait_healthy().processes}
    assert after == {**before, "worker-1": before["worker-1"] + 1}


@pytest.mark.process
def test_a_failpoint_that_has_acted_is_not_listed_any_more(living: TestNode) -> None:
    living.wait_healthy()
    point = "supervisor.spawn.before"
    living.ask(
        Inject(14, "failpoint", "supervisor", 1, count=1, only=point, action="sleep"),
    )

    def armed() -> tuple[str, ...]:
        reply = living.ask(Inject(int(time.monotonic() * 1e3), "list", "all"))
        assert isinstance(reply, Injected)
        return reply.armed

    assert armed() == (f"supervisor: failpoint {point} sleep 1 of 1 times left 1 ms",)
    os.kill(living.process("eplb").pid, signal.SIGKILL)
    until(lambda: armed() == ())
    living.wait_healthy()


@pytest.mark.process
def test_a_process_is_stopped_for_as_long_as_asked(living: TestNode) -> None:
    living.wait_healthy()
    victim = living.process("eplb")

    def state() -> str:
        return Path(f"/proc/{victim.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    asked = time.monotonic()
    assert living.ask(Inject(6, "stop", "eplb", 400)) == Injected(6, ("eplb",))
    until(lambda: state() == "T", 2)
    until(lambda: state() != "T", 10)
    assert time.monotonic() - asked >= 0.4
    assert living.process("eplb").incarnation == victim.incarnation


@pytest.mark.process
def test_clear_sends_a_stopped_process_on(living: TestNode) -> None:
    pid = living.process("eplb").pid

    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    living.wait_healthy()
    living.ask(Inject(11, "stop", "eplb"))
    until(lambda: state() == "T")
    living.ask(Inject(12, "clear", "eplb"))
    until(lambda: state() != "T")
    living.wait_healthy()
    assert living.process("eplb").pid == pid
