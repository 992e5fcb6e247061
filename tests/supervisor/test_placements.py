"""The group's placement follows its membership: every expert has a holder, and few move."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.placement import Placement, copies, moves
from phalanx.supervisor.placements import GroupPlacements, read_shape

LAYERS, EXPERTS = 2, 10


def settle(placements: GroupPlacements, *seats: int) -> Placement:
    placed = placements.settle(dict.fromkeys(seats, 0))
    assert placed is not None
    return msgspec.msgpack.decode(placed, type=Placement)


@given(st.integers(1, 5), st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=8))
def test_every_expert_has_a_holder_in_every_group(ranks: int, groups: list[set[int]]) -> None:
    placements = GroupPlacements(LAYERS, EXPERTS, ranks)
    for group in groups:
        seats = tuple(sorted(seat for seat in group if seat < ranks))
        if not seats:
            continue
        placement = settle(placements, *seats)
        assert placement.seats == seats
        assert all(all(copies(placement, layer)) for layer in range(LAYERS))


def test_one_loss_always_leaves_room() -> None:
    for ranks in range(2, 6):
        for lost in range(ranks):
            placements = GroupPlacements(LAYERS, EXPERTS, ranks)
            settle(placements, *range(ranks))
            settle(placements, *(seat for seat in range(ranks) if seat != lost))


def test_the_last_one_standing_holds_everything() -> None:
    placements = GroupPlacements(LAYERS, EXPERTS, 4)
    assert settle(placements, 0, 1, 2, 3).slots_per_rank == 4
    assert settle(placements, 1, 3).slots_per_rank == 5
    alone = settle(placements, 3)
    assert alone.slots_per_rank == EXPERTS
    assert all(sorted(layer[0]) == list(range(EXPERTS)) for layer in alone.physical_to_logical)


def test_odd_sizes() -> None:
    """Seven ranks become six, and three two: every survivor loads only what is missing."""
    for ranks in (7, 3):
        placements = GroupPlacements(LAYERS, 384, ranks)
        full = settle(placements, *range(ranks))
        rest = settle(placements, *(seat for seat in range(ranks) if seat != 1))
        missing = sum(len(loads) for loads in moves(full, rest).values())
        only_there = sum(
            all(seat == 1 for seat, _ in held)
            for layer in range(LAYERS)
            for held in copies(full, layer)
        )
        assert missing == only_there > 0


def test_slots_are_rounded_up_until_all_ranks_have_as_many() -> None:
    """From seven ranks down to one: five have 385 slots for 384 experts, four have 384."""
    placements, seats = GroupPlacements(LAYERS, 384, 7), list(range(7))
    slots = {7: 64, 6: 64, 5: 77, 4: 96, 3: 128, 2: 192, 1: 384}
    for lost in (3, 0, 6, 1, 5, 2, None):
        placement = settle(placements, *seats)
        assert placement.slots_per_rank == slots[len(seats)]
        for layer, held in enumerate(placement.physical_to_logical):
            assert [len(row) for row in held] == [slots[len(seats)]] * len(seats)
            assert all(copies(placement, layer))
        if lost is not None:
            seats.remove(lost)


def test_survivors_keep_what_they_hold_when_one_returns() -> None:
    placements = GroupPlacements(LAYERS, EXPERTS, 3)
    settle(placements, 0, 1, 2)
    without = settle(placements, 0, 2)
    again = settle(placements, 0, 1, 2)
    assert set(moves(without, again)) == {1}


def test_a_seat_lost_and_one_returned_at_once() -> None:
    """Two of three fall, one comes back."""
    placements = GroupPlacements(LAYERS, EXPERTS, 3)
    settle(placements, 0, 1, 2)
    settle(placements, 0, 2)
    assert settle(placements, 1, 2).seats == (1, 2)


def test_shape_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    config = {"text_config": {"num_hidden_layers": 3, "n_routed_experts": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == (3, 16)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"text_config": {"num_hidden_layers": 3}}', "[]"], ids=str
)
def test_a_useless_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_shape(tmp_path)


def test_an_absent_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the model's .*No such file"):
        read_shape(tmp_path / "nowhere")
