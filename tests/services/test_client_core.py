"""The client's rules as stories: nothing is lost or doubled, and every wait has an end."""

from itertools import pairwise

import msgspec
import pytest

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import (
    Abort,
    Accepted,
    Attach,
    ChatMessage,
    ClientMessage,
    ClientReply,
    Delta,
    Done,
    Error,
    Final,
    FinishReason,
    Generate,
    Health,
    HealthReply,
    PromptLogprob,
    PromptLogprobs,
    Sampling,
    Usage,
)
from phalanx.services.client import finished
from phalanx.services.client_core import ClientCore
from phalanx.services.client_flow import Begun, Flow, GatewaySilent, RequestTimeout, Spec

MS = 1_000_000
DECODER = Decoder[ClientMessage](ClientMessage)


class Line:
    """A client core on a line of its own."""

    def __init__(self, silence_ms: int = 60_000) -> None:
        keys = iter(f"key-{i}" for i in range(100))
        self.node_gone = False
        self.core = ClientCore(
            lambda: next(keys), silence_ms * MS, "/run/gateway.sock", lambda: self.node_gone
        )
        self.now = 10**9

    def start(self, timeout_ms: int | None = None, wait: bool = False, n: int = 1) -> Flow:
        timeout_ns = None if timeout_ms is None else timeout_ms * MS
        spec = Spec([1, 2], Sampling(max_tokens=9), n=n)
        return self.core.generate(spec, self.now, timeout_ns, wait)

    def sent(self) -> list[ClientMessage]:
        """What it wants to say now, without the health questions."""
        self.core.poll(self.now)
        frames = [DECODER.decode(frame) for frame in self.core.outgoing]
        self.core.outgoing.clear()
        return [message for message in frames if not isinstance(message, Health)]

    def hears(self, message: ClientReply) -> None:
        self.core.on_frame(encode(message), self.now)

    def passes(self, ms: int, alive: int = 1) -> list[ClientMessage]:
        """Time passes; with `alive`, a gateway of that incarnation answers meanwhile."""
        said: list[ClientMessage] = []
        for _ in range(0, ms, 100):
            self.now += 100 * MS
            said += self.sent()
            if alive:
                self.hears(HealthReply(10**9, True, alive, 2, "m"))
        return said

    def accept(self, flow: Flow, request_id: str = "r") -> None:
        (generate,) = (m for m in self.sent() if isinstance(m, Generate))
        self.hears(Accepted(generate.call, request_id, 42, 2, flow.n))


def delta(offset: int, *ids: int, index: int = 0) -> Delta:
    return Delta("r", index, offset, ids, "".join(f"[{i}]" for i in ids))


def final(offset: int, index: int = 0) -> Final:
    return Final("r", index, offset, "length", Usage(2, offset), "!")


def test_a_stream_and_its_result() -> None:
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.now += 30 * MS
    line.hears(delta(0, 5, 6))
    line.hears(delta(2, 7))
    line.hears(final(3))
    (result,) = flow.results()
    assert (result.token_ids, result.text, result.seed) == ((5, 6, 7), "[5][6][7]!", 42)
    assert result.ttft_ms == 30.0 and flow.done
    assert line.core.next_ns() is None  # nothing to wait for any more


def test_an_early_end_is_where_its_reader_is() -> None:
    """It asked for everything, and what an earlier gateway had sent it came before the answer."""
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.hears(delta(0, 5, 6))
    end = Final("r", 0, 0, "abort", Usage(2, 0), "", Code.SHUTDOWN, "stopped", b"digest")
    line.hears(end)
    (sequence,) = flow.sequences
    assert sequence.final is not None and flow.done
    assert (sequence.final.offset, sequence.final.usage) == (2, Usage(2, 2))
    assert sequence.final.digest == b"" and flow.results()[0].token_ids == (5, 6)
    line.hears(end)  # the same once more
    assert not line.core.ended.counts


@pytest.mark.parametrize("reason", ["error", "length"])
def test_what_an_early_end_owed_is_no_text_of_another_place(reason: FinishReason) -> None:
    """It was put behind tokens that it does not belong to; and an end for want of room is an early one."""
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.hears(delta(0, 5, 6))
    end = Final("r", 0, 1, reason, Usage(2, 1), "\ufffd", Code.KV_PRESSURE, "the pool is full")
    line.hears(end)
    (result,) = flow.results()
    assert (result.token_ids, result.text, result.usage) == ((5, 6), "[5][6]", Usage(2, 2))
    line.hears(end)
    assert not line.core.ended.counts


def test_what_has_ended_and_is_quiet_is_asked_for() -> None:
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.hears(HealthReply(10**9, True, 1, 2, "m"))
    line.hears(delta(0, 5, 6))
    line.now += 1000 * MS
    line.core.poll(line.now)
    (health,) = (DECODER.decode(frame) for frame in line.core.outgoing)
    assert isinstance(health, Health) and health.quiet == ("r",)
    line.core.outgoing.clear()
    line.hears(HealthReply(health.call, True, 1, 2, "m"))  # it runs: nothing is lost
    assert line.sent() == []
    line.hears(HealthReply(health.call, True, 1, 2, "m", ended=("r", "unknown")))
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and attach.offsets == (2,)
    line.hears(final(2))
    line.hears(HealthReply(health.call, True, 1, 2, "m", ended=("r",)))
    assert flow.done and line.sent() == []


def test_in_silence_the_gateway_is_asked_sooner() -> None:
    """The next gateway finds the question in the socket, and streams go on at once. Who waits long, in a
    queue say, asks no more often than everyone."""
    line = Line()
    line.accept(line.start())
    asked: list[int] = []
    for ms in range(0, 9000, 50):
        line.now += 50 * MS
        if ms < 1500 or ms == 5500:
            line.hears(delta(ms // 50, 7))
        line.core.poll(line.now)
        asked += [ms for frame in line.core.outgoing if isinstance(DECODER.decode(frame), Health)]
        line.core.outgoing.clear()
    assert len([ms for ms in asked if ms < 1500]) <= 2, "a second apart while tokens come"
    for quiet_from in (1500, 5500):
        first, *later = (ms - quiet_from for ms in asked if 0 < ms - quiet_from < 3000)
        assert first <= 250 and [b - a for a, b in pairwise((first, *later))] == [400, 800, 1000], (
            asked
        )


def test_a_prompt_is_taken_in_order_and_missed() -> None:
    line = Line()
    flow = line.core.generate(Spec([1, 2, 3], Sampling(prompt_logprobs=0)), line.now, None)
    (generate,) = line.sent()
    line.hears(Accepted(generate.call, "r", 42, 3, 1, prompt_logprobs=True))
    marks = (None, PromptLogprob(-1.0, 2), PromptLogprob(-2.0, 7))
    line.hears(PromptLogprobs("r", 0, 0, marks[:2]))
    line.hears(PromptLogprobs("r", 0, 0, marks[:2]))  # twice
    line.hears(delta(0, 5))  # the last one is missing: this cannot be right
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and (attach.offsets, attach.prompt_offset) == ((0,), 2)
    line.hears(PromptLogprobs("r", 0, 1, marks[1:]))  # overlaps
    line.hears(delta(0, 5))
    line.hears(final(1))
    (result,) = flow.results()
    assert (result.prompt_logprobs, result.token_ids) == (marks, (5,))


def test_who_only_reads_misses_a_lost_prompt_too() -> None:
    line = Line()
    flow = line.core.attach("r", (), line.now, None)
    (attach,) = line.sent()
    line.hears(Accepted(attach.call, "r", 42, 2, 1, prompt_logprobs=True))
    line.now += 100 * MS
    line.hears(delta(0, 5))  # what was to come before is lost
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and attach.prompt_offset == 0
    line.hears(PromptLogprobs("r", 0, 0, (None, PromptLogprob(-1.0, 2))))
    line.hears(delta(0, 5))
    line.hears(final(1))
    (result,) = flow.results()
    assert (result.prompt_logprobs, result.token_ids) == ((None, PromptLogprob(-1.0, 2)), (5,))


def test_an_unanswered_request_is_sent_again_as_it_was() -> None:
    line = Line()
    line.start()
    (first,) = line.sent()
    assert isinstance(first, Generate) and first.key == "key-0"
    assert line.passes(4_900) == []
    assert line.passes(300) == [first]


def test_another_gateway_is_asked_for_everything_at_once() -> None:
    line = Line()
    running, waiting = line.start(), None
    line.accept(running)
    line.hears(delta(0, 5, 6))
    waiting = line.start()
    (generate,) = line.sent()
    assert line.passes(500, alive=1) == []
    said = line.passes(200, alive=2)
    assert isinstance(said[0], Attach) and (said[0].request_id, said[0].offsets) == ("r", (2,))
    assert said[1:] == [generate]
    assert waiting is not None and not waiting.done


def test_a_gateway_heard_again_after_silence_is_asked_too() -> None:
    """A new node counts its gateways from one again."""
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.passes(1_000, alive=1)
    line.passes(3_500, alive=0)
    said = line.passes(200, alive=1)
    assert [type(m) for m in said] == [Attach]


def test_older_deltas_are_dropped_and_gaps_asked_for() -> None:
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.hears(delta(0, 5, 6))
    line.hears(delta(0, 5, 6))
    line.hears(delta(1, 6))
    assert line.sent() == [] and flow.sequences[0].token_ids == [5, 6]
    line.hears(delta(1, 6, 7))  # half of it is known: its text cannot be cut
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and attach.offsets == (2,)
    line.now += 100 * MS
    line.hears(delta(4, 9))
    assert [type(m) for m in line.sent()] == [Attach]
    line.hears(final(5))
    assert not flow.done
    line.hears(delta(2, 7, 8, 9))
    line.hears(final(5))
    line.hears(final(5))
    (result,) = flow.results()
    assert result.token_ids == (5, 6, 7, 8, 9)


def test_sequences_end_one_by_one() -> None:
    line = Line()
    flow = line.start(n=2)
    line.accept(flow)
    line.hears(delta(0, 5, index=1))
    line.hears(final(1, index=1))
    line.hears(delta(1, 6, index=1))
    assert not flow.done and [r.index for r in flow.results()] == [1]
    line.hears(final(0, index=0))
    assert flow.done and [r.index for r in flow.results()] == [0, 1]


def test_what_comes_after_a_final_is_not_delivered_but_counted() -> None:
    line = Line()
    flow = line.start(n=2)
    line.accept(flow)
    line.hears(delta(0, 5))
    line.hears(final(1))
    line.hears(final(1))
    line.hears(delta(0, 5))
    assert not line.core.ended.counts, "an Attach is answered from its offset on: that is legal"
    line.hears(delta(1, 6, 7))
    line.hears(final(2))
    line.hears(delta(0, 5, index=1))
    line.hears(final(1, index=1))
    assert flow.done and line.core.ended.counts == {"finals": 1, "tokens": 2}
    line.hears(final(1, index=1))  # of a request that is over
    line.hears(msgspec.structs.replace(final(1, index=1), finish_reason="abort"))
    line.hears(delta(1, 6, index=1))
    assert line.core.ended.counts == {"finals": 2, "tokens": 3}
    assert [r.token_ids for r in flow.results()] == [(5,), (5,)]
    assert line.core.ended.said[-1] == "request r, index 1: final length at 1; tokens up to 2"


def test_a_final_before_the_tokens_that_are_here_is_counted() -> None:
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.hears(delta(0, 5, 6, 7))
    line.hears(final(2))
    assert flow.done and line.core.ended.counts == {"tokens": 1}


def forgotten(line: Line, flow: Flow) -> Generate:
    """It is accepted and has two tokens when another gateway comes, which does not know it: what is sent then."""
    line.accept(flow)
    line.hears(delta(0, 5, 6))
    line.passes(200, alive=1)
    (attach,) = line.passes(300, alive=2)
    line.hears(Error(attach.call, Code.UNKNOWN_REQUEST, "?"))
    (again,) = line.sent()
    assert isinstance(again, Generate)
    return again


def test_a_forgotten_request_is_sent_anew_with_its_seed() -> None:
    line = Line()
    flow = line.start()
    again = forgotten(line, flow)
    assert again.sampling.seed == 42 and again.call != 0
    line.hears(Accepted(again.call, "r2", 42, 2, 1))
    # Nothing of it is taken before the gateway has compared what is here with its beginning.
    (prove,) = line.sent()
    assert isinstance(prove, Attach) and prove.request_id == "r2"
    assert (prove.offsets, prove.digests) == ((2,), (tokens_digest(0, (5, 6)),))
    line.hears(msgspec.structs.replace(delta(0, 5, 99), request_id="r2"))
    line.hears(msgspec.structs.replace(delta(2, 98), request_id="r2"))
    line.hears(Accepted(prove.call, "r2", 42, 2, 1))
    line.hears(msgspec.structs.replace(delta(2, 7), request_id="r2"))
    line.hears(msgspec.structs.replace(final(3), request_id="r2"))
    assert flow.results()[0].token_ids == (5, 6, 7)


def test_a_forgotten_request_waits_for_room_to_be_made_again() -> None:
    """It was accepted once, so it does not end because the node that begins anew is full."""
    line = Line()
    flow = line.start(timeout_ms=60_000)
    again = forgotten(line, flow)
    for code in (Code.OVERLOADED, Code.NOT_READY):
        line.hears(Error(again.call, code, "full", 700))
        assert flow.error is None
        assert line.passes(600, alive=2) == []
        assert line.passes(200, alive=2) == [again]
    line.core.abort(flow, line.now)
    line.hears(Error(again.call, Code.OVERLOADED, "full", 700))
    assert isinstance(flow.error, Refused) and flow.error.code is Code.OVERLOADED
    assert line.core.next_ns() is None


def test_a_forgotten_request_waits_no_longer_than_it_may_take() -> None:
    line = Line()
    flow = line.start(timeout_ms=3_000)
    line.accept(flow)
    line.passes(200, alive=1)
    (attach,) = line.passes(300, alive=2)
    line.hears(Error(attach.call, Code.UNKNOWN_REQUEST, "?"))
    for _ in range(30):
        for message in line.passes(100, alive=2):
            line.hears(Error(message.call, Code.OVERLOADED, "full", 700))
    assert isinstance(flow.error, RequestTimeout)


@pytest.mark.parametrize("aborted", [False, True])
def test_who_reads_on_a_request_that_is_forgotten_is_told(aborted: bool) -> None:
    """It has nothing to send it again with."""
    line = Line()
    flow = line.core.attach("r", [], line.now, None)
    (attach,) = line.sent()
    line.hears(Accepted(attach.call, "r", 42, 2, 1))
    line.hears(delta(0, 5, 6))
    if aborted:
        line.core.abort(flow, line.now)
        (asked,) = line.sent()
        assert isinstance(asked, Abort)
    else:
        line.passes(200, alive=1)
        (asked,) = line.passes(300, alive=2)
        assert isinstance(asked, Attach)
    line.hears(Error(asked.call, Code.OVERLOADED, "?"))
    assert not flow.done  # of a repeated question
    line.hears(Error(asked.call, Code.UNKNOWN_REQUEST, "no request 'r' is known"))
    assert isinstance(flow.error, Refused) and flow.error.code is Code.UNKNOWN_REQUEST
    assert "no request 'r' is known" in str(flow.error)
    assert "2 tokens" in str(flow.error) and "seed 42" in str(flow.error)
    assert line.core.next_ns() is None


def test_a_refusal_is_raised_and_overload_waited_out_if_wished() -> None:
    line = Line()
    flow = line.start()
    (generate,) = line.sent()
    line.hears(Error(generate.call, Code.OVERLOADED, "full", 700))
    assert isinstance(flow.error, Refused) and flow.error.retry_after_ms == 700
    patient = line.start(wait=True)
    (generate,) = line.sent()
    line.hears(Error(generate.call, Code.OVERLOADED, "full", 700))
    assert patient.error is None
    assert line.passes(600) == []
    assert line.passes(200) == [generate]


def test_a_deadline_aborts() -> None:
    line = Line()
    flow = line.start(timeout_ms=400)
    line.accept(flow)
    line.hears(delta(0, 5))
    said = line.passes(500)
    assert isinstance(flow.error, RequestTimeout) and "1 tokens" in str(flow.error)
    assert [type(m) for m in said] == [Abort]


def test_an_abort_before_acceptance_follows_it() -> None:
    line = Line()
    flow = line.start()
    line.core.abort(flow, line.now)
    (generate,) = line.sent()
    assert isinstance(generate, Generate)
    line.hears(Accepted(generate.call, "r", 1, 2, 1))
    (abort,) = line.sent()
    assert isinstance(abort, Abort) and abort.request_id == "r"
    line.hears(Done(abort.call))
    line.hears(Final("r", 0, 0, "abort", Usage(2, 0)))
    assert flow.results()[0].finish_reason == "abort"


def test_another_gateway_hears_what_is_here_before_the_abort() -> None:
    """It ends there, and not at nothing."""
    line = Line()
    flow = line.start()
    line.accept(flow)
    line.hears(delta(0, 5, 6))
    line.core.abort(flow, line.now)
    assert [type(m) for m in line.sent()] == [Abort]
    line.passes(500, alive=1)
    attach, abort = line.passes(200, alive=2)
    assert isinstance(attach, Attach) and attach.offsets == (2,) and isinstance(abort, Abort)


def test_what_is_accepted_after_its_deadline_is_aborted() -> None:
    line = Line()
    flow = line.start(timeout_ms=200)
    (generate,) = line.sent()
    assert line.passes(300) == [] and flow.error is not None
    line.hears(Accepted(generate.call, "r", 1, 2, 1))
    (abort,) = line.sent()
    assert isinstance(abort, Abort) and abort.request_id == "r"


@pytest.mark.parametrize("how", ["deadline", "dropped", "accepted late"])
def test_the_abort_of_what_was_given_up_is_repeated_until_it_is_answered(how: str) -> None:
    """A gateway may die with it unread, and the next one would run the request for nobody."""

    def given_up(request_id: str) -> Abort:
        flow = line.start(timeout_ms=None if how == "dropped" else 400)
        if how == "accepted late":
            (generate,) = line.sent()
            line.passes(500)
            line.hears(Accepted(generate.call, request_id, 1, 2, 1))
        else:
            line.accept(flow, request_id)
            line.passes(300)
        if how == "dropped":
            line.core.drop(flow, line.now)
        (abort,) = line.sent() if how != "deadline" else line.passes(200)
        assert isinstance(abort, Abort) and abort.request_id == request_id
        return abort

    for answer in (lambda call: Done(call), lambda call: Error(call, Code.UNKNOWN_REQUEST, "?")):
        line = Line()
        abort = given_up("r")
        assert line.passes(800, alive=2) == []
        assert line.passes(400, alive=2) == [abort]
        line.hears(answer(abort.call))
        assert line.core.next_ns() is None and line.passes(60_000, alive=2) == []
    line = Line()
    abort = given_up("r")
    assert line.passes(120_000, alive=0) == [abort] * 5  # and no more
    assert line.core.next_ns() is None


def test_silence_has_an_end_but_only_while_someone_listens() -> None:
    line = Line(silence_ms=2_000)
    flow = line.start()
    line.sent()
    line.passes(1_500, alive=0)
    line.now += 60_000 * MS  # the program did something else
    line.passes(1_500, alive=0)
    assert flow.error is None
    line.passes(1_000, alive=0)
    assert isinstance(flow.error, GatewaySilent)


def test_who_gives_up_says_what_came_and_how_to_go_on() -> None:
    line = Line(silence_ms=2_000)
    flow = line.start(n=3)
    line.accept(flow)
    line.hears(delta(0, 10, 11, index=2))
    line.hears(final(0, index=1))
    line.passes(3_000, alive=0)
    assert isinstance(flow.error, GatewaySilent) and flow.done
    (_, ended), (_, nothing), (at, begun) = finished(7, flow, 0)
    assert (ended.index, ended.finish_reason, ended.error) == (1, "length", "")
    for one in (nothing, begun):
        assert (one.request_id, one.seed, one.finish_reason, one.code) == ("r", 42, "error", None)
        assert "request r was accepted and 2 tokens came" in one.error and "seed 42" in one.error
    assert (nothing.index, nothing.token_ids, nothing.ttft_ms) == (0, (), None)
    assert (at, begun.index, begun.token_ids, begun.text) == (7, 2, (10, 11), "[10][11]")
    assert begun.usage == Usage(2, 2) and begun.ttft_ms is not None


def test_who_gives_up_before_it_was_accepted_says_so() -> None:
    line = Line(silence_ms=2_000)
    spec = Spec([1], Sampling(seed=5), n=2)
    flow = line.core.generate(spec, line.now, None)
    line.passes(3_000, alive=0)
    ((_, one),) = finished(0, flow, 0)
    assert (one.request_id, one.seed, one.token_ids) == ("", 5, ())
    assert "was not accepted: send it again" in one.error


def test_what_was_never_accepted_ends_with_the_node() -> None:
    """What was goes on with the next one."""
    line = Line()
    accepted = line.start()
    line.accept(accepted)
    forgotten, attached = line.start(), line.core.attach("r2", (), line.now, None)
    line.accept(forgotten, "r3")
    line.hears(Error(forgotten.calls[-1], Code.UNKNOWN_REQUEST, "forgotten"))
    waiting = line.start(wait=True)
    line.passes(3_000, alive=0)
    assert not waiting.done, "its gateway may come back"
    line.passes(2_000)
    line.node_gone = True
    line.passes(5_000)
    assert not waiting.done, "who answers is there"
    line.passes(1_000, alive=0)
    assert isinstance(waiting.error, Refused) and waiting.error.code is Code.SHUTDOWN
    assert "/run/gateway.sock" in waiting.error.text
    assert not (accepted.done or forgotten.done or attached.done)


def test_an_attached_flow_begins_where_it_was_asked_to() -> None:
    line = Line()
    flow = line.core.attach("r", (Begun(2), Begun(0)), line.now, None)
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and attach.offsets == (2, 0)
    line.hears(Accepted(attach.call, "r", 42, 2, 2))
    line.hears(delta(2, 7))
    line.hears(final(3))
    line.hears(delta(0, 9, index=1))
    line.hears(final(1, index=1))
    assert [r.token_ids for r in flow.results()] == [(7,), (9,)]
    unknown = line.core.attach("x", (), line.now, None)
    (attach,) = line.sent()
    line.hears(Error(attach.call, Code.UNKNOWN_REQUEST, "no such request"))
    assert isinstance(unknown.error, Refused)


def test_an_attached_flow_that_has_its_tokens_proves_them() -> None:
    line = Line()
    flow = line.core.attach("r", (Begun(token_ids=(5, 6)), Begun(3)), line.now, None)
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and attach.offsets == (2, 3)
    assert attach.digests == (tokens_digest(0, (5, 6)), b"")
    line.hears(Accepted(attach.call, "r", 42, 2, 2))
    line.hears(delta(2, 7))
    line.hears(delta(3, 8, index=1))
    line.now += 100 * MS
    line.hears(delta(9, 9))  # a gap
    (attach,) = line.sent()
    assert isinstance(attach, Attach) and attach.offsets == (3, 4)
    assert attach.digests == (tokens_digest(0, (5, 6, 7)), b"")
    assert [s.token_ids for s in flow.sequences] == [[7], [8]]


def test_what_comes_is_never_trusted() -> None:
    line = Line()
    flow = line.start()
    line.accept(flow)
    for frame in (b"", b"\xc1", encode(Generate(1, prompt="x")), b"\x81\xa4type\xa3New"):
        line.core.on_frame(frame, line.now)
    line.hears(Delta("other", 0, 0, (1,), "x"))
    line.hears(delta(0, 1, index=7))
    line.hears(Accepted(999, "other", 1, 1, 1))
    assert flow.sequences[0].token_ids == [] and not flow.done


def test_a_prompt_is_text_ids_or_chat() -> None:
    chat = Spec([ChatMessage("user", "hi")]).message("k")
    assert chat.messages == (ChatMessage("user", "hi"),) and chat.prompt is None
    assert Spec("hi").message("k").prompt == "hi"
    assert Spec([]).message("k").prompt_token_ids == ()
    with pytest.raises(TypeError):
        Spec([1.5]).message("k")  # type: ignore[list-item]
