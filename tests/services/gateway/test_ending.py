"""How a gateway ends when the node drains: with everybody told, in its place or in that of one that died."""

from array import array

import pytest
from gateway_desk import MS, Desk

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import DRAIN_MS
from phalanx.protocol.messages import Attach, Final, Sampling, Usage
from phalanx.services.gateway.core import READERS_NS
from phalanx.services.gateway.ending import LAST_WORDS_NS, Ending
from phalanx.services.gateway.entries import Entry, Produced, Recovered

R = "r" * 32
ENDED = Final(R, 0, 1, "length", Usage(1, 1))


def entry() -> Entry:
    sampling = Sampling(seed=1, max_tokens=2)
    return Entry(R, ints(5), sampling, 1, True, "k", b"", "tiny", "f1")


def ints(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def final(desk: Desk) -> Final:
    (last,) = [message for message in desk.told() if isinstance(message, Final)]
    return last


def begun(*recovered: Recovered) -> tuple[Desk, Ending]:
    desk = Desk(*recovered)
    return desk, Ending(desk.core)


def test_it_ends_when_all_have_their_finals() -> None:
    desk, ending = begun()
    desk.start()
    ((seat, submit),) = desk.submits()
    ending.drain(desk.now + 5_000 * MS)
    assert not ending.ends_all(desk.now) and not ending.over(desk.now)
    desk.produces(seat, submit, 0, 10, finish="length")
    assert not ending.over(desk.now)
    desk.decodes()
    assert final(desk).finish_reason == "length"
    assert ending.over(desk.now)


def test_the_shortest_time_counts() -> None:
    desk, ending = begun()
    desk.start()
    ending.drain(desk.now + 5_000 * MS)
    ending.drain(desk.now + 1_000 * MS)
    ending.drain(desk.now + 9_000 * MS)
    desk.passes(900)
    assert not ending.ends_all(desk.now)
    desk.passes(100)
    assert ending.ends_all(desk.now) and not ending.ends_all(desk.now)
    desk.turn()
    assert final(desk).code is Code.SHUTDOWN and ending.over(desk.now)


def test_a_word_that_comes_after_its_signal_counts() -> None:
    """The time of a signal alone is nobody's word: it is no limit of a longer drain."""
    desk, ending = begun()
    desk.start()
    assert not ending.ends_all(desk.now)
    begun_ns = desk.now
    ending.drain(begun_ns + 6 * DRAIN_MS * MS)
    assert not ending.ends_all(begun_ns + 2 * DRAIN_MS * MS)
    ending.drain(begun_ns + 3 * DRAIN_MS * MS)
    ending.drain(begun_ns + 6 * DRAIN_MS * MS)
    assert not ending.ends_all(begun_ns + 3 * DRAIN_MS * MS - 1)
    assert ending.ends_all(begun_ns + 3 * DRAIN_MS * MS)


def test_a_signal_alone_has_the_default_time() -> None:
    desk, ending = begun()
    desk.start()
    begun_ns = desk.now
    assert not ending.ends_all(begun_ns)
    assert not ending.ends_all(begun_ns + DRAIN_MS * MS - 1)
    assert ending.ends_all(begun_ns + DRAIN_MS * MS)


def test_who_takes_nothing_is_waited_for_a_second() -> None:
    desk, ending = begun()
    desk.now = READERS_NS
    desk.start()
    desk.takes = False
    ending.drain(desk.now)
    assert ending.ends_all(desk.now)
    desk.turn()
    assert not ending.over(desk.now + LAST_WORDS_NS - 1)
    assert ending.over(desk.now + LAST_WORDS_NS)


def test_a_successor_waits_for_those_who_read_from_the_one_before_it() -> None:
    """All has ended, and is on disk: they were not told."""
    desk, ending = begun(Recovered(entry(), {0: ENDED}))
    ending.drain(desk.now + 60_000 * MS)
    desk.turn()
    assert desk.core.idle and not ending.over(desk.now)
    desk.asks(Attach(1, R, (1,)))
    assert final(desk) == ENDED and ending.over(desk.now)


def test_nobody_is_waited_for_longer() -> None:
    desk, ending = begun(Recovered(entry(), {0: ENDED}))
    ending.drain(desk.now + 60_000 * MS)
    desk.passes(READERS_NS // MS - 100)
    assert not ending.over(desk.now)
    desk.passes(100)
    assert ending.over(desk.now)


def test_a_successor_that_begins_after_the_end_has_time_for_them() -> None:
    desk, ending = begun(Recovered(entry()))
    ending.drain(desk.now)
    assert ending.ends_all(desk.now)
    desk.turn()
    desk.passes(READERS_NS // MS - 100)
    assert not ending.over(desk.now)
    desk.asks(Attach(1, R))
    told = final(desk)
    assert (told.finish_reason, told.code) == ("abort", Code.SHUTDOWN) and ending.over(desk.now)


def test_an_early_end_is_told_where_its_reader_is() -> None:
    """It was ended by a gateway that did not know how far anybody had read."""
    log = Produced(R, 0, 0, ints(10, 11))
    desk, ending = begun(Recovered(entry(), produced=(log,)))
    ending.drain(desk.now)
    assert ending.ends_all(desk.now)
    desk.turn()
    desk.asks(Attach(1, R, (2,)))
    told = final(desk)
    assert (told.finish_reason, told.offset, told.usage.completion_tokens) == ("abort", 2, 2)
    desk.asks(Attach(2, R, (1,)), b"another")
    assert final(desk).offset == 1


@pytest.mark.parametrize("remembered", [True, False])
def test_who_is_told_again_what_has_ended_is_waited_for(remembered: bool) -> None:
    """All is on disk, and the gateway before this one fell before it was told: a tokenizer, or a rank as well, has to
    make it again first."""
    log = (Produced(R, 0, 0, ints(10, 11)),) if remembered else ()
    end = Final(R, 0, 2, "length", Usage(1, 2))
    desk, ending = begun(Recovered(entry(), {0: end}, produced=log))
    ending.drain(desk.now + 60_000 * MS)
    desk.asks(Attach(1, R, (1,)))
    assert not ending.over(desk.now)
    if not remembered:
        ((seat, submit),) = desk.submits()
        desk.produces(seat, submit, 0, 10, 11, finish="length")
        assert not ending.over(desk.now)
    desk.decodes()
    assert final(desk) == end and ending.over(desk.now)


def test_nor_longer_than_the_drain() -> None:
    end = Final(R, 0, 2, "length", Usage(1, 2))
    desk, ending = begun(Recovered(entry(), {0: end}))
    desk.now = READERS_NS
    ending.drain(desk.now)
    desk.asks(Attach(1, R, (1,)))
    assert ending.ends_all(desk.now) and not ending.over(desk.now)
    desk.turn()
    told = final(desk)
    assert (told.finish_reason, told.code) == ("abort", Code.SHUTDOWN) and ending.over(desk.now)
