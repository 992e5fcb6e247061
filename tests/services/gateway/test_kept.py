"""Ended requests: how many are kept, and which go first."""

from array import array

import pytest
from gateway_desk import Desk, texts

from phalanx.protocol.messages import Accepted, Attach, Error, Final, Sampling, Usage
from phalanx.services.gateway import kept
from phalanx.services.gateway.entries import Entry, Recovered

NAMES = [f"{number:032x}" for number in range(1, 5)]


def ended(name: str) -> Recovered:
    sampling = Sampling(seed=1, max_tokens=2)
    entry = Entry(name, array("i", [5]).tobytes(), sampling, 1, True, "", b"", "tiny", "f1")
    return Recovered(entry, {0: Final(name, 0, 2, "length", Usage(1, 2))})


@pytest.mark.parametrize("decoding", [False, True])
def test_beyond_the_bound_the_oldest_go_but_none_that_is_being_read(
    monkeypatch: pytest.MonkeyPatch, decoding: bool
) -> None:
    """The oldest of four, of which two are too many, is just made again for a reader."""
    desk = Desk(*(ended(name) for name in NAMES))
    desk.asks(Attach(1, NAMES[0], (0,)))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 9)
    if not decoding:
        desk.decodes()
    monkeypatch.setattr(kept, "KEPT_MAX", 2)
    desk.passes(100)
    desk.decodes()
    desk.produces(seat, submit, 1, 10, finish="length", seq=2)
    desk.decodes()
    told = desk.told()
    assert texts(told) == "[9][10]"
    assert isinstance(told[-1], Final) and told[-1].finish_reason == "length"
    for name in NAMES:
        desk.asks(Attach(2, name, (2,)))
    answers = [type(message) for message in desk.told() if not isinstance(message, Final)]
    assert answers == [Accepted, Error, Error, Accepted]
