"""Nodes whose streams could not be made again the same (`status` names why): tokens are on disk before they are told,
and what was told never changes, whoever dies. The simulated ranks give other tokens after every move."""

import struct
from array import array

import msgspec
import pytest
from gateway_desk import MODEL, T0, Desk

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.messages import (
    AbortSequence,
    Attach,
    Decode,
    Decoded,
    DecodedItem,
    Delta,
    Final,
    FinishReason,
    Generate,
    Hello,
    PromptLogprob,
    PromptLogprobs,
    Sampling,
    SequenceInfo,
    Tokens,
    TokensItem,
    Usage,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.client_flow import Flow
from phalanx.services.gateway.entries import Again, Entry, Finish, Produced, Recovered, Scored
from phalanx.services.gateway.streams import Stream
from sim.gateway_world import (
    CALM_NS,
    MS,
    Faults,
    SimClient,
    World,
    check_nothing_left,
    nothing_left,
    random_spec,
)

Told = list[tuple[tuple[int, ...], str, str, tuple[PromptLogprob | None, ...]]]


def told(flow: Flow) -> Told:
    return [(r.token_ids, r.text, r.finish_reason, r.prompt_logprobs) for r in flow.results()]


def run_seed(seed: int) -> None:
    """A story under faults. Whoever reads a stream again from its start is told what the first reader was."""
    world = World(seed, Faults(), inexact=True)
    clients = [world.client(), world.client()]
    for _ in range(8):
        world.run(world.rng.randint(0, 400) * MS)
        world.generate(world.rng.choice(clients), random_spec(world.rng))
    world.run(1000 * MS)
    world.calm()
    again: dict[int, Flow] = {}

    def read_again() -> bool:
        for number, (_, client, flow) in enumerate(world.flows):
            if flow.done and number not in again:
                again[number] = attach(world, client, flow.request_id)
        return len(again) == len(world.flows) and all(flow.done for flow in again.values())

    world.run(CALM_NS, until=read_again)
    assert read_again(), "something never ended"
    for number, (spec, _, flow) in enumerate(world.flows):
        assert flow.error is None and again[number].error is None
        assert told(flow) == told(again[number])
        for one in flow.sequences:
            assert one.final is not None and one.final.finish_reason in ("stop", "length")
            assert one.final.offset == len(one.token_ids)
            if spec.sampling.logprobs is not None:
                assert len(one.logprobs) == len(one.token_ids)
        if spec.sampling.prompt_logprobs is not None:
            assert len(flow.prompt_logprobs) == flow.prompt_tokens
    world.run(15_000 * MS, until=lambda: nothing_left(world))
    check_nothing_left(world)


def attach(world: World, client: SimClient, request_id: str) -> Flow:
    return client.core.attach(request_id, (), world.now, None)


@pytest.mark.parametrize("block", range(4))
def test_what_was_told_never_changes(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        try:
            run_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def _told_before_logged(patch: pytest.MonkeyPatch) -> None:
    original = Stream.note

    def note(self: Stream) -> list[Produced | Scored]:
        fresh = original(self)
        self.logged, self.end_logged = len(self.tokens), True
        return fresh

    patch.setattr(Stream, "note", note)


def _log_not_read(patch: pytest.MonkeyPatch) -> None:
    def recover(self: Stream, produced: object, scored: object) -> None:
        self.logged = self.noted = 0

    patch.setattr(Stream, "recover", recover)


def _scores_are_not_logged(patch: pytest.MonkeyPatch) -> None:
    original = Stream.note

    def note(self: Stream) -> list[Produced | Scored]:
        self.scores_logged = self.num_scores
        return [op for op in original(self) if not isinstance(op, Scored)]

    patch.setattr(Stream, "note", note)


@pytest.mark.parametrize("plant", [_told_before_logged, _log_not_read, _scores_are_not_logged])
def test_a_planted_bug_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    for seed in range(60):
        try:
            run_seed(seed)
        except AssertionError:
            return
    raise AssertionError("60 seeds did not find it")


R = "r" * 32


def entry(sampling: Sampling | None = None) -> Entry:
    sampling = sampling or Sampling(seed=1, max_tokens=9)
    return Entry(R, b"\5\0\0\0", sampling, 1, True, "", b"", MODEL.name, "f1")


def piece(offset: int, *ids: int, index: int = 0) -> Produced:
    return Produced(R, index, offset, array("i", ids).tobytes())


def restarted(recovered: Recovered, *running: SequenceInfo) -> Desk:
    """A new gateway, with an old log, and a scheduler that runs something."""
    desk = Desk(recovered, seats=0, logged=True)
    desk.core.on_topology(Topology(2, (Seat(0, 1, 1, "member"),), b"", "f1"), 0)
    desk.scheduler(0, 1, *running)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    return desk


def test_nothing_is_told_before_it_is_on_disk() -> None:
    desk = Desk(logged=True)
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    item = TokensItem(rid, 0, submit.attempt, 0, (10, 11), "length")
    desk.core.on_bus(seat, Tokens(0, 1, 1, (item,)), desk.now)
    desk.turn(commit=False)
    ((tokenizer, decode),) = desk.sent(Decode)
    assert isinstance(decode, Decode)
    shown = DecodedItem(decode.items[0].stream, ("[10]", "[11]"), "", b"")
    desk.core.on_bus(tokenizer, Decoded(decode.call, (shown,)), desk.now)
    desk.turn(commit=False)
    produced, finish = desk.ops[-2:]
    assert produced == Produced(rid, 0, 0, array("i", (10, 11)).tobytes())
    assert isinstance(finish, Finish) and desk.told() == [] and not desk.core.idle
    desk.core.on_journal(10**6, "no space", desk.now)  # and once more
    assert desk.told() == []
    desk.passes(100)
    delta, final = desk.told()
    assert isinstance(delta, Delta) and delta.token_ids == (10, 11)
    assert isinstance(final, Final) and final.offset == 2 and desk.core.idle


def test_nothing_is_told_before_what_was_lost_is_on_disk_again() -> None:
    """A disk took nothing for so long that tokens had to be dropped: that it takes later ones is not enough."""
    desk = Desk(logged=True)
    rid = desk.start()
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    desk.decodes()
    assert [m.token_ids for m in desk.told() if isinstance(m, Delta)] == [(10,)]

    def comes(offset: int, token: int, finish: FinishReason | None = None) -> None:
        item = TokensItem(rid, 0, submit.attempt, offset, (token,), finish)
        desk.core.on_bus(seat, Tokens(0, 1, 2 + offset, (item,)), desk.now)
        desk.turn(commit=False)
        for tokenizer, decode in desk.sent(Decode):
            assert isinstance(decode, Decode)
            shown = DecodedItem(decode.items[0].stream, (f"[{token}]",), "", b"")
            desk.core.on_bus(tokenizer, Decoded(decode.call, (shown,)), desk.now)
        desk.turn(commit=False)

    comes(1, 11)
    number = len(desk.ops) + 1  # after the fingerprint
    desk.core.on_journal(number, "no space", desk.now)
    comes(2, 12, "length")
    desk.ops.clear()
    desk.core.on_journal_lost(desk.now)  # the disk takes something again
    desk.core.on_journal(number + 2, "", desk.now)
    desk.turn(commit=False)
    assert desk.told() == [] and not desk.core.idle
    again, produced, *_, finish, _ = desk.ops
    assert isinstance(again, Again) and isinstance(finish, Finish)
    assert produced == Produced(rid, 0, 0, array("i", (10, 11, 12)).tobytes())
    desk.core.on_journal(number + 2 + len(desk.ops), "", desk.now)
    desk.turn(commit=False)
    desk.passes(100)
    told = desk.told()
    assert [m.token_ids for m in told if isinstance(m, Delta)] in ([(11,), (12,)], [(11, 12)])
    assert isinstance(told[-1], Final) and told[-1].offset == 3 and desk.core.idle


def test_a_stream_goes_on_from_its_log() -> None:
    desk = restarted(Recovered(entry(), {}, (piece(0, 10), piece(1, 11))))
    ((seat, submit),) = desk.submits()
    assert submit.outputs == array("i", (10, 11)).tobytes()
    desk.decodes()
    desk.asks(Attach(1, R))
    _, delta = desk.told()
    assert isinstance(delta, Delta) and delta.token_ids == (10, 11)
    desk.produces(seat, submit, 2, 12, finish="length")
    desk.decodes()
    delta, final = desk.told()
    assert isinstance(delta, Delta) and delta.token_ids == (12,) and isinstance(final, Final)


@pytest.mark.parametrize("outputs", [(10,), (10, 99), (10, 99, 12)])
def test_a_scheduler_that_has_other_tokens_than_the_log_is_not_adopted(
    outputs: tuple[int, ...],
) -> None:
    info = SequenceInfo(R, 0, 33, array("i", outputs).tobytes(), None)
    desk = restarted(Recovered(entry(), {}, (piece(0, 10, 11),)), info)
    ((_, submit),) = desk.submits()
    assert submit.outputs == array("i", (10, 11)).tobytes() and submit.attempt > 33
    ((_, abort),) = desk.sent(AbortSequence)
    assert isinstance(abort, AbortSequence) and abort.attempt == 33


def test_what_has_ended_is_told_again_from_the_log_without_a_rank() -> None:
    final = Final(R, 0, 2, "length", Usage(1, 2), digest=tokens_digest(0, (10, 11)))
    desk = restarted(Recovered(entry(), {0: final}, (piece(0, 10, 11),)))
    desk.asks(Attach(1, R, (1,), (tokens_digest(0, (10,)),)))
    desk.decodes()
    _, delta, told = desk.told()
    assert delta == Delta(R, 0, 1, (11,), "[11]") and told == final and not desk.submits()


def test_prompt_logprobs_are_told_when_they_are_on_disk() -> None:
    desk = Desk(logged=True)
    sampling = Sampling(max_tokens=1, prompt_logprobs=0)
    desk.asks(Generate(1, prompt_token_ids=(5, 6, 7), sampling=sampling))
    ((seat, submit),) = desk.submits()
    rid, _ = submit.request_id, desk.told()
    item = TokensItem(rid, 0, submit.attempt, 0, (), prompt_logprobs=records(1.0, 2.0))
    desk.core.on_bus(seat, Tokens(0, 1, 1, (item,)), desk.now)
    desk.turn(commit=False)
    assert desk.ops[-1] == Scored(rid, 0, records(1.0, 2.0)) and desk.told() == []
    desk.core.on_journal(10**6, "", desk.now)
    desk.turn()
    assert desk.told() == [PromptLogprobs(rid, 0, 0, scores(1.0, 2.0))]


def test_what_was_told_from_the_log_is_told_again_with_its_prompt_and_no_further() -> None:
    """The log has a token that came after the stop string."""
    sampling = Sampling(seed=1, max_tokens=9, stop=("[11]",), prompt_logprobs=0)
    scored = msgspec.structs.replace(entry(sampling), prompt=array("i", (5, 6, 7)).tobytes())
    final = Final(R, 0, 2, "stop", Usage(3, 2), digest=tokens_digest(0, (10, 11)))
    log = (Scored(R, 0, records(1.0)), Scored(R, 1, records(2.0)))
    desk = restarted(Recovered(scored, {0: final}, (piece(0, 10, 11, 12),), log))
    for call in (1, 2):
        desk.asks(Attach(call, R))
        desk.decodes()
        _, prompt, delta, end = desk.told()
        assert prompt == PromptLogprobs(R, 0, 0, scores(1.0, 2.0))
        assert delta == Delta(R, 0, 0, (10, 11), "[10]") and end == final and desk.core.idle


def test_what_an_older_log_lacks_is_an_error_at_once() -> None:
    """Of versions that did not log the prompt's log-probabilities."""
    sampling = Sampling(seed=1, max_tokens=9, prompt_logprobs=0)
    scored = msgspec.structs.replace(entry(sampling), prompt=array("i", (5, 6, 7)).tobytes())
    final = Final(R, 0, 2, "length", Usage(3, 2), digest=tokens_digest(0, (10, 11)))
    desk = restarted(Recovered(scored, {0: final}, (piece(0, 10, 11),)))
    desk.asks(Attach(1, R))
    desk.decodes()
    desk.asks(Attach(2, R))
    end = desk.told()[-1]
    assert isinstance(end, Final) and end.finish_reason == "error"
    assert "has 0 of the 2 log-probabilities of its prompt" in end.error and not desk.submits()


def records(*logprobs: float) -> bytes:
    """Of prompt tokens after the first, each the likeliest."""
    return b"".join(struct.pack("<fi", logprob, 1) for logprob in logprobs)


def scores(*logprobs: float) -> tuple[PromptLogprob | None, ...]:
    return (None, *(PromptLogprob(logprob, 1, (), ()) for logprob in logprobs))


def test_overlapping_pieces_of_the_log_are_one_stream() -> None:
    stream = Stream(entry(), 0, 1)
    stream.recover([piece(0, 5, 6), piece(1, 6, 7), piece(3, 8), piece(0, 1, index=1), piece(9, 1)])
    assert stream.tokens == [5, 6, 7, 8] and stream.logged == 4
    for outputs, fits in (((5, 6, 7, 8, 9), True), ((5, 6, 7), False), ((5, 6, 7, 9), False)):
        assert stream.fits(array("i", outputs).tobytes()) is fits
    stream.go_on(array("i", (5, 6, 7, 8, 9)).tobytes())
    assert stream.tokens == [5, 6, 7, 8, 9]
