"""The gateway's decisions as stories: events go in, and what it tells whom is compared."""

import struct
from array import array
from typing import Any

import msgspec
import pytest
from gateway_desk import MS, T0, T1, Desk, texts

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import (
    Abort,
    AbortSequence,
    Accepted,
    Attach,
    Decode,
    Decoded,
    DecodedItem,
    Delta,
    Done,
    Encode,
    Encoded,
    EncodeFailed,
    Error,
    Final,
    FinalSeen,
    FinishReason,
    Generate,
    Health,
    HealthReply,
    HealthUpdate,
    Hello,
    ListSequences,
    Ping,
    PromptLogprob,
    PromptLogprobs,
    Refusal,
    Resend,
    Sampling,
    SeatLoad,
    SequenceInfo,
    SequenceList,
    Stats,
    StatsReply,
    Submit,
    Submitted,
    TokenLogprobs,
    TokenRows,
    Tokens,
    TokensItem,
    Welcome,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway import admission
from phalanx.services.gateway import streams as streams_module
from phalanx.services.gateway.entries import Accept, Again, Alive, Entry, Finish, Forget, Recovered
from phalanx.services.gateway.placement import COMES_NS
from phalanx.services.gateway.suspects import FALLS_MAX
from sim.gateway_fakes import encode_text
from sim.gateway_world import Disk


def test_a_request_from_arrival_to_oblivion() -> None:
    desk = Desk()
    desk.asks(Generate(1, prompt="hi", sampling=Sampling(max_tokens=3)), commit=False)
    ((peer, encode),) = desk.sent(Encode)
    assert peer == T0 and isinstance(encode, Encode) and encode.prompt == "hi"
    desk.core.on_bus(T0, Encoded(encode.call, encode_text("hi").tobytes()), 0)
    desk.turn(commit=False)
    (op,) = desk.ops
    assert isinstance(op, Accept) and op.entry.prompt == encode_text("hi").tobytes()
    assert op.entry.fingerprint == "f1" and desk.said == [] and not desk.submits()
    desk.core.on_journal(desk.core.take_ops()[0], "", 0)
    desk.turn()
    rid = op.entry.request_id
    assert desk.told() == [Accepted(1, rid, op.entry.sampling.seed or 0, 2, 1)]
    ((seat, submit),) = desk.submits()
    assert (submit.sampling.max_tokens, submit.sampling.seed) == (3, op.entry.sampling.seed)
    desk.says(seat, Submitted(submit.call, 0, 1))
    desk.produces(seat, submit, 0, 7)
    desk.decodes()
    assert desk.told() == [Delta(rid, 0, 0, (7,), "[7]")]
    desk.produces(seat, submit, 1, 8, 9, finish="length", seq=2)
    assert desk.sent(FinalSeen) == [(seat, FinalSeen(((rid, 0, submit.attempt),)))]
    desk.decodes()
    delta, final = desk.told()
    assert delta == Delta(rid, 0, 1, (8, 9), "[8][9]")
    assert isinstance(final, Final)
    assert (final.offset, final.finish_reason, final.usage.completion_tokens) == (3, "length", 3)
    assert desk.ops[-1] == Finish(final)
    desk.passes(59_000)
    desk.asks(Attach(2, rid, (1,)))
    _, delta, again = desk.told()
    assert (delta, again) == (Delta(rid, 0, 1, (8, 9), "[8][9]"), final)
    desk.passes(59_000)
    assert Forget(rid) not in desk.ops
    desk.passes(2_000)
    assert desk.ops[-1] == Forget(rid)
    desk.asks(Attach(3, rid))
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.UNKNOWN_REQUEST


def test_a_refusal_touches_nothing() -> None:
    desk = Desk()
    desk.asks(Generate(9, prompt_token_ids=(64,)))
    (error,) = desk.told()
    assert isinstance(error, Error) and (error.call, error.code) == (9, Code.BAD_REQUEST)
    assert not desk.bus and not desk.ops and desk.core.idle
    desk.asks(Generate(10, prompt="x"))
    ((peer, encode),) = desk.sent(Encode)
    assert isinstance(encode, Encode)
    desk.says(peer, EncodeFailed(encode.call, Code.BAD_REQUEST, "no such character"))
    (error,) = desk.told()
    assert isinstance(error, Error) and (error.call, error.message) == (10, "no such character")
    desk.asks(Generate(11, prompt="x"))
    ((peer, encode),) = desk.sent(Encode)
    assert isinstance(encode, Encode)
    desk.says(peer, Encoded(encode.call, array("i", [5, 999]).tobytes()))
    (error,) = desk.told()
    assert isinstance(error, Error) and "999" in error.message
    assert desk.core.idle


@pytest.mark.parametrize("place", ["check", "resolve"])
def test_a_bug_that_one_request_meets_refuses_that_one(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it raised, the gateway would fall, and so would the next one, which is asked the same."""
    right = getattr(admission, place)

    def wrong(*given: Any, **more: Any) -> Any:
        sampling = given[0].sampling if place == "check" else given[0]
        return (1 // (sampling.max_tokens - 13) or True) and right(*given, **more)

    monkeypatch.setattr(admission, place, wrong)
    desk = Desk()
    desk.asks(Generate(9, prompt_token_ids=(5,), sampling=Sampling(max_tokens=13)))
    (error,) = desk.told()
    assert isinstance(error, Error) and (error.call, error.code) == (9, Code.INTERNAL)
    assert "ZeroDivisionError" in error.message
    assert not desk.bus and not desk.ops and desk.core.idle
    assert desk.start(Sampling(max_tokens=12)) and len(desk.submits()) == 1


def test_sequences_of_one_request_are_spread_with_seeds_of_their_own() -> None:
    desk = Desk()
    desk.start(Sampling(seed=3, max_tokens=5), n=4)
    submits = desk.submits()
    assert sorted(peer for peer, _ in submits) == [b"scheduler-0#1"] * 2 + [b"scheduler-1#1"] * 2
    seeds = [submit.sampling.seed for _, submit in submits]
    assert seeds[0] == 3 and len(set(seeds)) == 4


def test_a_lost_submit_is_repeated_as_it_was() -> None:
    desk = Desk()
    desk.start()
    ((_, first),) = desk.submits()
    desk.passes(400)
    assert not desk.submits()
    desk.passes(300)
    assert desk.submits() == [(b"scheduler-0#1", first)]
    desk.says(b"scheduler-0#1", Submitted(first.call, 0, 1))
    desk.passes(900)
    assert not desk.submits()


def test_a_full_seat_is_left_alone_and_a_hopeless_request_ends() -> None:
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    desk.says(seat, Refusal(submit.call, Code.OVERLOADED, "full"))
    ((other, again),) = desk.submits()
    assert other != seat and again.attempt == submit.attempt + 1
    desk.says(other, Refusal(again.call, Code.TOO_LARGE, "300 blocks, 200 there are"))
    (final,) = desk.told()
    assert isinstance(final, Final) and (final.request_id, final.finish_reason) == (rid, "error")
    assert (final.code, final.error) == (Code.TOO_LARGE, "300 blocks, 200 there are")
    assert desk.core.idle


def test_gaps_are_asked_for_and_duplicates_dropped() -> None:
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 2, 12, 13, seq=2)
    assert desk.sent(Resend) == [(seat, Resend(rid, 0, submit.attempt, 0))]
    desk.produces(seat, submit, 0, 10, 11, 12, 13, seq=3)
    desk.produces(seat, submit, 1, 11, seq=1)
    desk.produces(seat, submit, 3, 13, 14, seq=4)
    desk.decodes()
    desk.decodes()
    assert texts(desk.told()) == "[10][11][12][13][14]"


def test_rows_are_tokens_of_the_sequence_whose_handle_was_told() -> None:
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()

    def row(handle: int, offset: int, *ids: int, seq: int) -> None:
        rows = TokenRows(
            array("q", [handle]).tobytes(),
            array("i", [offset]).tobytes(),
            bytes([len(ids)]),
            array("i", ids).tobytes(),
        )
        desk.says(seat, Tokens(0, 1, seq, rows=rows))

    desk.says(seat, Submitted(submit.call, 0, 1))
    row(77, 0, 10, seq=1)  # nobody said whose that is
    assert desk.sent(Resend) == [(seat, Resend(rid, 0, submit.attempt, 0))]
    first = TokensItem(rid, 0, submit.attempt, 0, (10,), handle=77)
    desk.says(seat, Tokens(0, 1, 2, (first,)))
    row(77, 1, 11, 12, seq=3)
    row(77, 2, 12, 13, seq=4)  # overlaps
    row(77, 9, 19, seq=5)  # too far on
    desk.decodes()
    desk.decodes()
    assert texts(desk.told()) == "[10][11][12][13]"
    desk.now += 200 * MS
    row(77, 9, 19, seq=6)
    assert desk.sent(Resend) == [(seat, Resend(rid, 0, submit.attempt, 4))]
    desk.asks(Abort(5, rid))
    row(77, 4, 14, seq=7)
    told = desk.told()
    assert [type(m) for m in told] == [Done, Final] and not desk.sent(Decode)


def test_tokens_of_dead_places_count_for_nothing() -> None:
    desk = Desk()
    desk.start()
    ((seat, old),) = desk.submits()
    desk.produces(seat, old, 0, 10)
    desk.scheduler(0, incarnation=2)
    ((other, new),) = desk.submits()
    assert other == b"scheduler-1#1" and new.outputs == array("i", [10]).tobytes()
    assert (new.attempt, new.resumed, old.resumed) == (old.attempt + 1, True, False)
    desk.produces(seat, old, 1, 66, seq=2)  # of the dead scheduler
    desk.produces(other, old, 1, 67, seq=1)  # of a former attempt
    desk.produces(other, new, 1, 11, seq=2)
    desk.decodes()
    desk.decodes()
    assert texts(desk.told()) == "[10][11]"


def test_a_lost_worker_moves_its_streams_ahead_of_arrivals() -> None:
    desk = Desk(seats=3, capacity=1)
    for i in range(5):
        desk.asks(Generate(i, prompt_token_ids=(i + 2,), sampling=Sampling(max_tokens=5)))
    running = desk.submits()
    assert [(s.prompt[0], s.resumed) for _, s in running] == [(2, False), (3, False), (4, False)]
    first, *others = desk.topology.seats
    lost = [msgspec.structs.replace(seat, state="lost") for seat in others]
    desk.core.on_topology(Topology(4, (first, *lost)), desk.now)
    desk.turn()
    # The seat is full of arrivals, and it is given as many again that go ahead of them.
    ((peer, moved),) = desk.submits()
    assert (peer, moved.prompt[0], moved.resumed) == (b"scheduler-0#1", 3, True)
    desk.produces(b"scheduler-0#1", running[0][1], 0, 9, finish="length")
    ((peer, moved),) = desk.submits()  # the next one waited, and nobody was told an error
    assert (peer, moved.prompt[0], moved.resumed) == (b"scheduler-0#1", 4, True)
    desk.produces(b"scheduler-0#1", moved, 0, 9, finish="length", seq=2)
    assert not desk.submits()  # arrivals are given no more than before
    assert not any(isinstance(message, Error | Final) for message in desk.told())


def test_what_no_rank_has_room_for_waits_here_and_is_offered_again() -> None:
    desk = Desk()
    desk.start()
    ((seat, submit),) = desk.submits()
    desk.says(seat, Refusal(submit.call, Code.OVERLOADED, "full"))
    ((other, again),) = desk.submits()
    assert other != seat and (again.attempt, again.resumed) == (submit.attempt + 1, False)
    desk.says(other, Refusal(again.call, Code.OVERLOADED, "full"))
    assert not desk.submits() and not desk.told()
    for _ in range(20):  # for as long as it takes
        desk.passes(200)
        ((seat, submit),) = desk.submits()
        assert not submit.resumed
        desk.says(seat, Refusal(submit.call, Code.OVERLOADED, "full"))
        ((seat, submit),) = desk.submits()
        desk.says(seat, Refusal(submit.call, Code.OVERLOADED, "full"))
    desk.passes(200)
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, finish="length")
    desk.decodes()
    assert texts(desk.told()) == "[10]"


def test_what_a_scheduler_had_is_not_new_when_it_is_said_again() -> None:
    desk = Desk()
    desk.start()
    ((seat, submit),) = desk.submits()
    desk.passes(COMMAND_RETRY_MS + 100)
    ((_, again),) = desk.submits()
    assert again == submit and not again.resumed  # for all that is known the first one got lost
    desk.says(seat, Submitted(submit.call, 0, 1))
    while not (said := desk.submits()):
        desk.passes(1_000)  # quiet: it may have been forgotten there
    ((_, again),) = said
    assert again == msgspec.structs.replace(submit, resumed=True)
    desk.says(seat, Refusal(again.call, Code.OVERLOADED, "full"))
    ((other, moved),) = desk.submits()
    assert other != seat and moved.resumed


def test_a_request_that_fells_every_rank_is_given_up_and_others_are_not() -> None:
    desk = Desk(seats=1)
    poison = desk.start(Sampling(max_tokens=40))
    good = desk.start(Sampling(max_tokens=40))
    for fall in range(FALLS_MAX + 1):
        submits: dict[str, tuple[bytes, Submit]] = {}
        while poison not in submits:
            desk.passes(100)
            submits |= {submit.request_id: (seat, submit) for seat, submit in desk.submits()}
        assert submits.keys() == {poison, good}
        desk.produces(*submits[good], fall, 10)  # one token a time, before the rank falls
        desk.scheduler(0, incarnation=fall + 2)
    assert [submit.request_id for _, submit in desk.submits()] == [good]
    desk.decodes()
    finals = [message for message in desk.told() if isinstance(message, Final)]
    assert [(f.request_id, f.finish_reason, f.code) for f in finals] == [
        (poison, "error", Code.INTERNAL)
    ]


def test_a_seat_counts_only_with_the_worker_it_says_it_has() -> None:
    desk = Desk(seats=1)
    desk.core.on_topology(Topology(4, (Seat(0, 2, 1, "member"),)), desk.now)
    desk.start()
    assert not desk.submits()  # its scheduler still speaks of the worker that is gone
    desk.says(b"scheduler-0#1", SeatLoad(0, 1, True, worker_incarnation=2))
    assert len(desk.submits()) == 1


def test_the_end_is_seen_in_the_tokens_when_the_word_of_it_is_lost() -> None:
    desk = Desk()
    desk.start(Sampling(max_tokens=2))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, 11)
    desk.scheduler(0, incarnation=2)
    assert not desk.submits()
    desk.decodes()
    desk.decodes()
    told = desk.told()
    assert isinstance(told[-1], Final) and told[-1].finish_reason == "length"


def test_a_stop_string_ends_the_stream_at_its_token() -> None:
    desk = Desk()
    rid = desk.start(Sampling(max_tokens=9, stop=("2][3",)))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 11, 12)
    desk.decodes()
    (delta,) = desk.told()
    assert delta == Delta(rid, 0, 0, (11, 12), "[11][1")
    desk.produces(seat, submit, 2, 3, 4, 5, seq=2)
    desk.decodes()
    delta, final = desk.told()
    assert delta == Delta(rid, 0, 2, (3,), "")
    assert isinstance(final, Final)
    assert (final.offset, final.text, final.finish_reason) == (3, "", "stop")
    ((_, abort),) = desk.sent(AbortSequence)
    assert isinstance(abort, AbortSequence) and abort.reason == "stop"
    desk.produces(seat, submit, 5, 6, seq=3)
    desk.passes(600)
    assert len(desk.sent(AbortSequence)) == 1  # repeated
    desk.says(seat, Done(abort.call))
    desk.passes(600)
    assert not desk.sent(AbortSequence) and desk.told() == []


@pytest.mark.parametrize("code", [Code.NAN_LOGITS, Code.ALL_BLOCKED])
def test_a_sequence_that_fails_ends_alone_with_its_code(code: Code) -> None:
    desk = Desk()
    rid = desk.start(n=2)
    (seat, one), (other, two) = desk.submits()
    desk.produces(seat, one, 0, 10, finish="error", code=code, error="why")
    desk.decodes()
    _, final = desk.told()
    assert isinstance(final, Final) and (final.index, final.finish_reason) == (0, "error")
    assert (final.code, final.error, final.offset) == (code, "why", 1)
    desk.produces(other, two, 0, 20)
    desk.decodes()
    assert desk.told() == [Delta(rid, 1, 0, (20,), "[20]")]


def test_logprobs_travel_with_their_tokens() -> None:
    desk = Desk()
    desk.start(Sampling(max_tokens=3, logprobs=1))
    ((seat, submit),) = desk.submits()
    marks = tuple(TokenLogprobs(-float(i), (i,), (-0.5,)) for i in range(3))
    for seq, item in enumerate(
        [
            TokensItem(submit.request_id, 0, submit.attempt, 0, (10, 11), logprobs=marks[:2]),
            TokensItem(submit.request_id, 0, submit.attempt, 1, (11, 12), logprobs=marks[1:]),
        ]
    ):
        desk.says(seat, Tokens(0, 1, seq, (item,)))
    desk.decodes()
    desk.decodes()
    told = [m for m in desk.told() if isinstance(m, Delta)]
    assert sum((m.logprobs for m in told), ()) == marks


def records(first: int, end: int) -> bytes:
    """Records `first` .. `end` of a prompt, with one alternative."""
    found = [struct.pack("<fiif", -float(at), at, at + 5, -0.5) for at in range(first, end)]
    return b"".join(found)


def scored(at: int) -> PromptLogprob:
    return PromptLogprob(-float(at), at, (at + 5,), (-0.5,))


def score_item(submit: Submit, first: int, end: int) -> TokensItem:
    return TokensItem(
        submit.request_id,
        0,
        submit.attempt,
        0,
        (),
        prompt_offset=first,
        prompt_logprobs=records(first, end),
    )


def test_prompt_logprobs_go_before_tokens_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "PROMPT_LOGPROBS_MAX", 3)
    desk = Desk()
    sampling = Sampling(max_tokens=1, prompt_logprobs=1)
    desk.asks(Generate(1, prompt_token_ids=(5, 6, 7, 8, 9, 10), sampling=sampling, n=2))
    accepted = desk.told()[0]
    assert isinstance(accepted, Accepted)
    rid = accepted.request_id
    (seat, one), (_, two) = desk.submits()
    assert (one.sampling.prompt_logprobs, two.sampling.prompt_logprobs) == (1, None)
    desk.says(seat, Tokens(int(seat[10:11]), 1, 1, (score_item(one, 0, 2),)))
    assert desk.told() == [PromptLogprobs(rid, 0, 0, (None, scored(0), scored(1)))]
    # A piece is lost: nothing after it counts, and it is asked for.
    desk.says(seat, Tokens(int(seat[10:11]), 1, 2, (score_item(one, 4, 5),)))
    desk.now += 1000 * MS
    desk.produces(seat, one, 0, 10, finish="length", seq=3)
    assert desk.told() == [] and not desk.sent(Decode)
    assert (seat, Resend(rid, 0, one.attempt, 0, 2)) in desk.sent(Resend)
    desk.says(seat, Tokens(int(seat[10:11]), 1, 4, (score_item(one, 1, 5),)))
    desk.produces(seat, one, 0, 10, finish="length", seq=5)
    desk.decodes()
    first, second, third = desk.told()
    assert first == PromptLogprobs(rid, 0, 3, (scored(2), scored(3), scored(4)))
    assert second == Delta(rid, 0, 0, (10,), "[10]") and isinstance(third, Final)
    desk.asks(Attach(2, rid, (1,), prompt_offset=4))
    assert desk.told()[1] == PromptLogprobs(rid, 0, 4, (scored(3), scored(4)))
    desk.asks(Attach(3, rid, (0,), prompt_offset=7))
    assert isinstance(desk.told()[0], Error)


def test_a_prompt_alone_is_scored_and_ends() -> None:
    desk = Desk()
    sampling = Sampling(max_tokens=0, prompt_logprobs=1)
    desk.asks(Generate(1, prompt_token_ids=(5,), sampling=sampling))  # nothing precedes its token
    ((seat, submit),) = desk.submits()
    accepted, told = desk.told()
    assert isinstance(accepted, Accepted)
    assert told == PromptLogprobs(accepted.request_id, 0, 0, (None,))
    desk.produces(seat, submit, 0, finish="length")
    desk.decodes()
    (final,) = desk.told()
    assert isinstance(final, Final)
    assert (final.finish_reason, final.offset) == ("length", 0)
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (1, 0)


def test_a_moved_prompt_is_scored_again_and_told_once() -> None:
    desk = Desk()
    sampling = Sampling(max_tokens=0, prompt_logprobs=1)
    desk.asks(Generate(1, prompt_token_ids=(5, 6, 7), sampling=sampling))
    accepted = desk.told()[0]
    assert isinstance(accepted, Accepted)
    ((seat, submit),) = desk.submits()
    desk.says(seat, Tokens(int(seat[10:11]), 1, 1, (score_item(submit, 0, 1),)))
    assert desk.told() == [PromptLogprobs(accepted.request_id, 0, 0, (None, scored(0)))]
    desk.scheduler(int(seat[10:11]), 2)
    ((other, again),) = desk.submits()
    assert again.attempt > submit.attempt
    number, incarnation = int(other[10:11]), int(other[12:])
    desk.says(seat, Tokens(int(seat[10:11]), 1, 2, (score_item(submit, 1, 2),)))  # too late
    assert desk.told() == []
    desk.says(other, Tokens(number, incarnation, 1, (score_item(again, 0, 2),)))
    assert desk.told() == [PromptLogprobs(accepted.request_id, 0, 2, (scored(1),))]


def test_a_moved_stream_does_not_ask_for_the_scores_it_has() -> None:
    """Those of the whole prompt would have it computed again, past what the KV store has."""
    desk = Desk()
    sampling = Sampling(max_tokens=9, prompt_logprobs=1)
    desk.asks(Generate(1, prompt_token_ids=(5, 6, 7, 8), sampling=sampling))
    ((seat, submit),) = desk.submits()
    assert (submit.sampling.prompt_logprobs, submit.num_scores) == (1, 0)
    desk.says(seat, Tokens(int(seat[10:11]), 1, 1, (score_item(submit, 0, 2),)))
    desk.scheduler(int(seat[10:11]), 2)
    ((seat, submit),) = desk.submits()
    assert (submit.sampling.prompt_logprobs, submit.num_scores) == (1, 2)
    number, incarnation = int(seat[10:11]), int(seat[12:])
    desk.says(seat, Tokens(number, incarnation, 1, (score_item(submit, 2, 3),)))
    desk.produces(seat, submit, 0, 10, seq=2)
    desk.scheduler(number, incarnation + 1)
    ((seat, submit),) = desk.submits()
    assert (submit.sampling.prompt_logprobs, submit.num_scores) == (None, 3)
    desk.produces(seat, submit, 1, 11, finish="length", seq=1)
    desk.decodes()
    desk.decodes()
    told = desk.told()
    assert [m for m in told if isinstance(m, PromptLogprobs)][-1].entries == (scored(2),)
    assert [t for m in told if isinstance(m, Delta) for t in m.token_ids] == [10, 11]


@pytest.mark.parametrize(("first_score", "adopted"), [(0, True), (2, False), (3, False)])
def test_a_new_gateway_runs_anew_what_nobody_tells_it(first_score: int, adopted: bool) -> None:
    """The last one had scores that this scheduler never made, and took them along."""
    one = entry(Sampling(seed=1, max_tokens=9, prompt_logprobs=1))
    desk = Desk(
        Recovered(msgspec.structs.replace(one, prompt=array("i", [5, 6, 7, 8]).tobytes())), seats=0
    )
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    outputs = array("i", [10, 11]).tobytes()
    desk.scheduler(0, 1, SequenceInfo("r" * 32, 0, 33, outputs, None, first_score))
    desk.scheduler(1)
    assert bool(desk.sent(AbortSequence)) != adopted
    submits = [submit for _, submit in desk.submits()]
    asked = [(s.sampling.prompt_logprobs, s.num_scores, s.outputs) for s in submits]
    assert asked == ([] if adopted else [(1, 0, b"")])


@pytest.mark.parametrize("moment", ["waiting", "submitted", "running", "decoding", "held back"])
def test_abort_in_every_state_gives_one_final_and_no_token(moment: str) -> None:
    desk = Desk(seats=0 if moment == "waiting" else 2)
    rid = desk.start(Sampling(max_tokens=9, stop=("]",) if moment == "held back" else ()))
    submits = desk.submits()
    if moment in ("running", "decoding", "held back"):
        seat, submit = submits[0]
        desk.produces(seat, submit, 0, 10)
        if moment != "decoding":
            desk.sent(Decode) if moment == "held back" else desk.decodes()
    before = [m for m in desk.told() if isinstance(m, Delta)]
    desk.asks(Abort(5, rid), commit=False)
    assert desk.told() == []  # not before it is durable
    assert any(isinstance(op, Finish) for op in desk.ops)
    desk.core.on_journal(10**6, "", desk.now)
    desk.turn()
    final, done = sorted(desk.told(), key=lambda m: isinstance(m, Done))
    assert done == Done(5) and isinstance(final, Final)
    assert final.finish_reason == "abort"
    assert final.offset == sum(len(m.token_ids) for m in before)
    if submits:
        ((_, abort),) = desk.sent(AbortSequence)
        seat, submit = submits[0]
        desk.produces(seat, submit, 1, 11, 12, seq=2)
        desk.decodes()
        desk.says(seat, Done(abort.call))  # type: ignore[union-attr]
        assert desk.sent(FinalSeen)
    desk.asks(Abort(6, rid))
    assert desk.told() == [Done(6)]
    assert desk.core.idle


def test_without_streaming_one_delta_comes_before_each_final() -> None:
    desk = Desk()
    rid = desk.start(Sampling(max_tokens=3), stream=False)
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, 11)
    desk.decodes()
    assert desk.told() == []
    desk.produces(seat, submit, 2, 12, finish="length", seq=2)
    desk.decodes()
    delta, final = desk.told()
    assert delta == Delta(rid, 0, 0, (10, 11, 12), "[10][11][12]") and isinstance(final, Final)


def test_one_decode_at_a_time_and_again_elsewhere_when_its_tokenizer_dies() -> None:
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    ((first, question),) = desk.sent(Decode)
    desk.produces(seat, submit, 1, 11, seq=2)
    assert not desk.sent(Decode)
    desk.core.on_unroutable(first, Welcome(7), desk.now)
    desk.turn()
    ((second, again),) = desk.sent(Decode)
    assert second != first and isinstance(again, Decode) and isinstance(question, Decode)
    assert again.items[0].token_ids == (10, 11)
    desk.says(first, Decoded(question.call, (DecodedItem(1, ("stale",), "", b""),)))
    desk.says(second, Decoded(again.call, (DecodedItem(1, ("a", "b"), "", b""),)))
    assert desk.told() == [Delta(rid, 0, 0, (10, 11), "ab")]


def test_a_stream_does_not_wait_until_a_tokenizer_counts_as_hung() -> None:
    """Another one is asked soon, and first from then on; of one that is only slow, more patience is had."""
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    ((hung, first),) = desk.sent(Decode)
    desk.passes(500)
    ((other, question),) = desk.sent(Decode)
    assert other != hung and isinstance(question, Decode) and isinstance(first, Decode)
    for count, token in ((1, 11), (2, 12)):
        desk.says(other, Decoded(question.call, (DecodedItem(1, ("a",), "", b""),)))
        desk.produces(seat, submit, count, token, seq=count + 1)
        ((asked, question),) = desk.sent(Decode)
        assert asked == other and isinstance(question, Decode)
    desk.says(hung, Decoded(first.call, (DecodedItem(1, ("stale",), "", b""),)))
    assert [d.token_ids for d in desk.told() if isinstance(d, Delta)] == [(10,), (11,)], rid


def test_slow_tokenizers_are_given_more_time_until_they_come_in_time() -> None:
    """With fixed patience every answer of a loaded machine would be too late."""
    desk = Desk()
    desk.start()
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    asked: dict[int, tuple[bytes, int]] = {}
    for _ in range(100):
        for peer, question in desk.sent(Decode):
            assert isinstance(question, Decode)
            asked[question.call] = (peer, desk.now + 1000 * MS)  # so long they take
        for call, (peer, due) in list(asked.items()):
            if desk.now >= due:
                del asked[call]
                desk.says(peer, Decoded(call, (DecodedItem(1, ("a",), "", b""),)))
        if any(isinstance(told, Delta) for told in desk.told()):
            return
        desk.passes(100)
    raise AssertionError("not within 10 s")


def test_a_text_that_tokenizers_die_over_is_given_up() -> None:
    desk = Desk()
    desk.asks(Generate(1, prompt="poison"))
    for life in range(2, 9):
        for peer, message in desk.sent(Encode):
            assert isinstance(message, Encode)
            desk.now += 200 * MS
            name = peer.decode().partition("#")[0]
            desk.says(f"{name}#{life}".encode(), Hello(name, "tokenizer", life))
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.INTERNAL
    assert desk.core.idle


def test_a_long_text_leaves_a_tokenizer_to_the_streams() -> None:
    desk = Desk()
    for i in range(3):
        desk.asks(Generate(i, prompt="x" * 1_000_000))
    assert {peer for peer, _ in desk.sent(Encode)} == {T1}
    desk.asks(Generate(9, prompt="short"))
    assert [peer for peer, _ in desk.sent(Encode)] == [T0]


def test_a_client_that_takes_nothing_is_cancelled_after_a_while() -> None:
    desk = Desk()
    rid = desk.start(Sampling(max_tokens=50))
    ((seat, submit),) = desk.submits()
    desk.takes = False
    desk.produces(seat, submit, 0, 10)
    desk.decodes()
    desk.passes(29_000)
    desk.produces(seat, submit, 1, 11, 12, seq=2)
    desk.decodes()
    assert not desk.sent(AbortSequence)
    desk.passes(2_000)
    _, abort = desk.sent(AbortSequence)[0]
    assert isinstance(abort, AbortSequence) and abort.request_id == rid
    desk.takes = True
    desk.asks(Attach(2, rid), client=b"another")
    told = desk.told()
    assert isinstance(told[-1], Final)
    assert (told[-1].finish_reason, told[-1].code) == ("abort", Code.SLOW_CLIENT)


def test_what_a_busy_client_did_not_take_comes_in_one_piece() -> None:
    desk = Desk()
    rid = desk.start(Sampling(max_tokens=50))
    ((seat, submit),) = desk.submits()
    desk.takes = False
    for i in range(20):
        desk.produces(seat, submit, i, i + 2, seq=i)
        desk.decodes()
    desk.takes = True
    desk.passes(200)
    desk.decodes()
    (delta,) = desk.told()
    assert isinstance(delta, Delta) and delta.token_ids == tuple(range(2, 22))
    assert delta.request_id == rid


def test_a_repeated_generate_is_the_same_request() -> None:
    desk = Desk()
    ask = Generate(1, prompt_token_ids=(5,), key="k", sampling=Sampling(max_tokens=4))
    desk.asks(ask, commit=False)
    desk.asks(msgspec.structs.replace(ask, call=2), client=b"after reconnect")
    desk.core.on_journal(10**6, "", desk.now)
    desk.turn()
    (accepted,) = desk.told()
    assert isinstance(accepted, Accepted) and accepted.call == 2
    assert len([op for op in desk.ops if isinstance(op, Accept)]) == 1
    desk.asks(msgspec.structs.replace(ask, call=3))
    (again,) = desk.told()
    assert again == msgspec.structs.replace(accepted, call=3)
    assert len(desk.submits()) == 1
    desk.asks(msgspec.structs.replace(ask, call=4, n=2))
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.BAD_REQUEST


def test_a_journal_that_cannot_be_written_refuses_and_recovers() -> None:
    desk = Desk()
    desk.asks(Generate(1, prompt_token_ids=(5,), key="k"), commit=False)
    desk.core.on_journal(10**6, "disk full", desk.now)
    desk.turn()
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.OVERLOADED and error.retry_after_ms
    assert "disk full" in error.message and "make room" in error.message
    assert desk.core.idle and not desk.submits()
    desk.asks(Generate(2, prompt_token_ids=(5,), key="k"))
    assert isinstance(desk.told()[0], Accepted)


@pytest.mark.parametrize("logged", [False, True])
def test_a_journal_that_breaks_is_written_anew_with_all_that_is_open(logged: bool) -> None:
    desk = Desk(logged=logged)
    desk.start(n=2)
    (seat, first), _ = desk.submits()
    desk.produces(seat, first, 0, 7)
    desk.start()
    ((seat, second),) = desk.submits()
    desk.produces(seat, second, 0, 7, 8, finish="length", seq=2)
    desk.decodes()
    whole = Disk()
    for op in desk.ops:
        whole.apply(op)
    desk.clear()
    desk.core.on_health(HealthUpdate(True, 2, ()))
    desk.asks(Generate(5, prompt_token_ids=(6,)), commit=False)
    desk.core.on_journal(10**6, "malformed", desk.now)
    desk.core.on_journal_lost(desk.now)
    desk.clear()
    desk.asks(Health(6), commit=False)
    refused, health = desk.told()
    assert isinstance(refused, Error) and "malformed" in refused.message
    assert isinstance(health, HealthReply) and not health.healthy
    assert "journal" in health.reasons[0]
    desk.core.on_journal(10**6, "disk full", desk.now)  # nor can the new one be written at first
    desk.passes(100)
    anew = Disk()
    for op in desk.ops:
        anew.apply(op)
    assert vars(anew) == vars(whole) and len(anew.entries) == 2 and len(anew.finals) == 1
    assert bool(anew.produced) is logged
    desk.asks(Health(7))
    assert desk.told()[-1] == HealthReply(7, True, 1, 2, "tiny")


def test_a_journal_that_is_deleted_while_nothing_is_open_is_whole_with_the_next_commit() -> None:
    desk = Desk()
    desk.core.on_health(HealthUpdate(True, 2, ()))
    desk.core.on_journal(0, "", desk.now)  # a try, which found it gone
    desk.core.on_journal_lost(desk.now)
    desk.asks(Health(1), commit=False)
    (health,) = desk.told()
    assert isinstance(health, HealthReply) and not health.healthy and not desk.core.idle
    (last,) = desk.ops
    assert last == Alive()
    desk.core.on_journal(2, "", desk.now)  # after the fingerprint
    desk.asks(Health(2))
    assert desk.told() == [HealthReply(2, True, 1, 2, "tiny")]
    assert desk.core.idle and desk.core.on_disk


def test_a_disk_that_breaks_every_journal_is_not_busy_with_new_ones() -> None:
    desk = Desk()
    desk.start()
    desk.clear()
    written = 0
    for _ in range(100):
        desk.core.turn(desk.now)
        number, ops = desk.core.take_ops()
        written += sum(isinstance(op, Again) for op in ops)
        desk.core.on_journal(number, "malformed", desk.now)
        desk.core.on_journal_lost(desk.now)
        desk.now += 30 * MS
    assert written == 3  # in three seconds


def test_memory_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.services.gateway.admission.OPEN_BYTES_MAX", 100)
    desk = Desk()
    desk.asks(Generate(1, prompt="x" * 20))
    desk.asks(Generate(2, prompt_token_ids=(5,) * 6))
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.OVERLOADED
    desk.asks(Generate(3, prompt_token_ids=(5,) * 5, sampling=Sampling(max_tokens=1)))
    assert isinstance(desk.told()[0], Accepted)
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, finish="length")
    desk.decodes()
    desk.asks(Generate(4, prompt_token_ids=(5,) * 5))
    assert isinstance(desk.told()[-1], Accepted)


def test_a_finished_stream_let_go_for_memory_is_produced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.services.gateway.kept.KEPT_TOKENS_MAX", 4)
    desk = Desk()
    ids = []
    for _ in range(2):
        ids.append(desk.start(Sampling(max_tokens=3, seed=1)))
        ((seat, submit),) = desk.submits()
        desk.produces(seat, submit, 0, 10, 11, 12, finish="length")
        desk.decodes()
        assert isinstance(desk.told()[-1], Final)
    desk.asks(Attach(9, ids[0], (1,)))
    assert isinstance(desk.told()[0], Accepted)
    ((seat, submit),) = desk.submits()
    assert submit.request_id == ids[0] and submit.resumed
    desk.produces(seat, submit, 0, 10, 11, 12, finish="length")
    desk.decodes()
    delta, final = desk.told()
    assert delta == Delta(ids[0], 0, 1, (11, 12), "[11][12]") and isinstance(final, Final)
    assert (final.finish_reason, final.offset) == ("length", 3)
    assert len([op for op in desk.ops if isinstance(op, Finish)]) == 2


def test_a_reader_of_what_was_read_before_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.services.gateway.kept.KEPT_TOKENS_MAX", 4)
    desk = Desk()
    rid, _ = (desk.start(Sampling(max_tokens=3, seed=1)) for _ in range(2))
    for seat, submit in desk.submits():
        desk.produces(seat, submit, 0, 10, 11, 12, finish="length")
        desk.decodes()
    desk.told()
    desk.passes(59_000)
    desk.asks(Attach(9, rid))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    desk.decodes()
    desk.passes(600_000)  # it is made again slowly
    desk.produces(seat, submit, 1, 11, 12, finish="length", seq=2)
    desk.decodes()
    *_, delta, final = desk.told()
    assert isinstance(delta, Delta) and delta.token_ids == (11, 12) and isinstance(final, Final)
    desk.passes(59_000)
    assert Forget(rid) not in desk.ops
    desk.passes(2_000)
    assert desk.ops[-1] == Forget(rid)


# --- a new gateway ---


def entry(sampling: Sampling | None = None, n: int = 1, fingerprint: str = "f1") -> Entry:
    sampling = sampling or Sampling(seed=1, max_tokens=9)
    prompt = array("i", [5]).tobytes()
    return Entry("r" * 32, prompt, sampling, n, True, "k", b"", "tiny", fingerprint)


def test_a_new_gateway_adopts_what_runs_and_submits_only_the_rest() -> None:
    desk = Desk(Recovered(entry(n=2)), seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    outputs = array("i", [10, 11]).tobytes()
    desk.scheduler(0, 1, SequenceInfo("r" * 32, 1, 33, outputs, None))
    assert not desk.submits()  # the other scheduler may run sequence 0
    desk.scheduler(1)
    ((_, submit),) = desk.submits()
    assert (submit.index, submit.outputs, submit.attempt) == (0, b"", 7 << 20)
    assert submit.resumed  # it was accepted before, and may have run
    assert (b"scheduler-0#1", Resend("r" * 32, 1, 33, 2)) in desk.bus
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    desk.asks(Attach(1, "r" * 32, (0, 1)))
    desk.decodes()
    accepted, delta = desk.told()
    assert isinstance(accepted, Accepted)
    assert delta == Delta("r" * 32, 1, 1, (11,), "[11]")


def before_lists() -> Desk:
    """Two sequences are known from the journal; of the two ranks only the second has said what it runs."""
    desk = Desk(Recovered(entry(n=2)), seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    desk.scheduler(1)
    return desk


def halves(desk: Desk, seat: int, incarnation: int = 1) -> list[SequenceList]:
    """What the scheduler of a seat runs, in two pieces; it says neither yet."""
    peer = b"scheduler-%d#%d" % (seat, incarnation)
    desk.says(peer, Hello(f"scheduler-{seat}", "scheduler", incarnation, seat))
    desk.says(peer, SeatLoad(seat, incarnation, True, total_blocks=4, worker_incarnation=1))
    (*_, (_, asked)) = [pair for pair in desk.sent(ListSequences) if pair[0] == peer]
    assert isinstance(asked, ListSequences)
    infos = [SequenceInfo("r" * 32, at, 33, array("i", [10, 11]).tobytes(), None) for at in (0, 1)]
    return [
        SequenceList(asked.call, seat, incarnation, (info,), number, last=number == 1)
        for number, info in enumerate(infos)
    ]


def test_what_a_scheduler_runs_counts_when_all_of_it_is_told() -> None:
    desk = Desk(Recovered(entry(n=2)), seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    desk.scheduler(1)
    first, second = halves(desk, 0)
    desk.says(b"scheduler-0#1", first)
    # One that is not told yet goes on: what is said of it is not an abort's reason.
    desk.says(b"scheduler-0#1", Tokens(0, 1, 1, (TokensItem("r" * 32, 1, 33, 2, (12,), handle=1),)))
    assert not desk.submits() and not desk.sent(AbortSequence) and not desk.sent(Resend)
    desk.says(b"scheduler-0#1", second)
    assert [message for _, message in desk.sent(Resend)] == [
        Resend("r" * 32, index, 33, 2) for index in (0, 1)
    ]
    assert not desk.submits() and not desk.sent(AbortSequence)
    assert [stream.tokens for stream in desk.core._lives.requests["r" * 32].streams] == [
        [10, 11]
    ] * 2


@pytest.mark.parametrize("finish", [None, "stop"])
def test_what_a_rank_ran_that_fell_since_it_told_is_run_elsewhere(
    finish: FinishReason | None,
) -> None:
    """The gateway and the rank fall, one after the other. An end that its scheduler has still counts."""
    desk = before_lists()
    peer, now = b"scheduler-0#1", desk.now
    desk.core.on_bus(peer, Hello("scheduler-0", "scheduler", 1, 0), now)
    desk.turn()
    ((_, asked),) = [pair for pair in desk.sent(ListSequences) if pair[0] == peer]
    assert isinstance(asked, ListSequences)
    info = SequenceInfo("r" * 32, 0, 33, array("i", [10, 11]).tobytes(), finish)
    told = SequenceList(asked.call, 0, 1, (info,))
    # The shell looks at the board before it takes messages.
    lost = Topology(4, (Seat(0, 1, 1, "lost"), Seat(1, 1, 1, "member")), b"", "f1")
    desk.core.on_topology(lost, now)
    desk.says(peer, told)
    placed = {(submit.index, to) for to, submit in desk.submits()}
    asked_again = [message for _, message in desk.sent(Resend)]
    if finish is None:
        assert placed == {(0, b"scheduler-1#1"), (1, b"scheduler-1#1")} and not asked_again
    else:
        assert placed == {(1, b"scheduler-1#1")}
        assert asked_again == [Resend("r" * 32, 0, 33, 2)]


def test_what_breaks_off_counts_as_nothing_told() -> None:
    """Its scheduler died over it; the next one there runs nothing, and says so."""
    desk = before_lists()
    first, second = halves(desk, 0)
    desk.says(b"scheduler-0#1", first)
    desk.core.on_topology(Topology(4, (Seat(0, 1, 2, "member"), Seat(1, 1, 1, "member"))), desk.now)
    desk.says(b"scheduler-0#1", second)  # was on its way
    assert not desk.submits() and not desk.sent(Resend)
    desk.scheduler(0, 2)
    submits = [submit for _, submit in desk.submits()]
    assert [(submit.index, submit.outputs) for submit in submits] == [(0, b""), (1, b"")]


def test_a_list_that_lacks_a_piece_is_asked_for_again() -> None:
    desk = before_lists()
    _, second = halves(desk, 0)
    desk.says(b"scheduler-0#1", second)
    desk.passes(400)
    assert not desk.sent(ListSequences)
    desk.passes(200)
    ((peer, asked),) = desk.sent(ListSequences)
    assert peer == b"scheduler-0#1" and isinstance(asked, ListSequences)
    assert asked.call > second.call and asked.outputs and not desk.sent(Resend)


def test_later_on_the_names_of_what_runs_will_do() -> None:
    desk = Desk(seats=1)
    rid = desk.start()
    ((peer, submit),) = desk.submits()
    desk.produces(peer, submit, 0, 7)
    desk.passes(30_200)
    ((_, asked),) = desk.sent(ListSequences)
    assert isinstance(asked, ListSequences) and not asked.outputs
    left = SequenceInfo("e" * 32, 0, 3, b"", None)  # an abort of it got lost
    mine = SequenceInfo(rid, 0, submit.attempt, b"", None)
    desk.says(peer, SequenceList(asked.call, 0, 1, (mine, left)))
    ((_, abort),) = desk.sent(AbortSequence)
    assert isinstance(abort, AbortSequence)
    assert (abort.request_id, abort.attempt) == (left.request_id, left.attempt)


def test_an_adopted_sequence_that_lacks_logprobs_is_run_anew() -> None:
    """Its scheduler got the first tokens from a gateway before, without their log-probabilities."""
    desk = Desk(Recovered(entry(Sampling(seed=1, max_tokens=9, logprobs=0))), seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    outputs = array("i", [10, 11, 12]).tobytes()
    desk.scheduler(0, 1, SequenceInfo("r" * 32, 0, 33, outputs, None))
    desk.scheduler(1)
    assert (b"scheduler-0#1", Resend("r" * 32, 0, 33, 0)) in desk.bus
    item = TokensItem("r" * 32, 0, 33, 0, (10, 11, 12))
    desk.says(b"scheduler-0#1", Tokens(0, 1, 1, (item,)))
    ((peer, abort),) = desk.sent(AbortSequence)
    assert isinstance(abort, AbortSequence) and (peer, abort.attempt) == (b"scheduler-0#1", 33)
    ((seat, submit),) = desk.submits()
    assert (submit.outputs, submit.attempt) == (b"", 7 << 20)
    right = tuple(TokenLogprobs(-float(token)) for token in (10, 11))
    item = TokensItem("r" * 32, 0, submit.attempt, 0, (10, 11), logprobs=right)
    desk.says(seat, Tokens(int(seat[10:11]), 1, 2, (item,)))
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    desk.asks(Attach(1, "r" * 32))
    desk.decodes()
    assert desk.told()[-1] == Delta("r" * 32, 0, 0, (10, 11), "[10][11]", right)


def test_tokens_that_an_old_abort_leaves_behind_need_their_logprobs() -> None:
    """A word of the gateway before ended the adopted sequence; its tokens came without log-probabilities."""
    desk = Desk(Recovered(entry(Sampling(seed=1, max_tokens=9, logprobs=0))), seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    outputs = array("i", [10, 11, 12]).tobytes()
    desk.scheduler(0, 1, SequenceInfo("r" * 32, 0, 33, outputs, None))
    desk.scheduler(1)
    item = TokensItem("r" * 32, 0, 33, 0, (10, 11, 12), "abort")
    desk.says(b"scheduler-0#1", Tokens(0, 1, 1, (item,)))
    ((_, submit),) = desk.submits()
    assert submit.outputs == b""


def test_answers_to_the_last_gateway_are_no_answers_to_this_one() -> None:
    """A service that was busy when the gateway died answers the next one, which counts its own calls."""
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    for call in range(200):
        desk.says(seat, Refusal(call, Code.BAD_REQUEST, "asked by another"))
    assert not desk.told() and not desk.submits()
    desk.produces(seat, submit, 0, 7)
    ((peer, decode),) = [pair for pair in desk.bus if isinstance(pair[1], Decode)]
    (item,) = decode.items
    for call in range(200):
        desk.says(peer, Decoded(call, (DecodedItem(item.stream, ("wrong",), "", b""),)))
    for call in range(200):
        desk.says(seat, Submitted(call, 0, 1))
        desk.says(seat, Done(call))
    desk.decodes()
    assert desk.told() == [Delta(rid, 0, 0, (7,), "[7]")]
    desk.asks(Stats(7))
    (stats,) = desk.told()
    assert isinstance(stats, StatsReply) and stats.stale_answers == 800


def test_a_new_gateway_does_not_wait_for_ever_for_a_scheduler() -> None:
    desk = Desk(Recovered(entry()), seats=0)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member"))), 0)
    desk.scheduler(0)
    desk.passes(2_800)
    assert not desk.submits()
    desk.passes(400)
    assert len(desk.submits()) == 1
    # One that comes late with the same sequence is told to let it go.
    desk.scheduler(1, 1, SequenceInfo("r" * 32, 0, 33, b"", None))
    ((peer, abort),) = desk.sent(AbortSequence)
    assert peer == b"scheduler-1#1"
    assert isinstance(abort, AbortSequence) and abort.attempt == 33


def test_a_new_gateway_takes_a_name_for_a_hello() -> None:
    desk = Desk(seats=0)
    desk.says(b"scheduler-4#2", Ping("scheduler-4"))
    assert [type(m) for _, m in desk.bus] == [Welcome, ListSequences, Welcome]
    desk.says(b"nobody", Ping("nobody"))
    assert desk.core._placement.seats.by_number.keys() == {4}


def test_late_words_of_a_scheduler_that_is_gone_do_not_bring_it_back() -> None:
    desk = Desk()
    desk.start()
    ((gone, old),) = desk.submits()
    there = Seat(1, 1, 1, "member")
    desk.core.on_topology(Topology(4, (Seat(0, 0, 0, "absent"), there)), desk.now)
    desk.clear()
    desk.produces(gone, old, 0, 10)  # was on its way
    desk.passes(31_000)
    assert {type(message) for peer, message in desk.bus if peer == gone} == {Welcome}
    # Nor when the next one is known of, but has not spoken yet.
    desk.core.on_topology(Topology(6, (Seat(0, 1, 2, "member"), there)), desk.now)
    desk.says(gone, SeatLoad(0, 1, True, total_blocks=4, worker_incarnation=1))
    assert desk.core._placement.seats.get(0).peer == b""
    desk.passes(COMES_NS // MS)  # nor is it waited for longer
    desk.clear()
    desk.start()
    assert [peer for peer, _ in desk.submits()] == [b"scheduler-1#1"]
    desk.scheduler(0, 2)
    assert desk.core._placement.seats.get(0).peer == b"scheduler-0#2"


def test_other_numerics_never_continue_a_stream() -> None:
    desk = Desk(Recovered(entry(fingerprint="f0")))
    desk.asks(Attach(1, "r" * 32))
    desk.passes(3_200)
    desk.asks(Attach(2, "r" * 32))
    final = desk.told()[-1]
    assert isinstance(final, Final) and final.finish_reason == "error"
    assert "f0" in final.error and "f1" in final.error and not desk.submits()


def test_an_aborted_request_does_not_come_back_to_life() -> None:
    from phalanx.protocol.messages import Usage

    final = Final("r" * 32, 0, 2, "abort", Usage(1, 2))
    desk = Desk(Recovered(entry(), {0: final}))
    desk.passes(4_000)
    assert not desk.submits()
    desk.asks(Attach(1, "r" * 32, (2,)))
    assert desk.told()[1:] == [final]
    # For a reader who has nothing, its beginning is produced again, and nothing beyond.
    desk.asks(Attach(2, "r" * 32))
    ((seat, submit),) = desk.submits()
    assert submit.sampling.max_tokens == 2
    desk.produces(seat, submit, 0, 10, 11, finish="length")
    desk.decodes()
    assert desk.told()[1:] == [Delta("r" * 32, 0, 0, (10, 11), "[10][11]"), final]


def test_an_abort_while_it_is_made_again_changes_no_end() -> None:
    """Who aborts hears of an abort; what the journal has of it stays."""
    from phalanx.protocol.messages import Usage

    ended = Final("r" * 32, 0, 2, "length", Usage(1, 2))
    desk = Desk(Recovered(entry(), {0: ended}))
    desk.passes(4_000)
    desk.asks(Attach(1, "r" * 32))
    assert len(desk.submits()) == 1
    desk.ops.clear()
    desk.asks(Abort(2, "r" * 32))
    (_, done, abort) = desk.told()
    assert isinstance(abort, Final) and (abort.offset, abort.finish_reason) == (0, "abort")
    assert done == Done(2) and not desk.ops
    desk.asks(Attach(3, "r" * 32, (2,)))
    assert desk.told()[1:] == [ended]


# --- questions and the end ---


def test_health_names_what_is_quiet_because_all_was_told() -> None:
    desk = Desk()
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    desk.asks(Health(2, (rid, "x" * 32)))
    (reply,) = desk.told()
    assert isinstance(reply, HealthReply) and reply.ended == ("x" * 32,)  # the other one runs
    desk.takes = False
    desk.produces(seat, submit, 0, 10, finish="length")
    desk.decodes()
    desk.asks(Health(3, (rid,)))
    desk.takes = True
    desk.passes(200)
    (reply, *stream) = desk.told()
    assert isinstance(reply, HealthReply) and reply.ended == () and isinstance(stream[-1], Final)
    desk.asks(Health(4, (rid,)))
    desk.asks(Health(5, (rid,)), client=b"another")
    mine, others = desk.told()
    assert isinstance(mine, HealthReply) and mine.ended == (rid,)
    assert isinstance(others, HealthReply) and others.ended == ()


def test_health_and_stats_answer_always() -> None:
    desk = Desk(seats=0)
    desk.asks(Health(1))
    (health,) = desk.told()
    assert isinstance(health, HealthReply) and not health.healthy and health.reasons
    desk.core.on_health(HealthUpdate(True, 4, ()))
    desk.asks(Health(2))
    assert desk.told() == [HealthReply(2, True, 1, 4, "tiny")]
    desk.core.on_health(HealthUpdate(False, 5, ("worker-1 is lost",)))
    desk.asks(Health(3))
    assert desk.told() == [HealthReply(3, False, 1, 5, "tiny", ("worker-1 is lost",))]
    desk.asks(Stats(4))
    assert desk.told() == [StatsReply(4, 7, 0, 0, 0, {}, ())]


def test_a_drain_refuses_the_new_finishes_the_old_and_ends_the_rest() -> None:
    desk = Desk()
    desk.start()
    ((seat, submit),) = desk.submits()
    desk.core.drain()
    desk.asks(Generate(2, prompt_token_ids=(5,)))
    (error,) = desk.told()
    assert isinstance(error, Error) and error.code is Code.SHUTDOWN
    desk.produces(seat, submit, 0, 10)
    desk.decodes()
    assert texts(desk.told()) == "[10]"
    desk.core.finish_all(desk.now)
    desk.turn()
    (final,) = desk.told()
    assert isinstance(final, Final)
    assert (final.finish_reason, final.code, final.offset) == ("abort", Code.SHUTDOWN, 1)
    assert desk.core.idle


def test_who_hands_over_takes_nothing_new_so_that_soon_all_is_on_disk() -> None:
    desk = Desk(logged=True)
    desk.start(Sampling(max_tokens=40))
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    desk.asks(Generate(2, prompt_token_ids=(5,), key="before"), commit=False)
    assert not desk.core.on_disk
    desk.clear()
    desk.core.hand_over()
    desk.asks(Generate(3, prompt_token_ids=(5,), key="after"), commit=False)
    desk.produces(seat, submit, 1, 11, seq=2)
    assert desk.ops == [] and desk.told() == [], "the successor gets it"
    desk.core.on_journal(10**6, "", desk.now)
    desk.turn()
    assert desk.core.on_disk
    accepted = [message for message in desk.told() if isinstance(message, Accepted)]
    assert [message.call for message in accepted] == [2]
