"""Every expert always has a copy, whatever is lost and whatever returns; nothing is loaded in vain."""

import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.placement import (
    EMPTY,
    Placement,
    PlacementError,
    after_join,
    after_loss,
    choose_copy,
    copies,
    initial_placement,
    moves,
    slots_per_rank,
)


def experts_of(placement: Placement, layer: int, index: int) -> list[int]:
    return [e for e in placement.physical_to_logical[layer][index] if e != EMPTY]


def check(placement: Placement) -> None:
    """What is true of every placement."""
    assert list(placement.seats) == sorted(set(placement.seats))
    for layer, slots_by_seat in enumerate(placement.physical_to_logical):
        assert len(slots_by_seat) == len(placement.seats)
        assert all(len(slots) == placement.slots_per_rank for slots in slots_by_seat)
        present: set[int] = set()
        for index in range(len(placement.seats)):
            held = experts_of(placement, layer, index)
            assert len(set(held)) == len(held)  # never two copies on one seat
            present |= set(held)
        assert present == set(range(placement.num_experts))


def test_the_slots_that_survive_one_loss() -> None:
    assert slots_per_rank(16, 1) == 16
    assert slots_per_rank(16, 2) == 16
    assert slots_per_rank(16, 4) == 6
    assert slots_per_rank(384, 8) == 55
    with pytest.raises(PlacementError, match="0 experts"):
        slots_per_rank(0, 4)


def test_a_small_start_by_hand() -> None:
    """Six experts, three seats, three slots: two experts each, then a copy of a neighbour's."""
    placement = initial_placement(2, 6, [4, 0, 2], 3)
    assert placement.seats == (0, 2, 4)
    assert placement.physical_to_logical == (((0, 1, 2), (2, 3, 4), (4, 5, 0)),) * 2
    assert copies(placement, 1) == [
        [(0, 0), (4, 2)],
        [(0, 1)],
        [(0, 2), (2, 0)],
        [(2, 1)],
        [(2, 2), (4, 0)],
        [(4, 1)],
    ]


def test_a_loss_and_a_return_by_hand() -> None:
    start = initial_placement(1, 6, [0, 2, 4], 3)
    lost = after_loss(start, 4)
    # Only expert 5 had no other copy. Only expert 2 has two left; seat 0 gives up its own.
    assert lost.seats == (0, 2)
    assert lost.physical_to_logical == (((0, 1, 5), (2, 3, 4)),)
    assert moves(start, lost) == {0: [(0, 2, 5)]}
    back = after_join(lost, 4)
    assert back.physical_to_logical == (((0, 1, 5), (2, 3, 4), (0, 2, 1)),)
    assert moves(lost, back) == {4: [(0, 0, 0), (0, 1, 2), (0, 2, 1)]}
    assert (start.version, lost.version, back.version) == (0, 1, 2)


sizes = st.tuples(st.integers(1, 8), st.integers(1, 64))


@given(sizes, st.integers(0, 3))
def test_as_many_as_possible_survive_any_one_loss(size: tuple[int, int], spare: int) -> None:
    ranks, experts = size
    slots = slots_per_rank(experts, ranks) + spare
    placement = initial_placement(1, experts, range(ranks), slots)
    check(placement)
    counts = [len(places) for places in copies(placement, 0)]
    if ranks == 1:
        assert counts == [1] * experts
        return
    room = ranks * min(slots, experts)  # a seat never holds two copies of one expert
    twice = sum(c >= 2 for c in counts)
    assert twice == min(experts, room - experts)
    assert sum(counts) == room
    single = [sum(counts[e] == 1 for e in experts_of(placement, 0, i)) for i in range(ranks)]
    assert max(single) - min(single) <= 1  # no seat's loss is dearer than another's


@given(sizes, st.integers(0, 2), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_every_expert_has_a_copy_over_any_losses_and_joins(
    size: tuple[int, int], spare: int, seed: int, steps: int
) -> None:
    ranks, experts = size
    rng = random.Random(seed)
    placement = initial_placement(2, experts, range(ranks), slots_per_rank(experts, ranks) + spare)
    for _ in range(steps):
        old = placement
        absent = sorted(set(range(ranks)) - set(old.seats))
        if absent and rng.random() < 0.4:
            placement = joined(old, rng.choice(absent))
        else:
            placement = lost(old, rng.choice(old.seats))
        check(placement)


def lost(old: Placement, seat: int) -> Placement:
    if old.num_experts > (len(old.seats) - 1) * old.slots_per_rank:
        with pytest.raises(PlacementError, match="do not fit"):
            after_loss(old, seat)
        return old
    new = after_loss(old, seat)
    assert new == after_loss(old, seat)
    assert new.version == old.version + 1
    index = old.seats.index(seat)
    loads = moves(old, new)
    for layer in range(2):
        missing = [
            e for e, places in enumerate(copies(old, layer)) if {s for s, _ in places} == {seat}
        ]
        loaded = [e for seat_loads in loads.values() for at, _, e in seat_loads if at == layer]
        assert sorted(loaded) == missing  # one load for each expert that is gone, and no other
        kept = [slots for i, slots in enumerate(old.physical_to_logical[layer]) if i != index]
        changed = sum(
            a != b
            for before, after in zip(kept, new.physical_to_logical[layer], strict=True)
            for a, b in zip(before, after, strict=True)
        )
        assert changed == len(missing)
    return new


def joined(old: Placement, seat: int) -> Placement:
    new = after_join(old, seat)
    assert new == after_join(old, seat)
    assert set(moves(old, new)) == {seat}
    index = new.seats.index(seat)
    for before, after in zip(old.physical_to_logical, new.physical_to_logical, strict=True):
        assert after[:index] + after[index + 1 :] == before
    filled = experts_of(new, 0, index)
    assert len(filled) == min(old.slots_per_rank, old.num_experts)
    count = Counter(e for slots in old.physical_to_logical[0] for e in slots if e != EMPTY)
    left_out = [count[e] for e in range(old.num_experts) if e not in filled]
    assert not left_out or max(count[e] for e in filled) <= min(left_out)
    return new


def test_loads_after_a_loss_are_spread_over_the_survivors() -> None:
    placement = initial_placement(1, 384, range(8), slots_per_rank(384, 8))
    for seat in range(8):
        loads = moves(placement, after_loss(placement, seat))
        sizes = [len(seat_loads) for seat_loads in loads.values()]
        assert sum(sizes) == 41  # 48 of its own less 7 copied elsewhere: 5.9 a survivor
        assert len(sizes) == 7 and max(sizes) <= 7


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlacementError, match=r"10 experts do not fit into 3 ranks x 3 slots = 9"):
        initial_placement(1, 10, range(3), 3)
    with pytest.raises(PlacementError, match="distinct"):
        initial_placement(1, 4, [1, 1], 4)
    placement = initial_placement(1, 4, [0, 1], 4)
    with pytest.raises(PlacementError, match="seat 7 is not one of"):
        after_loss(placement, 7)
    with pytest.raises(PlacementError, match="seat 1 is already"):
        after_join(placement, 1)
    with pytest.raises(PlacementError, match="0 ranks x 4 slots = 0"):
        after_loss(after_loss(placement, 0), 1)


def test_survives_the_wire() -> None:
    placement = initial_placement(3, 5, [0, 3], 5)
    packed = msgspec.msgpack.encode(placement)
    assert msgspec.msgpack.decode(packed, type=Placement) == placement


def test_moves_to_the_same_placement_are_none() -> None:
    placement = initial_placement(2, 6, range(3), 4)
    assert moves(placement, placement) == {}


def plain_choice(key: int, num_copies: int) -> int:
    mask = (1 << 64) - 1
    word = (key + 0x9E3779B97F4A7C15) & mask
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    word ^= word >> 31
    return ((word >> 32) * num_copies) >> 32


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.integers(1, 2**31 - 1)
)
def test_the_copy_is_a_hash_of_the_key_alone(keys: list[int], num_copies: int) -> None:
    array = np.array(keys, dtype=np.int64)
    got = choose_copy(array, np.full(len(keys), num_copies))
    assert got.tolist() == [plain_choice(key & ((1 << 64) - 1), num_copies) for key in keys]
    alone = [
        int(choose_copy(array[i : i + 1], np.array([num_copies]))[0]) for i in range(len(keys))
    ]
    assert got.tolist() == alone


@pytest.mark.parametrize("num_copies", [1, 2, 3, 7])
def test_tokens_are_split_evenly(num_copies: int) -> None:
    """Successive keys, as positions of one request are: within 5 standard deviations of even."""
    counts = np.bincount(choose_copy(np.arange(100_000), np.array(num_copies)))
    share = 1 / num_copies
    limit = 5 * np.sqrt(100_000 * share * (1 - share))
    assert len(counts) == num_copies
    assert np.abs(counts - 100_000 * share).max() <= limit
