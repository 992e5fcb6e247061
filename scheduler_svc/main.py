"""The scheduler process of one rank: sockets, rings and clock around the core.

While a step is under way it sleeps on the seat's bell in slices and looks at its sockets in between;
otherwise it sleeps in the poller. The slices are short, and longer the longer the worker says nothing: a
group may be stopped for minutes. A worker that never answers is the supervisor's affair: messages are
served all the same.
"""

import time
from collections.abc import Iterator
from typing import TypeVar

from phalanx.protocol import faults
from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.errors import ArenaError, DecodeError
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.link import (
    connect_dealer,
    for_a_while,
    receive,
    send,
    watch_disconnects,
)
from phalanx.protocol.log import Logger
from phalanx.protocol.messages import (
    BusFromGateway,
    Contains,
    ContainsReply,
    FromSupervisor,
    Get,
    GetDone,
    Hello,
    KVReply,
    KVRequest,
    Ping,
    Put,
    PutDone,
    Submit,
    Tokens,
    Welcome,
)
from phalanx.protocol.queues import QueueTable, queue_arena_name, queue_bytes
from phalanx.protocol.rundir import BUS_SOCKET, KVSTORE_SOCKET, endpoint
from phalanx.protocol.service import Service, Socket
from phalanx.protocol.steps import StepResult, WorkerHello
from phalanx.protocol.topology import Seat
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import (
    GatewayChanged,
    Membership,
    Staging,
    StoreArenas,
    StoreLost,
    WorkerLost,
)
from phalanx.scheduler_svc.garbage import Garbage
from phalanx.scheduler_svc.seat import SeatLink

SLICE_MS = 2.0  # longest sleep on the bell before the sockets get a look, while results come
SLICE_MS_MAX = 50.0  # while none comes
SLICE_SHARE = 1 / 8  # of the time in which none has come
HELLO_WAIT_MS = 10.0  # a worker's hello rings the bell, which the poller does not hear
PING_MS = 1_000
MESSAGES_PER_TURN = 256
TURN_NS = 5_000_000  # for messages of one socket: what is left waits there, a step and a sign of life may not
STAGED_BLOCKS, STAGED_STATES = 512, 16  # at most, in the staging arena; each has a generation word
STAGED_BYTES = 64 << 20  # for blocks, and again for states
T = TypeVar("T")


class Shell:
    """Performs what the core decides; decides nothing itself."""

    def __init__(self, service: Service) -> None:
        self.service, self.log = service, service.log
        config = service.config
        rows = 2 * config.scheduler.max_waiting + config.scheduler.max_num_seqs
        name = queue_arena_name(config.node, service.seat, service.incarnation)
        self.arena = Arena.create(name, queue_bytes(rows), service.name, keep_free=0)
        columns = QueueTable.create(self.arena.data[:], rows, service.seat, service.incarnation)
        # Truncated prompts have states that are good for prompts of one length alone.
        self._stores = config.kvstore.enabled and config.worker.yoco_truncation == "off"
        self.core = Scheduler(
            config.scheduler,
            service.seat,
            service.incarnation,
            columns,
            store_enabled=self._stores,
        )
        row = service.board.seats[service.seat]
        self.seat = SeatLink(row, config.node, service.seat, service.incarnation)
        identity = f"{service.name}#{service.incarnation}"
        self.bus = connect_dealer(endpoint(service.run_dir, BUS_SOCKET), identity)
        store = endpoint(service.run_dir, KVSTORE_SOCKET)
        self.store = connect_dealer(store, identity, only_connected=True)
        self.store_ends = watch_disconnects(self.store)
        self._from_gateway = Decoder[BusFromGateway](BusFromGateway)
        self._from_store = Decoder[KVReply](KVReply)
        self._topology_version = -1
        self._gateway: int | None = None
        self._hello_due_ns = 0
        self._sent: dict[int, tuple[int, int, int]] = {}  # plans under way: when, rows, prompt rows
        # Steps that are done now: since when they ran, us in the worker, rows, prompt rows.
        self._ran: list[tuple[int, int, int, int]] = []
        self._staging: Arena | None = None  # for what the KV store reads back; one for each worker
        self._stagings = 0
        self._done_ns = 0  # when the tokens of the last step were sent
        self._heard_ns = 0  # when the worker said something, or was told to
        self._garbage = Garbage()

    def run(self) -> None:
        self.service.ready()
        self.service.loop(
            {
                self.bus: self.on_bus,
                self.store: self.on_store,
                self.store_ends: self.on_store_end,
            },
            self.turn,
            on_supervisor=self.on_supervisor,
        )
        self.seat.close()
        self._close_staging()
        self.arena.close()

    # ------------------------------------------------------------ sockets

    def on_bus(self) -> None:
        now_ns = time.monotonic_ns()
        for message in decoded(self.bus, self._from_gateway, self.log):
            if isinstance(message, Welcome):
                self._welcomed(message, now_ns)
            else:
                if isinstance(message, Submit):
                    failpoint("scheduler.submit.before")
                self.core.handle(message, now_ns)

    def on_store(self) -> None:
        now_ns = time.monotonic_ns()
        for message in decoded(self.store, self._from_store, self.log):
            self.core.handle(message, now_ns)

    def on_store_end(self) -> None:
        """Whatever the store had not copied is gone with the connection."""
        if receive(self.store_ends, MESSAGES_PER_TURN):
            self.core.handle(StoreLost(), time.monotonic_ns())
        elif faults.active is None or not faults.active.holds_back:
            self.core.store_stands()

    def on_supervisor(self, message: FromSupervisor) -> None:
        """TopologyChanged only wakes the loop, which looks at the board each turn."""

    def _greet(self, now_ns: int) -> None:
        """Hello until welcomed, then a Ping now and then: is it still the same gateway?"""
        if now_ns < self._hello_due_ns:
            return
        service = self.service
        if self._gateway is None:
            hello = Hello(service.name, "scheduler", service.incarnation, service.seat)
            send(self.bus, encode(hello))
            self._hello_due_ns = now_ns + COMMAND_RETRY_MS * 1_000_000
        else:
            send(self.bus, encode(Ping(service.name)))
            self._hello_due_ns = now_ns + PING_MS * 1_000_000

    def _welcomed(self, welcome: Welcome, now_ns: int) -> None:
        if self._gateway == welcome.gateway_incarnation:
            return
        if self._gateway is not None:  # another one took over, and does not know us
            service = self.service
            send(
                self.bus,
                encode(Hello(service.name, "scheduler", service.incarnation, service.seat)),
            )
        self._gateway = welcome.gateway_incarnation
        self._hello_due_ns = now_ns + PING_MS * 1_000_000
        self.core.handle(GatewayChanged(), now_ns)

    # ------------------------------------------------------------ one turn

    def turn(self, now_ns: int) -> float | None:
        """One turn of the loop; returns the longest wait until the next in ms."""
        if self.core.has_put:
            self.on_store_end()
        self._watch_topology(now_ns)
        self._greet(now_ns)
        self._take_results(now_ns)
        self._act(now_ns)
        if self.core.listens:
            self._serve_worker(now_ns)
            return 0.0
        self._garbage.when_idle(now_ns)
        due_ms = (self._hello_due_ns - now_ns) / 1e6
        if self.seat.expects_hello:
            due_ms = min(due_ms, HELLO_WAIT_MS)
        return max(0.0, min(due_ms, self.core.wait_ms(now_ns)))

    def _serve_worker(self, start_ns: int) -> None:
        """Steps, for one slice of time: sleep until the result, commit it, send the next plan."""
        bell = self.service.board.seats[self.service.seat].scheduler_bell
        now_ns = start_ns
        while self.core.listens and now_ns - start_ns < SLICE_MS * 1e6:
            heard = bell.value
            if not self._take_results(now_ns):
                bell.wait(heard, self._slice_ms(now_ns))
                now_ns = time.monotonic_ns()
                continue
            now_ns = time.monotonic_ns()
            self._act(now_ns)
            self._garbage.after_step()

    def _slice_ms(self, now_ns: int) -> float:
        silent_ms = (now_ns - self._heard_ns) / 1e6
        most_ms = min(SLICE_MS_MAX, self.core.wait_ms(now_ns))
        return max(SLICE_MS, min(silent_ms * SLICE_SHARE, most_ms))

    def _take_results(self, now_ns: int) -> bool:
        """Whether the worker said anything."""
        messages = self.seat.receive()
        if messages:
            self._heard_ns = now_ns
        for message in messages:
            failpoint("scheduler.commit.before")
            self.core.handle(message, now_ns)
            self.service.row.advance()
            if isinstance(message, WorkerHello):
                self._sent.clear()
                self._worker_ready(message, now_ns)
            elif isinstance(message, StepResult) and (sent := self._sent.pop(message.seq, None)):
                since_ns, rows, prompt_rows = max(sent[0], self._done_ns), *sent[1:]
                self._ran.append((since_ns, message.step_us, rows, prompt_rows))
        return bool(messages)

    def _worker_ready(self, hello: WorkerHello, now_ns: int) -> None:
        self.log.info(
            "worker is there",
            worker_incarnation=hello.worker_incarnation,
            blocks=hello.num_blocks,
            slots=hello.num_slots,
        )
        try:
            with (
                Arena.attach(hello.block_arena) as blocks,
                Arena.attach(hello.snapshot_arena) as snapshots,
            ):
                generations = blocks.generation(0), snapshots.generation(0)
        except ArenaError as error:  # then this worker's prompts are not stored
            self.log.warning("no KV store writes for this worker", error=str(error))
            return
        self.core.handle(StoreArenas(*generations, self._new_staging(hello)), now_ns)

    def _new_staging(self, hello: WorkerHello) -> Staging | None:
        """A new arena for each worker, with a name of its own: whatever the store may still write is of the
        old one."""
        self._close_staging()
        if not self._stores or not hello.num_snapshots:
            return None
        service = self.service
        blocks = min(STAGED_BLOCKS, STAGED_BYTES // hello.block_bytes, hello.num_blocks - 1)
        states = min(STAGED_STATES, max(1, STAGED_BYTES // hello.slot_bytes))
        self._stagings += 1
        number = f"{service.incarnation}.{self._stagings}"
        name = arena_name(service.config.node, f"stage{service.seat}", number)
        try:
            nbytes = blocks * hello.block_bytes + states * hello.slot_bytes
            self._staging = Arena.create(name, nbytes, service.name)
        except ArenaError as error:
            self.log.warning("nothing is read back from the KV store", error=str(error))
            return None
        return Staging(name, self._staging.generation(0), blocks, states)

    def _close_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _act(self, now_ns: int) -> None:
        actions = self.core.step(now_ns)
        if actions.offer is not None:
            self.seat.send(actions.offer)
        for plan in actions.plans:
            failpoint("scheduler.plan.before_send")
            self.seat.send(plan)
            failpoint("scheduler.plan.after_send")
            self._heard_ns = time.monotonic_ns()
            self._sent[plan.seq] = (self._heard_ns, *self.core.rows_of(plan.seq))
        for message in actions.gateway:
            if isinstance(message, Tokens):
                failpoint("scheduler.tokens.before_send")
            # A full queue: tokens are asked for again, finals and loads are said again.
            send(self.bus, encode(message))
            if isinstance(message, Tokens):
                failpoint("scheduler.tokens.after_send")
        if self._ran:
            self._note_steps()
        unsent = [r for r in self.core.store_step(now_ns) if not self._ask_store(r)]
        for request in unsent:
            self.core.handle(not_sent(request), now_ns)
        if unsent:  # sequences that waited for these answers go on
            self._act(now_ns)

    def _ask_store(self, request: KVRequest) -> bool:
        if isinstance(request, Get) and self._staging is not None:
            handle = request.handle
            while self._staging.generation(handle.region) != handle.generation:
                self._staging.bump(handle.region)
        return send(self.store, encode(request))

    def _note_steps(self) -> None:
        """Of the steps whose tokens have just left."""
        self._done_ns = done_ns = time.monotonic_ns()
        for since_ns, worker_us, *rows in self._ran:
            us = (done_ns - since_ns) // 1000
            self.core.table.columns.note_step(done_ns, us, worker_us, *rows)
        self._ran.clear()

    def _watch_topology(self, now_ns: int) -> None:
        board = self.service.board
        if board.topology_version == self._topology_version:
            return
        self._topology_version = board.topology_version
        topology = board.topology()
        if topology is None:
            return
        seat = topology.seat(self.service.seat) or Seat(self.service.seat, 0, 0, "absent")
        if self.seat.follow(seat) and self.core.worker is not None:
            self.log.info("worker is gone", was=self.core.worker.worker_incarnation)
            self.core.handle(WorkerLost(), now_ns)
        self.core.handle(Membership(topology.epoch, seat.state == "member"), now_ns)


def decoded(socket: Socket, decoder: Decoder[T], log: Logger) -> Iterator[T]:
    """What there is, for one turn. One message may take a tenth of a second, with a prompt and drafts of half a million
    tokens, and there may be many of them."""
    for frame in for_a_while(lambda: receive(socket, 1), MESSAGES_PER_TURN, TURN_NS):
        try:
            yield decoder.decode(frame)
        except DecodeError as error:
            log.error("bad message", error=str(error))


def not_sent(request: KVRequest) -> KVReply:
    """What the store would say, if it were there."""
    reason = "the store is away, or its queue is full"
    match request:
        case Put():
            return PutDone(request.call, stored=False, durable=False, reason=reason)
        case Get():
            return GetDone(request.call, found=False, reason=reason)
        case Contains():
            return ContainsReply(request.call, 0)
        case _:
            raise AssertionError(f"a scheduler does not ask for {request}")


def serve(service: Service) -> None:
    Shell(service).run()
