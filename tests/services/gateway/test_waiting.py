"""Who waits for a rank: in their order, and nobody who has ended for long."""

from array import array

import pytest

from phalanx.protocol.messages import Sampling
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.streams import End, Stream
from phalanx.services.gateway.waiting import SWEPT_MIN, Waiting


def stream(number: int, resumed: bool = False) -> Stream:
    sampling = Sampling(seed=1, max_tokens=9)
    entry = Entry("r" * 32, array("i", [5]).tobytes(), sampling, 1, True, "", b"", "tiny", "f1")
    made = Stream(entry, 0, number)
    made.resumed = resumed
    return made


def numbers(waiting: Waiting) -> list[int]:
    found = []
    while (one := waiting.pop()) is not None:
        found.append(one.number)
    return found


def test_the_resumed_go_first_then_the_oldest_and_none_that_has_ended() -> None:
    waiting = Waiting()
    for one in (stream(4), stream(1), ended := stream(2), stream(5, True), stream(3, True)):
        waiting.add(one)
    ended.end = End("abort")
    first = waiting.pop(resumed=True)
    assert first is not None and first.number == 3
    waiting.put_away(first)
    assert numbers(waiting) == [5, 1, 4]
    waiting.add(stream(6))
    assert waiting.pop(resumed=True) is None
    waiting.seats_changed()
    assert numbers(waiting) == [3, 6]


@pytest.mark.parametrize("away", [False, True])
def test_what_gives_up_while_nobody_takes_anything_is_let_go(away: bool) -> None:
    """Clients ask again and again: their prompts were kept until a rank came."""
    waiting = Waiting()
    waiting.add(stream(0))  # behind which nobody surfaces
    for number in range(1, 20 * SWEPT_MIN):
        waiting.add(one := stream(number))
        if away:
            waiting.put_away(one)
        one.end = End("abort")
        assert waiting.num_kept <= 2 * SWEPT_MIN
    assert numbers(waiting) == [0]
