"""Children of a request get seeds that are fixed by (seed, index), in range, and distinct."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.seeds import SEED_LIMIT, derive_seed


@given(st.integers(0, SEED_LIMIT - 1), st.integers(0, 1 << 20))
def test_in_range_and_repeatable(seed: int, index: int) -> None:
    child = derive_seed(seed, index)
    assert 0 <= child < SEED_LIMIT
    assert child == derive_seed(seed, index)
    assert derive_seed(seed, 0) == seed


def test_values_are_fixed_for_ever() -> None:
    """A journal written by one version must resume under the next."""
    assert [derive_seed(1, i) for i in range(4)] == [
        1,
        3316356330981164,
        8498871037046174,
        407638796292049,
    ]


def test_no_two_children_of_neighbouring_requests_meet() -> None:
    children = {derive_seed(seed, index) for seed in range(300) for index in range(1, 101)}
    assert len(children) == 300 * 100


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (SEED_LIMIT, 0), (0, -1)])
def test_out_of_range_is_refused(seed: int, index: int) -> None:
    with pytest.raises(ValueError, match=str(seed if index == 0 else index)):
        derive_seed(seed, index)
