"""Placements that change under a running group, amid faults, in the simulator of the whole system; and bugs in how they
do, each of which some run has to find.

Loads are skewed and shift several times a second here, and ranks die around flips.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from random import Random

import msgspec
import pytest

from e2e.draws import drawn, seed_of_run
from phalanx.eplb_svc import planning
from phalanx.protocol.config import EplbConfig
from phalanx.protocol.placement import EMPTY, Placement, SeatSlots
from phalanx.supervisor import rebalance
from phalanx.supervisor.events import Action
from phalanx.supervisor.placements import GroupPlacements
from phalanx.supervisor.rebalance import Phase, Rebalances, Rebalancing
from sim.world import World
from sim.world_body import MS
from sim.world_shape import Shape
from sim.world_worker import WorkerBody

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _rough(monkeypatch: Patch) -> None:
    """Many plans, and deaths at the worst moments."""
    shape, flip, copy = Shape.of, WorkerBody._flip, WorkerBody._copy

    def of(rng: Random) -> Shape:
        return replace(
            shape(rng),
            ranks=rng.choice((3, 4, 5)),
            requests=8,
            eplb=EplbConfig(period_s=0.1, min_rows=1, margin=0.0),
            loads_ns=rng.choice((200, 500)) * MS,
            cannot_copy=rng.choice((0.0, 0.05)),
        )

    def strike(body: WorkerBody) -> None:
        node = body.node
        if node.world.faulty and node.rng.random() < 0.08:
            seat = node.rng.choice(sorted(body.members))
            node.after(
                node.rng.randrange(20 * MS), lambda: node.die(node.children[f"worker-{seat}"], -9)
            )

    def flips(self: WorkerBody) -> None:
        before = self.row.run
        flip(self)
        if self.row.run != before:
            strike(self)

    def copies(self: WorkerBody, placement: Placement, lacking: list[tuple[int, int, int]]) -> None:
        copy(self, placement, lacking)
        if not lacking:
            strike(self)

    monkeypatch.setattr(Shape, "of", of)
    monkeypatch.setattr(WorkerBody, "_flip", flips)
    monkeypatch.setattr(WorkerBody, "_copy", copies)


def test_streams_stay_the_same_while_experts_move() -> None:
    """Whatever falls meanwhile: `World` checks every step and every stream."""
    first = 10 * seed_of_run("REBALANCE_SEED")
    flips, outcomes = 0, set()
    for seed in range(first, first + 8):
        world = World(seed).run()
        flips += world.flips
        assert world.node is not None
        outcomes |= {record.outcome for record in world.node.core.rebalances.records}
    assert flips > 8 and "applied" in outcomes, f"{flips} flips from seed {first} on"


# ---------------------------------------------------------------- planted bugs

Plant = Callable[[Patch], None]
PLANTED: list[tuple[Plant, range]] = []


def planted(seeds: int) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        PLANTED.append((plant, range(seeds)))
        return plant

    return note


@planted(seeds=60)
def keeps_the_placement_before_the_flip(patch: Patch) -> None:
    """Though survivors run the new one."""
    right = GroupPlacements.settle

    def settle(
        self: GroupPlacements, rooms: Mapping[int, int], runs: Collection[int] = ()
    ) -> bytes | None:
        return right(self, rooms, ())

    patch.setattr(GroupPlacements, "settle", settle)


@planted(seeds=60)
def takes_the_new_placement_though_nobody_runs_it(patch: Patch) -> None:
    """Survivors that have no copies yet load them while everybody waits."""
    right = GroupPlacements.settle

    def settle(
        self: GroupPlacements, rooms: Mapping[int, int], runs: Collection[int] = ()
    ) -> bytes | None:
        runs = () if self.proposed is None else (self.proposed.version,)
        return right(self, rooms, runs)

    patch.setattr(GroupPlacements, "settle", settle)


@planted(seeds=20)
def a_version_is_given_twice(patch: Patch) -> None:
    def propose(self: GroupPlacements, placement: Placement) -> Placement:
        self.proposed = placement
        return placement

    patch.setattr(GroupPlacements, "propose", propose)


@planted(seeds=60)
def the_next_one_is_proposed_before_all_have_flipped(patch: Patch) -> None:
    """It counts as applied as soon as all are ready for it."""
    right = Rebalances._copying

    def copying(self: Rebalances, change: Rebalancing, words: object, now_ns: int) -> list[Action]:
        actions = right(self, change, words, now_ns)  # type: ignore[arg-type]
        if change.phase is Phase.FLIPPING:
            change.phase = Phase.COPYING
            return self._adopt(change, now_ns)
        return actions

    patch.setattr(Rebalances, "_copying", copying)


@planted(seeds=20)
def copies_go_where_experts_are_in_use(patch: Patch) -> None:
    def aligned(row: SeatSlots, wanted: set[int], limit: int) -> SeatSlots:
        return (*sorted(wanted), *(EMPTY,) * (limit - len(wanted)))

    patch.setattr(planning, "_aligned", aligned)
    patch.setattr(rebalance, "objection", lambda running, proposed, slots: "")


@planted(seeds=20)
def a_rank_flips_when_it_is_ready_itself(patch: Patch) -> None:
    """Whatever the others vote."""

    def flip(self: WorkerBody) -> None:
        if self.next is not None and self.row.ready == self.next.version:
            self.placement, self.row.run, self.next = self.next, self.row.ready, None

    patch.setattr(WorkerBody, "_flip", flip)


@planted(seeds=20)
def an_expert_is_left_out(patch: Patch) -> None:
    right = GroupPlacements.propose

    def propose(self: GroupPlacements, placement: Placement) -> Placement:
        layer = tuple(tuple(EMPTY if e == 0 else e for e in row) for row in placement.physical_to_logical[0])  # fmt: skip
        layers = (layer, *placement.physical_to_logical[1:])
        return right(self, msgspec.structs.replace(placement, physical_to_logical=layers))

    patch.setattr(GroupPlacements, "propose", propose)


_DRAWN = drawn("PLANT_SEED", 2, len(PLANTED))


@pytest.mark.parametrize(
    "plant, seeds",
    [
        pytest.param(*one, id=one[0].__name__, marks=() if at in _DRAWN else pytest.mark.soak)
        for at, one in enumerate(PLANTED)
    ],
)
def test_bug_is_found(plant: Plant, seeds: range, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert any(_fails(seed) for seed in seeds), f"not found in {len(seeds)} runs"


def _fails(seed: int) -> bool:
    try:
        World(seed).run()
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return True
    return False
