"""A simulated host under the supervisor's core: virtual time, one seed, children that crash, hang, are
starved, answer late or never, and die between any two steps of STOP and GO.

`Host(seed).run()` is one life of a node: faults for a while, then calm, then a shutdown. Everything that
must hold is checked by `host_checks.Checks` as it happens; a failing seed replays exactly.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.config import KVStoreConfig, NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.messages import HandOver, Restart, Scale
from phalanx.protocol.placement import Placement
from phalanx.protocol.topology import Proposal, Topology
from phalanx.supervisor.core import SupervisorCore
from phalanx.supervisor.events import (
    AcksSeen,
    Action,
    BecameReady,
    ChangeAsked,
    Event,
    Finished,
    Inspect,
    Inspected,
    Kill,
    Observed,
    PipeClosed,
    PlacementsSeen,
    PlacementWords,
    Progressed,
    Propose,
    Publish,
    Reaped,
    Send,
    SetEpoch,
    ShutdownAsked,
    Spawn,
    Spawned,
)
from phalanx.supervisor.placements import GroupPlacements
from phalanx.supervisor.processes import ProcessSpec, process_table
from sim.clock import Act, Clock
from sim.host_checks import Checks

MS = 1_000_000
TICK_NS = 100 * MS
FAULTS_END_NS = 14_000 * MS
CALM_NS = 200_000 * MS  # a start that hangs is only given up after its deadline of 120 s
LAYERS, EXPERTS = 2, 6

# paging: waits for one page after another from a slow disk; asleep: for one that takes long or never comes.
Mood = Literal["well", "stopped", "deadlocked", "starved", "deaf", "paging", "asleep"]
MOODS: tuple[Mood, ...] = ("stopped", "deadlocked", "starved", "deaf", "paging", "asleep")
MakeCore = Callable[[tuple[ProcessSpec, ...], GroupPlacements], SupervisorCore]


@dataclass(eq=False)
class Child:
    spec: ProcessSpec
    incarnation: int
    born_ns: int
    mood: Mood = "well"
    mood_ns: int = 0  # since when
    beat_ns: int = 0  # its last sign of life, if that was earlier
    alive: bool = True
    reaped: bool = False
    reaped_ns: int = 0
    ready_ns: int = 0  # when that was heard; 0: it was not
    said_ready: bool = False
    killed: bool = False  # SIGKILL was sent
    termed: bool = False  # SIGTERM was sent
    afflicted: bool = False  # was other than well at some time
    preparing: bool = False  # a worker loads experts for a GO: it looks at nothing else meanwhile
    progress: int = 0
    progress_ns: int = 0  # when it grew
    well_ns: int = 0  # since when it is well, if it is
    room: int = 0  # of a worker: for so many expert slots of a layer; 0: for any number
    slow: bool = False  # takes longer to answer than it may, now and then
    waited_ns: int = 0  # for a CPU, in earlier starvations
    body: Any = None  # what runs in it, where that is simulated as well

    @property
    def turns(self) -> bool:
        """Whether its loop runs."""
        return self.alive and self.mood in ("well", "deaf")


@dataclass
class Row:
    """The acknowledgement words of a seat. A dead worker's words stay until the next one writes."""

    incarnation: int = 0
    stop: int = 0
    go: int = 0
    # How far it is with a proposed placement, and the versions.
    ready: int = 0
    run: int = 0
    copied: int = 0
    steps: int = 0


@dataclass
class Plan:
    """What this seed's host is like; drawn once."""

    protocol_death: float  # at each step of STOP and GO
    slow_answer: float
    spawn_failure: float
    crash_looper: str  # dies at its start as long as there are faults; empty: none does
    ignores_term: float
    bad_input: str  # exits with BAD_INPUT at its third start; empty: none does
    newcomer_fails: float = 0.0  # a seat that was added cannot start, whatever is tried


@dataclass
class Host:
    seed: int
    make_core: MakeCore = SupervisorCore
    clock: Clock = field(default_factory=lambda: Clock(1_000_000_000))
    children: dict[str, Child] = field(default_factory=dict[str, Child])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    word: int = 1
    ends_steps: bool = True  # the word, if it is odd
    topology: Topology | None = None
    proposal: Proposal | None = None
    finished: Finished | None = None
    story: list[str] = field(default_factory=list[str])
    load_ms: tuple[int, int] = (300, 3000)  # of a worker
    looks_while_it_loads: bool = True  # a worker, at the epoch

    def __post_init__(self) -> None:
        self.rng = self._chance()
        config = self._draw_config()
        self.table = process_table(config)
        self.specs = {spec.name: spec for spec in self.table}
        self.rows = {seat: Row() for seat in range(config.ranks)}
        self.first_ranks = config.ranks
        self.core = self.make_core(self.table, GroupPlacements(LAYERS, EXPERTS, config.ranks))
        self.checks = Checks(self)
        self.plan = self._draw_plan()
        self._pids = 0
        self._calls = 0
        # Expert slots that a worker has room for: any number, or hardly more than all ranks together need.
        self.rooms: dict[int, int] = {}
        self.least_room = -(-EXPERTS // config.ranks) if self.rng.random() < 0.4 else 0
        self.never_born: set[tuple[str, int]] = set()
        self.faults_end_ns = self.now_ns + FAULTS_END_NS

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns

    def _chance(self) -> random.Random:
        return random.Random(self.seed)

    def _draw_config(self) -> NodeConfig:
        ranks = self.rng.choice([1, 2, 3, 3, 4])
        return NodeConfig(
            ranks=ranks, tokenizers=1, kvstore=KVStoreConfig(enabled=self.rng.random() < 0.5)
        )

    def _draw_plan(self) -> Plan:
        rng, names = self.rng, sorted(self.specs)
        return Plan(
            protocol_death=rng.choice([0.0, 0.02, 0.1]),
            slow_answer=rng.choice([0.0, 0.02]),
            spawn_failure=rng.choice([0.0, 0.0, 0.05]),
            crash_looper=rng.choice(names) if rng.random() < 0.15 else "",
            ignores_term=rng.choice([0.0, 0.2]),
            bad_input=rng.choice(names) if rng.random() < 0.1 else "",
            newcomer_fails=rng.choice([0.0, 0.5]),
        )

    # ------------------------------------------------------------ the run

    def run(self) -> "Host":
        start_ns = self.now_ns
        for _ in range(self.rng.randint(0, 14)):
            self.after(self.rng.randrange(FAULTS_END_NS), self._random_fault)
        for _ in range(self.rng.choice([0, 0, 1, 2, 5])):
            self.after(self.rng.randrange(FAULTS_END_NS), self._ask_for_a_change)
        self._tick()
        self.clock.advance(self.faults_end_ns)
        self.clock.advance(self.faults_end_ns + CALM_NS, self._settled)
        self.checks.settled()
        if self.finished is None:
            if self.rng.random() < 0.3:
                self._ask_for_a_change()
                self.clock.advance(self.now_ns + self.ms(0, 3000))
            self._shut_down()
        self.clock.advance(self.now_ns + 30_000 * MS, lambda: self.finished is not None)
        self.checks.finished()
        self.lived_s = (self.now_ns - start_ns) / 1e9
        return self

    def _shut_down(self) -> None:
        """Told to stop, once or twice, and what can go wrong goes wrong meanwhile."""
        drain_ms = self.rng.choice([0, 500, 3000])
        self._ask_to_stop(drain_ms)
        for _ in range(self.rng.choice([0, 0, 1, 2, 4])):
            self.after(self.ms(0, drain_ms + 3000), self._fault_at_the_end)
        if self.rng.random() < 0.2:
            again_ms = self.rng.choice([0, 1000, 5000])
            self.after(self.ms(0, 3000), lambda: self._ask_to_stop(again_ms))

    def _ask_to_stop(self, drain_ms: int) -> None:
        if self.finished is None:
            self.story.append(f"{self.now_ns / 1e9:.3f} told to stop within {drain_ms} ms")
            self.checks.told_to_stop(drain_ms)
            self.feed(ShutdownAsked(drain_ms))

    def _fault_at_the_end(self) -> None:
        """Mostly of the one that the node drains for."""
        gateway = self.children["gateway"]
        if not gateway.alive or self.rng.random() < 0.3:
            self._random_fault()
        elif self.rng.random() < 0.6:
            self.die(gateway, -9)
        elif gateway.mood == "well":
            self.afflict(gateway, self.rng.choice(MOODS))

    def _settled(self) -> bool:
        return self.finished is not None or (
            not self.core.reasons()
            and not self.core.changes.told
            and all(c.mood == "well" for c in self.children.values() if c.alive)
        )

    def after(self, delay_ns: int, act: Act) -> None:
        self.clock.after(delay_ns, act)

    def awake_ns(self, since_ns: int) -> int:
        """Of the time since then what the supervisor could have used."""
        return self.now_ns - since_ns

    def ms(self, low: float, high: float) -> int:
        """A random time between two numbers of milliseconds."""
        return int(self.rng.uniform(low, high) * MS)

    # ------------------------------------------------------------ the shell

    def feed(self, event: Event) -> None:
        actions = self.core.handle(event, self.now_ns)
        self._carry_out(actions)
        if actions:
            self.checks.after_event()

    def _tick(self) -> None:
        if self.finished is not None:
            return
        for child in list(self.children.values()):
            if not child.reaped:
                self.feed(self._observe(child))
        if self.core.rebalances.now is not None:
            self.feed(self._placements())
        self._carry_out(self.core.tick(self.now_ns))
        self.checks.after_event()
        if self.core.awaits_acks:
            self._read_rows()
        self.after(TICK_NS, self._tick)

    def _placements(self) -> PlacementsSeen:
        rows = [(seat, self.rows[seat]) for seat in self.core.group.members]
        return PlacementsSeen(
            tuple(
                PlacementWords(seat, row.incarnation, row.ready, row.run, row.copied, row.steps)
                for seat, row in rows
            )
        )

    def _observe(self, child: Child) -> Observed:
        if child.turns:
            beat_ns = self.now_ns - self.rng.randrange(200 * MS)
            if child.spec.kind != "worker" or not child.said_ready:
                self.gets_on(child)
        else:
            last_ns = child.beat_ns or child.mood_ns
            beat_ns = last_ns if child.alive else self.now_ns - 200 * MS
        beat_ns = max(beat_ns, child.born_ns)
        phase = ProcessPhase.READY if child.said_ready else ProcessPhase.LOADING
        return Observed(child.spec.name, child.incarnation, beat_ns, child.progress, phase)

    def gets_on(self, child: Child) -> None:
        child.progress, child.progress_ns = child.progress + 1, self.now_ns

    def waited_for(self, child: Child) -> bool:
        """Whether peers have waited for it since it is as it is."""
        return False

    def _read_rows(self) -> None:
        for seat, row in self.rows.items():
            self.feed(AcksSeen(seat, row.incarnation, row.stop, row.go, row.run))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.checks.action(action)
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Spawn(name, incarnation):
                spec = self.specs[name] = self.core.processes[name].spec
                if spec.kind == "worker":
                    self.rows.setdefault(spec.seat, Row())
                self._spawn(spec, incarnation)
            case Send(name, incarnation, HandOver()):
                self._hand_over(self.children.get(name), incarnation)
            case Kill(name, incarnation, number):
                self._signal(self.children.get(name), incarnation, number)
            case SetEpoch(epoch, seats, ends_steps):
                self.story.append(f"{self.now_ns / 1e9:.3f} epoch {epoch}")
                self.word, self.ends_steps = epoch, ends_steps
                self._ring(seats)
            case Publish(topology, seats):
                self.topology = topology
                self._ring(seats)
            case Propose(proposal, seats):
                self.proposal = proposal
                self._ring(seats)
            case Inspect(name, incarnation):
                self.after(0, lambda: self._inspect(name, incarnation))
            case Finished():
                self.finished = action

    def _inspect(self, name: str, incarnation: int) -> None:
        child = self.children.get(name)
        if child is None or child.incarnation != incarnation or child.reaped:
            return
        waited_ns = child.waited_ns
        if child.mood == "starved":
            waited_ns += self.now_ns - child.mood_ns
        states = {"stopped": "T", "starved": "R", "paging": "D", "asleep": "D"}
        state, asleep_ns = states.get(child.mood, "S"), self.now_ns - child.mood_ns
        if child.mood == "paging":
            asleep_ns = min(asleep_ns, 300 * MS)
            state = "R" if self.rng.random() < 0.05 else "D"  # a page has just come
        self.feed(Inspected(name, incarnation, state, waited_ns, asleep_ns if state == "D" else 0))

    def _ring(self, seats: tuple[int, ...]) -> None:
        for seat in seats:
            child = self.children.get(f"worker-{seat}")
            if child is not None and child.said_ready:
                self._look_soon(child)
        self.after(self.ms(0, 1), self._read_rows)

    # ------------------------------------------------------------ children

    def _spawn(self, spec: ProcessSpec, incarnation: int) -> None:
        if self._faulty and self.rng.random() < self.plan.spawn_failure:
            self.never_born.add((spec.name, incarnation))
            event = Reaped(spec.name, incarnation, ExitCode.INTERNAL, "no room for a process")
            self.after(0, lambda: self.feed(event))
            return
        child = Child(spec, incarnation, self.now_ns, mood_ns=self.now_ns)
        self.children[spec.name] = child
        self._pids += 1
        self.feed(Spawned(spec.name, incarnation, 1000 + self._pids))
        newcomer = spec.seat >= self.first_ranks and incarnation == 1
        if newcomer and self.rng.random() < self.plan.newcomer_fails:
            if self.rng.random() < 0.5:
                code = self.rng.choice([ExitCode.BAD_INPUT, ExitCode.INTERNAL])
                self.after(self.ms(1, 2000), lambda: self.die(child, code))
            else:
                child.mood = "deadlocked"
        elif spec.name == self.plan.bad_input and incarnation == 3:
            self.after(self.ms(1, 50), lambda: self.die(child, ExitCode.BAD_INPUT))
        elif spec.name == self.plan.crash_looper and self._faulty:
            self.after(self.ms(1, 300), lambda: self.die(child, ExitCode.INTERNAL))
        else:
            load_ns = self.ms(*self.load_ms) if spec.kind == "worker" else self.ms(50, 400)
            self.after(load_ns // 2, lambda: self._say_progress(child))
            self.after(load_ns, lambda: self._become_ready(child))

    @property
    def _faulty(self) -> bool:
        return self.now_ns < self.faults_end_ns

    def _say_progress(self, child: Child) -> None:
        if child.turns:
            event = Progressed(child.spec.name, child.incarnation, "load", 0.5)
            self.after(self.ms(0, 5), lambda: self.feed(event))

    def _become_ready(self, child: Child) -> None:
        if not child.alive:
            return
        if not child.turns:  # it goes on loading when it runs again
            self.after(100 * MS, lambda: self._become_ready(child))
            return
        child.said_ready = True
        if child.spec.kind == "worker":
            row = self.rows[child.spec.seat]
            row.incarnation = child.incarnation  # its old answers stay there
            row.ready = row.run = 0
        # Messages travel: this one may come after the death of its sender.
        self.after(self.ms(0, 30), lambda: self._hear_ready(child))
        if child.spec.kind == "worker":
            self._look_soon(child)
            self.after(200 * MS, lambda: self._look_again(child))

    def _hear_ready(self, child: Child) -> None:
        child.ready_ns = self.now_ns
        if child.spec.kind == "worker":
            self.checks.worker_changes += 1
        self.checks.gateway_served |= (
            child.spec.kind == "gateway" and child.alive and not child.termed
        )
        if self.least_room:
            room = self.least_room + self.rng.choice((0, 0, 1, 3))
            child.room = self.rooms.setdefault(child.spec.seat, room)  # of its GPU
        self.feed(BecameReady(child.spec.name, child.incarnation, "numbers", child.room))

    def _look_again(self, child: Child) -> None:
        """A worker's sleep on its bell ends by itself."""
        if child.alive and self.finished is None:
            self._look(child)
            self.after(200 * MS, lambda: self._look_again(child))

    def _look_soon(self, child: Child) -> None:
        slow = self._faulty and self.rng.random() < self.plan.slow_answer
        child.slow |= slow
        self.after(self.ms(200, 2500) if slow else self.ms(0.05, 5), lambda: self._look(child))

    def _look(self, child: Child) -> None:
        """One turn of a worker's loop: obey STOP, prepare for GO."""
        if not child.turns or child.preparing or child.mood == "deaf" or self._dies_now(child):
            return
        row = self.rows[child.spec.seat]
        if self.word % 2 == 0:
            return
        if row.stop != self.word:
            row.stop = self.word
            self.checks.stop_acked(child, self.word)
            if not self._dies_now(child):
                self._read_soon(child.spec.seat)
                self._look_soon(child)
            return
        topology = self.topology
        if topology is None or topology.epoch != self.word + 1 or row.go == topology.epoch:
            return
        seat = topology.seat(child.spec.seat)
        if seat is None or seat.state != "member" or seat.worker_incarnation != child.incarnation:
            return
        child.preparing = True
        self._load(child, topology.epoch, *self._draw_load())

    def _draw_load(self) -> tuple[int, int]:
        """(experts to be loaded, ns of each): mostly few, as there are copies; now and then a large model's."""
        if self.rng.random() < 0.9:
            return 1, self.ms(0.1, 60)
        return self.rng.randint(5, 100), self.ms(5, 400)

    def _load(self, child: Child, epoch: int, experts: int, each_ns: int) -> None:
        """One expert after the other, unless the group comes to change anew."""
        if not child.turns or child.mood == "deaf":
            child.preparing = False  # it begins again when it looks again
        elif self.word != epoch - 1 and self.looks_while_it_loads:
            child.preparing = False
            self._look_soon(child)
        elif experts:
            self.gets_on(child)
            self.after(each_ns, lambda: self._load(child, epoch, experts - 1, each_ns))
        else:
            self._prepared(child, epoch)

    def _prepared(self, child: Child, epoch: int) -> None:
        """Experts are loaded. If the epoch moved meanwhile this answer is stale, and still written."""
        child.preparing = False
        if child.turns and not self._dies_now(child):
            self._look_soon(child)
            row, topology = self.rows[child.spec.seat], self.topology
            if topology is not None and topology.epoch == epoch:
                placement = msgspec.msgpack.decode(topology.placement, type=Placement)
                row.ready = row.run = placement.version
            row.go = epoch
            self.checks.go_acked(child, epoch)
            if not self._dies_now(child):
                self._read_soon(child.spec.seat)

    def _read_soon(self, seat: int) -> None:
        def read() -> None:
            row = self.rows[seat]
            self.feed(AcksSeen(seat, row.incarnation, row.stop, row.go, row.run))

        self.after(self.ms(0, 1), read)

    def _dies_now(self, child: Child) -> bool:
        if self._faulty and self.rng.random() < self.plan.protocol_death:
            self.die(child, -11)
        return not child.alive

    # ------------------------------------------------------------ faults and ends

    def _random_fault(self) -> None:
        living = [c for c in self.children.values() if c.alive]
        if not living:
            return
        workers = [c for c in living if c.spec.kind == "worker"]
        child = self.rng.choice(workers if workers and self.rng.random() < 0.6 else living)
        fault = self.rng.choice(("crash", "crash", *MOODS))
        self.story.append(f"{self.now_ns / 1e9:.3f} {fault} {child.spec.name}#{child.incarnation}")
        if fault == "crash":
            self.die(child, -9)
        elif child.mood == "well":
            self.afflict(child, fault)

    def afflict(self, child: Child, mood: str) -> None:
        child.mood, child.mood_ns, child.afflicted = mood, self.now_ns, True  # type: ignore[assignment]
        self.checks.hurt(child)
        if mood == "starved":
            self.after(self.ms(500, 4000), lambda: self._fed(child))
        elif mood == "deaf":
            self.after(self.ms(500, 15000), lambda: self._fed(child))
        elif mood == "paging":
            self.after(self.ms(500, 4000), lambda: self._fed(child))
        elif mood == "asleep" and self.rng.random() < 0.7:
            self.after(self.ms(500, 40000), lambda: self._fed(child))

    def _draw_change(self, call: int) -> Scale | Restart:
        timeout_s = self.rng.choice([0.2, 2.0, 10.0, 60.0])
        if self.rng.random() < 0.6:
            return Scale(call, self.rng.choice([1, 2, 3, 4, 6]), timeout_s)
        names = ("all", "worker", "scheduler", "gateway", "eplb", "worker-0", "kvstore")
        return Restart(call, (self.rng.choice(names),), timeout_s)

    def _ask_for_a_change(self) -> None:
        self._calls += 1
        request = self._draw_change(self._calls)
        self.story.append(f"{self.now_ns / 1e9:.3f} asked {request}")
        self.checks.asked(request)
        self.feed(ChangeAsked(b"operator", request))

    def _hand_over(self, child: Child | None, incarnation: int) -> None:
        if child is not None and child.incarnation == incarnation and child.turns:
            self.after(self.ms(0, 1000), lambda: self.die(child, 0))

    def _fed(self, child: Child) -> None:
        if child.mood == "starved":
            child.waited_ns += self.now_ns - child.mood_ns
        child.mood, child.well_ns = "well", self.now_ns
        if child.spec.kind == "worker":
            self._look_soon(child)

    def _signal(self, child: Child | None, incarnation: int, number: int) -> None:
        if child is None or child.incarnation != incarnation or child.reaped:
            return
        if number == 9:
            child.killed = True
            if child.alive:
                self.checks.sigkilled(child)
                self.after(self.ms(0, 20), lambda: self.die(child, -9))
            return
        child.termed = True
        if child.turns and self.rng.random() >= self.plan.ignores_term:
            drain_ns = self.ms(0, 2000) if child.spec.kind == "gateway" else self.ms(0, 300)
            self.after(drain_ns, lambda: self.die(child, 0))

    def die(self, child: Child, code: int) -> None:
        """Pipe and pidfd tell of it separately; a process with a GPU can be reaped only much later."""
        if not child.alive:
            return
        child.alive = False
        self.checks.died(child, code)
        name, incarnation = child.spec.name, child.incarnation
        pipe_ns = self.ms(0, 2)
        reap_ns = self.ms(100, 260) if self.rng.random() < 0.2 else self.ms(0, 3)

        def pipe_closed() -> None:
            self.feed(PipeClosed(name, incarnation, self.now_ns))

        def reaped() -> None:
            child.reaped, child.reaped_ns = True, self.now_ns
            self.feed(Reaped(name, incarnation, code, "last words"))

        self.after(pipe_ns, pipe_closed)
        self.after(reap_ns, reaped)
