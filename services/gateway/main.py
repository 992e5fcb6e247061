"""The gateway's shell: sockets, the journal's thread, the clock. It decides nothing."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from secrets import randbits

from phalanx.protocol.background import Background
from phalanx.protocol.codec import Decoder, call_of, encode
from phalanx.protocol.errors import DecodeError, ExitCode, PhalanxError
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import (
    BUS_MESSAGE_BYTES_MAX,
    HEALTH_REPEAT_MS,
    MESSAGE_BYTES_MAX,
)
from phalanx.protocol.link import (
    bind_router,
    close_all,
    for_a_while,
    receive,
    receive_from,
    send,
    send_to,
    thread_pair,
)
from phalanx.protocol.messages import (
    Accepted,
    BusToGateway,
    ClientMessage,
    ClientReply,
    Drain,
    Final,
    FromSupervisor,
    HandOver,
    HealthUpdate,
    Submit,
    Trouble,
)
from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import BUS_SOCKET, CLIENT_SOCKET, JOURNAL_FILE, endpoint
from phalanx.protocol.service import Service, Socket
from phalanx.services.gateway.admission import Settings
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.ending import LAST_WORDS_NS, Ending
from phalanx.services.gateway.entries import Accept, Finish, Recovered, taken_over
from phalanx.services.gateway.journal import Journal, JournalWriter, NotNow, told_failure
from phalanx.services.gateway.overseer import LOOK_NS, Overseer
from phalanx.services.gateway.poison import crashes, given_up, note_crash
from phalanx.services.gateway.token_log import TokenLog, recall
from phalanx.services.model_limits import read_model

MS = 1_000_000
MESSAGES_PER_TURN = 512
TURN_NS = 10 * MS  # for messages of one socket
HAND_OVER_LINGER_MS = 50
PROBE_NS = 1_000 * MS  # between two looks at the journal's file, or tries to write it
_READ_AGAIN_S = 0.5  # between two tries to read a journal whose disk fails
SEAT_DEPTH = 4  # sequences given to a rank, in multiples of those it runs at a time


class Gateway:
    def __init__(self, service: Service) -> None:
        self._service = service
        config, run_dir = service.config, service.run_dir
        journal = Journal(run_dir / JOURNAL_FILE, config.gateway.journal_ttl_s, service.log)
        recovered = load(journal, service)
        self.note = taken_over(recovered)
        if recovered:
            service.log.info("requests taken over from the journal", requests=len(recovered))
        settings = settings_of(service)
        self._tokens = TokenLog(config.node, service.log)
        if not settings.logged and (notes := self._tokens.read()) is not None:
            recovered = recall(recovered, notes)
        self._core = Core(settings, recovered, time.monotonic_ns())
        self._write_tokens(time.monotonic_ns())
        self._topology_version = 0
        self._ending = Ending(self._core)
        self._failure = self._told = ""  # why the journal cannot be written, and for people
        if journal.failure:
            self._note_failure(journal.failure, told_failure(journal.path, journal.failure))
        self._probe_at_ns = self._say_at_ns = 0
        self._said_lacking = False
        self._overseer, self._oversee_at_ns = Overseer(time.monotonic_ns()), 0
        self._supervisor_hangs = False
        self._looks = Looks(os.getppid())
        self.clients = bind_router(endpoint(run_dir, CLIENT_SOCKET), MESSAGE_BYTES_MAX)
        self.bus = bind_router(endpoint(run_dir, BUS_SOCKET), BUS_MESSAGE_BYTES_MAX)
        self.journal, self._waker = thread_pair("journal")
        self._file = journal  # the writer's, which has a thread of its own
        self._looks_at_file = Background[bool]("journal's file")
        self._writer = JournalWriter(journal, self._wake)
        self._client_decoder = Decoder[ClientMessage](ClientMessage, MESSAGE_BYTES_MAX)
        self._bus_decoder = Decoder[BusToGateway](BusToGateway)

    # --- events ---

    def on_clients(self) -> None:
        now_ns = time.monotonic_ns()
        for client, frame in self._taken(self.clients):
            try:
                message = self._client_decoder.decode(frame)
            except DecodeError as error:
                self._core.on_bad_frame(client, call_of(frame), str(error))
                continue
            self._core.on_client(client, message, now_ns)

    def on_bus(self) -> None:
        self._look_at_topology()  # first, so that no message is judged by an old membership
        now_ns = time.monotonic_ns()
        for peer, frame in self._taken(self.bus):
            try:
                message = self._bus_decoder.decode(frame)
            except DecodeError as error:
                self._service.log.error("bad message on the bus", peer=repr(peer), error=str(error))
                continue
            self._core.on_bus(peer, message, now_ns)

    def _taken(self, socket: Socket) -> Iterator[tuple[bytes, bytes]]:
        """A request of a hundred thousand tokens takes ten milliseconds, and hundreds may come at once."""
        return for_a_while(lambda: receive_from(socket, 1), MESSAGES_PER_TURN, TURN_NS)

    def on_journal(self) -> None:
        receive(self.journal, MESSAGES_PER_TURN)
        for written in self._writer.results():
            self._note_failure(written.failure, written.told)
            failpoint("gateway.accept.after_sync")
            now_ns = time.monotonic_ns()
            self._core.on_journal(written.number, written.failure, now_ns)
            if written.lost:
                self._core.on_journal_lost(now_ns)

    def _note_failure(self, failure: str, told: str) -> None:
        """Of the journal; empty: it was written."""
        self._told = told
        if failure == self._failure:
            return
        if failure:
            self._service.log.error("the journal cannot be written", error=failure)
        else:
            self._service.log.info("the journal can be written again")
        self._failure = failure

    def _look_at_journal(self, now_ns: int) -> None:
        """While it cannot be written, or was deleted: try it, though nobody may ask for it. Tell the supervisor."""
        if now_ns >= self._probe_at_ns:
            self._probe_at_ns = now_ns + PROBE_NS
            if self._failure or any(self._looks_at_file.ask(self._file.deleted)):
                self._writer.submit(0, [])
        text = self._told or self._writer.late(now_ns) or self._core.lacks
        lacking = bool(text)
        if lacking == self._said_lacking and (not lacking or now_ns < self._say_at_ns):
            return
        self._said_lacking, self._say_at_ns = lacking, now_ns + HEALTH_REPEAT_MS * MS
        trouble = Trouble(self._service.name, self._service.incarnation, text)
        send(self._service.supervisor, encode(trouble))

    def _look_at_supervisor(self, now_ns: int) -> None:
        if now_ns < self._oversee_at_ns:
            return
        self._oversee_at_ns = now_ns + LOOK_NS
        if self._looks.pid != os.getppid():
            self._looks = Looks(os.getppid())
        beat_ns = self._service.board.supervisor_beat_ns
        wrong = self._overseer.look(beat_ns, now_ns, lambda: self._looks.inspect(now_ns))
        if bool(wrong) != self._supervisor_hangs:
            self._supervisor_hangs = bool(wrong)
            self._service.log.warning("supervisor", text=wrong or "it lives")
        self._core.on_supervisor(wrong)

    def on_supervisor(self, message: FromSupervisor) -> None:
        match message:
            case HealthUpdate():
                self._core.on_health(message)
            case Drain(timeout_ms):
                self._ending.drain(time.monotonic_ns() + timeout_ms * MS)
                self._service.stopping = True
            case HandOver(timeout_ms):
                self._ending.hand_over(time.monotonic_ns() + timeout_ms * MS)
                self._service.stopping = True
            case _:  # a nudge or nothing of ours: the topology is looked at in every turn
                pass

    # --- the turn ---

    def tick(self, now_ns: int) -> float:
        """Let the core act on what came, and carry out what it says."""
        self._look_at_topology()
        self._look_at_journal(now_ns)
        self._look_at_supervisor(now_ns)
        self._core.turn(now_ns)
        more = self._write_tokens(now_ns)
        for peer, message in self._core.take_bus():
            if isinstance(message, Submit):
                moved = message.resumed
                self._service.log.debug(
                    "moved" if moved else "placed",
                    request_id=message.request_id,
                    index=message.index,
                    attempt=message.attempt,
                    tokens=len(message.outputs) // 4,
                    to=peer.decode(errors="replace"),
                )
                failpoint("gateway.resume.before_send" if moved else "gateway.submit.before_send")
            if not send_to(self.bus, peer, encode(message)):
                self._core.on_unroutable(peer, message, now_ns)
            if isinstance(message, Submit) and message.resumed:
                failpoint("gateway.resume.after_send")
        number, ops = self._core.take_ops()
        if ops:
            if any(isinstance(op, Accept) for op in ops):
                failpoint("gateway.accept.before_write")
            if any(isinstance(op, Finish) for op in ops):
                failpoint("gateway.final.before_write")
            self._writer.submit(number, ops)
        self._core.deliver(self._send_client, now_ns)
        if (report := self._core.take_scrub_report()) is not None:
            send(self._service.supervisor, encode(report))
        # A remainder below a millisecond is waited for too: zero would spin.
        return 0 if more else self._core.wait_ns(now_ns) // MS + 1

    def _write_tokens(self, now_ns: int) -> bool:
        """Whether there is more to be written, for which nobody need wait."""
        notes = self._core.take_notes()
        if notes:
            failpoint("gateway.tokens.before_write")
        more = self._tokens.write(notes, self._core.all_notes, now_ns)
        if notes:
            failpoint("gateway.tokens.after_write")
        return more

    def drained(self, now_ns: int) -> bool:
        """Told to end: whether it may."""
        if self._ending.ends_all(now_ns):
            self.tick(now_ns)
        return self._ending.over(now_ns)

    def close(self) -> None:
        self._writer.close()
        handing_over = self._ending.hands_over
        self._tokens.close(keep=handing_over)
        sockets = [self.clients, self.bus, self.journal, self._waker, self._service.supervisor]
        # Who takes nothing now reads on from the successor, which waits for our end.
        close_all(sockets, HAND_OVER_LINGER_MS if handing_over else LAST_WORDS_NS // MS)

    def _wake(self) -> None:
        """Called in the journal's thread."""
        send(self._waker, b"")

    def _send_client(self, client: bytes, message: ClientReply) -> bool | None:
        if isinstance(message, Accepted):
            failpoint("gateway.accept.before_send")
        final = isinstance(message, Final)
        if final:
            failpoint("gateway.final.before_send")
        taken = send_to(self.clients, client, encode(message))
        if final:
            failpoint("gateway.final.after_send")
        return taken

    def _look_at_topology(self) -> None:
        version = self._service.board.topology_version
        if version != self._topology_version:
            topology = self._service.board.topology()
            self._topology_version = version
            if topology is not None:
                self._core.on_topology(topology, time.monotonic_ns())


def load(journal: Journal, service: Service) -> list[Recovered]:
    """Wait until it can be read: to serve without it would drop what was accepted."""
    while True:
        try:
            return journal.load(time.time())
        except NotNow as error:
            if service.stopping:
                sys.exit(ExitCode.OK)
            path = service.run_dir / JOURNAL_FILE
            service.progress(
                f"cannot read the journal {path} ({error}): see why its disk does not work"
            )
            time.sleep(_READ_AGAIN_S)


def settings_of(service: Service) -> Settings:
    """Raises ConfigError when the model's configuration cannot be read."""
    config = service.config
    scheduler = config.scheduler
    return Settings(
        model=replace(
            read_model(Path(config.model_dir), config.model),
            skips_prompt_rows=config.worker.yoco_truncation == "compact",
        ),
        incarnation=service.incarnation,
        life=time.time_ns(),
        max_open_requests=config.gateway.max_open_requests,
        default_max_tokens=config.gateway.default_max_tokens,
        keep_undelivered_s=config.gateway.journal_ttl_s,
        seat_capacity=min(SEAT_DEPTH * scheduler.max_num_seqs, scheduler.max_waiting),
        draw=randbits,
        history_requests=config.gateway.history_requests,
        history_bytes=config.gateway.history_bytes,
        history_ttl_s=config.gateway.history_ttl_s,
        scrub_every_s=config.gateway.scrub_every_s,
        poison=given_up(crashes(service.run_dir)),
        logged=not config.exact,
    )


def serve(service: Service) -> None:
    try:
        gateway = Gateway(service)
        service.ready(note=gateway.note)
        service.loop(
            {
                gateway.clients: gateway.on_clients,
                gateway.bus: gateway.on_bus,
                gateway.journal: gateway.on_journal,
            },
            gateway.tick,
            on_supervisor=gateway.on_supervisor,
            drained=gateway.drained,
        )
    except PhalanxError:
        raise
    except Exception as error:  # a bug, of which the next gateway shall know who met it
        if request_id := note_crash(service.run_dir, error):
            service.log.error("crashes at work on a request", request_id=request_id)
        raise
    gateway.close()
