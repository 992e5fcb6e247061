"""A gateway, its schedulers, tokenizers and clients in one process, in virtual time, from one seed.

The gateway core and the client core are the real ones. Messages on the bus are delayed, lost,
doubled and reordered; workers, schedulers, tokenizers and the gateway die at random moments, the
disk fills up, clients stop reading. A worker that was declared lost goes on sending garbage. Then
the faults stop, and everything must come to its one right end.
"""

import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.errors import Refused
from phalanx.protocol.messages import (
    Accepted,
    BusFromGateway,
    BusToGateway,
    ChatMessage,
    ClientMessage,
    ClientReply,
    Delta,
    Done,
    Final,
    HealthUpdate,
    Hello,
    Ping,
    PromptLogprobs,
    Submit,
    Tokens,
    Welcome,
)
from phalanx.protocol.prompt_logprobs import record_bytes
from phalanx.protocol.seeds import derive_seed
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.client_core import ClientCore
from phalanx.services.client_flow import Flow, Spec
from phalanx.services.gateway.admission import Settings
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.entries import (
    Accept,
    Again,
    Alive,
    Entry,
    Fell,
    Finish,
    Forget,
    Op,
    Produced,
    Recovered,
    Scored,
    Stamp,
)
from phalanx.services.gateway.validate import sampling_for
from phalanx.services.model_limits import ModelLimits
from sim.gateway_fakes import (
    EOS,
    VOCAB,
    Expected,
    FakeScheduler,
    FakeTokenizer,
    encode_text,
    expected,
    logprob_at,
    score_at,
)
from sim.token_memory import TokenMemory

MS = 1_000_000
MODEL = ModelLimits("sim", VOCAB, 4096, EOS)


@dataclass(frozen=True)
class Faults:
    """Chances; of messages each, of deaths per virtual second."""

    loss: float = 0.02
    doubling: float = 0.05
    reordering: float = 0.1
    deaths_per_s: float = 3.0
    node_loss: float = 0.05  # a death is one of everything
    disk_full: float = 0.1
    stalls: float = 0.1


class Disk:
    """The journal's file, with what is on it after a crash."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.finals: dict[str, dict[int, Final]] = {}
        self.produced: dict[str, list[Produced]] = {}
        self.scored: dict[str, list[Scored]] = {}
        self.falls: dict[str, dict[int, Fell]] = {}
        self.full = False

    def apply(self, op: Op) -> None:
        match op:
            case Accept(entry) | Again(entry):
                self.entries[entry.request_id] = entry
            case Finish(final):
                self.finals.setdefault(final.request_id, {})[final.index] = final
            case Produced():
                self.produced.setdefault(op.request_id, []).append(op)
            case Scored():
                self.scored.setdefault(op.request_id, []).append(op)
            case Fell():
                self.falls.setdefault(op.request_id, {})[op.index] = op
            case Forget(request_id):
                self.entries.pop(request_id, None)
                self.falls.pop(request_id, None)
                self.finals.pop(request_id, None)
                self.produced.pop(request_id, None)
                self.scored.pop(request_id, None)
            case Stamp(fingerprint):
                for entry in list(self.entries.values()):
                    if not entry.fingerprint:
                        stamped = msgspec.structs.replace(entry, fingerprint=fingerprint)
                        self.entries[entry.request_id] = stamped
            case Alive():
                pass

    def has(self, message: Delta | Final | PromptLogprobs) -> bool:
        """Whether what it says was written; of a final, that there is one."""
        request_id, index = message.request_id, message.index
        match message:
            case Final():
                return index in self.finals.get(request_id, {})
            case Delta():
                pieces = self.produced.get(request_id, ())
                kept = [p.offset + len(p.token_ids) // 4 for p in pieces if p.index == index]
                return message.offset + len(message.token_ids) <= max(kept, default=0)
            case PromptLogprobs():
                num_top = self.entries[request_id].sampling.prompt_logprobs
                assert num_top is not None
                size = record_bytes(num_top)
                scored = [s.first + len(s.records) // size for s in self.scored.get(request_id, ())]
                # There is no record of the first token.
                return message.offset + len(message.entries) - 1 <= max(scored, default=0)

    def recovered(self) -> list[Recovered]:
        return [
            Recovered(
                entry,
                dict(self.finals.get(request_id, {})),
                tuple(sorted(self.produced.get(request_id, ()), key=lambda p: (p.index, p.offset))),
                tuple(sorted(self.scored.get(request_id, ()), key=lambda s: s.first)),
                tuple(self.falls.get(request_id, {}).values()),
            )
            for request_id, entry in self.entries.items()
        ]


@dataclass(eq=False)
class SimClient:
    identity: bytes
    core: ClientCore
    stalled: bool = False
    inbox: deque[bytes] = field(default_factory=deque)  # at most CLIENT_QUEUE


CLIENT_QUEUE = 30
CALM_NS = 40_000 * MS  # within this time after the last fault, everything has ended
DECODER = Decoder[ClientMessage](ClientMessage)


class World:
    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        core: type[Core] = Core,
        seats: int = 3,
        tokenizers: int = 2,
        max_open: int = 10_000,
        inexact: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.faults = faults if faults is not None else Faults()
        self.faulty = faults is not None
        self.now = 10**12
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._core_type = core
        self._max_open = max_open
        self._inexact = inexact  # what is computed anew gives other tokens
        # In some runs a scheduler refuses arrivals before it has all that the gateway would give it.
        self._queue = 1 if seed % 3 == 1 else 100
        self.disk = Disk()
        self.memory = TokenMemory(seed)
        self.gateway: Core | None = None
        self.gateway_incarnation = 0
        self._writing: list[tuple[int, list[Op]]] = []  # under way to the disk
        self._late: list[Op] = []  # could not be written, for the next try
        self.clients: list[SimClient] = []
        self.topology = Topology(2, tuple(Seat(i, 1, 1, "member") for i in range(seats)))
        self.schedulers: dict[int, FakeScheduler | None] = {}
        self.scheduler_incarnations = dict.fromkeys(range(seats), 0)
        self.tokenizers: dict[str, tuple[bytes, FakeTokenizer] | None] = {}
        self.tokenizer_incarnations: dict[str, int] = {}
        self.welcomed: dict[bytes, int] = {}  # peer -> gateway incarnation it knows
        self.told: dict[tuple[bytes, str], list[bool]] = {}
        self.flows: list[tuple[Spec, SimClient, Flow]] = []
        self.start_gateway()
        for seat in range(seats):
            self.start_scheduler(seat)
        for i in range(tokenizers):
            self.start_tokenizer(f"tokenizer-{i}")
        if self.faulty:
            self.after(self._until_death(), self._a_death)

    # --- time ---

    def after(self, delay_ns: int, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + delay_ns, self._order, act))

    def run(self, duration_ns: int, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + duration_ns
        while self._events and self._events[0][0] <= end:
            if until():
                return
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = max(self.now, end)

    # --- the gateway ---

    def start_gateway(self) -> None:
        self.gateway_incarnation += 1
        settings = Settings(
            MODEL,
            self.gateway_incarnation,
            self.gateway_incarnation,
            self._max_open,
            default_max_tokens=20,
            keep_undelivered_s=600,
            seat_capacity=8,
            draw=self.rng.getrandbits,
            logged=self._inexact,
        )
        recovered = self.disk.recovered()
        if not self._inexact:
            recovered = self.memory.recovered(recovered)
        self.gateway = self._core_type(settings, recovered, self.now)
        self.memory.begin(self.gateway)
        self.told.clear()
        self.gateway.on_health(HealthUpdate(True, self.topology.epoch, ()))
        self.gateway.on_topology(self.topology, self.now)
        self._turn_later(self.gateway, 0)

    def kill_gateway(self) -> None:
        assert self.gateway is not None
        self.memory.killed(self.gateway, self.now)
        self.gateway = None
        if self.rng.random() < 0.5 and not self.disk.full:
            # The disk got what was on its way all the same, and nobody was told.
            for op in self._late + [op for _, batch in self._writing for op in batch]:
                self.disk.apply(op)
        self._writing, self._late = [], []
        for client in self.clients:
            client.inbox.clear()

    def turn(self, gateway: Core | None) -> None:
        if gateway is None or self.gateway is not gateway:
            return
        gateway.turn(self.now)
        self.memory.write(gateway)
        for peer, message in gateway.take_bus():
            if isinstance(message, Submit) and not self._inexact:
                self.memory.check(message)
            if not self._to_peer(peer, message):
                gateway.on_unroutable(peer, message, self.now)
        number, ops = gateway.take_ops()
        if ops:
            self._writing.append((number, ops))
            if len(self._writing) == 1:
                self.after(self.rng.randint(1, 30) * MS, lambda: self._commit(gateway))
        gateway.deliver(self._to_client, self.now)

    def _turn_later(self, gateway: Core, delay_ns: int) -> None:
        def act() -> None:
            if self.gateway is gateway:
                self.turn(gateway)
                self._turn_later(gateway, min(gateway.wait_ns(self.now), 100 * MS) + MS)

        self.after(delay_ns, act)

    def _commit(self, gateway: Core) -> None:
        """Write all that has gathered, as one commit."""
        if self.gateway is not gateway:
            return
        number = self._writing[-1][0]
        ops = self._late + [op for _, batch in self._writing for op in batch]
        self._writing, self._late = [], []
        if self.disk.full:
            self._late = [op for op in ops if not isinstance(op, Accept)]
            gateway.on_journal(number, "disk full", self.now)
        else:
            for op in ops:
                self.disk.apply(op)
            gateway.on_journal(number, "", self.now)
        self.turn(gateway)

    # --- the bus ---

    def to_gateway(self, peer: bytes, message: BusToGateway) -> None:
        target = self.gateway

        def arrive() -> None:
            if self.gateway is not None and self.gateway is target:
                self.gateway.on_bus(peer, message, self.now)
                self.turn(self.gateway)

        self._carry(arrive)

    def _to_peer(self, peer: bytes, message: BusFromGateway) -> bool:
        target = self._peer(peer)
        if target is None:
            return False

        def arrive() -> None:
            if self._peer(peer) is target:
                if isinstance(message, Welcome):
                    self._welcome(peer, message.gateway_incarnation)
                for reply in target.on(message):
                    self.to_gateway(peer, reply)

        self._carry(arrive)
        return True

    def _carry(self, arrive: Callable[[], None]) -> None:
        """Reliable and in order without faults; with them, nothing is certain."""
        if not self.faulty:
            self.after(MS // 10, arrive)
            return
        if self.rng.random() < self.faults.loss:
            return
        for _ in range(1 + (self.rng.random() < self.faults.doubling)):
            late = self.rng.random() < self.faults.reordering
            self.after(self.rng.randint(1, 200 if late else 3) * MS // 2, arrive)

    def _peer(self, peer: bytes) -> FakeScheduler | FakeTokenizer | None:
        for scheduler in self.schedulers.values():
            if scheduler and peer == b"scheduler-%d#%d" % (scheduler.seat, scheduler.incarnation):
                return scheduler
        for known in self.tokenizers.values():
            if known is not None and known[0] == peer:
                return known[1]
        return None

    def _welcome(self, peer: bytes, incarnation: int) -> None:
        if self.welcomed.get(peer) != incarnation:
            if peer in self.welcomed:
                self._hello(peer)
            self.welcomed[peer] = incarnation

    def _hello(self, peer: bytes) -> None:
        name, _, incarnation = peer.decode().partition("#")
        seat = int(name.rpartition("-")[2])
        if name.startswith("scheduler"):
            hello = Hello(name, "scheduler", int(incarnation), seat)
        else:
            hello = Hello(name, "tokenizer", int(incarnation))
        self.to_gateway(peer, hello)

    def _greet(self, peer: bytes) -> None:
        """Hello until welcomed, then Ping, as every service does."""
        if self._peer(peer) is not None:
            if peer in self.welcomed:
                self.to_gateway(peer, Ping(peer.decode().partition("#")[0]))
            else:
                self._hello(peer)
            self.after(500 * MS, lambda: self._greet(peer))

    # --- schedulers and workers ---

    def start_scheduler(self, seat: int) -> None:
        self.scheduler_incarnations[seat] += 1
        scheduler = FakeScheduler(
            seat, self.scheduler_incarnations[seat], queue=self._queue, inexact=self._inexact
        )
        self.schedulers[seat] = scheduler
        self._set_seat(seat, scheduler_incarnation=scheduler.incarnation)
        self._look(scheduler)
        peer = b"scheduler-%d#%d" % (seat, scheduler.incarnation)
        self._greet(peer)
        self._step(scheduler, peer)
        self._report(scheduler, peer)

    def kill_scheduler(self, seat: int) -> None:
        self.schedulers[seat] = None
        self.after(self.rng.randint(50, 400) * MS, lambda: self.start_scheduler(seat))

    def kill_worker(self, seat: int) -> None:
        if self.topology.seats[seat].state != "member":
            return
        scheduler = self.schedulers[seat]
        incarnation = self.topology.seats[seat].worker_incarnation
        if scheduler is not None:
            self._garbage(scheduler)
        self._set_seat(seat, state="lost")
        self.after(
            self.rng.randint(100, 2000) * MS,
            lambda: self._set_seat(seat, state="member", worker_incarnation=incarnation + 1),
        )

    def _garbage(self, scheduler: FakeScheduler) -> None:
        """The lost worker is not dead at once: for a while it gives tokens that are wrong."""
        peer = b"scheduler-%d#%d" % (scheduler.seat, scheduler.incarnation)
        items = []
        for one in scheduler.sequences.values():
            if one.finish is None:
                item = scheduler._item(one, len(one.outputs))
                items.append(msgspec.structs.replace(item, token_ids=(7, 7, 7, 7)))
        if items:
            scheduler.seq += 1
            whole = tuple(items)
            message = Tokens(scheduler.seat, scheduler.incarnation, scheduler.seq, whole)
            if self.rng.random() < 0.5:
                rows = [(item.handle, item.offset, 7) for item in items]
                message = scheduler._tokens([], rows)
            gateway = self.gateway

            def send() -> None:
                if self.gateway is gateway:
                    self.to_gateway(peer, message)

            # It arrives when the gateway has heard of the loss, however late.
            for delay in (40, 300):
                self.after(delay * MS, send)

    def _set_seat(self, number: int, **changes: object) -> None:
        seats = list(self.topology.seats)
        seats[number] = msgspec.structs.replace(seats[number], **changes)
        self.topology = Topology(self.topology.epoch + 2, tuple(seats))
        for scheduler in self.schedulers.values():
            if scheduler is not None:
                self.after(self.rng.randint(0, 40) * MS, lambda s=scheduler: self._look(s))  # type: ignore[misc]
        gateway = self.gateway

        def tell() -> None:
            if gateway is not None and gateway is self.gateway:
                gateway.on_topology(self.topology, self.now)  # the board shows the newest one
                self.turn(gateway)

        self.after(self.rng.randint(0, 30) * MS, tell)

    def _look(self, scheduler: FakeScheduler) -> None:
        if self.schedulers.get(scheduler.seat) is not scheduler:
            return
        seat = self.topology.seats[scheduler.seat]
        scheduler.member = seat.state == "member"
        now = seat.worker_incarnation if scheduler.member else 0
        if scheduler.worker != now:
            scheduler.lose_worker()
            scheduler.worker = now

    def _step(self, scheduler: FakeScheduler, peer: bytes) -> None:
        if self.schedulers.get(scheduler.seat) is scheduler:
            for message in scheduler.step():
                self.to_gateway(peer, message)
            self.after(
                (10 if scheduler.sequences else 20) * MS, lambda: self._step(scheduler, peer)
            )

    def _report(self, scheduler: FakeScheduler, peer: bytes) -> None:
        if self.schedulers.get(scheduler.seat) is scheduler:
            self.to_gateway(peer, scheduler.load())
            for message in scheduler.repeat_finals():
                self.to_gateway(peer, message)
            self.after(200 * MS, lambda: self._report(scheduler, peer))

    # --- tokenizers ---

    def start_tokenizer(self, name: str) -> None:
        incarnation = self.tokenizer_incarnations.get(name, 0) + 1
        self.tokenizer_incarnations[name] = incarnation
        peer = f"{name}#{incarnation}".encode()
        self.tokenizers[name] = (peer, FakeTokenizer())
        self._greet(peer)

    def kill_tokenizer(self, name: str) -> None:
        self.tokenizers[name] = None
        self.after(self.rng.randint(50, 400) * MS, lambda: self.start_tokenizer(name))

    # --- clients ---

    def client(self) -> SimClient:
        identity = b"client-%d" % len(self.clients)
        core = ClientCore(lambda: f"{self.rng.getrandbits(128):032x}", 3600 * 10**9)
        client = SimClient(identity, core)
        self.clients.append(client)
        self._serve(client)
        return client

    def generate(self, client: SimClient, spec: Spec) -> Flow:
        flow = client.core.generate(spec, self.now, None, True)
        self.flows.append((spec, client, flow))
        return flow

    def _serve(self, client: SimClient) -> None:
        """Its loop: it reads unless it is stalled, and says what is to be said."""
        if not client.stalled:
            while client.inbox:
                client.core.on_frame(client.inbox.popleft(), self.now)
        client.core.poll(self.now)
        self.flush(client)
        busy = client.core._open or client.core.outgoing
        self.after((5 if busy else 100) * MS, lambda: self._serve(client))

    def flush(self, client: SimClient) -> None:
        while client.core.outgoing and self.gateway is not None:
            message = DECODER.decode(client.core.outgoing.popleft())
            gateway = self.gateway
            self.after(MS, lambda g=gateway, m=message: self._arrive(g, client, m))  # type: ignore[misc]

    def _arrive(self, gateway: Core, client: SimClient, message: ClientMessage) -> None:
        if self.gateway is gateway:
            gateway.on_client(client.identity, message, self.now)
            self.turn(gateway)

    def _to_client(self, identity: bytes, message: ClientReply) -> bool:
        client = next(c for c in self.clients if c.identity == identity)
        if len(client.inbox) >= CLIENT_QUEUE:
            return False
        self._check_said(identity, message)
        client.inbox.append(encode(message))
        return True

    def _check_said(self, identity: bytes, message: ClientReply) -> None:
        """What may not be said, whatever happens."""
        if isinstance(message, Accepted):
            assert message.request_id in self.disk.entries, "accepted what is not on disk"
            self.told[identity, message.request_id] = [False] * message.n
        elif isinstance(message, Delta | Final):
            self.memory.handed(message)
            told = self.told[identity, message.request_id]
            assert not told[message.index], "said something after the final"
            if isinstance(message, Final):
                told[message.index] = True
                if message.finish_reason == "abort" and not self.disk.full and not self._late:
                    on_disk = self.disk.finals.get(message.request_id, {})
                    assert message.index in on_disk, "told an abort that is not on disk"

    # --- faults ---

    def _until_death(self) -> int:
        return int(self.rng.expovariate(self.faults.deaths_per_s) * 10**9)

    def _a_death(self) -> None:
        if not self.faulty:
            return
        kinds: list[Callable[[], None]] = [
            lambda: self.kill_worker(self.rng.choice(list(self.schedulers))),
            self._kill_some_scheduler,
            self._kill_some_tokenizer,
            self._restart_gateway,
        ]
        self.rng.choice(kinds)()
        if self.rng.random() < self.faults.node_loss:
            self._lose_everything()
        if self.rng.random() < self.faults.disk_full:
            self.disk.full = True
            self.after(self.rng.randint(50, 800) * MS, self._disk_again)
        if self.clients and self.rng.random() < self.faults.stalls:
            client = self.rng.choice(self.clients)
            client.stalled = True
            self.after(self.rng.randint(100, 5000) * MS, lambda: setattr(client, "stalled", False))
        self.after(self._until_death(), self._a_death)

    def _disk_again(self) -> None:
        self.disk.full = False

    def _kill_some_scheduler(self) -> None:
        alive = [seat for seat, scheduler in self.schedulers.items() if scheduler is not None]
        if alive:
            self.kill_scheduler(self.rng.choice(alive))

    def _kill_some_tokenizer(self) -> None:
        alive = [name for name, known in self.tokenizers.items() if known is not None]
        if alive:
            self.kill_tokenizer(self.rng.choice(alive))

    def _restart_gateway(self) -> None:
        if self.gateway is not None:
            self.kill_gateway()
            self.after(self.rng.randint(20, 500) * MS, self.start_gateway)

    def _lose_everything(self) -> None:
        """The whole node at once, as by a loss of power; it starts again by itself."""
        self._restart_gateway()
        self.memory.lose()
        for seat in [s for s, scheduler in self.schedulers.items() if scheduler is not None]:
            self.kill_scheduler(seat)
        for name in [n for n, known in self.tokenizers.items() if known is not None]:
            self.kill_tokenizer(name)

    def calm(self) -> None:
        """No more faults from here on."""
        self.faulty = False
        self.disk.full = False
        for client in self.clients:
            client.stalled = False


# --- what must be true at the end ---


def prompt_of(spec: Spec) -> bytes:
    prompt = spec.prompt
    if isinstance(prompt, str):
        return encode_text(prompt).tobytes()
    if isinstance(prompt[0], ChatMessage):
        chat = [part for part in prompt if isinstance(part, ChatMessage)]
        return encode_text("".join(f"{m.role}:{m.content}\n" for m in chat)).tobytes()
    return array("i", [part for part in prompt if isinstance(part, int)]).tobytes()


def streams_of(spec: Spec, flow: Flow) -> list[Expected]:
    prompt = prompt_of(spec)
    sampling = sampling_for(spec.sampling, len(prompt) // 4, MODEL, None, 20, flow.seed)
    return [
        expected(msgspec.structs.replace(sampling, seed=derive_seed(flow.seed, index)), prompt)
        for index in range(spec.n)
    ]


def check_flow(spec: Spec, flow: Flow) -> None:
    """Every sequence ended once, with the stream it had to give, or with a part of it if aborted."""
    assert flow.done, f"{flow.request_id} never ended"
    if isinstance(flow.error, Refused):
        assert flow.aborting, flow.error
        return
    assert flow.error is None, flow.error
    prompt = prompt_of(spec)
    for index, (one, right) in enumerate(zip(flow.sequences, streams_of(spec, flow), strict=True)):
        final = one.final
        assert final is not None
        got = tuple(one.token_ids)
        if index == 0:
            check_prompt(spec, flow, prompt, final)
        if final.finish_reason == "abort":
            assert flow.aborting
            assert got == right.tokens[: len(got)]
            assert final.offset == len(got) == final.usage.completion_tokens
            continue
        text = "".join(one.texts) + final.text
        assert (got, text, final.finish_reason) == (right.tokens, right.text, right.reason)
        assert final.offset == len(got) == final.usage.completion_tokens
        if spec.sampling.logprobs is not None:
            seed = derive_seed(flow.seed, index)
            assert one.logprobs == [logprob_at(seed, prompt, at) for at in range(len(got))]


def check_prompt(spec: Spec, flow: Flow, prompt: bytes, final: Final) -> None:
    num_top = spec.sampling.prompt_logprobs
    if num_top is None:
        assert not flow.prompt_logprobs
        return
    right = [None, *(score_at(prompt, at, num_top) for at in range(1, len(prompt) // 4))]
    got = flow.prompt_logprobs
    assert got == (right[: len(got)] if final.finish_reason == "abort" else right)


def check_nothing_left(world: World) -> None:
    """Everyone is done with everything that has ended."""
    gateway = world.gateway
    assert gateway is not None and gateway.idle and not world._writing
    admission = gateway._admission
    assert not admission.pending and not admission._by_call and not gateway._recovery
    assert admission.sequences == 0 and admission.nbytes == 0 and not gateway._lives._abort_calls
    for seat in gateway._placement.seats.by_number.values():
        assert not seat.streams and not seat.handles
    attempts = gateway._attempts
    assert not attempts._aborts and not attempts._aborting and not attempts._calls
    assert not gateway._texts._dirty
    assert not gateway._texts._encodes
    assert all(not t.calls and not t.busy for t in gateway._texts._pool.values())
    for scheduler in world.schedulers.values():
        assert scheduler is not None and not scheduler.sequences


def nothing_left(world: World) -> bool:
    try:
        check_nothing_left(world)
    except AssertionError:
        return False
    return True


def check_forgotten(world: World) -> None:
    """After the time for re-attachment nothing is remembered, in memory or on disk."""
    gateway = world.gateway
    assert gateway is not None
    lives = gateway._lives
    assert not lives.requests and not len(lives._kept) and not gateway._admission._by_key
    assert lives._kept._num_tokens == 0
    assert not world.disk.entries and not world.disk.finals


def random_spec(rng: random.Random) -> Spec:
    from phalanx.protocol.messages import Sampling

    ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
    prompt = rng.choice(
        [ids, "".join(chr(rng.randrange(32, 96)) for _ in ids), [ChatMessage("user", "hi")]]
    )
    stops = [chr(ord("A") + rng.randrange(26)) + rng.choice("123456"), "."]
    sampling = Sampling(
        seed=rng.choice([None, rng.getrandbits(53)]),
        max_tokens=rng.choice([None, 1, 2, rng.randint(1, 60)]),
        stop=tuple(rng.sample(stops, rng.choice([0, 0, 1, 2]))),
        stop_token_ids=rng.choice([(), (), (rng.randrange(VOCAB),)]),
        logprobs=rng.choice([None, None, 0]),
    )
    if (sampling.max_tokens or 0) % 3 == 1:  # without a draw of its own
        sampling = msgspec.structs.replace(
            sampling,
            prompt_logprobs=len(prompt) % 3,
            max_tokens=0 if sampling.max_tokens == 1 else sampling.max_tokens,
        )
    n, stream = rng.choice([1, 1, 1, 2, 4]), rng.random() < 0.8
    # Of a prompt that is only scored there is one sequence: others are refused.
    return Spec(prompt, sampling, n=1 if sampling.max_tokens == 0 else n, stream=stream)


def run_seed(seed: int, core: type[Core] = Core, requests: int = 12) -> World:
    """One whole story: requests under faults, calm, the end. Raises AssertionError."""
    world = World(seed, Faults(), core=core)
    clients = [world.client(), world.client()]
    for _ in range(requests):
        world.run(world.rng.randint(0, 400) * MS)
        client = world.rng.choice(clients)
        flow = world.generate(client, random_spec(world.rng))
        if world.rng.random() < 0.15:
            delay = world.rng.randint(0, 1500) * MS
            world.after(delay, lambda c=client, f=flow: c.core.abort(f, world.now))  # type: ignore[misc]
    world.run(1000 * MS)
    world.calm()
    world.run(CALM_NS, until=lambda: all(flow.done for _, _, flow in world.flows))
    for spec, _, flow in world.flows:
        check_flow(spec, flow)
    world.run(15_000 * MS, until=lambda: nothing_left(world))
    check_nothing_left(world)
    world._events.clear()
    world.now += 700_000 * MS  # nothing happens for long
    world.turn(world.gateway)
    world.run(100 * MS)
    check_forgotten(world)
    return world


__all__ = ["Done", "World", "run_seed"]
