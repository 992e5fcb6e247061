"""The planner has experts moved in a running node, and whoever has a part in it dies in each phase: count, plan,
copy, flip, in force. All ranks run the old placement or the new one, no token changes, and the node heals.

CI draws one of the deaths; the seed stands in its name, `MOVING_SEED=N` repeats it. All of them: `make soak`.
"""

import itertools
import json
import random
from collections.abc import Callable

import msgspec
import pytest

from e2e.draws import seed_of_run
from e2e.failpoint_cases import MOVING, REBALANCE
from e2e.field import specs
from e2e.node import wait_for
from phalanx.protocol.board import Board
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.failpoints import kind_of
from phalanx.protocol.messages import Sampling
from phalanx.protocol.placement import Placement, copies
from phalanx.services.client import Spec
from phalanx.testing.node import Node, Streams

pytestmark = [pytest.mark.process, pytest.mark.soak]

# A plan whenever it gains anything at all, and soon.
EPLB = {"period_s": 0.2, "min_rows": 8, "margin": 0.0}
SCRUB_EVERY_S = (
    0.01  # what is copied has the right bits: with a finding the node would not be healthy
)
SEED = seed_of_run("MOVING_SEED")
DEATHS = [
    *((name, f"worker-{rank}") for name in REBALANCE for rank in (0, 2)),
    ("eplb.counts.before", "eplb"),
    *((name, "eplb") for name in MOVING if kind_of(name) == "eplb"),
]
SUPERVISOR = [name for name in MOVING if kind_of(name) == "supervisor"]
ASKED = specs(40)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    config = tmp_path_factory.mktemp("moving") / "config.json"
    every = {"eplb": EPLB, "tokenizers": 1, "worker": {"scrub_every_s": SCRUB_EVERY_S}}
    config.write_text(json.dumps(every))
    return "--inject", "--config", str(config)


@pytest.fixture(scope="module")
def moving(start_node: Callable[..., Node], options: tuple[str, ...]) -> Node:
    return start_node(3, *options)


@pytest.fixture(scope="module")
def fault_free(node: Node) -> Streams:
    """Of two ranks, which hold all experts: there is never anything to move."""
    return node.run(ASKED)


def load(node: Node, until: Callable[[], bool], what: str) -> None:
    """Other experts are hot in each run, so plans have something to gain."""
    for seed in itertools.count():
        if until():
            return
        assert seed < 60, f"{what}: not after {seed} runs"
        rng = random.Random(seed)
        prompt = [rng.randrange(10, 200)] * 100
        node.run([Spec(prompt, Sampling(seed=seed, max_tokens=60, ignore_eos=True))] * 2)


def one_placement(node: Node) -> Placement | None:
    """What all ranks run and the topology says; None as long as these differ."""
    board = Board.attach(node_name(node.run_dir))
    try:
        topology = board.topology()
        assert topology is not None
        placement = msgspec.msgpack.decode(topology.placement, type=Placement)
        run = {board.seats[seat].placement_run for seat in topology.members()}
        return placement if run == {placement.version} else None
    finally:
        board.close()


def check(node: Node) -> None:
    node.wait_healthy()
    wait_for(lambda: one_placement(node) is not None, 60, "all ranks run one placement")
    placement = one_placement(node)
    if placement is not None:  # another plan may be on its way already
        layers = range(len(placement.physical_to_logical))
        assert all(all(copies(placement, layer)) for layer in layers)
    wait_for(node.whole, 60, "every block and slot back")


def applied(node: Node) -> int:
    return node.look().rebalanced.applied


def test_plans_are_applied_and_no_token_changes(moving: Node, fault_free: Streams) -> None:
    pids, checked = moving.pids("worker"), moving.look().scrubbed_experts
    load(moving, lambda: applied(moving) > 0, "a plan is applied")
    assert moving.run(ASKED) == fault_free
    assert moving.pids("worker") == pids and moving.look().epoch == 2, "nobody noticed"
    (history,) = moving("eplb", "history")
    first = history[0]
    assert first["outcome"] == "applied" and first["moved"] > 0
    assert first["after"] < first["before"] and first["copy_ms"] > 0
    (shown,) = moving("eplb", "show")
    assert shown["applied"] > 0 and len(shown["layers"]) == 10
    assert moving.look().scrubbed_experts.slots > checked.slots
    check(moving)


def dies(node: Node, fault_free: Streams, name: str, process: str) -> None:
    node.wait_healthy()
    node.failpoint(name, process=process)
    try:
        passed = lambda: node.came_up(process).get(name, 0) > 0
        load(node, passed, name)
        assert node.run(ASKED) == fault_free
    finally:
        node.clear()
    check(node)


@pytest.mark.parametrize("death", [random.Random(SEED).choice(DEATHS)], ids=lambda d: f"{SEED}-{d}")
def test_a_death_in_a_drawn_phase_changes_nothing(
    moving: Node, fault_free: Streams, death: tuple[str, str]
) -> None:
    dies(moving, fault_free, *death)


@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_a_death_in_any_phase_changes_nothing(
    moving: Node, fault_free: Streams, death: tuple[str, str]
) -> None:
    dies(moving, fault_free, *death)


@pytest.mark.parametrize("name", SUPERVISOR)
def test_after_the_death_of_the_supervisor_up_goes_on(
    start_node: Callable[..., Node], options: tuple[str, ...], fault_free: Streams, name: str
) -> None:
    node = start_node(3, *options)
    node.failpoint(name, process="supervisor")

    def gone() -> bool:
        try:
            node.look()
        except PhalanxError:
            return True
        return False

    def fall() -> None:
        wait_for(gone, 120, "the supervisor is gone")
        node.start(3, *options)

    many = [*ASKED, *(Spec([i + 20] * 100, Sampling(seed=i, max_tokens=400, ignore_eos=True)) for i in range(4))]  # fmt: skip
    found = node.run(many, fall, timeout=300)
    assert {key: stream for key, stream in found.items() if key in fault_free} == fault_free
    check(node)
    node.stop()
