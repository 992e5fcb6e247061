"""A client's digest of what it has decides whether a stream goes on: never one stream after another."""

from array import array

import pytest
from gateway_desk import T0, Desk, texts

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    Abort,
    AbortSequence,
    Accepted,
    Attach,
    ClientReply,
    Delta,
    Error,
    Final,
    Hello,
    Sampling,
    Usage,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway.entries import Entry, Finish, Recovered

R = "r" * 32


def entry(n: int = 1, fingerprint: str = "f1") -> Entry:
    prompt = array("i", [5]).tobytes()
    return Entry(R, prompt, Sampling(seed=1, max_tokens=9), n, True, "k", b"", "tiny", fingerprint)


def ended(offset: int, digest: bytes) -> Final:
    return Final(R, 0, offset, "length", Usage(1, offset), digest=digest)


def tokens(told: list[ClientReply]) -> list[int]:
    return [token for m in told if isinstance(m, Delta) for token in m.token_ids]


def finals(told: list[ClientReply]) -> list[Final]:
    return [m for m in told if isinstance(m, Final)]


def restarted(*recovered: Recovered) -> Desk:
    """A new node with an old journal, whose rank comes up after its gateway."""
    desk = Desk(*recovered, seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"),), b"", "f1"), 0)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    desk.scheduler(0)
    return desk


def test_an_abort_is_told_to_a_reader_whose_tokens_are_not_compared_yet() -> None:
    desk = restarted(Recovered(entry()))
    desk.asks(Attach(1, R, (2,), (tokens_digest(0, (10, 11)),)))
    desk.asks(Abort(2, R))
    (final,) = finals(desk.told())
    assert (final.finish_reason, final.offset, final.digest) == ("abort", 2, b"")


def test_an_abort_that_comes_before_the_reader_ends_where_he_is() -> None:
    """It was on its way to the gateway before, and the reader has more than this one knows of."""
    desk = restarted(Recovered(entry()))
    desk.asks(Abort(1, R))
    desk.asks(Attach(2, R, (2,), (tokens_digest(0, (10, 11)),)))
    (final,) = finals(desk.told())
    assert (final.finish_reason, final.offset, final.usage) == ("abort", 2, Usage(1, 2))


def test_after_the_loss_of_the_node_a_stream_goes_on_where_the_client_is() -> None:
    desk = restarted(Recovered(entry()))
    desk.asks(Attach(1, R, (2,), (tokens_digest(0, (10, 11)),)))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    desk.decodes()
    assert [type(m) for m in desk.told()] == [Accepted]
    desk.produces(seat, submit, 1, 11, 12, seq=2)
    desk.decodes()
    assert desk.told() == [Delta(R, 0, 2, (12,), "[12]")]
    desk.produces(seat, submit, 3, 13, finish="length", seq=3)
    desk.decodes()
    delta, final = desk.told()
    assert delta == Delta(R, 0, 3, (13,), "[13]") and isinstance(final, Final)
    assert final.digest == tokens_digest(0, (10, 11, 12, 13))


def test_an_end_for_want_of_room_is_no_other_stream() -> None:
    """Made again, it came less far than its reader had got, who was told that his tokens were those of another one."""
    desk = restarted(Recovered(entry()))
    desk.asks(Attach(1, R, (2,), (tokens_digest(0, (10, 11)),)))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, finish="length", code=Code.KV_PRESSURE, error="full")
    desk.decodes()
    told = desk.told()
    (final,) = finals(told)
    assert (final.finish_reason, final.code, final.offset) == ("length", Code.KV_PRESSURE, 2)
    assert final.usage == Usage(1, 2) and not tokens(told) and not texts(told)


def test_another_stream_is_not_spliced_to_what_the_client_has() -> None:
    desk = restarted(Recovered(entry()))
    desk.asks(Attach(1, R, (2,), (tokens_digest(0, (10, 99)),)))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, 11, 12)
    desk.decodes()
    told = desk.told()
    (final,) = finals(told)
    assert tokens(told) == [] and final.offset == 2
    assert (final.finish_reason, final.code) == ("error", Code.STREAM_CHANGED)
    assert "2 tokens" in final.error and desk.ops[-1] == Finish(final)
    assert [type(m) for _, m in desk.sent(AbortSequence)] == [AbortSequence]
    assert desk.core.idle


def test_each_sequence_is_compared_by_itself() -> None:
    desk = Desk()
    rid = desk.start(Sampling(max_tokens=9), n=2)
    for seat, submit in desk.submits():
        desk.produces(seat, submit, 0, 20 + submit.index, 30)
    desk.decodes()
    desk.told()
    right = tokens_digest(0, (20,))
    desk.asks(Attach(2, rid, (1, 1), (right, right)))
    _, delta, final = desk.told()
    assert delta == Delta(rid, 0, 1, (30,), "[30]")
    assert isinstance(final, Final) and (final.index, final.code) == (1, Code.STREAM_CHANGED)


def test_a_reader_who_has_something_else_does_not_change_what_has_ended() -> None:
    desk = Desk()
    rid = desk.start(Sampling(max_tokens=2))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, 11, finish="length")
    desk.decodes()
    (first,) = finals(desk.told())
    desk.asks(Attach(2, rid, (1,), (tokens_digest(0, (99,)),)))
    (final,) = finals(desk.told())
    assert (final.offset, final.code) == (1, Code.STREAM_CHANGED)
    desk.asks(Attach(3, rid, (3,), (tokens_digest(0, (10, 11, 12)),)))  # more than there was
    (final,) = finals(desk.told())
    assert (final.offset, final.code) == (3, Code.STREAM_CHANGED)
    desk.asks(Attach(4, rid, (1,), (tokens_digest(0, (10,)),)))
    told = desk.told()
    assert (texts(told), finals(told)) == ("[11]", [first])
    assert [op.final for op in desk.ops if isinstance(op, Finish)] == [first]


def test_the_end_in_the_journal_is_told_to_whom_it_belongs() -> None:
    """All tokens were delivered before the loss, the Final was not: nothing need be computed."""
    final = ended(2, tokens_digest(0, (10, 11)))
    desk = Desk(Recovered(entry(), {0: final}))
    desk.asks(Attach(1, R, (2,), (tokens_digest(0, (10, 11)),)))
    assert desk.told()[1:] == [final] and not desk.submits()
    desk.asks(Attach(2, R, (2,), (tokens_digest(0, (10, 12)),)))
    (changed,) = finals(desk.told())
    assert changed.code is Code.STREAM_CHANGED and not desk.submits()


def test_what_is_told_again_must_come_to_the_digest_in_the_journal() -> None:
    final = ended(2, tokens_digest(0, (10, 11)))
    for last, code in ((11, None), (12, Code.STREAM_CHANGED)):
        desk = Desk(Recovered(entry(), {0: final}))
        desk.asks(Attach(1, R))
        desk.turn()
        ((seat, submit),) = desk.submits()
        desk.produces(seat, submit, 0, 10, last, finish="length")
        desk.decodes()
        assert finals(desk.told())[0].code is code
        assert not any(isinstance(op, Finish) for op in desk.ops)  # it has ended already


def test_what_is_made_again_and_ends_earlier_leaves_the_recorded_end() -> None:
    """Where memory may end a stream, the next one to make it may have less of it."""
    desk = Desk(Recovered(entry(), {0: ended(3, tokens_digest(0, (10, 11, 12)))}))
    desk.asks(Attach(1, R))
    desk.turn()
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, finish="length", code=Code.KV_PRESSURE)
    desk.decodes()
    (final,) = finals(desk.told())
    assert (final.offset, final.code) == (1, Code.KV_PRESSURE)
    assert not any(isinstance(op, Finish) for op in desk.ops)


def test_an_ended_request_of_other_numerics_is_not_made_again() -> None:
    final = ended(2, tokens_digest(0, (10, 11)))
    desk = Desk(Recovered(entry(fingerprint="f0"), {0: final}))
    desk.asks(Attach(1, R, (1,), (tokens_digest(0, (10,)),)))
    desk.passes(200)
    (told,) = finals(desk.told())
    assert (told.finish_reason, told.offset) == ("error", 1)
    assert "f0" in told.error and "f1" in told.error and not desk.submits()
    desk.asks(Attach(2, R, (2,), (tokens_digest(0, (10, 11)),)))  # who has all of it lacks the end
    assert finals(desk.told()) == [final]


@pytest.mark.parametrize("digests", [(b"short",), (b"x" * 16, b"x" * 16)])
def test_a_digest_that_is_none_is_refused(digests: tuple[bytes, ...]) -> None:
    desk = Desk(Recovered(entry(n=2)))
    desk.asks(Attach(1, R, (2,), digests))
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.BAD_REQUEST and "16" in error.message


@pytest.mark.parametrize("leaves", [False, True])
def test_a_reader_who_says_that_he_has_more_than_there_can_be_does_not_lengthen_the_stream(
    leaves: bool,
) -> None:
    """An early end is where its reader is. Another one, of a request of nine tokens, then waited for a million."""
    desk = Desk()
    request = desk.start(Sampling(max_tokens=9))
    ((seat, submit),) = desk.submits()
    desk.asks(Attach(2, request, (10**6,)), b"another")
    if leaves:
        desk.core._lives.requests[request].view = None
    desk.asks(Abort(3, request), b"another")
    told = finals(desk.told())
    assert [final.offset for final in told] == ([] if leaves else [10**6])
    desk.asks(Attach(4, request))
    ((seat, submit),) = desk.submits()
    assert submit.sampling.max_tokens == 9
    desk.produces(seat, submit, 0, *range(10, 19), finish="length")
    desk.decodes()
    (final,) = finals(desk.told())
    assert (final.finish_reason, final.offset, final.usage.completion_tokens) == ("abort", 9, 9)
