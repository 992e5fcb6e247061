"""Plans: worked examples of DeepSeek's planner come out to the figure, every plan is legal, the bound
is one."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.eplb_svc.balance import (
    EMPTY,
    Counts,
    Layout,
    lower_bound,
    moe_lb,
    place,
    plan,
    rank_loads,
    replicate,
    startup_layout,
    worth_applying,
)


def counts(*steps: list[int]) -> Counts:
    return np.array(steps, dtype=np.int64)


# The examples give the sums (rank loads, scores, figures), not the counts; these counts have those sums.
BY_HAND = counts([90, 20, 20, 40, 30], [90, 40, 40, 10, 20])
WORSE = counts([20, 20, 40, 50, 20], [70, 30, 30, 20, 50])
COMPLETE = counts([20, 20, 40, 120], [20, 40, 20, 100])


def test_a_full_run_by_hand() -> None:
    start = startup_layout(5, 2, 3)
    assert start.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert rank_loads(BY_HAND, start).tolist() == [[85, 115], [125, 75]]
    assert moe_lb(BY_HAND, start) == 1.20
    assert replicate(BY_HAND, 1, max_copies=2) == [0]
    planned = plan(BY_HAND, 2, 3)
    assert planned.tolist() == [
        [0, 1, 3],
        [0, 2, 4],
    ]  # e1, busy at step 1, beside e3, busy at step 0
    assert moe_lb(BY_HAND, planned) == 1.05
    assert worth_applying(BY_HAND, start, planned, margin=0.02)


def test_when_greedy_makes_it_worse() -> None:
    start, planned = startup_layout(5, 2, 3), plan(WORSE, 2, 3, distinct=False)
    assert planned.tolist() == [[2, 4, 0], [3, 1, 0]]
    assert round(moe_lb(WORSE, start), 3) == 1.057
    assert round(moe_lb(WORSE, planned), 3) == 1.114
    assert not worth_applying(WORSE, start, planned, margin=0.0)


def test_the_exercise_with_three_copies() -> None:
    start = startup_layout(4, 2, 3)
    assert start.tolist() == [[0, 1, 2], [3, 0, 1]]
    assert rank_loads(COMPLETE, start).tolist() == [[60, 140], [50, 130]]
    assert round(moe_lb(COMPLETE, start), 2) == 1.42
    assert replicate(COMPLETE, 2, max_copies=6) == [3, 3]
    planned = plan(COMPLETE, 2, 3, distinct=False)
    assert planned.tolist() == [[3, 3, 0], [3, 1, 2]]  # e0 joins the rank with room: rank 0
    assert round(moe_lb(COMPLETE, planned), 3) == 1.018


def test_without_a_second_copy_on_one_rank() -> None:
    """The same load: the third copy of e3 goes to another expert instead."""
    planned = plan(COMPLETE, 2, 3)
    assert all(len(set(row)) == 3 for row in planned.tolist())
    assert sorted(planned.flatten().tolist()) == [0, 1, 1, 2, 3, 3]
    assert round(moe_lb(COMPLETE, planned), 3) == 1.053


def test_the_newcomers_toy() -> None:
    """Four experts with 3, 2, 6 and 1 jobs: a copy of e2 alone makes it worse, with e1 moved it is
    perfect. (Greedy, told to fill both spare slots, ends in between.)"""
    jobs = counts([3, 2, 6, 1])
    copied_only = np.array([[0, 1, 2], [2, 3, EMPTY]])
    moved_too = np.array([[0, 2, EMPTY], [1, 2, 3]])
    assert round(moe_lb(jobs, copied_only), 2) == 1.33
    assert moe_lb(jobs, moved_too) == 1.0
    assert round(moe_lb(jobs, plan(jobs, 2, 3)), 3) == 1.083


def test_the_metric_takes_the_maximum_over_ranks_at_each_step() -> None:
    """Averaged over the wrong axis, loads that merely alternate between ranks look perfect."""
    alternating = counts([8, 0], [0, 8])
    layout = np.array([[0], [1]])
    assert rank_loads(alternating, layout).tolist() == [[8, 0], [0, 8]]
    assert moe_lb(alternating, layout) == 2.0


def test_a_plan_must_win_by_the_margin_and_its_cost() -> None:
    start, planned = startup_layout(5, 2, 3), plan(BY_HAND, 2, 3)  # 1.20 against 1.05
    assert worth_applying(BY_HAND, start, planned, margin=0.14)
    assert not worth_applying(BY_HAND, start, planned, margin=0.16)
    assert not worth_applying(BY_HAND, start, planned, margin=0.1, moving_cost=0.06)
    assert not worth_applying(BY_HAND, planned, planned, margin=0.01)  # balanced already: leave it


def test_an_idle_window_is_balanced() -> None:
    idle = counts([0, 0, 0], [0, 0, 0])
    assert moe_lb(idle, plan(idle, 2, 2)) == 1.0 == lower_bound(idle, 2, 2)
    nothing = np.zeros((0, 3), dtype=np.int64)
    assert moe_lb(nothing, plan(nothing, 2, 2)) == 1.0 == lower_bound(nothing, 2, 2)


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="5 experts do not fit into 2 ranks x 2 slots"):
        plan(BY_HAND, 2, 2)
    with pytest.raises(ValueError, match=r"experts \[4\] have tokens but no slot"):
        rank_loads(BY_HAND, np.array([[0, 1], [2, 3]]))


def plain_replicate(window: Counts, extra: int, max_copies: int) -> list[int]:
    """Stage A in words: try every expert that may have one more, keep the smallest sum."""
    copies, chosen = [1] * window.shape[1], []
    for _ in range(extra):
        open_experts = [e for e, c in enumerate(copies) if c < max_copies]
        if not open_experts:
            break
        scores = {}
        for tried in open_experts:
            load = {e: window[:, e] / (copies[e] + (e == tried)) for e in open_experts}
            scores[tried] = float(np.max(list(load.values()), axis=0).sum())
        expert = min(scores, key=lambda e: (scores[e], e))
        copies[expert] += 1
        chosen.append(expert)
    return chosen


@st.composite
def windows(draw: st.DrawFn, experts_max: int = 9, steps_max: int = 5) -> Counts:
    experts, steps = draw(st.integers(1, experts_max)), draw(st.integers(1, steps_max))
    # Multiples of 2520 = lcm(1..10): loads per copy are integers, and equal sums are equal floats.
    values = st.integers(0, 12).map(lambda i: i * 2520)
    rows = st.lists(values, min_size=experts, max_size=experts)
    return np.array(draw(st.lists(rows, min_size=steps, max_size=steps)), dtype=np.int64)


@settings(max_examples=300)
@given(windows(), st.integers(0, 8), st.integers(1, 10))
def test_stage_a_equals_trying_every_expert(window: Counts, extra: int, max_copies: int) -> None:
    got = replicate(window, extra, max_copies=max_copies)
    assert got == plain_replicate(window, extra, max_copies)


@settings(max_examples=300)
@given(windows(experts_max=20), st.integers(1, 6), st.integers(0, 5), st.booleans())
def test_every_plan_is_legal(window: Counts, ranks: int, spare: int, distinct: bool) -> None:
    experts = window.shape[1]
    slots = -(-experts // ranks) + spare
    layout = plan(window, ranks, slots, distinct=distinct)
    assert layout.shape == (ranks, slots)
    assert np.array_equal(layout, plan(window, ranks, slots, distinct=distinct))
    assert set(layout.flatten().tolist()) - {EMPTY} == set(range(experts))
    if distinct:
        for row in layout.tolist():
            held = [e for e in row if e != EMPTY]
            assert len(set(held)) == len(held)
        assert (layout == EMPTY).sum() == max(0, slots - experts) * ranks
    else:
        assert not (layout == EMPTY).any()
    assert moe_lb(window, layout) >= lower_bound(window, ranks, slots) - 1e-12  # sums of thirds


@settings(max_examples=300)
@given(st.integers(2, 5), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_forced_duplicates_are_swapped_away(ranks: int, slots: int, seed: int) -> None:
    """Copies dealt so tightly that the last ones meet themselves, in any weights."""
    rng = random.Random(seed)
    extra_of = {e: rng.randint(0, ranks - 1) for e in range(ranks * slots)}
    copied: list[int] = []
    experts = 0
    while experts < ranks * slots - len(copied):
        room = ranks * slots - len(copied) - experts - 1
        copied += [experts] * min(extra_of[experts], room)
        experts += 1
    window = np.array([[rng.randint(0, 9) for _ in range(experts)]], dtype=np.int64)
    layout = place(window, copied, ranks, slots)
    assert all(len(set(row)) == slots for row in layout.tolist())


def all_layouts(experts: int, ranks: int, slots: int) -> list[Layout]:
    rows = list(itertools.combinations_with_replacement(range(experts), slots))
    return [
        np.array(layout)
        for layout in itertools.combinations_with_replacement(rows, ranks)
        if set(itertools.chain(*layout)) == set(range(experts))
    ]


@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(3, 2, 2), (4, 2, 3), (4, 3, 2), (2, 2, 2)]
)
def test_no_layout_beats_the_bound(experts: int, ranks: int, slots: int) -> None:
    rng = np.random.default_rng(experts * 100 + ranks * 10 + slots)
    layouts = all_layouts(experts, ranks, slots)
    tight = 0
    for _ in range(30):
        window = (rng.pareto(0.5, (rng.integers(1, 3), experts)) * 20).astype(np.int64)
        best = min(moe_lb(window, layout) for layout in layouts)
        bound = lower_bound(window, ranks, slots)
        assert 1.0 <= bound <= best * (1 + 1e-12)  # loads in thirds add up inexactly
        tight += bound > best - 0.01
    assert tight  # and it is all but met now and then, so it says something


def test_the_bound_sees_a_hot_expert() -> None:
    """One expert with all the tokens, one spare slot: no better than half of them on one rank of 4."""
    assert lower_bound(counts([100, 0, 0, 0, 0, 0, 0]), 4, 2) == 2.0
    assert lower_bound(counts([100, 0, 0, 0]), 4, 4) == 1.0
