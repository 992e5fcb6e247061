"""The gateway's decisions: who is served, what is remembered, what everyone is told. Pure.

Events come in (messages with their sender, commits of the journal, topology, time); messages for the
bus and operations for the journal are taken out, and clients are fed through a `send` that says
whether they took it. A request's life: Generate -> checked -> (tokenized) -> journalled -> Accepted
-> placed on a rank -> tokens -> text -> deltas -> one Final a sequence -> kept for re-attachment ->
forgotten. `docs/gateway.md` tells the story with its reasons.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from phalanx.protocol.digests import DIGEST_BYTES
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import (
    Abort,
    Accepted,
    Attach,
    BusFromGateway,
    BusToGateway,
    ClientMessage,
    Decoded,
    Done,
    Encoded,
    EncodeFailed,
    Error,
    Final,
    Generate,
    Health,
    HealthReply,
    HealthUpdate,
    Hello,
    Ping,
    Refusal,
    Replay,
    ScrubReport,
    SeatLoad,
    SequenceList,
    Stats,
    StatsReply,
    Submitted,
    Tokens,
    Welcome,
)
from phalanx.protocol.topology import Topology
from phalanx.services.gateway.admission import (
    RETRY_AFTER_MS,
    Admission,
    Pending,
    Settings,
    digest_of,
)
from phalanx.services.gateway.delivery import Delivery, Send
from phalanx.services.gateway.entries import (
    Accept,
    Again,
    Alive,
    Entry,
    Finish,
    Forget,
    Note,
    Op,
    Recovered,
    Stamp,
)
from phalanx.services.gateway.history import History, Past, check_comparable
from phalanx.services.gateway.kept import Kept
from phalanx.services.gateway.ledger import Ledger
from phalanx.services.gateway.placement import Placement, ids_of
from phalanx.services.gateway.recovery import Recovery, nowhere
from phalanx.services.gateway.replays import Replays, Run
from phalanx.services.gateway.scrub import Scrubber, bits_of, probe_of
from phalanx.services.gateway.streams import End, Request, Stream
from phalanx.services.gateway.texts import EncodeJob, Texts

MS = 1_000_000
TICK_NS = 100 * MS  # how often timers are looked at
REWRITE_NS = 1_000 * MS  # between two times that all of a lost journal is written again
ATTEMPTS_PER_LIFE = 1 << 20  # so that no restarted gateway repeats an attempt of the last one
DELIVERED_NS = 10_000 * MS  # what was told this long ago is not on its way to its reader any more
# Services answer to whichever gateway is there: what the last one asked is no answer to this one.
CALLS_PER_LIFE = 1 << 40


@dataclass(frozen=True, eq=False)
class Noted:
    """Who waits for the log: so many tokens and scores of a stream, or its end as well."""

    stream: Stream
    count: int
    scores: int
    end: bool = False


@dataclass(frozen=True, eq=False)
class Rewritten:
    """Who waits for a new journal to have what was in the one that was lost."""


class Core:
    """See the module. Every `on_...` takes one event; after a batch of them, call `turn`."""

    def __init__(self, settings: Settings, recovered: Sequence[Recovered], now_ns: int) -> None:
        self._settings = settings
        self._model = settings.model
        self._bus: list[tuple[bytes, BusFromGateway]] = []
        self._ledger: Ledger[Pending | Request | Noted | Rewritten] = Ledger()
        self._admission = Admission(settings)
        first_call = settings.incarnation * CALLS_PER_LIFE
        self._texts = Texts(self._to_bus, first_call)
        self._placement = Placement(
            self._to_bus,
            seat_capacity=settings.seat_capacity,
            first_attempt=settings.incarnation * ATTEMPTS_PER_LIFE,
            first_call=first_call,
            eos_token_id=settings.model.eos_token_id,
        )
        self._delivery = Delivery()
        self._kept = Kept(settings.keep_undelivered_s * 1000 * MS, settings.logged)
        self._history = History(
            settings.history_requests, settings.history_bytes, settings.history_ttl_s * 1000 * MS
        )
        self._replays = Replays(settings.draw, self._admission.number)
        self._scrubber = Scrubber(int(settings.scrub_every_s * 1000) * MS)
        self._probe: Entry | None = None  # for the scrubber, of the request that ended last
        self._unlogged: list[Noted | Rewritten] = []  # the disk did not take them yet
        self._rewriting: Rewritten | None = None  # the newest, until it is on disk
        self._journal_lost = False  # and nothing was done about it yet
        self._rewrite_at_ns = now_ns  # not before
        self._requests: dict[str, Request] = {}
        self._abort_calls: dict[str, list[tuple[bytes, int]]] = {}  # to be answered when durable
        self._hellos: dict[str, int] = {}  # newest incarnation of each service
        self._recovery = Recovery(self._placement.seats, now_ns)
        self._fresh: dict[int, Stream] = {}  # with something for the token log
        self._stamps: list[Note] = []  # likewise
        self._fingerprint = ""
        self._epoch = 0
        self._health = HealthUpdate(False, 0, ("the node is starting",))
        self._handing_over = False
        self._overseen = ""  # what is wrong with the supervisor, which says all the rest
        self._closed: End | None = None  # the end of everything that is still open at shutdown
        self._tick_at_ns = self._alive_at_ns = now_ns
        self._accepted = self._refused = self._sequences = 0
        self._finished: dict[str, int] = {}
        for one in recovered:
            self._recover(one, now_ns)

    # ------------------------------------------------------------ what comes out

    def turn(self, now_ns: int) -> None:
        """Once after each batch of events: timers, then everything that goes out in batches."""
        if now_ns >= self._tick_at_ns:
            self._tick_at_ns = now_ns + TICK_NS
            self._tick(now_ns)
        if self._recovery:
            self._end_recovery(now_ns)
        self._placement.dispatch(now_ns)
        for stream in self._placement.take_fallen():
            self._ledger.add(stream.fell())
        for stream in self._placement.take_ended():
            self._produced(stream, now_ns)
        self._texts.dispatch(now_ns)
        self._give_up_jobs(now_ns)

    def take_bus(self) -> list[tuple[bytes, BusFromGateway]]:
        """Messages for services; report those that cannot be sent with `on_unroutable`."""
        taken, self._bus[:] = self._bus[:], []
        return taken

    def take_ops(self) -> tuple[int, list[Op]]:
        """Changes for the journal and the number of the last one, to be told to `on_journal`."""
        return self._ledger.take()

    def take_notes(self) -> list[Note]:
        """News for the token log, to be written before anything is sent that follows from it: with it the
        next gateway goes on where this one was. Where the journal has the tokens there are none."""
        notes: list[Note] = [*self._stamps, *self._placement.take_placed()]
        self._stamps.clear()
        for stream in self._fresh.values():
            notes += stream.note()
        self._fresh.clear()
        return [] if self._settings.logged else notes

    def all_notes(self) -> Iterator[Note]:
        """What a new token log begins with: all but what was delivered a while ago."""
        if self._settings.logged:
            return
        yield Stamp(self._fingerprint)
        for request in self._requests.values():
            delivered_ns = request.delivered_ns
            late = delivered_ns is not None and self._tick_at_ns - delivered_ns > DELIVERED_NS
            if not late or request.being_read:
                for stream in request.streams:
                    yield from stream.note_all()

    def deliver(self, send: Send, now_ns: int) -> None:
        """Feed the clients with whatever they take."""
        for request in self._delivery.deliver(send, now_ns):
            request.delivered_ns = now_ns

    @property
    def lacks(self) -> str:
        """What it cannot promise for now, for people; empty: nothing."""
        if self._rewriting is None:
            return ""
        return (
            "the gateway's journal broke or was deleted; what is open is not in the new one yet, so a death of"
            " the gateway would lose it"
        )

    def take_scrub_report(self) -> ScrubReport | None:
        """For the supervisor, if there is news."""
        return self._scrubber.take_report()

    def wait_ns(self, now_ns: int) -> int:
        """How long the next `turn` may be away, as long as no event comes."""
        again_ns = self._delivery.next_ns()
        due_ns = self._tick_at_ns if again_ns is None else min(self._tick_at_ns, again_ns)
        return max(0, due_ns - now_ns)

    @property
    def idle(self) -> bool:
        """Nothing is open and everything that can be told was told."""
        open_here = self._admission.sequences or not self._replays.idle or self._unlogged
        return not open_here and self.settled

    @property
    def on_disk(self) -> bool:
        """Nothing is on its way to the journal; so after `deliver` everybody has what he takes."""
        return self._ledger.idle

    @property
    def settled(self) -> bool:
        """Nothing is on its way to the journal, and nothing to a client that takes it."""
        return self._ledger.idle and self._delivery.idle

    # ------------------------------------------------------------ clients

    def on_client(self, client: bytes, message: ClientMessage, now_ns: int) -> None:
        match message:
            case Generate():
                if not self._handing_over:
                    self._on_generate(client, message, now_ns)
            case Abort():
                self._on_abort(client, message, now_ns)
            case Attach():
                self._on_attach(client, message, now_ns)
            case Replay():
                self._on_replay(client, message, now_ns)
            case Stats():
                self._delivery.reply(client, self._stats(message.call))
            case Health():
                self._delivery.reply(client, self._health_reply(client, message))

    def on_bad_frame(self, client: bytes, call: int, text: str) -> None:
        """Bytes that are no message: one error, and nothing else happens."""
        self._error(client, call, Refused(Code.BAD_REQUEST, text))

    def _on_generate(self, client: bytes, message: Generate, now_ns: int) -> None:
        try:
            digest = digest_of(message)
            known = self._admission.known(client, message, digest)
            if isinstance(known, Request):
                self._attach(known, client, message.call, now_ns)
            elif known is not None:
                self._admission.asked_again(known, client, message)
            else:
                self._begin(self._admission.enter(client, message, digest))
        except Refused as refused:
            self._error(client, message.call, refused)

    def _begin(self, pending: Pending) -> None:
        message = pending.message
        if message.prompt_token_ids is not None:
            self._tokenized(pending, message.prompt_token_ids)
        else:
            job = EncodeJob(pending.number, message.prompt, message.messages, message.spans)
            self._texts.encode(job)

    def _tokenized(self, pending: Pending, prompt_ids: Sequence[int]) -> None:
        pool_tokens = self._placement.seats.pool_tokens()
        try:
            entry = self._admission.resolve(pending, prompt_ids, pool_tokens, self._fingerprint)
        except Refused as refused:
            self._refuse(pending, refused)
            return
        self._ledger.add(Accept(entry))
        self._ledger.wait(pending)

    def _refuse(self, pending: Pending, refused: Refused) -> None:
        self._admission.refuse(pending)
        self._error(pending.client, pending.message.call, refused)

    def _accept(self, pending: Pending, now_ns: int) -> None:
        """The journal has it: from here on it ends with one Final a sequence, whatever happens."""
        request = self._admission.accept(pending)
        self._requests[request.request_id] = request
        self._accepted += 1
        self._sequences += len(request.streams)
        for stream in request.streams:
            stream.logged = 0 if self._settings.logged else None
        self._attach(request, pending.client, pending.message.call, now_ns)
        for stream in request.streams:
            self._placement.enqueue(stream)
        if self._closed is not None:
            self._abort_request(request, self._closed, now_ns)

    def _attach(
        self,
        request: Request,
        client: bytes,
        call: int,
        now_ns: int,
        offsets: Sequence[int] = (),
        digests: Sequence[bytes] = (),
        prompt_offset: int = 0,
    ) -> None:
        seed = request.entry.sampling.seed
        assert seed is not None
        entry = request.entry
        scored = entry.sampling.prompt_logprobs is not None
        accepted = Accepted(call, entry.request_id, seed, entry.prompt_tokens, entry.n, scored)
        self._delivery.reply(client, accepted)
        request.attach(client, offsets, digests, prompt_offset)
        self._revive(request)
        self._compare(request, now_ns)
        self._delivery.offer(request)

    def _compare(self, request: Request, now_ns: int) -> None:
        """A reader whose tokens are not the beginning of its stream gets an error, never the rest."""
        view = request.view
        for stream in request.strangers():
            assert view is not None
            cursor = view.cursors[stream.index]
            text = (
                f"the {cursor} tokens that the client has are not the first {cursor} of this stream:"
                " it is not continued; send the request again"
            )
            final = stream.final_of(End("error", Code.STREAM_CHANGED, text), cursor)
            view.ends[stream.index] = final
            if stream.final is None:
                self._end_with(request, stream, final, now_ns)

    def _on_attach(self, client: bytes, message: Attach, now_ns: int) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            self._error(client, message.call, _unknown(message.request_id))
        elif (
            len(message.offsets) > request.entry.n
            or any(at < 0 for at in message.offsets)
            or not 0 <= message.prompt_offset <= request.entry.prompt_tokens
        ):
            text = (
                f"offsets are {message.offsets} and prompt_offset is {message.prompt_offset}; the"
                f" request has {request.entry.n} sequences and {request.entry.prompt_tokens} prompt"
                " tokens"
            )
            self._error(client, message.call, Refused(Code.BAD_REQUEST, text))
        elif len(message.digests) > len(message.offsets) or not all(
            len(digest) in (0, DIGEST_BYTES) for digest in message.digests
        ):
            text = f"digests go with offsets, each of {DIGEST_BYTES} bytes or empty"
            self._error(client, message.call, Refused(Code.BAD_REQUEST, text))
        else:
            self._attach(
                request,
                client,
                message.call,
                now_ns,
                message.offsets,
                message.digests,
                message.prompt_offset,
            )

    def _on_abort(self, client: bytes, message: Abort, now_ns: int) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            self._error(client, message.call, _unknown(message.request_id))
            return
        if request.finished and not request.held:
            self._delivery.reply(client, Done(message.call))
            return
        self._abort_calls.setdefault(request.request_id, []).append((client, message.call))
        self._abort_request(request, End("abort"), now_ns)

    def _abort_request(self, request: Request, end: End, now_ns: int) -> None:
        """End what is open. Clients hear of it once the journal has it: it never comes back to life."""
        ended = [stream for stream in request.streams if stream.final is None]
        for stream in ended:
            final = stream.final_of(end, _reached(request, stream))
            self._end_with(request, stream, final, now_ns)
        if any(stream.final is not stream.recorded for stream in ended):
            request.held = True
            self._ledger.wait(request)
        elif ended:  # what was only told again: the journal has its end already
            self._tell_abort(request)

    def _stats(self, call: int) -> StatsReply:
        return StatsReply(
            call,
            self._settings.incarnation,
            len(self._admission.pending) + len(self._requests) - len(self._kept),
            self._accepted,
            self._refused,
            dict(self._finished),
            self._placement.seats.loads(),
            self._sequences,
            self._admission.sequences - sum(p.message.n for p in self._admission.pending.values()),
        )

    def _health_reply(self, client: bytes, asked: Health) -> HealthReply:
        health = self._health
        draining = self._admission.draining
        reasons = health.reasons
        if draining:
            reasons += ("the node is shutting down",)
        if self.lacks and self.lacks not in reasons:  # the supervisor was told, and tells it again
            reasons += (self.lacks,)
        if self._overseen:
            reasons += (self._overseen,)
        healthy = health.healthy and not (draining or self.lacks or self._overseen)
        ended = tuple(quiet for quiet in asked.quiet if self._told_all(client, quiet))
        incarnation, model = self._settings.incarnation, self._model.name
        return HealthReply(asked.call, healthy, incarnation, self._epoch, model, reasons, ended)

    def _told_all(self, client: bytes, request_id: str) -> bool:
        """Whether this client got everything already: messages to it keep their order, so one that asks
        nevertheless has lost some."""
        request = self._requests.get(request_id)
        if request is None:
            return True
        view = request.view
        return view is not None and view.client == client and all(view.finals)

    def _error(self, client: bytes, call: int, refused: Refused) -> None:
        self._refused += 1
        error = Error(call, refused.code, refused.text, refused.retry_after_ms)
        self._delivery.reply(client, error)

    # ------------------------------------------------------------ services

    def on_bus(self, peer: bytes, message: BusToGateway, now_ns: int) -> None:
        if self._handing_over:
            return
        if isinstance(message, Hello):
            self._on_hello(peer, message, now_ns)
            return
        if not self._known(peer, now_ns) or isinstance(message, Ping):
            # A stranger learns from this that there is a new gateway, and introduces itself.
            self._to_bus(peer, Welcome(self._settings.incarnation))
        match message:
            case Encoded() | EncodeFailed():
                self._on_encoded(peer, message)
            case Decoded():
                for stream, item, flush in self._texts.on_decoded(peer, message):
                    if stream.final is None:
                        stream.show(item, flush)
                        self._shown(stream, now_ns)
            case Submitted():
                self._placement.on_submitted(peer, message, now_ns)
            case Refusal():
                hopeless = self._placement.on_refusal(peer, message, now_ns)
                if hopeless is not None:
                    self._fail(*hopeless, now_ns)
            case Done():
                self._placement.on_done(peer, message.call)
            case Tokens():
                for stream in self._placement.on_tokens(peer, message, self._find, now_ns):
                    self._produced(stream, now_ns)
            case SequenceList():
                self._on_list(peer, message, now_ns)
            case SeatLoad():
                self._placement.on_load(peer, message, self._find)

    def on_unroutable(self, peer: bytes, message: BusFromGateway, now_ns: int) -> None:
        """The message could not be sent: its receiver is gone."""
        # Commands to schedulers are repeated anyway, and the topology tells when one is gone.
        self._texts.lost(peer, now_ns)

    def on_topology(self, topology: Topology, now_ns: int) -> None:
        self._epoch = max(self._epoch, topology.epoch)
        if topology.fingerprint and topology.fingerprint != self._fingerprint:
            self._fingerprint = topology.fingerprint
            self._ledger.add(Stamp(topology.fingerprint))
            self._stamps.append(Stamp(topology.fingerprint))
        self._placement.on_topology(topology)
        self._recovery.heard()

    def on_health(self, update: HealthUpdate) -> None:
        self._health = update
        self._epoch = max(self._epoch, update.epoch)

    def on_supervisor(self, wrong: str) -> None:
        """What is wrong with the supervisor itself, for people; empty: nothing."""
        self._overseen = wrong

    def _on_hello(self, peer: bytes, hello: Hello, now_ns: int) -> None:
        self._to_bus(peer, Welcome(self._settings.incarnation))
        if hello.incarnation < self._hellos.get(hello.name, 0):
            return  # a late word of a dead one
        self._hellos[hello.name] = hello.incarnation
        if hello.kind == "tokenizer":
            self._texts.hello(peer, hello.name, hello.incarnation, now_ns)
        else:
            self._placement.hello(peer, hello.seat, hello.incarnation, now_ns)

    def _known(self, peer: bytes, now_ns: int) -> bool:
        """Whether its Hello came. If not, its name is as good: a Hello may be lost."""
        if self._texts.knows(peer) or self._placement.seats.of(peer) is not None:
            return True
        hello = introduction(peer)
        if hello is not None:
            self._on_hello(peer, hello, now_ns)
        return False

    def _on_encoded(self, peer: bytes, message: Encoded | EncodeFailed) -> None:
        job = self._texts.on_encoded(peer, message)
        pending = self._admission.pending.get(job.key) if job is not None else None
        if pending is None:
            return
        if isinstance(message, EncodeFailed):
            self._refuse(pending, Refused(message.code, message.message))
        else:
            self._tokenized(pending, ids_of(message.token_ids))

    def _on_list(self, peer: bytes, message: SequenceList, now_ns: int) -> None:
        adopted = self._placement.on_list(
            peer, message, self._find, lambda stream: stream in self._recovery, now_ns
        )
        for stream in adopted:
            self._recovery.discard(stream)
            self._produced(stream, now_ns)
        self._recovery.heard()

    def _find(self, request_id: str, index: int) -> Stream | None:
        request = self._requests.get(request_id)
        if request is None:
            return self._replays.find(request_id, index)
        if not 0 <= index < request.entry.n:
            return None
        return request.streams[index]

    # ------------------------------------------------------------ streams

    def _produced(self, stream: Stream, now_ns: int) -> None:
        if stream.silent:
            self._replayed(stream, now_ns)
            return
        self._note(stream)
        self._texts.decode(stream)
        if stream.sampling.prompt_logprobs is not None:
            self._delivery.offer(self._requests[stream.request_id])

    def _note(self, stream: Stream) -> None:
        """Where a stream could not be made again, its tokens are told once they are on disk."""
        if stream.logged is None:
            self._fresh[stream.number] = stream
        elif fresh := stream.note():
            for op in fresh:
                self._ledger.add(op)
            self._ledger.wait(Noted(stream, stream.noted, stream.scores_noted))

    def _logged(self, noted: Noted) -> None:
        """What was noted is on disk."""
        stream = noted.stream
        assert stream.logged is not None
        stream.logged = max(stream.logged, noted.count)
        stream.scores_logged = max(stream.scores_logged, noted.scores)
        stream.end_logged |= noted.end
        if (request := self._requests.get(stream.request_id)) is not None:
            self._delivery.offer(request)

    def _log_again(self) -> None:
        """See `on_journal`: here comes something."""
        unlogged, self._unlogged = self._unlogged, []
        if unlogged:
            self._ledger.add(Alive())
        for waiter in unlogged:
            self._ledger.wait(waiter)

    def _shown(self, stream: Stream, now_ns: int) -> None:
        """The stream has new text, or its end."""
        request = self._requests[stream.request_id]
        if stream.final is None:
            self._texts.decode(stream)
        elif stream.recorded is not None and stream.final is not stream.recorded:
            self._end_with(request, stream, stream.final, now_ns)
        else:
            # A scheduler that has not ended it by itself is told to: it was a stop string.
            self._placement.release(stream, None if stream.end is not None else "stop")
            self._ended(stream, now_ns)
        self._compare(request, now_ns)
        self._delivery.offer(request)

    def _fail(self, stream: Stream, end: End, now_ns: int) -> None:
        """The stream ends with an error at what was shown of it."""
        if stream.silent:
            stream.end = end
            self._replayed(stream, now_ns)
            return
        request = self._requests[stream.request_id]
        final = stream.final_of(end, max(len(stream.shown), _reached(request, stream)))
        self._end_with(request, stream, final, now_ns)
        self._delivery.offer(request)

    def _end_with(self, request: Request, stream: Stream, final: Final, now_ns: int) -> None:
        """End it; but what ended before and is only told again stays as it ended: `final` is for the
        one who reads it now."""
        if stream.recorded is not None and request.view is not None:
            request.view.ends[stream.index] = final
            request.view.proofs.pop(stream.index, None)
        stream.final = stream.recorded or final
        self._placement.release(stream, "abort")
        self._ended(stream, now_ns)

    def _ended(self, stream: Stream, now_ns: int) -> None:
        assert stream.final is not None
        self._recovery.discard(stream)
        request = self._requests[stream.request_id]
        self._note(stream)
        if stream.final is not stream.recorded:
            self._ledger.add(Finish(stream.final))
            if stream.logged is not None:
                self._ledger.wait(Noted(stream, stream.noted, stream.scores_noted, end=True))
        if stream.recorded is None:
            reason = stream.final.finish_reason
            self._finished[reason] = self._finished.get(reason, 0) + 1
            self._admission.sequence_ended()
        if request.finished:
            self._keep(request, now_ns)
            self._note_probe(request)
        self._compare(request, now_ns)

    # ------------------------------------------------------------ finished requests

    def _keep(self, request: Request, now_ns: int) -> None:
        if request.finished_ns is None:
            self._admission.request_ended(request)
        self._kept.keep(request, now_ns)

    def _forget(self, request: Request, now_ns: int) -> None:
        self._history.add(Past.of(request), now_ns)
        self._kept.forget(request)
        self._admission.forget(request)
        del self._requests[request.request_id]
        for stream in request.streams:
            self._placement.release(stream, "abort")
        self._ledger.add(Forget(request.request_id))

    def _revive(self, request: Request) -> None:
        """Produce again what a reader still wants of sequences that ended in an earlier life."""
        for stream in request.streams:
            final = stream.final
            if final is None or not request.missed(stream):
                continue
            if stream.logged is not None:
                self._tell_from_log(request, stream, final)
                continue
            stream.recorded, stream.final = final, None
            stream.unshow()
            stream.sampling = msgspec.structs.replace(stream.sampling, max_tokens=final.offset)
            if stream.scored and len(stream.tokens) >= final.offset > 0:
                self._texts.decode(stream)  # the token log had all of it
            else:
                self._recovery.add_unplaced(stream)

    def _tell_from_log(self, request: Request, stream: Stream, final: Final) -> None:
        """Nothing is made again here: the text of the tokens in the log is."""
        if len(stream.tokens) < final.offset:
            missing = f"{len(stream.tokens)} of its {final.offset} tokens"
        elif len(stream.shown) >= final.offset:
            wanted = stream.entry.prompt_tokens - 1
            missing = f"{stream.num_scores} of the {wanted} log-probabilities of its prompt"
        else:
            stream.recorded, stream.final = final, None
            self._texts.decode(stream)
            return
        text = f"the log has {missing}: they cannot be told again"
        view = request.view
        assert view is not None
        end = End("error", Code.INTERNAL, text)
        view.ends[stream.index] = stream.final_of(end, view.cursors[stream.index])

    # ------------------------------------------------------------ replays

    def _on_replay(self, client: bytes, message: Replay, now_ns: int) -> None:
        if self._replays.asked(client, message.call):
            return  # the answer comes when it is done
        try:
            if self._admission.draining:
                raise Refused(Code.SHUTDOWN, "the node is shutting down and runs nothing again")
            past = self._past(message.request_id)
            if past.entry.model != self._model.name:
                text = (
                    f"it was served by the model {past.entry.model!r}, this is {self._model.name!r}"
                )
                raise Refused(Code.UNKNOWN_MODEL, text)
            check_comparable(past)
            run = self._replays.start(past, message.seat)
        except Refused as refused:
            self._error(client, message.call, refused)
            return
        run.askers.append((client, message.call))
        for stream in run.streams:
            self._placement.enqueue(stream)
        self._finish_replay(run, now_ns)  # of nothing, if no token was delivered

    def _past(self, request_id: str) -> Past:
        """The ended request of this id, or the only one whose id begins so. Raises Refused."""
        known = self._requests.get(request_id)
        mine = [known] if known is not None else []
        if not mine and request_id:
            mine = [r for other, r in self._requests.items() if other.startswith(request_id)]
        past = [Past.of(request) for request in mine if request.ended]
        past += [] if known is not None else self._history.find(request_id)
        if request_id and len(past) == 1 and len(mine) <= 1:
            return past[0]
        if mine and not past:
            text = f"the request {request_id!r} has not ended yet: there is nothing to compare with"
            raise Refused(Code.NOT_READY, text)
        if past:
            raise Refused(Code.BAD_REQUEST, f"more than one request begins with {request_id!r}")
        text = (
            f"no ended request {request_id!r} is kept; kept are {self._history.describe()}"
            " (gateway.history_* in the configuration)"
        )
        raise Refused(Code.UNKNOWN_REQUEST, text)

    def _replayed(self, stream: Stream, now_ns: int) -> None:
        """A stream of a replay has new tokens, or its end."""
        run = self._replays.of(stream)
        if run is not None and stream.end is not None:
            self._finish_replay(run, now_ns)

    def _finish_replay(self, run: Run, now_ns: int) -> None:
        if not run.done:
            return
        self._end_replay(run)
        if run.past is None:
            self._scrubbed(run.streams[0], now_ns)
        for client, call in run.askers:
            self._delivery.reply(client, run.report(call, self._fingerprint))

    def _end_replay(self, run: Run) -> None:
        self._replays.end(run)
        for stream in run.streams:
            self._placement.release(stream, "abort")
            stream.end = stream.end or End("abort")  # nor is it placed, if it waits

    # ------------------------------------------------------------ the scrubber

    def _note_probe(self, request: Request) -> None:
        if self._settings.scrub_every_s > 0:
            self._probe = probe_of(request, self._model.vocab_size) or self._probe

    def _scrub(self, now_ns: int) -> None:
        """Compare two ranks, if it is time and there is something to compare them with."""
        seats = self._placement.seats
        self._scrubber.forget(seats.worker_incarnations())
        if not self._scrubber.due(now_ns):
            return
        usable = seats.usable(now_ns)
        if self._probe is None or len(usable) < 2 or self._admission.draining:
            self._scrubber.put_off(now_ns)
            return
        for seat in self._scrubber.begin(self._probe, usable):
            self._placement.enqueue(self._replays.probe(self._probe, seat))

    def _scrubbed(self, stream: Stream, now_ns: int) -> None:
        """A rank has answered."""
        bits, seats = bits_of(stream), self._placement.seats
        if bits is None:
            self._scrubber.give_up(now_ns)
            for run in self._replays:
                if run.past is None:
                    self._end_replay(run)
            return
        worker = seats.get(stream.seat).worker_incarnation
        more = self._scrubber.on_answer(stream.seat, worker, bits, seats.usable(now_ns), now_ns)
        if more is not None:
            self._placement.enqueue(self._replays.probe(stream.entry, more))

    # ------------------------------------------------------------ journal

    def on_journal(self, done: int, failure: str, now_ns: int) -> None:
        """The changes up to number `done` are durable, or could not be made so."""
        for waiter in self._ledger.settle(done):
            if isinstance(waiter, Request):
                self._tell_abort(waiter)
            elif isinstance(waiter, Noted | Rewritten) and failure:
                self._unlogged.append(waiter)  # the journal tries again with whatever comes next
            elif isinstance(waiter, Noted):
                self._logged(waiter)
            elif isinstance(waiter, Rewritten):
                self._rewriting = None if waiter is self._rewriting else self._rewriting
            elif failure:
                text = f"the journal cannot be written ({failure}), so no request can be promised"
                self._refuse(waiter, Refused(Code.OVERLOADED, text, RETRY_AFTER_MS))
            else:
                self._accept(waiter, now_ns)

    def on_journal_lost(self, now_ns: int) -> None:
        """Its file broke or was deleted, and another takes its place: what is known here is written once more."""
        self._journal_lost, self._rewriting = True, Rewritten()
        self._rewrite(now_ns)

    def _rewrite(self, now_ns: int) -> None:
        if not self._journal_lost or self._rewriting is None or now_ns < self._rewrite_at_ns:
            return
        self._journal_lost, self._rewrite_at_ns = False, now_ns + REWRITE_NS
        for request in self._requests.values():
            told = request.entry.fingerprint or self._fingerprint
            self._ledger.add(Again(msgspec.structs.replace(request.entry, fingerprint=told)))
            for stream in request.streams:
                if stream.logged is not None:
                    stream.noted = stream.scores_noted = 0
                    self._note(stream)
                if (final := stream.recorded or stream.final) is not None:
                    self._ledger.add(Finish(final))
        self._ledger.wait(self._rewriting)

    def _tell_abort(self, request: Request) -> None:
        """An abort that could not be journalled is told as well: the request has ended here."""
        if self._ledger.awaited_by(request):
            return
        request.held = False
        self._delivery.offer(request)
        for client, call in self._abort_calls.pop(request.request_id, ()):
            self._delivery.reply(client, Done(call))

    def _recover(self, one: Recovered, now_ns: int) -> None:
        request = self._admission.recover(one.entry)
        self._requests[request.request_id] = request
        for fell in one.falls:
            request.streams[fell.index].fell_before(fell)
        for stream in request.streams:
            stream.final = one.finals.get(stream.index)
            if self._settings.logged:
                stream.recover(one.produced, one.scored if stream.index == 0 else ())
                stream.end_logged = stream.final is not None
            else:
                stream.recall(one.produced, one.scored if stream.index == 0 else ())
                if one.placed is not None:
                    stream.placed = one.placed.get(stream.index, nowhere(stream))
            if stream.final is None:
                self._sequences += 1
                self._recovery.add(stream)
                self._texts.decode(stream)  # what the log has of it
            else:
                self._admission.sequence_ended()
        if request.finished:
            self._keep(request, now_ns)

    def _end_recovery(self, now_ns: int) -> None:
        """What no scheduler runs any more is run anew: the same tokens, by construction."""
        for stream in self._recovery.free(now_ns):
            told = stream.entry.fingerprint
            if told and not self._fingerprint:
                continue  # nothing runs yet that could tell whether the tokens would be the same
            self._recovery.discard(stream)
            if told in ("", self._fingerprint) and stream.entry.model == self._model.name:
                self._placement.enqueue(stream, resumed=True)
            else:
                text = (
                    f"accepted by the model {stream.entry.model!r} with numerics {told!r}, the node"
                    f" now runs {self._model.name!r} with {self._fingerprint!r}: the rest of the"
                    " stream would not fit its beginning; send the request again"
                )
                self._fail(stream, End("error", Code.INTERNAL, text), now_ns)

    # ------------------------------------------------------------ time

    def _tick(self, now_ns: int) -> None:
        self._placement.tick(now_ns)
        for seat in self._placement.seats.unheard():
            # Whoever knew another gateway introduces itself; else an idle one would not for a second.
            peer = b"scheduler-%d#%d" % (seat.number, seat.incarnation)
            self._to_bus(peer, Welcome(self._settings.incarnation))
        self._rewrite(now_ns)
        self._log_again()
        self._texts.tick(now_ns)
        for peer in self._texts.busy_peers():
            # Harmless to the living; that it cannot be sent tells that a tokenizer is gone.
            self._to_bus(peer, Welcome(self._settings.incarnation))
        for client, stalled_ms in self._delivery.given_up(now_ns):
            self._give_up_client(client, stalled_ms, now_ns)
        for request in self._kept.old(now_ns):
            self._forget(request, now_ns)
        self._history.expire(now_ns)
        self._scrub(now_ns)
        if now_ns >= self._alive_at_ns and self._admission.sequences:
            self._alive_at_ns = now_ns + self._settings.keep_undelivered_s * 1000 * MS // 4
            self._ledger.add(Alive())

    def _give_up_client(self, client: bytes, stalled_ms: int, now_ns: int) -> None:
        end = End("abort", Code.SLOW_CLIENT, f"the client took nothing for {stalled_ms} ms")
        for request in list(self._requests.values()):
            if request.view is not None and request.view.client == client:
                request.view = None
                self._abort_request(request, end, now_ns)

    def _give_up_jobs(self, now_ns: int) -> None:
        failed, self._texts.failed[:] = self._texts.failed[:], []
        for job in failed:
            text = "the tokenizers died over this text or did not answer; it is not tried again"
            if isinstance(job, Stream):
                self._fail(job, End("error", Code.INTERNAL, text), now_ns)
            elif (pending := self._admission.pending.get(job.key)) is not None:
                self._refuse(pending, Refused(Code.INTERNAL, text))

    # ------------------------------------------------------------ the end of the node

    def drain(self) -> None:
        """No new requests from here on; those that run go on."""
        self._admission.draining = True

    def hand_over(self) -> None:
        """A successor is to go on: take nothing new, so that soon nothing is on its way. Clients ask it again, by
        the keys of what was not accepted; schedulers have what is missing."""
        self._handing_over = True

    def finish_all(self, now_ns: int) -> None:
        """The time to drain is over: everything that still runs ends, and its client is told why."""
        text = "shutdown: the node was stopped, and the time to finish what ran is over"
        self._closed = End("abort", Code.SHUTDOWN, text)
        for pending in list(self._admission.pending.values()):
            if pending.entry is None:
                self._refuse(pending, Refused(Code.SHUTDOWN, text))
        for request in list(self._requests.values()):
            self._abort_request(request, self._closed, now_ns)
        for run in self._replays:
            self._end_replay(run)
            for client, call in run.askers:
                self._error(client, call, Refused(Code.SHUTDOWN, text))

    def _to_bus(self, peer: bytes, message: BusFromGateway) -> None:
        self._bus.append((peer, message))


def introduction(peer: bytes) -> Hello | None:
    """What the bus identity NAME-NUMBER#INCARNATION of a service says of it."""
    match = re.fullmatch(rb"(tokenizer|scheduler)-(\d{1,9})#(\d{1,9})", peer)
    if match is None:
        return None
    kind, number, incarnation = match[1].decode(), int(match[2]), int(match[3])
    if kind == "scheduler":
        return Hello(f"scheduler-{number}", "scheduler", incarnation, number)
    return Hello(f"tokenizer-{number}", "tokenizer", incarnation)


def _reached(request: Request, stream: Stream) -> int:
    """How many of its tokens the stream's reader has; without one, the most that any reader got."""
    return request.view.cursors[stream.index] if request.view is not None else stream.sent


def _unknown(request_id: str) -> Refused:
    return Refused(
        Code.UNKNOWN_REQUEST, f"no request {request_id!r} is known; it may have ended long ago"
    )
