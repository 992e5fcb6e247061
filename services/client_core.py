"""What a client of the gateway must remember so that no token is lost or doubled. Pure.

The rules, which a client in any language may follow (`docs/protocol.md`):

* Every Generate carries a key of its own and is repeated until it is answered; with the same key it
  is the same request, so repeating is harmless and a gateway that died in between loses nothing.
* Deltas are taken in order of their offsets: older ones are dropped, a gap leads to an Attach at the
  offset reached. Another gateway, also that of the next node, gets an Attach for every open request.
* An Attach says the digest of what is here: a stream that is another one is not spliced to it.
* A Health question every second, and sooner in silence, tells both: that the gateway is there, and which
  one. It names what is quiet; of a request that has ended nothing more would come, so what was lost of it is asked for.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from phalanx.protocol.codec import Decoder
from phalanx.protocol.errors import Code, DecodeError, PhalanxError, Refused
from phalanx.protocol.messages import (
    Abort,
    Accepted,
    Attach,
    ClientMessage,
    ClientReply,
    Delta,
    Done,
    Error,
    Final,
    Health,
    HealthReply,
    PromptLogprobs,
    Replay,
    Replayed,
    Stats,
    StatsReply,
)
from phalanx.services.client_abandoned import Abandoned
from phalanx.services.client_ended import Ended
from phalanx.services.client_flow import (
    MS,
    REPEAT_NS_MIN,
    Begun,
    Flow,
    GatewaySilent,
    RequestTimeout,
    Spec,
    frame_of,
    node_ended,
)
from phalanx.services.early_ends import told_at

PING_NS = 1_000 * MS
# With nothing heard for so long it is asked sooner: a question that waits in the socket while the gateway
# is away is the first thing that the next one reads, and its answer says that it is another one.
PING_SILENT_NS = 200 * MS
SCAN_NS = 50 * MS  # how often timers are looked at: thousands of requests share one client
REPEAT_NS_MAX = 30_000 * MS  # of unanswered and of quiet requests, at last
SILENT_NS = 3 * PING_NS  # a gateway heard again after this long is asked for everything open
QUIET_NS = 500 * MS  # a request of which nothing was heard for so long is asked after
QUIET_MAX = 256  # of them in one question; of the others nothing is heard until they are repeated
REATTACH_NS = 50 * MS  # a gap is asked for again not before
WAIT_OVERLOADED_NS = 200 * MS  # when the gateway says no time


Asking = Abort | Replay | Stats | Health
Answer = Replayed | StatsReply | HealthReply | Done


@dataclass(eq=False)
class Question:
    """A call with one answer."""

    message: Asking
    reply: Answer | Error | None = None
    repeat_at_ns: int = 0
    on_event: Callable[[], None] = lambda: None


class ClientCore:
    """Frames and time in; frames out (`outgoing`), flows and questions filled.

    Args:
        draw_key: Draws an idempotency key nobody else draws.
        silence_ns: With something open and nothing heard for this long, everything open fails.
        where: The gateway's socket, for people.
        node_gone: Whether the node has ended and left nothing to wait for; asked now and then in silence.
    """

    def __init__(
        self,
        draw_key: Callable[[], str],
        silence_ns: int,
        where: str = "",
        node_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._draw_key, self._node_gone = draw_key, node_gone
        self._silence_ns, self._where = silence_ns, where
        self._decoder = Decoder[ClientReply](ClientReply)
        self._last_call = 0
        self._flows: dict[int, Flow] = {}  # by each call that is about it
        self._by_request: dict[str, Flow] = {}
        self._open: dict[int, Flow] = {}  # by id()
        self._questions: dict[int, Question] = {}
        self._abandoned = Abandoned()
        self.ended = Ended()
        self._life = 0  # of the gateway that answered last
        self._heard_ns: int | None = None  # last sign of the gateway, or since when one is due
        self._pinged_ns = -PING_NS
        self._pause_ns = PING_SILENT_NS  # doubled with every question that brings no news
        self._scan_at_ns = 0
        self.outgoing: deque[bytes] = deque()

    # --- calls ---

    def generate(
        self, spec: Spec, now_ns: int, timeout_ns: int | None, wait_overloaded: bool = False
    ) -> Flow:
        """Raises Refused when the request cannot be put into a message at all."""
        try:
            message = spec.message(spec.key or self._draw_key())
        except TypeError as error:
            raise Refused(
                Code.BAD_REQUEST, f"the prompt is no text, ids or chat: {error}"
            ) from error
        deadline_ns = None if timeout_ns is None else now_ns + timeout_ns
        flow = Flow(message, now_ns, deadline_ns, wait_overloaded, spec.n)
        self._begin(flow, now_ns)
        try:
            self._send_generate(flow, now_ns)
        except Refused:
            self._close(flow)
            raise
        return flow

    def attach(
        self, request_id: str, begun: Sequence[Begun], now_ns: int, timeout_ns: int | None
    ) -> Flow:
        """Take over a request. Its deltas begin where it was left; so do the results' tokens."""
        deadline_ns = None if timeout_ns is None else now_ns + timeout_ns
        flow = Flow(None, now_ns, deadline_ns, False, 0, request_id=request_id, begun=tuple(begun))
        self._begin(flow, now_ns)
        self._by_request[request_id] = flow
        self._send_attach(flow, now_ns)
        return flow

    def abort(self, flow: Flow, now_ns: int) -> None:
        """End the request; its finals say `abort` unless it was faster."""
        if not flow.done and not flow.aborting:
            flow.aborting = True
            if flow.accepted:
                self._send(Abort(self._call(flow), flow.request_id))

    def ask(self, make: Callable[[int], Asking], now_ns: int) -> Question:
        self._last_call += 1
        question = Question(make(self._last_call), repeat_at_ns=now_ns + PING_NS)
        self._questions[self._last_call] = question
        self._expect_life(now_ns)
        self._send(question.message)
        return question

    def forget(self, question: Question) -> None:
        self._questions.pop(question.message.call, None)

    def drop(self, flow: Flow, now_ns: int) -> None:
        """End the request: nobody reads this flow any more."""
        self._give_up(flow, now_ns)
        self._close(flow)

    def fail_all(self, error: PhalanxError) -> None:
        """The connection itself is broken."""
        for flow in list(self._open.values()):
            self._fail(flow, error)
        for question in list(self._questions.values()):
            question.on_event()

    # --- events ---

    def on_frame(self, frame: bytes, now_ns: int) -> None:
        try:
            message = self._decoder.decode(frame)
        except DecodeError:
            return  # of a newer gateway: what we do know goes on
        back = self._heard_ns is not None and now_ns - self._heard_ns > SILENT_NS
        self._heard_ns = now_ns
        if not isinstance(message, HealthReply):
            self._pause_ns = PING_SILENT_NS
        if back:  # perhaps another gateway, and if the whole node is new, none that says so
            self._repeat_all(now_ns)
        match message:
            case Delta() | Final():
                flow = self._by_request.get(message.request_id)
                if flow is not None and not flow.done:
                    self._take(flow, message, now_ns)
                else:
                    self.ended.hear_late(message)
            case PromptLogprobs():
                flow = self._by_request.get(message.request_id)
                if flow is not None and not flow.done and message.index == 0:
                    self._take_prompt(flow, message, now_ns)
            case Accepted():
                if (flow := self._flows.get(message.call)) is not None:
                    self._on_accepted(flow, message, now_ns)
                elif self._abandoned.accepted(message.call):
                    self._abort_unread(message.request_id, now_ns)
            case Error():
                self._on_error(message, now_ns)
            case HealthReply() | Replayed() | StatsReply() | Done():
                if isinstance(message, HealthReply):
                    self._on_life(message.gateway_life, now_ns)
                    self._mend_ended(message.ended, now_ns)
                self._answer(message)

    def poll(self, now_ns: int) -> None:
        """Timers. Call it before sending what is `outgoing`, and no later than `next_ns`."""
        if now_ns < self._scan_at_ns:
            return
        if self._heard_ns is not None and now_ns - self._scan_at_ns > PING_NS:
            # Nobody listened for a while: that is not the gateway's silence.
            self._heard_ns = now_ns
        self._scan_at_ns = now_ns + SCAN_NS
        for flow in list(self._open.values()):
            if flow.deadline_ns is not None and now_ns >= flow.deadline_ns:
                self._time_out(flow, now_ns)
            elif now_ns >= flow.repeat_at_ns:
                flow.repeat_ns = min(2 * flow.repeat_ns, REPEAT_NS_MAX)
                self._repeat(flow, now_ns)
        for question in self._questions.values():
            if now_ns >= question.repeat_at_ns:
                question.repeat_at_ns = now_ns + PING_NS
                self._send(question.message)
        for abort in self._abandoned.repeat(now_ns):
            self._send(abort)
        if not self._open:
            return
        heard_ns = now_ns if self._heard_ns is None else self._heard_ns
        silent = now_ns - max(heard_ns, self._pinged_ns) >= self._pause_ns
        if silent or now_ns - self._pinged_ns >= PING_NS:
            self._pause_ns = min(2 * self._pause_ns, PING_NS) if silent else self._pause_ns
            self._pinged_ns = now_ns
            self._last_call += 1
            self._send(Health(self._last_call, self._quiet(now_ns)))
            if now_ns - heard_ns >= PING_SILENT_NS:
                self._tell_of_end()
        if self._heard_ns is not None and now_ns - self._heard_ns >= self._silence_ns:
            silent_s = (now_ns - self._heard_ns) / 1e9
            for flow in list(self._open.values()):
                text = f"the gateway at {self._where} was silent for {silent_s:.1f} s"
                self._fail(flow, GatewaySilent(f"{text}; {flow.where_it_stands}"))

    def _tell_of_end(self) -> None:
        """Fail what no node has promised, if there is none. What was accepted goes on with the next one."""
        new = [flow for flow in self._open.values() if flow.generate and not flow.request_id]
        for flow in new if new and self._node_gone() else ():
            self._fail(flow, Refused(Code.SHUTDOWN, node_ended(self._where)))

    def _quiet(self, now_ns: int) -> tuple[str, ...]:
        flows = (
            flow.request_id
            for flow in self._open.values()
            if flow.accepted and now_ns - (flow.repeat_at_ns - flow.repeat_ns) >= QUIET_NS
        )
        return tuple(islice(flows, QUIET_MAX))

    def next_ns(self) -> int | None:
        """When `poll` is due; None: nothing is open."""
        return self._scan_at_ns if self._open or self._questions or self._abandoned else None

    # --- inside ---

    def _begin(self, flow: Flow, now_ns: int) -> None:
        self._open[id(flow)] = flow
        flow.repeat_at_ns = now_ns + flow.repeat_ns
        self._expect_life(now_ns)

    def _expect_life(self, now_ns: int) -> None:
        """From now on the gateway's silence counts, if it did not already."""
        if len(self._open) + len(self._questions) <= 1 or self._heard_ns is None:
            self._heard_ns = now_ns

    def _call(self, flow: Flow) -> int:
        self._last_call += 1
        self._flows[self._last_call] = flow
        flow.calls.append(self._last_call)
        return self._last_call

    def _send(self, message: ClientMessage) -> None:
        self.outgoing.append(frame_of(message))

    def _send_generate(self, flow: Flow, now_ns: int) -> None:
        assert flow.generate is not None
        if not flow.generate.call:
            call = self._call(flow)
            flow.generate = msgspec.structs.replace(flow.generate, call=call)
        flow.repeat_at_ns = now_ns + flow.repeat_ns
        self._send(flow.generate)

    def _send_attach(self, flow: Flow, now_ns: int) -> None:
        flow.attach_at_ns = now_ns + REATTACH_NS
        flow.repeat_at_ns = now_ns + flow.repeat_ns
        known = flow.sequences or [b.received(index) for index, b in enumerate(flow.begun)]
        offsets, digests = tuple(s.offset for s in known), tuple(s.digest for s in known)
        proof, told = digests if any(digests) else (), len(flow.prompt_logprobs)
        call = self._call(flow)
        if flow.proving:
            flow.proving = call
        self._send(Attach(call, flow.request_id, offsets, proof, told))

    def _repeat(self, flow: Flow, now_ns: int) -> None:
        if flow.accepted or flow.generate is None:
            self._send_attach(flow, now_ns)
        else:
            self._send_generate(flow, now_ns)
        if flow.aborting and flow.accepted:  # it ends where the reader is, so that is told first
            self._send(Abort(self._call(flow), flow.request_id))

    def _on_accepted(self, flow: Flow, message: Accepted, now_ns: int) -> None:
        if flow.done:
            return
        if not flow.sequences:
            begun = [*flow.begun, *([Begun()] * message.n)][: message.n]
            flow.sequences = [one.received(index) for index, one in enumerate(begun)]
        flow.accepted, flow.seed, flow.n = True, message.seed, message.n
        flow.prompt_tokens, flow.scored = message.prompt_tokens, message.prompt_logprobs
        if flow.request_id != message.request_id:
            self._by_request.pop(flow.request_id, None)
            flow.request_id = message.request_id
        self._by_request[flow.request_id] = flow
        flow.repeat_at_ns = now_ns + flow.repeat_ns
        if flow.aborting:
            self._send(Abort(self._call(flow), flow.request_id))
        if flow.proving == message.call:
            flow.proving = 0
        if flow.generate is not None and message.call == flow.generate.call and flow.began:
            # Asked for anew, as the node had forgotten it: it must be the stream that we have part of.
            flow.proving = message.call
            self._send_attach(flow, now_ns)
        flow.on_event()

    def _take(self, flow: Flow, message: Delta | Final, now_ns: int) -> None:
        if flow.proving or not 0 <= message.index < len(flow.sequences):
            return
        sequence = flow.sequences[message.index]
        have = sequence.offset
        if sequence.final is not None:
            self.ended.hear(sequence.final, message)
            return
        flow.repeat_ns = REPEAT_NS_MIN
        flow.repeat_at_ns = now_ns + flow.repeat_ns
        whole = isinstance(message, Delta) or message.finish_reason in ("stop", "length")
        if message.offset > have or (message.index == 0 and whole and flow.lacks_prompt):
            self._mend(flow, now_ns)
        elif isinstance(message, Final):
            message = told_at(message, have)
            sequence.final = message
            self.ended.beyond(message, have)
            flow.ended.append(message.index)
            self._event(flow, message)
            if flow.done:
                self.ended.keep(flow.request_id, [s.final for s in flow.sequences])
                self._close(flow)
        elif message.offset == have:
            if sequence.first_ns is None and message.token_ids:
                sequence.first_ns = now_ns
            sequence.take(message)
            self._event(flow, message)
        elif message.offset + len(message.token_ids) > have:
            self._mend(flow, now_ns)  # part of it is known; the text cannot be cut at a token

    def _take_prompt(self, flow: Flow, message: PromptLogprobs, now_ns: int) -> None:
        flow.repeat_ns = REPEAT_NS_MIN
        flow.repeat_at_ns = now_ns + flow.repeat_ns
        have = len(flow.prompt_logprobs)
        if message.offset > have:
            self._mend(flow, now_ns)
        else:
            flow.prompt_logprobs += message.entries[have - message.offset :]

    def _event(self, flow: Flow, message: Delta | Final) -> None:
        if flow.keep_events:
            flow.events.append(message)
        if flow.keep_events or isinstance(message, Final):
            flow.on_event()

    def _mend(self, flow: Flow, now_ns: int) -> None:
        if now_ns >= flow.attach_at_ns:
            self._send_attach(flow, now_ns)
        else:
            flow.repeat_at_ns = min(flow.repeat_at_ns, flow.attach_at_ns)

    def _mend_ended(self, ended: Sequence[str], now_ns: int) -> None:
        for request_id in ended:
            flow = self._by_request.get(request_id)
            if flow is not None and flow.accepted and not flow.done:
                self._mend(flow, now_ns)

    def _on_error(self, error: Error, now_ns: int) -> None:
        flow = self._flows.get(error.call)
        if flow is None:
            self._answer(error)
        elif not flow.done:
            self._refused(flow, error, now_ns)

    def _refused(self, flow: Flow, error: Error, now_ns: int) -> None:
        if error.code is Code.UNKNOWN_REQUEST and flow.generate is not None:
            # The node has forgotten it. The stream is a function of the request and its seed.
            if flow.aborting:
                self._fail(flow, Refused(error.code, error.message))
                return
            sampling = msgspec.structs.replace(flow.generate.sampling, seed=flow.seed)
            flow.generate = msgspec.structs.replace(flow.generate, call=0, sampling=sampling)
            flow.accepted = False
            self._send_generate(flow, now_ns)
        elif flow.accepted and error.code is Code.UNKNOWN_REQUEST:
            self._fail(flow, Refused(error.code, flow.forgotten(error.message)))
        elif flow.accepted:
            pass  # of a repeated question; what was accepted ends with its finals
        elif self._waits(flow, error.code):
            wait_ns = error.retry_after_ms * MS or WAIT_OVERLOADED_NS
            flow.repeat_ns = REPEAT_NS_MIN // 2  # doubled when it is repeated
            flow.repeat_at_ns = now_ns + wait_ns
        else:
            self._fail(flow, Refused(error.code, error.message, error.retry_after_ms))

    def _waits(self, flow: Flow, code: Code) -> bool:
        """Whether a refusal is waited out: also where the node took it once and has forgotten it."""
        taken = flow.generate is not None and bool(flow.request_id)
        patient = flow.wait_overloaded or (taken and not flow.aborting)
        return patient and code in (Code.OVERLOADED, Code.NOT_READY)

    def _answer(self, message: Answer | Error) -> None:
        self._abandoned.answered(message.call)
        question = self._questions.pop(message.call, None)
        if question is not None:
            question.reply = message
            question.on_event()

    def _on_life(self, life: int, now_ns: int) -> None:
        known, self._life = self._life, life
        if known not in (0, life):
            self._repeat_all(now_ns)
        elif known == 0:
            # One that did not answer at once may have died before it was known.
            self._repeat_all(now_ns, PING_NS // 2)

    def _repeat_all(self, now_ns: int, older_ns: int = 0) -> None:
        for flow in list(self._open.values()):
            if now_ns - flow.started_ns >= older_ns:
                self._repeat(flow, now_ns)

    def _time_out(self, flow: Flow, now_ns: int) -> None:
        waited_s = (now_ns - flow.started_ns) / 1e9
        got = sum(len(s.token_ids) for s in flow.sequences)
        self._give_up(flow, now_ns)
        self._fail(
            flow, RequestTimeout(f"the request took more than {waited_s:.1f} s, {got} tokens came")
        )

    def _give_up(self, flow: Flow, now_ns: int) -> None:
        """It runs, or may be accepted yet, with nobody to read it."""
        if flow.done:
            return
        if flow.accepted:
            self._abort_unread(flow.request_id, now_ns)
        elif flow.generate is not None:
            self._abandoned.generate(flow.generate.call)

    def _abort_unread(self, request_id: str, now_ns: int) -> None:
        self._last_call += 1
        abort = Abort(self._last_call, request_id)
        self._abandoned.abort(abort, now_ns)
        self._send(abort)

    def _fail(self, flow: Flow, error: PhalanxError) -> None:
        flow.error = error
        self._close(flow)
        flow.on_event()

    def _close(self, flow: Flow) -> None:
        self._open.pop(id(flow), None)
        for call in flow.calls:
            self._flows.pop(call, None)
        if self._by_request.get(flow.request_id) is flow:
            del self._by_request[flow.request_id]
