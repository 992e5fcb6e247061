"""A node of scheduler cores, hash workers, a KV store and a gateway in virtual time, from one seed.

Faults come in the first part of a run; then they stop and everything must end. After every event
the invariants of each core are checked, and what no core can see of itself: that a step in flight
writes only blocks that nobody else may have, that nothing follows a final, that the store copies
what its keys say, that work goes on while there is any.
"""

import heapq
from collections.abc import Callable
from random import Random

import msgspec
import numpy as np

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.errors import Code
from phalanx.protocol.kvkeys import block_keys, state_key
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import (
    BusFromGateway,
    BusToGateway,
    Contains,
    ContainsReply,
    FinishReason,
    Get,
    GetDone,
    KVRequest,
    Message,
    Put,
    PutDone,
    Sampling,
    Tokens,
)
from phalanx.protocol.prompt_logprobs import entries as score_entries
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import (
    GatewayChanged,
    Membership,
    Staging,
    StoreArenas,
    StoreLost,
    WorkerLost,
)
from sim.hash_worker import (
    MAX_MODEL_LEN,
    VOCAB,
    WINDOW,
    HashWorker,
    Ints,
    Staged,
    entries,
    fault_free,
    fault_free_scores,
)
from sim.poison import Poison
from sim.scheduler_checks import Onlooker, check_clean
from sim.scheduler_gateway import ModelGateway, Request

MS = 1_000_000
FAULTS_END_NS = 600 * MS
LIMIT_NS = 30_000 * MS
WAKE_NS_MIN = 2 * MS
UNREAD = 0.1  # of the plans that restore something find their staging arena gone, while faults last


class Options(msgspec.Struct, frozen=True):
    """What kind of run a seed makes. Probabilities are per occasion, while faults last."""

    tight: bool  # all prompts just below a block border, long outputs, a pool too small for that
    repeats: float  # share of the requests whose prompt begins as an earlier one's
    ranks: int
    requests: int
    num_blocks: int
    num_slots: int
    config: SchedulerConfig
    store: bool
    staged: tuple[int, int]  # blocks and states of a staging arena; none: nothing is read back
    step_ns: int
    drop: float
    duplicate: float
    jitter_ns: int
    abandon: float  # a step is abandoned: the epoch moved
    stale: float  # an old result comes again
    put_lost: float
    kills: int
    crashes: int
    gateway_restarts: int
    aborts: float  # share of the requests

    @classmethod
    def of(cls, rng: Random) -> "Options":
        rough = rng.random() < 0.7
        tight = rng.random() < 0.25
        seqs = 4 if tight else rng.choice((2, 4, 6))
        store = rng.random() < 0.6
        staged = rng.choice(((0, 0), (2, 1), (4, 2), (20, 4)))
        again = store and staged[0] and not tight and rng.random() < 0.5
        return cls(
            tight=tight,
            ranks=rng.choice((1, 1, 2, 3)),
            repeats=0.8 if again else 0.0,
            requests=rng.choice((7, 10, 14) if again else (4, 7, 10)),
            num_blocks=6 if tight else rng.choice((8, 12, 16) if again else (5, 6, 8, 12)),
            num_slots=seqs + rng.choice((-1, 0, 1)),
            config=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=rng.choice((17, 40, 130, 400)),
                prefill_watermark=rng.choice((0.5, 0.9, 1.0)),
                max_waiting=rng.choice((2, 20)),
                async_steps=rng.random() < 0.75,
                target_itl_ms=rng.choice((0, 0, 4)),
                priority_step_ms=rng.choice((0, 20)),
                preempt=rng.choice(("recompute", "recompute", "recompute", "stop")),
            ),
            store=store,
            staged=staged,
            step_ns=rng.choice((1, 5)) * MS,
            drop=0.05 * rough,
            duplicate=0.1 * rough,
            jitter_ns=rng.choice((0, 8, 30)) * MS * rough,
            abandon=0.08 * rough,
            stale=0.1 * rough,
            put_lost=0.2 * rough,
            kills=rng.choice((0, 1, 2)) * rough,
            crashes=rng.choice((0, 0, 1)) * rough,
            gateway_restarts=rng.choice((0, 0, 1)) * rough,
            aborts=rng.choice((0.0, 0.4)),
        )

    @classmethod
    def stored(cls, rng: Random) -> "Options":
        """Prompts that come again, and a store that has them: most of them are loaded."""
        return msgspec.structs.replace(
            cls.of(rng),
            tight=False,
            requests=14,
            num_blocks=rng.choice((8, 12, 16)),
            store=True,
            staged=rng.choice(((2, 1), (4, 2), (20, 4))),
            repeats=0.9,
            step_ns=MS,
            put_lost=0.4,
            aborts=0.4,
        )

    @classmethod
    def soak(cls, rng: Random) -> "Options":
        """Four ranks for long, with a pool of 1.2 times what their sequences need on average."""
        seqs = 6
        mean_blocks = 2.0  # of a request of `World._request`, half done
        return msgspec.structs.replace(
            cls.of(rng),
            tight=False,
            ranks=4,
            requests=60,
            num_blocks=1 + round(1.2 * seqs * mean_blocks),
            num_slots=seqs,
            config=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=rng.choice((40, 130, 400)),
                max_waiting=60,
                async_steps=rng.random() < 0.75,
            ),
            step_ns=MS,
            aborts=0.3,
        )


class RankUnderTest:
    """One core with its worker, and what an onlooker knows of them."""

    def __init__(self, world: "World", seat: int) -> None:
        self.world, self.seat = world, seat
        self.incarnation = 0
        self.worker_incarnation = 0
        self._free_ns = 0  # when the worker has done all its plans
        self.core: Scheduler
        self.worker: HashWorker | None = None
        self.old_results: list[StepResult] = []
        self.poison = Poison()
        self.losses = 0  # of the store, that it has not heard of yet
        self.start()

    def start(self) -> None:
        """A new scheduler process. Its link is new, so a worker that lives starts clean."""
        options = self.world.options
        self.incarnation += 1
        rows = 2 * options.config.max_waiting + options.config.max_num_seqs
        columns = QueueTable.create(
            memoryview(bytearray(queue_bytes(rows))), rows, self.seat, self.incarnation
        )
        self.core = Scheduler(
            options.config, self.seat, self.incarnation, columns, store_enabled=options.store
        )
        self.onlooker = Onlooker(self.core)
        self.renew_worker(None)

    def renew_worker(self, ready_in_ns: int | None) -> None:
        """The worker is gone; None: it lives and follows the new link, else the next one needs a while."""
        self.onlooker.new_worker()
        self.old_results.clear()
        if self.worker is not None and ready_in_ns is not None:
            self.worker = None
            self.event(WorkerLost())
        self.worker_incarnation += 1
        incarnation = self.worker_incarnation
        self.world.after(ready_in_ns or MS, lambda: self._worker_ready(incarnation))

    def _worker_ready(self, incarnation: int) -> None:
        if incarnation != self.worker_incarnation:
            return
        options = self.world.options
        ring = self.world.ring
        self.worker = HashWorker(incarnation, options.num_blocks, options.num_slots, **ring)
        self.event(
            self.worker.hello(), self._arenas(self.worker), Membership(2 * incarnation, True)
        )

    def _arenas(self, worker: HashWorker) -> StoreArenas:
        """With a staging arena that nobody used before, small enough that loads wait for each other."""
        blocks, states = self.world.options.staged
        if not blocks:
            return StoreArenas(0, 0)
        name = f"ph-sim-staging{self.seat}-{self.incarnation}.{worker.incarnation}"
        self.world.staged[name] = Staged(blocks, states, worker.ring)
        worker.staging = self.world.staged
        return StoreArenas(0, 0, Staging(name, 0, blocks, states))

    def store_lost(self) -> None:
        self.losses -= 1
        self.event(StoreLost())

    def event(self, *events: object) -> None:
        world = self.world
        for event in events:
            self.onlooker.takes(event)
            self.core.handle(event, world.now_ns)
            self.poison.look(self.core.rank.pool, self.worker)
        self.pump()

    def pump(self) -> None:
        """Let the core decide, carry it out, and look at what it did."""
        world, core = self.world, self.core
        actions = core.step(world.now_ns)
        self.poison.look(core.rank.pool, self.worker)
        for message in actions.gateway:
            if isinstance(message, Tokens):
                self.onlooker.said(message)
            world.to_gateway(self, message)
        if not self.losses:
            core.store_stands()
        for request in core.store_step(world.now_ns):
            world.to_store(self, request)
        for plan in actions.plans:
            self._run(plan)
        self.onlooker.check()
        world.wake(self, int(core.wait_ms(world.now_ns) * 1e6) + 1)

    def _run(self, plan: StepPlan) -> None:
        worker, core = self.worker, self.core
        assert worker is not None, "a plan without a worker"
        self.onlooker.planned(plan)
        # One step after the other, as they came.
        self._free_ns = max(self._free_ns, self.world.now_ns) + self.world.options.step_ns
        delay = self._free_ns - self.world.now_ns
        self.world.after(delay, lambda: self._finish_step(plan, worker, core))

    def _finish_step(self, plan: StepPlan, worker: HashWorker, core: Scheduler) -> None:
        if worker is not self.worker or core is not self.core:
            return  # died with its step, or serves another scheduler now
        world = self.world
        abandon = world.chance(world.options.abandon)
        if plan.restores and world.faulty and world.side.random() < UNREAD:
            worker.unread.add(plan.staging)  # from here on, for this plan and all that follow
        result = worker.run(plan, abandon=abandon)
        self.poison.check(worker)
        result = msgspec.structs.replace(result, step_us=1000 + 50 * len(plan.token_ids) // 4)
        self.onlooker.done(plan.seq)
        again = self.old_results[-3:]
        self.old_results.append(result)
        if again and world.chance(world.options.stale):
            self.event(world.rng.choice(again))
        self.event(result)


class World:
    """One run. `ring` overrides the worker's ring length, for a planted fault."""

    def __init__(
        self,
        seed: int,
        ring: dict[str, int] | None = None,
        options: Callable[[Random], Options] = Options.of,
    ) -> None:
        self.rng, self._moves_rng = Random(seed), Random(-seed - 1)
        self.side = Random(f"{seed}, on the side")
        self.options = options(self.rng)
        self.ring = ring or {}
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._num_requests = 0
        self._last_arrival: dict[object, int] = {}
        self._due: dict[int, int] = {}
        self.gateway = ModelGateway(self.rng, self.to_seat, self.after)
        self.keyed: dict[bytes, Ints] = {}
        self.stored: dict[bytes, Ints] = {}
        self.staged: dict[str, Staged] = {}  # by name
        self.newest: dict[tuple[str, int], int] = {}  # the last Get for each place in an arena
        self.store_incarnation = 1
        self.ranks = [RankUnderTest(self, seat) for seat in range(self.options.ranks)]
        self._schedule()

    @property
    def faulty(self) -> bool:
        return self.now_ns < FAULTS_END_NS

    def chance(self, probability: float) -> bool:
        return self.faulty and self.rng.random() < probability

    def after(self, delay_ns: int, then: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now_ns + max(1, delay_ns), self._serial, then))

    def wake(self, rank: RankUnderTest, delay_ns: int) -> None:
        """Step the core again at that time, once whatever the number of calls."""
        delay_ns = max(delay_ns, WAKE_NS_MIN)
        at = self.now_ns + delay_ns
        if self.now_ns < self._due.get(rank.seat, 0) <= at:
            return
        self._due[rank.seat] = at
        self.after(delay_ns, rank.pump)

    # ------------------------------------------------------------ messages

    def _deliver(self, path: object, then: Callable[[], None]) -> None:
        """In order, unless this run reorders; perhaps twice, perhaps never."""
        if self.chance(self.options.drop):
            return
        for _ in range(1 + self.chance(self.options.duplicate)):
            delay = 1 + self.rng.randrange(self.options.jitter_ns + 1) * self.faulty
            at = self.now_ns + delay
            if not self.options.jitter_ns:
                at = self._last_arrival[path] = max(at, self._last_arrival.get(path, 0))
            self.after(at - self.now_ns, then)

    def to_seat(self, seat: int, message: BusFromGateway) -> None:
        rank, gateway = self.ranks[seat], self.gateway.incarnation
        core = rank.core

        def arrive() -> None:
            if rank.core is core and self.gateway.incarnation == gateway:
                rank.event(message)

        self._deliver(("down", seat), arrive)

    def to_gateway(self, rank: RankUnderTest, message: BusToGateway) -> None:
        seat, gateway = rank.seat, self.gateway.incarnation

        def arrive() -> None:
            if self.gateway.incarnation == gateway:
                self.gateway.receive(seat, message)

        self._deliver(("up", seat), arrive)

    def to_store(self, rank: RankUnderTest, message: KVRequest) -> None:
        match message:
            case Put():
                self._put(rank, message)
            case Contains():
                self._contains(rank, message)
            case Get():
                self._get(rank, message)
            case _:
                raise AssertionError(f"not for a store: {message}")

    def _store_answers(
        self, rank: RankUnderTest, delay_ns: int, then: Callable[[], Message]
    ) -> None:
        """After a while, if the store and who asked still live."""
        core, store = rank.core, self.store_incarnation

        def answer() -> None:
            if self.store_incarnation == store:
                message = then()
                if rank.core is core:
                    rank.event(message)

        self.after(delay_ns, answer)

    def _store_delay(self) -> int:
        """Sometimes longer than anybody waits."""
        late = self.chance(self.options.put_lost / 4)
        return self.rng.randrange(4_000 if late else 20 if self.faulty else 3) * MS

    def _contains(self, rank: RankUnderTest, message: Contains) -> None:
        if self.chance(self.options.put_lost / 4):
            return

        def look() -> ContainsReply:
            keys = message.keys
            stored = next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))
            ends = (i + 1 for i in reversed(range(stored)) if state_key(keys[i]) in self.stored)
            return ContainsReply(message.call, stored, next(ends, 0))

        self._store_answers(rank, self._store_delay(), look)

    def _get(self, rank: RankUnderTest, message: Get) -> None:
        """One copy after the other, each in its time, perhaps twice; what is gone meanwhile or does not
        verify is a miss."""
        handle, staged = message.handle, self.staged[message.handle.arena]
        region = staged.record(handle.offset)
        assert region.nbytes == handle.nbytes
        staged.generations[handle.region] = handle.generation
        self.newest[handle.arena, handle.offset] = message.call
        if self.chance(self.options.put_lost / 2):
            self.stored.pop(message.key, None)

        def copy() -> GetDone:
            found = self.stored.get(message.key)
            if found is None or staged.generations[handle.region] != handle.generation:
                return GetDone(message.call, False)
            newest = self.newest[handle.arena, handle.offset]
            assert newest == message.call, "a copy into a region that is another load's now"
            region[:] = found
            return GetDone(message.call, True, region.nbytes)

        for _ in range(1 + self.chance(self.options.put_lost / 2)):
            if not self.chance(self.options.put_lost / 4):
                self._store_answers(rank, self._store_delay(), copy)

    def _put(self, rank: RankUnderTest, message: Put) -> None:
        """The store copies some time later and answers, or does neither."""
        worker, core, store = rank.worker, rank.core, self.store_incarnation
        if worker is None or self.chance(self.options.put_lost):
            return

        def copy() -> None:
            if rank.worker is not worker or self.store_incarnation != store:
                return
            if self.now_ns > message.deadline_ns:
                return
            handle = message.handle
            place = handle.offset // handle.nbytes
            if message.kind == "block":
                found = worker.blocks[place]
            else:
                found = worker.snapshots[place]
            self._check_copy(message, found, worker.ring)
            self.stored[message.key] = found.copy()
            if rank.core is core:
                rank.event(PutDone(message.call, True, False))

        slow = self.faulty and not self.options.repeats
        self.after(self.rng.randrange(200 if slow else 30) * MS, copy)

    def _check_copy(self, put: Put, found: Ints, ring: int) -> None:
        expected = self.keyed[put.key]
        if put.kind == "state":
            positions = expected >> 20
            found = found[positions % ring]
        assert np.array_equal(found, expected), "the store copied what its key does not say"

    # ------------------------------------------------------------ the course of a run

    def _schedule(self) -> None:
        rng, options = self.rng, self.options
        for number in range(options.requests):
            request = self._request(number)
            arrival = rng.randrange(FAULTS_END_NS // (2 if options.repeats else 3))
            for member in [request, *self._siblings(request)]:
                self._note_keys(member)
                self._num_requests += 1
                self.after(arrival, lambda request=member: self.gateway.open(request))  # type: ignore[misc]
                if rng.random() < options.aborts:
                    reason: FinishReason = rng.choice(("abort", "abort", "stop"))
                    self.after(
                        arrival + rng.randrange(200 * MS),
                        lambda request=member, reason=reason: self.gateway.abort(request, reason),  # type: ignore[misc]
                    )
        for _ in range(options.kills):
            self._at_random(lambda: self._some_rank().renew_worker(rng.randrange(1, 100) * MS))
        for _ in range(options.crashes):
            self._at_random(lambda: self._some_rank().start())
        for _ in range(options.gateway_restarts):
            self._at_random(self._restart_gateway)
        if options.store:
            self._at_random(self._lose_store)
        moves = self._moves_rng
        for _ in range(moves.choice((0, 0, 3, 12))):
            self.after(moves.randrange(FAULTS_END_NS), lambda: self.gateway.ask_back(moves))

    def _restart_gateway(self) -> None:
        self.gateway.restart([rank.seat for rank in self.ranks])
        for rank in self.ranks:
            rank.event(GatewayChanged())

    def _lose_store(self) -> None:
        self.store_incarnation += 1  # what it had not copied yet, it never copies
        for rank in self.ranks:
            rank.losses += 1
            late_ns = self.side.choice((0, self.side.randrange(100) * MS))
            self.after(late_ns, rank.store_lost)

    def _at_random(self, then: Callable[[], None]) -> None:
        self.after(self.rng.randrange(FAULTS_END_NS), then)

    def _some_rank(self) -> RankUnderTest:
        return self.rng.choice(self.ranks)

    def _request(self, number: int) -> Request:
        """Lengths lie around block borders, where things go wrong; one in ten can never fit."""
        rng = self.rng
        border = rng.choice((0, 1, 1, 1, 2)) * BLOCK_SIZE
        length = max(1, border + rng.randrange(-20, 6))
        if rng.random() < 0.1:
            length = rng.choice((MAX_MODEL_LEN, MAX_MODEL_LEN - 8))
        shared = number % 2 == 0
        if self.options.tight:
            length = rng.randrange(105, 128)
        first = 5 if shared else number  # half of the prompts share a prefix
        prompt = [(first * (at + 3)) % VOCAB for at in range(length)]
        if shared and length > 1:
            prompt[-1] = number % VOCAB
        if rng.random() < self.options.repeats:
            length = rng.choice((130, 250, 256, 257, 390))
            step = rng.choice((7, 11))
            prompt = [(step * at) % VOCAB for at in range(length)]
            if rng.random() < 0.4:
                prompt[-rng.randrange(1, length) :] = [number % VOCAB] * rng.randrange(1, 3)
        seed = rng.randrange(1 << 32)
        sampling = Sampling(
            seed=seed,
            max_tokens=rng.choice((40, 150) if self.options.tight else (1, 2, 20, 40, 150)),
            min_tokens=rng.choice((0, 0, 5)),
            stop_token_ids=rng.choice(((), (), (3, 4))),
            ignore_eos=rng.random() < 0.7,
            logprobs=rng.choice((None, 0)),
            predicted_token_ids=self._predicted(prompt, seed),
            forced_token_ids=tuple(
                rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 0, 3, 25)))
            ),
        )
        if seed % 4 == 0:  # without a draw of its own
            sampling = msgspec.structs.replace(
                sampling,
                prompt_logprobs=seed // 4 % 3,
                max_tokens=0 if seed % 16 == 4 else sampling.max_tokens,
                min_tokens=0 if seed % 16 == 4 else sampling.min_tokens,
            )
        return Request(f"{number:032x}", rng.randrange(2), prompt, sampling)

    def _siblings(self, first: Request) -> list[Request]:
        """Further sequences of the same request: the same prompt, other seeds."""
        rng, found = self.rng, []
        for index in range(first.index + 1, first.index + 1 + rng.choice((0, 0, 0, 1, 3))):
            sampling = msgspec.structs.replace(
                first.sampling, seed=rng.randrange(1 << 32), prompt_logprobs=None
            )
            sampling = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens or 1)
            found.append(Request(first.request_id, index, first.prompt, sampling))
        return found

    def _predicted(self, prompt: list[int], seed: int) -> tuple[int, ...]:
        """What comes, with mistakes; for half of the requests nothing."""
        rng = self.rng
        if rng.random() < 0.5:
            return ()
        wrong = rng.choice((0.0, 0.2, 0.6, 1.0))
        truth = fault_free(prompt, seed, rng.choice((3, 60, 170)))
        return tuple((t + (rng.random() < wrong)) % VOCAB for t in truth)

    def _note_keys(self, request: Request) -> None:
        tokens = [*request.prompt, *request.expected()[0]]
        kept = entries(np.array(tokens, np.int64), 0)
        for at, key in enumerate(block_keys(b"hash", b"", tokens)):
            end = (at + 1) * BLOCK_SIZE
            self.keyed[key] = kept[end - BLOCK_SIZE : end]
            self.keyed[state_key(key)] = kept[max(0, end - WINDOW) : end]

    def run(self) -> None:
        """To the end. Raises AssertionError: an invariant broke, a token is wrong, something hangs."""
        while not self._settled():
            assert self._events and self.now_ns < LIMIT_NS, self._stuck()
            self.now_ns, _, then = heapq.heappop(self._events)
            then()
        for request in self.gateway.requests.values():
            self._check_end(request)
        for rank in self.ranks:
            check_clean(rank.core)

    def _settled(self) -> bool:
        return (
            not self.faulty
            and len(self.gateway.requests) == self._num_requests
            and all(request.over for request in self.gateway.requests.values())
            and all(
                not rank.core.sequences and not rank.core.busy and not _kept(rank.core)
                for rank in self.ranks
            )
        )

    def _stuck(self) -> str:
        waiting = [r.request_id for r in self.gateway.requests.values() if not r.over]
        return f"waits for ever: requests {waiting} at {self.now_ns / 1e9:.1f} s"

    def _check_end(self, request: Request) -> None:
        stream, end = request.expected()
        outputs = request.outputs
        self._check_scores(request)
        assert outputs == stream[: len(outputs)], f"{request.request_id}: a wrong token"
        if request.refused:
            assert self._never_fits(request), request.refused
        elif request.code == Code.KV_PRESSURE:
            assert self.options.config.preempt == "stop" and request.finish == "length"
        elif request.abort is None or request.finish != request.abort:
            assert (outputs, request.finish) == (stream, end), f"{request.request_id}: wrong end"

    def _check_scores(self, request: Request) -> None:
        num_top = request.sampling.prompt_logprobs
        if num_top is None:
            assert not request.scores
            return
        right = fault_free_scores(request.prompt, num_top)
        got = list(score_entries(request.scores, num_top))
        assert got == right[: len(got)], f"{request.request_id}: a wrong prompt log-probability"
        if request.finish in ("stop", "length") and request.finish != request.abort:
            assert len(got) == len(right), (
                f"{request.request_id}: prompt log-probabilities are missing"
            )

    def _never_fits(self, request: Request) -> bool:
        assert request.sampling.max_tokens is not None
        length = len(request.prompt)
        room = min(request.sampling.max_tokens, MAX_MODEL_LEN - length)
        blocks = -(-(length + max(room - 1, 0)) // BLOCK_SIZE)
        return room < min(1, request.sampling.max_tokens) or blocks > self.options.num_blocks - 1


def _kept(core: Scheduler) -> bool:
    """What the store still reads or writes."""
    copies = core.store is not None and bool(core.store.holders())
    return copies or (core.restorer is not None and not core.restorer.whole)
