"""Ended requests: how many are kept, and which go first."""

import tracemalloc
from array import array

import msgspec
import pytest
from gateway_desk import Desk, texts

from phalanx.protocol.messages import (
    Accepted,
    Attach,
    Error,
    Final,
    Sampling,
    TokenLogprobs,
    Tokens,
    TokensItem,
    Usage,
)
from phalanx.services.gateway import kept
from phalanx.services.gateway.entries import Entry, Recovered
from phalanx.services.gateway.requests import TOKEN_BYTES, Request

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


def told(alternatives: int, count: int) -> list[TokenLogprobs]:
    """As they come from the bus."""
    ids = tuple(range(1000, 1000 + alternatives))
    logprobs = tuple(-float(at) for at in range(1, alternatives + 1))
    encoded = msgspec.msgpack.encode([TokenLogprobs(-0.5, ids, logprobs)] * count)
    return msgspec.msgpack.decode(encoded, type=list[TokenLogprobs])


@pytest.mark.parametrize("alternatives", [0, 5, 20])
def test_what_log_probabilities_take_counts(alternatives: int) -> None:
    """They are most of it: 4 Mi tokens were several gigabytes."""
    entry = msgspec.structs.replace(
        ended(NAMES[0]).entry, sampling=Sampling(seed=1, max_tokens=2, logprobs=alternatives)
    )
    request = Request(entry, 1)
    tracemalloc.start()
    try:
        request.streams[0].logprobs = told(alternatives, 2_000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 < request.num_tokens * TOKEN_BYTES / taken < 1.5


def test_of_streams_with_log_probabilities_fewer_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(kept, "KEPT_TOKENS_MAX", 10 * 1_500 // TOKEN_BYTES)
    sampling = Sampling(max_tokens=8, logprobs=20, seed=1)
    requests = []
    for _ in range(2):
        requests.append(desk.start(sampling))
        ((seat, submit),) = desk.submits()
        tokens, name = tuple(range(10, 18)), (submit.request_id, submit.index, submit.attempt)
        item = TokensItem(*name, 0, tokens, "length", logprobs=tuple(told(20, 8)))
        desk.says(seat, Tokens(int(seat[10:11]), 1, len(requests), (item,)))
        desk.decodes()
        desk.told()
    streams = [desk.core._lives.requests[name].streams[0] for name in requests]
    assert [len(stream.logprobs) for stream in streams] == [0, 8]
