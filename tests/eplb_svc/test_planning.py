"""A plan is within reach of the placement in force: bounded moves, slots that are empty now, nobody without a copy."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.eplb_svc.balance import EMPTY, moe_lb
from phalanx.eplb_svc.planning import MOVE_COST, Planning
from phalanx.protocol.placement import (
    Placement,
    after_join,
    after_loss,
    copies,
    initial_placement,
    moves,
    slots_per_rank,
    slots_used,
)


def planned(
    window: np.ndarray, current: Placement, spare: int = 1, slots: int = 0, margin: float = 0.0
) -> Planning:
    planning = Planning(window, current, dict.fromkeys(current.seats, slots), spare)
    for _ in range(100_000):
        if planning.step(margin):
            return planning
    raise AssertionError("the plan never came to an end")


def check(current: Placement, new: Placement, spare: int, slots: int = 0) -> None:
    """What a proposed placement has to be."""
    assert (new.version, new.seats) == (current.version + 1, current.seats)
    for layer in range(len(current.physical_to_logical)):
        assert all(copies(new, layer)), "an expert has no copy"
        for old, row in zip(
            current.physical_to_logical[layer], new.physical_to_logical[layer], strict=True
        ):
            held = [e for e in row if e != EMPTY]
            assert len(set(held)) == len(held), "an expert twice on a rank"
            for at, expert in enumerate(row):
                before = old[at] if at < len(old) else EMPTY
                assert expert in (before, EMPTY) or before == EMPTY, "a slot in use is overwritten"
            stay = set(old) & set(held)
            assert all(row[old.index(e)] == e for e in stay), "an expert that stays moves"
    for index, seat in enumerate(current.seats):
        fullest = max(
            sum(e != EMPTY for e in layer[index]) for layer in current.physical_to_logical
        )
        assert all(
            sum(e != EMPTY for e in layer[index]) <= fullest for layer in new.physical_to_logical
        )
        limit = fullest + spare if not slots else min(slots, fullest + spare)
        assert slots_used(new, seat) <= max(limit, slots_used(current, seat))


def test_a_hot_expert_gets_a_copy() -> None:
    """Three ranks, and one expert that half of all rows choose."""
    current = initial_placement(2, 8, range(3), 4)
    window = np.tile(np.array([100] * 7 + [700]), (5, 2, 1))
    planning = planned(window, current)
    new = planning.placement
    assert new is not None and new.slots_per_rank == 5
    check(current, new, 1)
    assert len(copies(new, 0)[7]) > len(copies(current, 0)[7])
    assert planning.after < planning.before - 0.1
    assert planning.moved == sum(len(loads) for loads in moves(current, new).values())
    assert [b.now for b in planning.balances] == [planning.before] * 2


def test_what_is_balanced_stays() -> None:
    """A plan that wins less than it costs is none (it cost others seconds)."""
    current = initial_placement(1, 8, range(3), 4)
    even = np.array([1000 * len(places) for places in copies(current, 0)])
    planning = planned(np.tile(even, (4, 1, 1)), current)
    assert planning.placement is None and planning.moved == 0
    assert planning.after == planning.before == 1.0


def test_layers_that_do_not_gain_stay_as_they_are() -> None:
    current = initial_placement(3, 8, range(3), 4)
    even = [1000 * len(places) for places in copies(current, 0)]
    window = np.tile(np.array([even, [100] * 7 + [900], even]), (4, 1, 1))
    new = planned(window, current).placement
    assert new is not None
    kept = [tuple((*row, EMPTY) for row in layer) for layer in current.physical_to_logical]
    assert new.physical_to_logical[0] == kept[0] and new.physical_to_logical[2] == kept[2]
    assert new.physical_to_logical[1] != kept[1]


def test_all_layers_together_must_win_by_the_margin() -> None:
    current = initial_placement(40, 8, range(3), 4)
    even = [1000 * len(places) for places in copies(current, 0)]
    window = np.tile(np.array([even] * 39 + [[100] * 7 + [900]]), (4, 1, 1))
    gain = planned(window, current)
    assert gain.placement is not None
    won = gain.before - gain.after - gain.moved * MOVE_COST / 40
    assert planned(window, current, margin=won * 1.01).placement is None
    assert planned(window, current, margin=won * 0.99).placement is not None


def test_without_room_nothing_moves() -> None:
    """Every slot is in use, and there are no others."""
    current = initial_placement(1, 8, range(2), 4)
    window = np.tile(np.array([500, 400] + [100] * 6), (4, 1, 1))
    assert planned(window, current, spare=0).placement is None
    assert planned(window, current, spare=1, slots=4).placement is None
    assert planned(window, current, spare=1, slots=5).placement is not None


def test_plans_follow_each_other_in_the_same_slots() -> None:
    """What one leaves empty is where the next one copies to: no rank ever needs more than one slot more."""
    rng = np.random.default_rng(3)
    current = initial_placement(2, 16, range(4), slots_per_rank(16, 4))
    widest, applied = current.slots_per_rank + 1, 0
    for _ in range(30):
        window = (rng.pareto(1.2, (8, 2, 16)) * 100).astype(np.int64)
        new = planned(window, current).placement
        if new is not None:
            check(current, new, 1)
            current, applied = new, applied + 1
        assert current.slots_per_rank <= widest
    assert applied > 10


def test_the_second_copy_goes_only_where_it_pays() -> None:
    """Both ranks hold everything: no copy wins anything, so none is lost."""
    current = initial_placement(1, 8, range(2), 8)
    window = np.tile(np.array([5000] + [1] * 7), (4, 1, 1))
    assert planned(window, current).placement is None


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 14),
    st.integers(0, 2),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_every_plan_can_be_applied_and_is_better(
    ranks: int, experts: int, spare: int, seed: int, lost: list[int]
) -> None:
    """Also after ranks have fallen and come back; and after the plan any one may fall."""
    rng = np.random.default_rng(seed)
    current = initial_placement(2, experts, range(ranks), slots_per_rank(experts, ranks))
    for seat in lost:
        if seat < ranks and ranks > 1:
            current = after_loss(current, seat)
            if rng.random() < 0.7:
                current = after_join(current, seat)
            ranks = len(current.seats)
            break
    window = (rng.pareto(1.2, (rng.integers(1, 40), 2, experts)) * 10).astype(np.int64)
    planning = planned(window, current, spare)
    assert planning.after <= planning.before
    new = planning.placement
    if new is None:
        return
    check(current, new, spare)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=Placement) == new
    now = [moe_lb(window[:, i], np.array(layer)) for i, layer in enumerate(new.physical_to_logical)]
    assert now == pytest.approx([b.moe_lb for b in planning.balances])
    if len(new.seats) > 1 and experts <= (len(new.seats) - 1) * new.slots_per_rank:
        for seat in new.seats:
            rest = after_loss(new, seat)
            assert all(all(copies(rest, layer)) for layer in range(2))


def test_a_large_model_takes_no_long_call_and_gives_the_same_plan_again() -> None:
    """A layer of 384 experts on 8 ranks."""
    rng = np.random.default_rng(7)
    current = initial_placement(1, 384, range(8), slots_per_rank(384, 8))
    window = (rng.pareto(1.5, (64, 1, 384)) * 50).astype(np.int64)
    first = Planning(window, current, {}, 1)
    steps = 1
    while not first.step(0.0):
        steps += 1
    assert steps > 4, "one call did it all"
    assert first.placement is not None
    assert first.placement == planned(window, current).placement
    check(current, first.placement, 1)
    assert first.after < first.before - 0.1 and first.moved <= 8
