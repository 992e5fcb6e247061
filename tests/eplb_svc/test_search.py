"""Local search never loses what it was given, keeps plans legal, and mends what greedy got wrong."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.eplb_svc.balance import EMPTY, lower_bound, moe_lb, plan, startup_layout
from phalanx.eplb_svc.search import improve


def test_greedy_made_it_worse_and_search_mends_it() -> None:
    """The load on which DeepSeek's planner goes from 1.057 to 1.114."""
    window = np.array([[20, 20, 40, 50, 20], [70, 30, 30, 20, 50]])
    planned = plan(window, 2, 3)
    assert round(moe_lb(window, planned), 3) == 1.114
    assert moe_lb(window, improve(window, planned)) <= moe_lb(window, startup_layout(5, 2, 3))


def test_closes_most_of_the_gap_to_the_best_layout() -> None:
    """Five experts, two ranks, three slots, small enough to try every layout."""
    rng = np.random.default_rng(1)
    rows = list(itertools.combinations(range(5), 3))
    layouts = [
        np.array(pair) for pair in itertools.product(rows, rows) if len({*pair[0], *pair[1]}) == 5
    ]
    greedy_gap = search_gap = 0.0
    for _ in range(60):
        window = rng.integers(1, 100, (3, 5))
        best = min(moe_lb(window, layout) for layout in layouts)
        planned = plan(window, 2, 3)
        greedy_gap += moe_lb(window, planned) - best
        search_gap += moe_lb(window, improve(window, planned)) - best
    assert greedy_gap > 0.5 and search_gap < greedy_gap / 3


def test_a_spare_copy_changes_hands() -> None:
    """The copy was made for yesterday's hot expert; no swap of slots can help, a new copy can."""
    window = np.array([[1, 1, 1, 9]])
    layout = np.array([[0, 1, 2], [3, 0, EMPTY]])
    improved = improve(window, layout)
    assert moe_lb(window, improved) == 1.0
    assert (improved == 3).sum() == 2


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(1, 16), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_never_worse_and_always_legal(ranks: int, experts: int, spare: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = -(-experts // ranks) + spare
    window = (rng.pareto(1.2, (rng.integers(0, 80), experts)) * 10).astype(np.int64)
    planned = plan(window, ranks, slots)
    kept = planned.copy()
    improved = improve(window, planned)
    assert np.array_equal(planned, kept)
    assert np.array_equal(improved, improve(window, planned))
    assert set(improved.flatten().tolist()) - {EMPTY} == set(range(experts))
    for row in improved.tolist():
        held = [e for e in row if e != EMPTY]
        assert len(set(held)) == len(held)
    got = moe_lb(window, improved)
    assert lower_bound(window, ranks, slots) * (1 - 1e-12) <= got <= moe_lb(window, planned)
