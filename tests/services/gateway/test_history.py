"""What is remembered of ended requests: the newest, their tokens while there is room, their digests after."""

import struct
from array import array
from dataclasses import replace

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.messages import Difference, Final, Sampling, TokenLogprobs, Usage
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.history import History, Past, PastSequence
from phalanx.services.gateway.requests import Request

S = 10**9


def past(name: str, *tokens: int, logprobs: bool = False) -> Past:
    sampling = Sampling(seed=1, max_tokens=99, logprobs=0 if logprobs else None)
    entry = Entry(name, array("i", [5]).tobytes(), sampling, 1, True, "", b"", "tiny", "f1")
    request = Request(entry, 1)
    (stream,) = request.streams
    stream.tokens, stream.shown = [*tokens, 63], [""] * (len(tokens) + 1)  # one beyond its end
    stream.logprobs = [TokenLogprobs(-float(token)) for token in stream.tokens]
    digest = tokens_digest(0, tokens)
    stream.final = Final(name, 0, len(tokens), "stop", Usage(1, len(tokens)), digest=digest)
    return Past.of(request)


def record(logprob: float) -> bytes:
    return struct.pack("<fiif", logprob, 1, 5, logprob)


def only(found: list[Past]) -> PastSequence:
    ((sequence,),) = (one.sequences for one in found)
    return sequence


def test_an_equal_run_has_no_difference() -> None:
    one = only([past("a", 7, 8, 9)])
    assert one.difference((7, 8, 9), ()) is None
    told = only([past("a", 7, 8, logprobs=True)])
    assert told.difference((7, 8), (TokenLogprobs(-7.0), TokenLogprobs(-8.0))) is None


def test_the_first_difference_is_named() -> None:
    one = only([past("a", 7, 8, 9, logprobs=True)])
    right = tuple(TokenLogprobs(-float(token)) for token in (7, 8, 9))
    assert one.difference((7, 4, 9), right) == Difference(1, "token", "8", "4")
    bent = (right[0], TokenLogprobs(-8.000000000000002), right[2])
    found = one.difference((7, 8, 4), bent)
    assert found is not None and (found.at, found.what) == (1, "logprobs")
    assert "-8.000000000000002" in found.replayed and "-8.0," in found.delivered
    assert one.difference((7, 8), right[:2]) == Difference(2, "length", "3", "2")
    assert one.difference((7,), right[:1], "rank 1 left") == Difference(
        1, "error", "stop", "rank 1 left"
    )


def test_log_probabilities_of_the_prompt_are_compared() -> None:
    one = replace(only([past("a", 7, 8)]), scores=record(-1.0) + record(-2.0), num_top=1)
    assert one.difference((7, 8), (), scores=record(-1.0) + record(-2.0)) is None
    found = one.difference((7, 8), (), scores=record(-1.0) + record(-2.0000002))
    assert found is not None and (found.at, found.what) == (2, "prompt_logprobs")
    assert "-2.0," in found.delivered and "-2.0000002" in found.replayed
    found = one.difference((7, 8), (), scores=record(-1.0))
    assert found is not None and (found.at, found.replayed) == (2, "none")
    assert one.difference((7,), (), early=True, scores=record(-1.0)) is None
    assert one.compares_scores and not only([past("a", 7)]).compares_scores


def test_without_tokens_the_digest_decides() -> None:
    one = only([past("a", 7, 8).light])
    assert one.tokens is None and one.comparable
    assert one.difference((7, 8), ()) is None
    found = one.difference((7, 9), ())
    assert found == Difference(
        2, "digest", tokens_digest(0, (7, 8)).hex(), tokens_digest(0, (7, 9)).hex()
    )


def test_memory_is_bounded_tokens_go_first() -> None:
    each = past("a", *range(600)).nbytes
    bare = past("a", *range(600)).light.nbytes
    history = History(most=100, bytes_max=2 * each + 6 * bare, ttl_ns=10 * S)
    names = "abcdefghijklmnop"
    for name in names:
        history.add(past(name, *range(600)), 0)
        assert history.nbytes <= 2 * each + 6 * bare
    kept = [name for name in names if history.find(name)]
    full = [name for name in kept if only(history.find(name)).tokens is not None]
    assert full == ["o", "p"] and kept == list("ijklmnop")
    history.add(past("q" * 32, *range(10_000)), 0)  # more than there is room for
    assert only(history.find("q")).tokens is None and history.nbytes <= 2 * each + 6 * bare


def test_number_and_age_are_bounded() -> None:
    history = History(most=2, bytes_max=1 << 20, ttl_ns=10 * S)
    for at, name in enumerate("abc"):
        history.add(past(name, 7), at * S)
    assert not history.find("a") and len(history) == 2
    history.expire(11 * S)
    assert not history.find("b") and history.find("c")
    history.expire(12 * S)
    assert len(history) == 0 and history.nbytes == 0
    none = History(most=0, bytes_max=1 << 20, ttl_ns=S)
    none.add(past("a", 7), 0)
    assert len(none) == 0


def test_an_id_may_be_cut_short_as_long_as_it_is_one() -> None:
    history = History(most=9, bytes_max=1 << 20, ttl_ns=S)
    for name in ("ab1", "ab2", "ab", "c3"):
        history.add(past(name, 7), 0)
    assert [len(history.find(text)) for text in ("ab", "ab1", "a", "c", "d")] == [1, 1, 3, 1, 0]
