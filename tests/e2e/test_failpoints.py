"""A process dies at a named point, in the middle of a recovery or a rejoin: no token changes, every sequence
ends once, nothing is left, and the node is healthy again.

CI draws some of the cases; the seed stands in their names, `FAILPOINT_SEED=N` repeats them. All of them: `make
soak`.
"""

import random
from collections.abc import Callable

import pytest

from e2e.draws import seed_of_run
from e2e.failpoint_cases import (
    CONTROL,
    ELSEWHERE,
    HANGING,
    JOURNAL_RAISES,
    MODEL,
    MOVING,
    RAISING,
    RAISING_MODEL,
    SUPERVISOR,
    Case,
)
from e2e.field import Field, specs
from e2e.moving import mover, one_more_copy
from e2e.node import wait_for
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.failpoints import NAMES
from phalanx.protocol.limits import HANG_MS
from phalanx.protocol.messages import Sampling
from phalanx.services.client import Spec
from phalanx.testing.node import Node

pytestmark = pytest.mark.process

SEED = seed_of_run("FAILPOINT_SEED")
DRAWN = random.Random(SEED).sample(CONTROL, 3)


def check(field: Field, case: Case) -> None:
    node = field.healthy_node(case.process, *filter(None, [case.fallen]))
    born = node.process(case.process)
    assert born is not None
    ms = HANG_MS * 40 if case.action == "sleep" else 0
    node.failpoint(case.name, case.action, process=case.process, nth=case.nth, ms=ms)

    def passed() -> bool:
        return node.came_up(case.process).get(case.name, 0) >= case.nth

    def replaced() -> bool:
        now = node.process(case.process)
        return now is not None and now.incarnation > born.incarnation

    def meanwhile() -> None:
        if case.moves:
            with mover(node) as experts:
                experts.widen()
                experts.propose(one_more_copy)
        if case.fallen:
            field.kill(case.fallen)
        if case.process == "kvstore":  # it has the blocks of the others: give it new ones
            node.wait_healthy()
            rng = random.Random(str(case))
            prompt = [rng.randrange(10, 200) for _ in range(300)]
            node.run([Spec(prompt, Sampling(seed=1, max_tokens=2))])

    try:
        got = node.run(field.specs, meanwhile)
        wait_for(passed, 60, "the point")
        assert got == field.fault_free
        wait_for(replaced, 60, "a new process")  # one that stopped a moment ago is not noticed yet
        node.wait_healthy()
        wait_for(node.whole, 60, "every block and slot back")
        assert node.run(field.specs) == field.fault_free
    finally:
        node.clear(case.process)


@pytest.fixture(scope="module")
def model(start_node: Callable[..., Node]) -> Field:
    return Field(lambda: start_node(2, "--inject"), specs(24))


def test_every_failpoint_has_a_case() -> None:
    named = {case.name for case in (*CONTROL, *MODEL)} | {*SUPERVISOR, *ELSEWHERE, *MOVING}
    assert named == set(NAMES)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{SEED}-{case}")
def test_a_death_at_a_drawn_point_changes_nothing(control: Field, case: Case) -> None:
    check(control, case)


@pytest.mark.parametrize("case", [JOURNAL_RAISES, random.Random(SEED).choice(RAISING)], ids=str)
def test_a_bug_at_a_point_changes_nothing(control: Field, case: Case) -> None:
    check(control, case)


@pytest.mark.parametrize("case", [random.Random(SEED).choice(HANGING)], ids=str)
def test_a_hang_at_a_point_changes_nothing(control: Field, case: Case) -> None:
    """It neither dies nor goes on, and is killed for it."""
    check(control, case)


@pytest.mark.soak
@pytest.mark.parametrize("case", HANGING, ids=str)
def test_a_hang_at_any_point_changes_nothing(control: Field, case: Case) -> None:
    check(control, case)


@pytest.mark.soak
@pytest.mark.parametrize("case", [*CONTROL, *RAISING], ids=str)
def test_a_death_at_any_point_changes_nothing(control: Field, case: Case) -> None:
    check(control, case)


@pytest.mark.soak
@pytest.mark.parametrize("case", [*MODEL, *RAISING_MODEL], ids=str)
def test_a_death_within_the_work_changes_nothing(model: Field, case: Case) -> None:
    check(model, case)


@pytest.mark.parametrize("name", [random.Random(SEED).choice(SUPERVISOR)])
def test_a_supervisor_that_pauses_changes_nothing(control: Field, name: str) -> None:
    """It is late with its next word, and then not the one to blame others for that."""
    node = control.healthy_node("worker-1")
    restarts = {p.name: p.restarts for p in node.look().processes}
    node.failpoint(name, "sleep", process="supervisor", ms=1800)
    got = node.run(control.specs, lambda: control.kill("worker-1"))
    wait_for(lambda: node.came_up("supervisor").get(name, 0) > 0, 60, "the point")
    node.clear("supervisor")
    assert got == control.fault_free
    node.wait_healthy()
    restarts["worker-1"] += 1
    assert {p.name: p.restarts for p in node.look().processes} == restarts


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "action"),
    [*((name, "kill") for name in SUPERVISOR), ("supervisor.go.before_even", "raise")],
)
def test_after_the_death_of_the_supervisor_up_goes_on(
    start_node: Callable[..., Node], name: str, action: str
) -> None:
    node = start_node(2, "--inject", "--device", "null")
    fault_free = node.run(specs(400))
    node.failpoint(name, action, process="supervisor")

    def fall() -> None:
        try:
            node.inject("kill", "worker-1")
        except PhalanxError:
            pass  # it died over this very command
        wait_for(lambda: not node.names() or not _alive(node), 20, "the supervisor is gone")
        node.start(2, "--inject", "--device", "null")

    assert node.run(specs(400), fall) == fault_free
    node.wait_healthy()
    wait_for(node.whole, 60, "every block and slot back")
    assert node.stop() == {"stopped": True, "left": []}


def _alive(node: Node) -> bool:
    try:
        node.look()
    except PhalanxError:
        return False
    return True
