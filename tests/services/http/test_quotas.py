"""Who runs, who waits, who is sent away: bounds hold, nobody starves, and capacity that falls sheds by the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.services.http.errors import HttpError
from phalanx.services.http.quotas import Door, Quota, Ticket

KEYS = ["a", "b", "c"]


def test_a_free_place_goes_to_the_key_with_the_fewest_running() -> None:
    door = Door(4, 100, Quota(100, 100))
    heavy = [door.enter("heavy", 0) for _ in range(20)]
    assert sum(ticket.running for ticket in heavy) == 4
    light = door.enter("light", 0)
    assert not light.running
    assert door.leave(heavy[0], 1) == [light]
    assert door.leave(heavy[1], 2) == [heavy[4]]


def test_a_key_keeps_to_its_quota_while_there_is_room() -> None:
    door = Door(100, 100, Quota(100, 100))
    door.set_quota("small", Quota(1, 1))
    first, second = door.enter("small", 0), door.enter("small", 0)
    assert first.running and not second.running
    with pytest.raises(HttpError, match="quota is 1 and 1") as refused:
        door.enter("small", 0)
    assert refused.value.status == 429 and refused.value.retry_after_s >= 1
    assert door.enter("other", 0).running
    assert door.leave(first, 1) == [second]


def test_retry_after_follows_the_rate() -> None:
    door = Door(1, 1, Quota(10, 10))
    ticket = door.enter("a", 0)
    for second in range(1, 16):  # one ends every two seconds
        door.leave(ticket, second * 2_000_000_000)
        ticket = door.enter("a", second * 2_000_000_000)
    door.enter("a", 30_000_000_000)
    with pytest.raises(HttpError) as refused:
        door.enter("a", 30_000_000_000)
    assert refused.value.retry_after_s == 4  # two ahead, half of one a second


def test_when_ranks_are_lost_the_newest_of_the_longest_queue_goes() -> None:
    door = Door(2, 6, Quota(2, 6))
    running = [door.enter("a", 0), door.enter("a", 0)]
    waiting_a = [door.enter("a", 0) for _ in range(4)]
    waiting_b = [door.enter("b", 0) for _ in range(2)]
    started, shed = door.set_capacity(0.5, 1)
    assert not started and all(ticket.running for ticket in running)
    assert shed == [waiting_a[3], waiting_a[2], waiting_a[1]] or shed == [
        waiting_a[3],
        waiting_a[2],
        waiting_b[1],
    ]
    assert door.shed_error(1).status == 503
    started, shed = door.set_capacity(1.0, 2)
    assert not started and not shed


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(KEYS)), max_size=200))
def test_bounds_hold_and_no_place_stays_empty(moves: list[tuple[int, str]]) -> None:
    door = Door(3, 5, Quota(2, 3))
    held: list[Ticket] = []
    for now, (move, key) in enumerate(moves):
        if move < 6:
            try:
                held.append(door.enter(key, now))
            except HttpError:
                pass
        elif move < 9 and held:
            ticket = held.pop(move % len(held))
            door.leave(ticket, now)
        else:
            _, shed = door.set_capacity(1.0 if move % 2 else 0.4, now)
            held = [ticket for ticket in held if ticket not in shed]
        running = [ticket for ticket in held if ticket.running]
        waiting = [ticket for ticket in held if not ticket.running]
        assert (len(running), len(waiting)) == (door.running, door.waiting)
        assert len(running) <= 3 and len(waiting) <= 5
        for name in KEYS:
            own = sum(ticket.key == name for ticket in running)
            queued = sum(ticket.key == name for ticket in waiting)
            assert own <= 2 and queued <= 3
            if queued and own < 2:
                assert len(running) >= 1  # the server is full for now
    for ticket in list(held):
        door.leave(ticket, 10**6)
    assert (door.running, door.waiting) == (0, 0)
