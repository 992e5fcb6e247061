"""Ranks that vote, in one thread and virtual time: real schedulers, hands, votes and board, hash workers.

Every rank's worker and scheduler take their turns in a random order, one rank far behind another; they
look at the board between any two things that another one does. Schedulers die and hang, workers fall and
come back. What must hold: all ranks of an epoch decide the same in the same order, every prompt step was
due, no step is empty, and every stream is what it would be without any of this.
"""

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from phalanx.protocol.board import Board, Vote
from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import FinalSeen, Refusal, Sampling, Submit, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, ToScheduler, ToWorker
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Membership, WorkerLost
from phalanx.worker_svc.agreement import Agreement, Waits
from phalanx.worker_svc.ballot import Next
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.hand import Hand
from sim.hash_worker import VOCAB, HashWorker, fault_free
from sim.scheduler_checks import check
from sim.token_rows import Handles

US, MS = 1_000, 1_000_000
STUCK_MS = 2_500  # no token for so long, longer than any fault lasts: it waits for ever


@dataclass
class Options:
    ranks: int = 3
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    requests: int = 60
    every_us: int = 3000  # between two arrivals, on average
    outputs: tuple[int, ...] = (1, 5, 30, 60)
    open_max: int = 60  # requests that are not finished; further ones wait outside
    scheduler_faults: int = 0
    worker_faults: int = 0

    @classmethod
    def of(cls, seed: int) -> "Options":
        rng = Random(seed)
        config = SchedulerConfig(
            policy="ballot",
            prompt_all_steps=rng.choice((3, 7)),
            prompt_any_steps=rng.choice((5, 10)),
            prompt_steps_max=rng.choice((1, 2, 4)),
            max_num_seqs=rng.choice((2, 4, 6)),
            max_num_batched_tokens=rng.choice((17, 64, 300)),
            async_steps=rng.random() < 0.75,
            max_waiting=100,
        )
        faults = rng.random() < 0.7
        return cls(
            ranks=rng.choice((1, 2, 3, 4)),
            config=config,
            requests=rng.choice((20, 40)),
            every_us=rng.choice((300, 3000, 20_000)),
            scheduler_faults=rng.choice((0, 1, 3)) * faults,
            worker_faults=rng.choice((0, 1, 3)) * faults,
        )


@dataclass(eq=False)
class Request:
    number: int
    prompt: list[int]
    max_tokens: int
    seat: int = -1  # where it is; -1: to be placed
    attempt: int = -1
    outputs: list[int] = field(default_factory=list[int])
    finish: str | None = None


@dataclass
class Decision:
    """What one member of an epoch decided after one vote or two."""

    next_: Next
    first_votes: dict[int, int]  # seat -> what it said first
    ran: int = 0  # members that had a plan for the step
    members: int = 0  # that took it


class SimRank:
    """A seat: scheduler process, worker process and the rings between them."""

    def __init__(self, world: "World", seat: int) -> None:
        self.world, self.seat = world, seat
        self.incarnation = self.worker_incarnation = 0
        self.core: Scheduler | None = None
        self.worker: HashWorker | None = None
        self.slow_until_ns = 0  # the scheduler gets no CPU
        self.to_worker: deque[ToWorker] = deque()
        self.to_scheduler: deque[ToScheduler] = deque()
        self.relink = False
        self.agreement: Agreement | None = None
        self.rounds: Waits | None = None
        self.ready: Callable[[], bool] = lambda: True
        self.decided = 0  # decisions of this epoch so far
        self.stopped_at = 0
        self.start_worker()
        self.start_scheduler()

    # ------------------------------------------------------------ the scheduler

    def start_scheduler(self) -> None:
        self.incarnation += 1
        config = self.world.options.config
        rows = 2 * config.max_waiting + config.max_num_seqs
        columns = QueueTable.create(
            memoryview(bytearray(queue_bytes(rows))), rows, self.seat, self.incarnation
        )
        self.core = Scheduler(config, self.seat, self.incarnation, columns)
        self.core_due_ns = 0
        self.handles = Handles()
        self.to_worker.clear()
        self.to_scheduler.clear()
        self.relink = True
        self.membership = Membership(0, False)

    def kill_scheduler(self) -> None:
        self.core = None
        self.world.unplace(self.seat)

    def scheduler_turn(self) -> bool:
        core, world = self.core, self.world
        if core is None or world.now_ns < self.slow_until_ns:
            return False
        membership = Membership(world.epoch, self.seat in world.members)
        heard = membership != self.membership
        if heard:
            self.membership = membership
            core.handle(membership, world.now_ns)
        while self.to_scheduler:
            heard = True
            core.handle(self.to_scheduler.popleft(), world.now_ns)
        for submit in world.submits(self.seat, core.accepting):
            heard = True
            core.handle(submit, world.now_ns)
        if not heard and world.now_ns < self.core_due_ns:
            return False
        actions = core.step(world.now_ns)
        self.core_due_ns = world.now_ns + max(int(core.wait_ms(world.now_ns) * MS), MS)
        if actions.plans:
            self.core_due_ns = world.now_ns  # perhaps another one ahead
        if self.world.rng.random() < 0.1:
            check(core)
        if actions.offer is not None:
            self.to_worker.append(actions.offer)
        self.to_worker += actions.plans
        for message in actions.gateway:
            assert not isinstance(message, Refusal), message
            if isinstance(message, Tokens):
                world.take_tokens(self, message)
        return heard or bool(actions.plans) or actions.offer is not None

    # ------------------------------------------------------------ the worker

    def start_worker(self) -> None:
        self.worker_incarnation += 1
        self.worker = HashWorker(self.worker_incarnation, 40, 8)
        self.hand = Hand()
        self.agreement = self.rounds = None
        self.stopped_at = 0

    def kill_worker(self) -> None:
        self.worker = None
        self.world.unplace(self.seat)
        if self.core is not None:
            self.core.handle(WorkerLost(), self.world.now_ns)
        self.to_worker.clear()
        self.to_scheduler.clear()
        self.relink = True

    def _read(self) -> int:
        """As `Rank._read`, with queues for rings."""
        now_ns, hand = self.world.now_ns, self.hand
        while self.to_worker and hand.plan is None and hand.prompt is None:
            answer = hand.take(self.to_worker.popleft(), now_ns)
            if answer is not None:
                self.to_scheduler.append(answer)
        return now_ns

    def worker_turn(self) -> bool:
        """One look at the world, as in `Rank._turn`. Returns whether anything was done."""
        world = self.world
        if self.worker is None:
            return False
        if self.rounds is not None:
            return self._go_on()
        if world.epoch % 2 == 1:
            acked, self.stopped_at = self.stopped_at == world.epoch, world.epoch
            return not acked
        if self.relink and self.core is not None:
            self.relink = False
            self.worker = HashWorker(self.worker_incarnation, 40, 8)
            self.hand.reset(world.now_ns)
            self.to_scheduler.append(self.worker.hello())
            return True
        if self.agreement is None or self.agreement.group.epoch != world.epoch:
            return self._enter()
        if not self.agreement.due():
            return False
        self.rounds = self.agreement.reach()
        self.ready = next(self.rounds)
        self._note_vote(self.agreement.group.round)
        return True

    def _enter(self) -> bool:
        world = self.world
        if self.seat not in world.members:
            return False
        group = Group(world.board, self.seat, world.members, world.epoch, lambda: None)
        config = world.options.config
        self.agreement = Agreement(config, group, self.hand, self._read, self.to_scheduler.append)
        self.hand.begin_epoch(world.now_ns)
        self.decided = 0
        return True

    def _note_vote(self, number: int) -> None:
        vote, _ = self.world.board.seats[self.seat].vote(number)
        self.world.decision(self.decided).first_votes[self.seat] = vote

    def _go_on(self) -> bool:
        assert self.rounds is not None and self.agreement is not None
        if not self.ready():
            if self.world.epoch == self.agreement.group.epoch:
                return False
            self._leave()
            return True
        try:
            self.ready = next(self.rounds)
        except StopIteration as end:
            self.rounds = None
            self._step(end.value)
        return True

    def _leave(self) -> None:
        """EpochChanged."""
        self.rounds = self.agreement = None
        self.to_scheduler += self.hand.abandon()

    def _step(self, next_: Next) -> None:
        world, hand = self.world, self.hand
        assert self.agreement is not None and self.worker is not None
        decision = world.decide(self, next_)
        self.decided += 1
        if next_ is Next.NOTHING:
            return
        plan = hand.prompt if next_ is Next.PROMPT else hand.plan
        decision.members += 1
        if plan is not None:
            decision.ran += 1
            assert bool(plan.turn) == (next_ is Next.PROMPT)
            self._check_kind(plan, next_)
        if world.epoch != self.agreement.group.epoch and world.rng.random() < 0.5:
            if plan is not None:
                self.worker.run(plan, abandon=True)
            self._leave()
            return
        if plan is not None:
            self.to_scheduler.append(self.worker.run(plan))
        hand.done(next_ is Next.PROMPT, world.now_ns)
        world.check_step(decision)

    def _check_kind(self, plan: StepPlan, next_: Next) -> None:
        for flight in self.core.flights if self.core is not None and not self.relink else ():
            if flight.seq == plan.seq:
                rows = bool(len(flight.decoders.rows)), bool(flight.chunks)
                assert rows == (next_ is Next.DECODE, next_ is Next.PROMPT), "rows of a wrong kind"


class World:
    def __init__(self, seed: int, options: Options | None = None) -> None:
        self.rng = Random(seed)
        self.options = options or Options.of(seed)
        self.now_ns = 0
        self.epoch = 2
        self.members = list(range(self.options.ranks))
        self.board = Board.create(f"sim{uuid.uuid4().hex[:8]}")
        self.requests: list[Request] = []
        self.open: list[Request] = []
        self.decisions: dict[int, list[Decision]] = {}
        self.steps = 0  # taken, in all epochs
        self.prompt_steps = 0
        self.ranks = [SimRank(self, seat) for seat in self.members]
        self._due = self._arrivals()
        self._faults = self._draw_faults()
        self._returns: list[tuple[int, Callable[[], None]]] = []

    # ------------------------------------------------------------ requests

    def _arrivals(self) -> deque[tuple[int, Request]]:
        rng, at, found = self.rng, 0, deque[tuple[int, Request]]()
        for number in range(self.options.requests):
            at += rng.choice((0, 0, 1, 2, 5)) * self.options.every_us * US
            length = rng.choice((1, 5, 40, 127, 128, 200))
            prompt = [rng.randrange(VOCAB) for _ in range(length)]
            found.append((at, Request(number, prompt, rng.choice(self.options.outputs))))
        return found

    def unplace(self, seat: int) -> None:
        """Its scheduler or worker is gone: whatever was there is placed anew."""
        for request in self.open:
            if request.seat == seat:
                request.seat = -1

    def submits(self, seat: int, accepting: bool) -> list[Submit]:
        """What this seat is to take now."""
        if not accepting:
            return []
        found = []
        for request in self.open:
            if request.seat < 0 and self.rng.random() < 0.7:
                request.seat, request.attempt = seat, request.attempt + 1
                sampling = Sampling(
                    seed=request.number, max_tokens=request.max_tokens, ignore_eos=True
                )
                ids, outputs = (
                    np.array(t, np.int32).tobytes() for t in (request.prompt, request.outputs)
                )
                name = f"{request.number:032x}"
                resumed = request.attempt > 0
                found.append(
                    Submit(1, name, 0, request.attempt, ids, sampling, outputs, resumed=resumed)
                )
        return found

    def take_tokens(self, rank: SimRank, message: Tokens) -> None:
        assert rank.core is not None
        for item in rank.handles.items(message):
            request = self.requests[int(item.request_id, 16)]
            if (request.seat, request.attempt) != (rank.seat, item.attempt):
                continue
            assert item.offset <= len(request.outputs)
            request.outputs[item.offset :] = item.token_ids
            self.token_ns = self.now_ns
            if item.finish_reason is not None:
                assert item.finish_reason == "length", item
                request.finish = item.finish_reason
                self.open.remove(request)
                seen = FinalSeen(((item.request_id, item.index, item.attempt),))
                rank.core.handle(seen, self.now_ns)

    # ------------------------------------------------------------ decisions

    def decision(self, at: int) -> Decision:
        """The decision number `at` of the epoch that its first member makes known."""
        made = self.decisions.setdefault(self.epoch - self.epoch % 2, [])
        while len(made) <= at:
            made.append(Decision(Next.SECOND_VOTE, {}))  # not made yet
        return made[at]

    def decide(self, rank: SimRank, next_: Next) -> Decision:
        assert rank.agreement is not None
        epoch = rank.agreement.group.epoch
        made = self.decisions[epoch][rank.decided]
        if made.next_ is Next.SECOND_VOTE:
            made.next_ = next_
            self.steps += next_ is not Next.NOTHING
            self.prompt_steps += next_ is Next.PROMPT
            self._check_due(epoch, rank.decided)
        what = f"epoch {epoch}, decision {rank.decided}: rank {rank.seat} takes {next_}"
        assert made.next_ is next_, f"{what}, others {made.next_}"
        return made

    def _check_due(self, epoch: int, at: int) -> None:
        """Was it time for this kind? From the history alone."""
        config, made = self.options.config, self.decisions[epoch]
        votes = made[at].first_votes.values()
        assert len(votes) == len(self.members)
        if made[at].next_ is not Next.PROMPT or not any(vote & Vote.PLAN for vote in votes):
            return
        steps = [d for d in made[:at] if d.next_ is not Next.NOTHING]
        run = 0
        while run < len(steps) and steps[-1 - run].next_ is Next.PROMPT:
            run += 1
        assert run < config.prompt_steps_max, "no decode step for too long"
        since, row = 0, 0  # decode steps since a prompt step, and prompt steps in a row
        for step in steps:
            if step.next_ is Next.PROMPT:
                since, row = 0, row + 1
            else:
                since, row = since + (row < config.prompt_steps_max), 0
        wishes = [bool(vote & Vote.WANTS_PROMPT) for vote in votes]
        all_point = since % config.prompt_all_steps == 0 and all(wishes)
        any_point = since > 0 and since % config.prompt_any_steps == 0 and any(wishes)
        assert all_point or any_point, f"a prompt step after {since} decode steps: {wishes}"

    def check_step(self, decision: Decision) -> None:
        """Once all took it: it was for somebody."""
        if decision.members == len(self.members):
            assert decision.ran > 0, f"an empty step: {decision}"

    # ------------------------------------------------------------ faults

    def _draw_faults(self) -> deque[tuple[int, Callable[[], None]]]:
        span = max(self._due[-1][0], 20 * MS)
        drawn = [(self.rng.randrange(span), self._scheduler_fault)
                 for _ in range(self.options.scheduler_faults)]  # fmt: skip
        drawn += [(self.rng.randrange(span), self._worker_fault)
                  for _ in range(self.options.worker_faults)]  # fmt: skip
        return deque(sorted(drawn, key=lambda fault: fault[0]))

    def _later(self, ms: int, then: Callable[[], None]) -> None:
        self._returns.append((self.now_ns + ms * MS, then))

    def _scheduler_fault(self) -> None:
        rank = self.rng.choice(self.ranks)
        if self.rng.random() < 0.5:
            rank.slow_until_ns = self.now_ns + self.rng.choice((10, 70, 400)) * MS
        elif rank.core is not None:
            rank.kill_scheduler()
            self._later(self.rng.choice((5, 300)), rank.start_scheduler)

    def _worker_fault(self) -> None:
        """Stop, and go without it; then stop and go with its successor. A lonely one comes back at once."""
        if self.epoch % 2 == 1 or len(self.members) < len(self.ranks):
            return
        rank = self.rng.choice(self.ranks)
        rank.kill_worker()
        survivors = [seat for seat in self.members if seat != rank.seat]
        if not survivors:
            rank.start_worker()
            self._move_to([rank.seat])
            return
        self._move_to(survivors)
        self._later(self.rng.choice((5, 50)), lambda: self._rejoin(rank))

    def _rejoin(self, rank: SimRank) -> None:
        if self.epoch % 2 == 1:
            self._later(1, lambda: self._rejoin(rank))
            return
        rank.start_worker()
        self._move_to(list(range(len(self.ranks))))

    def _move_to(self, members: list[int]) -> None:
        """STOP now; GO when every worker that lives has acknowledged."""
        self.epoch += 1
        self.board.set_epoch(self.epoch, [])
        self._later(0, lambda: self._go(members))

    def _go(self, members: list[int]) -> None:
        waited = [self.ranks[seat] for seat in members]
        if any(rank.stopped_at != self.epoch for rank in waited):
            self._later(0, lambda: self._go(members))
            return
        self.members = members
        self.epoch += 1
        self.board.set_epoch(self.epoch, [])

    # ------------------------------------------------------------ the course of a run

    def run(self, steps_max: int = 1 << 30) -> "World":
        """Until every stream is complete. Raises AssertionError when something is wrong or stuck."""
        try:
            self._run(steps_max)
        finally:
            self.board.close()
        return self

    def _run(self, steps_max: int) -> None:
        actors = [turn for rank in self.ranks for turn in (rank.scheduler_turn, rank.worker_turn)]
        self.board.set_epoch(self.epoch, [])
        idle_ns = 0
        self.token_ns = self.now_ns  # when something came last: a token or a request
        while self._goes_on() and self.steps < steps_max:
            favour = self.rng.choice(actors)  # one may be far ahead of the others
            busy = False
            for _ in range(self.rng.choice((1, 1, 1, 4))):
                busy |= favour()
            if self.rng.random() < 0.5:
                busy |= self.rng.choice(actors)()
            spent_ns = 20 * US if busy else 100 * US if idle_ns < 2 * MS else MS
            idle_ns = 0 if busy else idle_ns + spent_ns
            self.now_ns += spent_ns
            self._happen()
            assert self.now_ns - self.token_ns < STUCK_MS * MS, "waits for ever"

    def _goes_on(self) -> bool:
        return bool(self._due or self.open)

    def _happen(self) -> None:
        room = self.options.open_max - len(self.open)
        while self._due and self._due[0][0] <= self.now_ns and room > 0:
            self.requests.append(self._due.popleft()[1])
            self.open.append(self.requests[-1])
            room -= 1
            self.token_ns = self.now_ns
        while self._faults and self._faults[0][0] <= self.now_ns:
            self._faults.popleft()[1]()
        due = [pair for pair in self._returns if pair[0] <= self.now_ns]
        for pair in due:
            self._returns.remove(pair)
            pair[1]()

    def check_streams(self) -> None:
        for request in self.requests:
            assert request.outputs == self.expected(request), f"{request.number}: a wrong token"

    @staticmethod
    def expected(request: Request) -> list[int]:
        return fault_free(request.prompt, request.number, request.max_tokens)
