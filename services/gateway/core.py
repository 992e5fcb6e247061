"""The gateway's decisions: who is served, what is remembered, what everyone is told. Pure.

Events come in (messages with their sender, commits of the journal, topology, time); messages for the
bus and operations for the journal are taken out, and clients are fed through a `send` that says
whether they took it. A request's life: Generate -> checked -> (tokenized) -> journalled -> Accepted
-> placed on a rank -> tokens -> text -> deltas -> one Final a sequence -> kept for re-attachment ->
forgotten. `docs/gateway.md` tells the story with its reasons.

Here is who hears of which event, and in which order. The way in is decided in `intake.py`, the life of what was
accepted in `lives.py`, where it runs in `placement.py`, what counts of what is said of it there in `attempts.py`, what a gateway
before this one left in `recovery.py`.
"""

from collections.abc import Iterator, Sequence

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import (
    Abort,
    Attach,
    BusFromGateway,
    BusToGateway,
    ClientMessage,
    Decoded,
    Done,
    Encoded,
    EncodeFailed,
    Generate,
    Health,
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
)
from phalanx.protocol.topology import Topology
from phalanx.services.gateway.admission import Admission, Pending, Settings
from phalanx.services.gateway.delivery import Delivery, Send
from phalanx.services.gateway.entries import Note, Op, Recovered
from phalanx.services.gateway.health import NodeHealth
from phalanx.services.gateway.intake import Intake
from phalanx.services.gateway.lives import Lives
from phalanx.services.gateway.logs import Logs
from phalanx.services.gateway.peers import Peers
from phalanx.services.gateway.placement import Placement
from phalanx.services.gateway.recovery import Recovery
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.reruns import Reruns
from phalanx.services.gateway.streams import End, Stream
from phalanx.services.gateway.texts import Texts

MS = 1_000_000
TICK_NS = 100 * MS  # how often timers are looked at
ATTEMPTS_PER_LIFE = 1 << 20  # so that no restarted gateway repeats an attempt of the last one
# Services answer to whichever gateway is there: what the last one asked is no answer to this one.
CALLS_PER_LIFE = 1 << 40
# A gateway that drains waits so long since its start for those who read from the one before it: a client asks a
# silent gateway for its health every 200 ms, and every second after a while.
READERS_NS = 2_000 * MS


class Core:
    """See the module. Every `on_...` takes one event; after a batch of them, call `turn`."""

    def __init__(self, settings: Settings, recovered: Sequence[Recovered], now_ns: int) -> None:
        self._settings = settings
        self._bus: list[tuple[bytes, BusFromGateway]] = []
        first_call = settings.incarnation * CALLS_PER_LIFE
        self._admission = Admission(settings)
        self._texts = Texts(self._to_bus, first_call)
        self._placement = Placement(
            self._to_bus,
            seat_capacity=settings.seat_capacity,
            first_attempt=settings.incarnation * ATTEMPTS_PER_LIFE,
            first_call=first_call,
            eos_token_id=settings.model.eos_token_id,
        )
        self._attempts = self._placement.attempts
        self._delivery = Delivery()
        self._logs = Logs(settings.logged, now_ns)
        seats = self._placement.seats
        self._peers = Peers(self._texts, self._placement, self._to_bus, settings.incarnation)
        self._health = NodeHealth(settings.life, settings.model.name)
        self._recovery = Recovery(seats, self._texts, settings.model.name, now_ns)
        self._intake = Intake(
            self._admission, self._texts, self._logs, self._delivery, seats.pool_tokens
        )
        self._reruns = Reruns(
            settings, self._admission, self._placement, self._delivery, self._logs
        )
        self._lives = Lives(
            settings,
            self._admission,
            self._placement,
            self._texts,
            self._recovery,
            self._logs,
            self._delivery,
            finished=self._reruns.finished,
        )
        self._handing_over = False
        self._tick_at_ns = self._alive_at_ns = now_ns
        self.readers_until_ns = now_ns + READERS_NS
        for one in recovered:
            self._lives.recover(one, now_ns)

    # ------------------------------------------------------------ what comes out

    def turn(self, now_ns: int) -> None:
        """Once after each batch of events: timers, then everything that goes out in batches."""
        if now_ns >= self._tick_at_ns:
            self._tick_at_ns = now_ns + TICK_NS
            self._tick(now_ns)
        for stream, end in self._recovery.free(self._logs.fingerprint, now_ns):
            if end is None:
                self._placement.enqueue(stream, resumed=True)
            else:
                self._lives.fail(stream, end, now_ns)
        self._placement.dispatch(now_ns)
        for stream in self._placement.take_fallen():
            self._logs.fell(stream)
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
        return self._logs.take_ops()

    def take_notes(self) -> list[Note]:
        """News for the token log, to be written before anything is sent that follows from it: with it the
        next gateway goes on where this one was. Where the journal has the tokens there are none."""
        return self._logs.take_notes(self._attempts.take_placed())

    def all_notes(self) -> Iterator[Note]:
        """What a new token log begins with. It may be taken a little at a time, over many turns; `take_notes` has
        what is new meanwhile."""
        return self._logs.all_notes(list(self._lives.requests.values()), self._tick_at_ns)

    def deliver(self, send: Send, now_ns: int) -> None:
        """Feed the clients with whatever they take."""
        for request in self._delivery.deliver(send, now_ns):
            request.delivered_ns = now_ns

    @property
    def lacks(self) -> str:
        """What it cannot promise for now, for people; empty: nothing."""
        return self._logs.lacks

    def take_scrub_report(self) -> ScrubReport | None:
        """For the supervisor, if there is news."""
        return self._reruns.take_scrub_report()

    def wait_ns(self, now_ns: int) -> int:
        """How long the next `turn` may be away, as long as no event comes."""
        again_ns = self._delivery.next_ns()
        due_ns = self._tick_at_ns if again_ns is None else min(self._tick_at_ns, again_ns)
        return max(0, due_ns - now_ns)

    @property
    def idle(self) -> bool:
        """Nothing is open, or made again for a reader, and everything that can be told was told."""
        open_here = self._admission.sequences or not self._reruns.idle
        told = not open_here and self._logs.idle and self._delivery.idle
        return told and all(request.finished for request in self._lives.requests.values())

    def drained(self, now_ns: int) -> bool:
        """Idle, and nobody is on the way here who read from the gateway before this one."""
        return self.idle and (
            now_ns >= self.readers_until_ns
            or all(request.view is not None for request in self._lives.requests.values())
        )

    @property
    def on_disk(self) -> bool:
        """Nothing is on its way to the journal, nor lacks there; so after `deliver` everybody has what he takes."""
        return self._logs.on_disk

    # ------------------------------------------------------------ clients

    def on_client(self, client: bytes, message: ClientMessage, now_ns: int) -> None:
        match message:
            case Generate():
                if not self._handing_over:
                    self._on_generate(client, message, now_ns)
            case Abort():
                self._lives.on_abort(client, message, now_ns)
            case Attach():
                self._lives.on_attach(client, message, now_ns)
            case Replay():
                self._reruns.on_replay(client, message, self._lives.requests, now_ns)
            case Stats():
                self._delivery.reply(client, self._stats(message.call))
            case Health():
                quiet = message.quiet
                ended = tuple(one for one in quiet if self._lives.told_all(client, one))
                draining, lacks = self._admission.draining, self._logs.lacks
                reply = self._health.reply(message.call, draining, lacks, ended)
                self._delivery.reply(client, reply)

    def on_bad_frame(self, client: bytes, call: int, text: str) -> None:
        """Bytes that are no message: one error, and nothing else happens."""
        self._delivery.refuse(client, call, Refused(Code.BAD_REQUEST, text))

    def _on_generate(self, client: bytes, message: Generate, now_ns: int) -> None:
        known = self._intake.on_generate(client, message)
        if known is not None:
            self._lives.attach(known, client, message.call, now_ns)

    def _stats(self, call: int) -> StatsReply:
        pending = self._admission.pending.values()
        return StatsReply(
            call,
            self._settings.incarnation,
            len(pending) + self._lives.num_open,
            self._lives.num_accepted,
            self._delivery.refused,
            dict(self._lives.num_ended),
            self._placement.seats.loads(),
            self._lives.num_sequences,
            self._admission.sequences - sum(one.message.n for one in pending),
            self._texts.num_stale + self._attempts.num_stale,
        )

    # ------------------------------------------------------------ services

    def on_bus(self, peer: bytes, message: BusToGateway, now_ns: int) -> None:
        if self._handing_over:
            return
        if isinstance(message, Hello):
            self._peers.hello(peer, message, now_ns)
            return
        if not self._peers.known(peer, now_ns) or isinstance(message, Ping):
            self._peers.welcome(peer)
        match message:
            case Encoded() | EncodeFailed():
                self._intake.on_encoded(peer, message)
            case Decoded():
                for stream, item, flush in self._texts.on_decoded(peer, message):
                    self._lives.on_decoded(stream, item, flush, now_ns)
            case Submitted():
                self._attempts.on_submitted(peer, message, now_ns)
            case Refusal():
                hopeless = self._attempts.on_refusal(peer, message, now_ns)
                if hopeless is not None:
                    self._fail(*hopeless, now_ns)
            case Done():
                self._attempts.on_done(peer, message.call)
            case Tokens():
                for stream in self._attempts.on_tokens(peer, message, self._find, now_ns):
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
        self._health.on_epoch(topology.epoch)
        self._logs.stamp(topology.fingerprint)
        self._placement.on_topology(topology, now_ns)
        self._recovery.heard()

    def on_health(self, update: HealthUpdate) -> None:
        self._health.on_health(update)

    def on_supervisor(self, wrong: str) -> None:
        """What is wrong with the supervisor itself, for people; empty: nothing."""
        self._health.on_supervisor(wrong)

    def _on_list(self, peer: bytes, message: SequenceList, now_ns: int) -> None:
        adopted = self._attempts.on_list(
            peer, message, self._find, lambda stream: stream in self._recovery, now_ns
        )
        for stream in adopted:
            self._recovery.discard(stream)
            self._placement.adopted(stream)
            self._produced(stream, now_ns)
        self._recovery.heard()

    def _find(self, request_id: str, index: int) -> Stream | None:
        found = self._lives.find(request_id, index)
        return found if found is not None else self._reruns.find(request_id, index)

    def _produced(self, stream: Stream, now_ns: int) -> None:
        """The stream has new tokens, or its end."""
        if stream.silent:
            self._reruns.produced(stream, now_ns)
        else:
            self._lives.produced(stream)

    def _fail(self, stream: Stream, end: End, now_ns: int) -> None:
        if stream.silent:
            self._reruns.fail(stream, end, now_ns)
        else:
            self._lives.fail(stream, end, now_ns)

    # ------------------------------------------------------------ journal

    def on_journal(self, done: int, failure: str, now_ns: int) -> None:
        """The changes up to number `done` are durable, or could not be made so."""
        for waiter in self._logs.settle(done, failure):
            if isinstance(waiter, Pending):
                request = self._intake.on_journalled(waiter, failure)
                if request is not None:
                    self._lives.accept(request, waiter.client, waiter.message.call, now_ns)
            elif isinstance(waiter, Request):
                self._lives.on_journalled(waiter)
            else:
                self._lives.on_logged(waiter)

    def on_journal_lost(self, now_ns: int) -> None:
        """Its file broke or was deleted, and another takes its place: what is known here is written once more."""
        self._logs.lost(self._lives.requests.values(), now_ns)

    # ------------------------------------------------------------ time

    def _tick(self, now_ns: int) -> None:
        self._attempts.tick(now_ns)
        self._peers.welcome_unheard()
        self._logs.tick(self._lives.requests.values(), now_ns)
        self._texts.tick(now_ns)
        self._peers.welcome_busy()
        for client, stalled_ms in self._delivery.given_up(now_ns):
            self._lives.give_up_client(client, stalled_ms, now_ns)
        for request in self._lives.forget_old(now_ns):
            self._reruns.forgotten(request, now_ns)
        self._reruns.tick(now_ns)
        if now_ns >= self._alive_at_ns and self._admission.sequences:
            self._alive_at_ns = now_ns + self._settings.keep_undelivered_s * 1000 * MS // 4
            self._logs.alive()

    def _give_up_jobs(self, now_ns: int) -> None:
        failed, self._texts.failed[:] = self._texts.failed[:], []
        for job in failed:
            text = "the tokenizers died over this text or did not answer; it is not tried again"
            if isinstance(job, Stream):
                self._fail(job, End("error", Code.INTERNAL, text), now_ns)
            else:
                self._intake.give_up(job, text)

    # ------------------------------------------------------------ the end of the node

    def drain(self) -> None:
        """No new requests from here on; those that run go on."""
        self._admission.draining = True

    def hand_over(self) -> None:
        """A successor is to go on: take nothing new, so that soon nothing is on its way. Clients ask it again, by
        the keys of what was not accepted; schedulers have what is missing."""
        self._handing_over = True
        self._logs.hurry()

    def finish_all(self, now_ns: int) -> None:
        """The time to drain is over: everything that still runs ends, and its client is told why."""
        text = "shutdown: the node was stopped, and the time to finish what ran is over"
        refused = Refused(Code.SHUTDOWN, text)
        self._intake.refuse_all(refused)
        self._lives.end_all(End("abort", Code.SHUTDOWN, text), now_ns)
        self._reruns.end_all(refused)

    def _to_bus(self, peer: bytes, message: BusFromGateway) -> None:
        self._bus.append((peer, message))
