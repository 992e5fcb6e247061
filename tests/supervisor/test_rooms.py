"""Ranks that have no room for all experts: the group stops instead of asking for what is not there."""

import signal
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from supervisor.test_core import Story, running

from phalanx.protocol.errors import Code, ExitCode
from phalanx.protocol.messages import Error, Scale
from phalanx.protocol.placement import Placement, copies, slots_used
from phalanx.supervisor.events import BecameReady, ChangeAsked, Kill, Reply
from phalanx.supervisor.group import GroupPhase
from phalanx.supervisor.placements import GroupPlacements

LAYERS, EXPERTS = 2, 10


def settle(placements: GroupPlacements, rooms: Mapping[int, int]) -> Placement | None:
    placed = placements.settle(rooms)
    return None if placed is None else msgspec.msgpack.decode(placed, type=Placement)


@given(
    st.integers(1, 5),
    st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 6), min_size=1), max_size=8),
)
def test_nobody_gets_more_than_there_is_room_for(ranks: int, groups: list[dict[int, int]]) -> None:
    placements = GroupPlacements(LAYERS, EXPERTS, ranks)
    version = -1
    for rooms in groups:
        placement = settle(placements, rooms)
        least = min(room or EXPERTS for room in rooms.values())
        assert (placement is None) == (least * len(rooms) < EXPERTS)
        assert (placement is None) == bool(placements.shortage(rooms))
        if placement is None:
            continue
        assert placement.seats == tuple(sorted(rooms))
        assert all(all(copies(placement, layer)) for layer in range(LAYERS))
        for seat, room in rooms.items():
            assert slots_used(placement, seat) <= (room or EXPERTS)
        assert placement.version >= version, "ranks compare versions"
        version = placement.version


def four_gpus(room: int = 2) -> Story:
    """Six experts on four ranks with room for two or so each: one may fall, not two."""
    story = Story(4)
    for name, process in story.core.processes.items():
        slots = room if name.startswith("worker") else 0
        story.feed(BecameReady(name, process.incarnation, "n", slots))
    story.acks(go=2)
    assert not story.core.reasons()
    story.actions.clear()
    return story


def test_survivors_without_room_are_kept_until_enough_are_back() -> None:
    story = four_gpus()
    story.dies("worker-1").acks(stop=3, seats=(0, 2, 3)).acks(go=4, seats=(0, 2, 3))
    assert story.epoch == 4, "three have room"
    story.dies("worker-2").acks(stop=5, seats=(0, 3)).wait(60_000)
    assert story.epoch == 5 and story.core.group.members.keys() == {0, 3}
    told = "the group is stopped: worker-0, worker-3 have room for 2 x 2 of 6 experts a layer, so it takes 3 ranks"
    assert told in story.core.reasons()
    killed = {action.name for action in story.take(Kill) if action.signal == signal.SIGKILL}
    assert not killed & {"worker-0", "worker-3"}
    story.feed(BecameReady("worker-2", 2, "n", 2))
    story.acks(go=6, seats=(0, 2, 3))
    assert story.epoch == 6 and story.core.group.members == {0: 1, 2: 2, 3: 1}


def test_with_room_two_may_fall() -> None:
    story = four_gpus(3)
    story.dies("worker-1").dies("worker-2").acks(stop=3, seats=(0, 3)).acks(go=4, seats=(0, 3))
    assert story.epoch == 4 and story.core.group.members.keys() == {0, 3}


def test_a_node_whose_ranks_never_have_room_ends_with_the_numbers() -> None:
    story = Story(2)
    for seat in range(2):
        story.feed(BecameReady(f"worker-{seat}", 1, "n", 2))
    assert story.core.code == ExitCode.BAD_INPUT
    assert "have room for 2 x 2 of 6 experts a layer, so it takes 3 ranks" in story.core.failed


@pytest.mark.parametrize("ranks, refused", [(3, False), (2, True)])
def test_a_scale_to_too_few_is_refused(ranks: int, refused: bool) -> None:
    story = four_gpus()
    story.feed(ChangeAsked(b"operator", Scale(1, ranks, 60.0)))
    replies = [reply.message for reply in story.take(Reply)]
    assert bool(replies) == refused and story.epoch == (2 if refused else 3)
    for reply in replies:
        assert isinstance(reply, Error) and reply.code == Code.BAD_REQUEST
        assert "ranks is 2, but worker-0, worker-1 have room for 2 x 2 of 6" in reply.message


def test_without_a_word_of_room_any_number_fits() -> None:
    story = running()
    story.dies("worker-0").dies("worker-1").acks(stop=3, seats=(2,)).acks(go=4, seats=(2,))
    assert story.epoch == 4 and story.core.group.members.keys() == {2}


def test_a_scale_that_goes_back_does_not_wait_for_who_loads_for_it() -> None:
    """A newcomer is in the GO, and a survivor loads for a minute: streams would stand still all the time."""
    story = four_gpus(6)
    story.feed(ChangeAsked(b"operator", Scale(1, 5, 10.0))).wait(100)
    for name in ("worker-4", "scheduler-4"):
        story.feed(BecameReady(name, 1, "n", 6))
    story.acks(stop=3)
    assert story.core.group.phase is GroupPhase.GOING and 4 in story.core.group.members
    story.wait(10_200)
    assert story.epoch == 5, "a STOP without the newcomer"
    story.acks(stop=5).acks(stop=5, seats=(4,)).acks(go=6)
    assert story.epoch == 6 and story.core.group.members.keys() == {0, 1, 2, 3}
