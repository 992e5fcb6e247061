"""Ranks whose experts move while they step, in one thread: real board, votes and `Rebalance`, fake experts.

Ranks turn in a random order, one far ahead of another, and look at the board between any two things that
another one does. A supervisor proposes placements, good ones and such as must be refused, withdraws and
replaces them at any time; ranks fall and return; copies fail. What must hold: in every round all ranks run
the same placement, every row meets the expert that it chose, and what is good is run in the end.
"""

import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random

import msgspec

from phalanx.protocol.board import Board, Vote
from phalanx.protocol.placement import EMPTY, Placement, copies
from phalanx.protocol.topology import Proposal
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.rebalance import NotReady, Rebalance

LAYERS, EXPERTS, SLOTS = 2, 6, 5  # slots that a rank has in each layer
Waits = Generator[Callable[[], bool], None, None]


class Silent:
    def info(self, event: str, **fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None: ...


@dataclass
class Inbox:
    """Where a rank receives in one epoch: rows of a step's layer, and answers to its own."""

    rows: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)


class SimRank:
    """A worker: what its slots hold, where it sends rows, and how far it is."""

    slots = SLOTS

    def __init__(self, world: "World", seat: int) -> None:
        self.world, self.seat = world, seat
        self.held = [[EMPTY] * SLOTS for _ in range(LAYERS)]
        self.tables: list[list[list[tuple[int, int]]]] = []
        self.coming: list[list[list[tuple[int, int]]]] = []
        self.group: Group | None = None
        self.acked = 0
        self.rounds: Waits | None = None  # a round and its step, under way
        self.ready: Callable[[], bool] = lambda: True
        self.posted = False

    # ------------------------------------------------------------ as a backend

    def bring(self, layer: int, slot: int, expert: int) -> None:
        if self.world.rng.random() < self.world.copies_fail:
            self.held[layer][slot] = EMPTY
            raise NotReady("the files are gone")
        self.held[layer][slot] = expert

    def lay_out(self, placement: Placement, layer: int) -> None:
        if layer == 0:
            self.coming = []
        self.coming.append(copies(placement, layer))

    def flip(self) -> None:
        assert len(self.coming) == LAYERS
        self.tables, self.coming = self.coming, []

    # ------------------------------------------------------------ as `Rank`

    def turn(self) -> None:
        world = self.world
        if self.rounds is not None:
            self.go_on()
        elif world.epoch % 2 == 1:
            self.acked = world.epoch
        elif self.group is None or self.group.epoch != world.epoch:
            self.enter()
        else:
            self.rebalance.turn()
            # A parked group steps when somebody has work.
            if world.rng.random() < world.busy or self.group.peer_waits():
                self.rounds = self.round(self.group)
                self.ready = next(self.rounds)

    def go_on(self) -> None:
        assert self.rounds is not None and self.group is not None
        if not self.ready():
            if self.world.epoch != self.group.epoch:
                self.rounds, self.posted = None, False
            return
        try:
            self.ready = next(self.rounds)
        except StopIteration:
            self.rounds = None

    def enter(self) -> None:
        """GO: hold what its placement has here."""
        world, placement = self.world, self.world.placement
        index = placement.seats.index(self.seat)
        for layer, seats in enumerate(placement.physical_to_logical):
            for slot, expert in enumerate(seats[index]):
                if expert != EMPTY:
                    self.held[layer][slot] = expert
        self.tables, self.coming = [copies(placement, layer) for layer in range(LAYERS)], []
        self.group = Group(
            world.board, self.seat, world.members, world.epoch, lambda: None, placement.version
        )
        row = world.board.seats[self.seat]
        row.placement_run = row.placement_ready = placement.version
        self.rebalance = Rebalance(world.board, self.group, placement, self, Silent())

    def round(self, group: Group) -> Waits:
        number = group.round
        for _ in range(1 + (number % 5 == 0)):  # policy `ballot` votes twice now and then
            group.post(Vote.PLAN)
            self.posted = True
            yield group.complete
            group.votes()
            self.posted = False
        self.rebalance.follow()
        self.world.note_round(group, number)
        for layer in range(LAYERS):
            yield from self.exchange(group, number, layer)
        self.world.steps += 1

    def exchange(self, group: Group, number: int, layer: int) -> Waits:
        """Rows to the ranks that hold their experts, and their answers back."""
        world, at = self.world, (number, layer)
        inbox, peers = world.inboxes[self.seat], group.peers
        sent: dict[int, list[tuple[int, int, int]]] = {seat: [] for seat in group.members}
        for expert in range(EXPERTS):
            seat, slot = world.rng.choice(self.tables[layer][expert])
            sent[seat].append((self.seat, slot, expert))
        for seat, rows in sent.items():
            world.inboxes[seat].rows.setdefault(at, []).extend(rows)
            world.inboxes[seat].answers.setdefault(at, [])
        sent_key = (group.epoch, number, layer)
        world.sent.setdefault(sent_key, set()).add(self.seat)
        yield lambda: world.sent[sent_key].issuperset(peers)
        for seat, slot, expert in inbox.rows[at]:
            world.inboxes[seat].answers.setdefault(at, []).append((expert, self.held[layer][slot]))
        world.served.setdefault(sent_key, set()).add(self.seat)
        yield lambda: world.served.get(sent_key, set()).issuperset(peers)
        answers = inbox.answers[at]
        assert sorted(answers) == [(e, e) for e in range(EXPERTS)], (
            f"rank {self.seat}, round {number} of epoch {group.epoch}: (chosen, met) {answers}"
        )


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.node = f"reb{uuid.uuid4().hex[:8]}"
        self.board = Board.create(self.node)
        self.busy = rng.choice((0.05, 0.5, 1.0))
        self.copies_fail = rng.choice((0.0, 0.0, 0.05))
        self.faults = rng.choice((0.0, 0.002, 0.01))
        self.epoch, self.steps = 2, 0
        self.members = list(range(rng.choice((2, 3, 4))))
        self.seats = list(self.members)
        self.version = 0  # the highest that was ever given to a placement
        self.placement = self.dealt(self.members)  # of the last GO
        self.proposed: Placement | None = None
        self.known = {0: self.placement}  # by version
        self.over: set[int] = set()  # versions that nobody may come to run any more
        self.ran: dict[tuple[int, int], int] = {}  # (epoch, round) -> version
        self.flips = 0
        self.sent: dict[tuple[int, int, int], set[int]] = {}
        self.served: dict[tuple[int, int, int], set[int]] = {}
        self.inboxes = {seat: Inbox() for seat in self.members}
        self.board.set_epoch(self.epoch, [])
        self.ranks = {seat: SimRank(self, seat) for seat in self.members}

    # ------------------------------------------------------------ placements

    def dealt(self, members: list[int]) -> Placement:
        """Every expert somewhere, some twice, and empty slots here and there."""
        layers = []
        for _ in range(LAYERS):
            held = [[EMPTY] * SLOTS for _ in members]
            for expert in self.rng.sample(range(EXPERTS), EXPERTS):
                self.put(held, expert)
            for _ in range(self.rng.randrange(3)):
                self.put(held, self.rng.randrange(EXPERTS))
            layers.append(tuple(map(tuple, held)))
        return Placement(self.version, EXPERTS, SLOTS, tuple(members), tuple(layers))

    def put(self, held: list[list[int]], expert: int) -> None:
        room = [row for row in held if row.count(EMPTY) > 1 and expert not in row]
        if room:
            row = self.rng.choice(room)
            row[self.rng.choice([slot for slot, old in enumerate(row) if old == EMPTY])] = expert

    def moved(self, placement: Placement) -> Placement:
        """Some copies more in empty slots, some less."""
        rng, layers = self.rng, []
        for seats in placement.physical_to_logical:
            held = [list(row) for row in seats]
            free = [(row, s) for row in held for s, e in enumerate(row[:SLOTS]) if e == EMPTY]
            for row, slot in rng.sample(free, min(len(free), rng.randint(1, 3))):
                row[slot] = rng.randrange(EXPERTS)
            old = [(i, s) for i, row in enumerate(seats) for s, e in enumerate(row) if e != EMPTY]
            for i, slot in rng.sample(old, min(len(old), 3)):
                if sum(row.count(held[i][slot]) for row in held) > 1:
                    held[i][slot] = EMPTY
            layers.append(tuple(map(tuple, held)))
        return self.next_version(placement, tuple(layers))

    def spoilt(self, placement: Placement) -> Placement:
        """One that cannot be run from there, or not without a stall."""
        layers = [list(map(list, seats)) for seats in placement.physical_to_logical]
        held = self.rng.choice(layers)
        match self.rng.randrange(3):
            case 0:  # an expert into a slot where another one is in use
                row = self.rng.choice([row for row in held if any(e != EMPTY for e in row)])
                slot = self.rng.choice([s for s, e in enumerate(row) if e != EMPTY])
                held[0].append(row[slot])  # it has a place elsewhere
                row[slot] = (row[slot] + 1) % EXPERTS
            case 1:  # no copy of one
                held[:] = [[EMPTY if e == 0 else e for e in row] for row in held]
            case _:  # more slots than there are
                held[self.rng.randrange(len(held))].append(0)
        return self.next_version(placement, tuple(tuple(map(tuple, seats)) for seats in layers))

    def next_version(self, placement: Placement, layers: object) -> Placement:
        self.version += 1
        return msgspec.structs.replace(placement, version=self.version, physical_to_logical=layers)

    # ------------------------------------------------------------ the supervisor

    def supervise(self) -> None:
        rng = self.rng
        if self.epoch % 2 == 1:
            self.try_go()
        elif rng.random() < self.faults:
            self.stop()
        elif self.proposed is None:
            rows = [self.board.seats[seat] for seat in self.members]
            at = {(row.placement_run, row.placement_ready) for row in rows}
            if len(at) == 1 and len(set(at.pop())) == 1 and self.entered():
                # Nothing is under way, nor will be: what was withdrawn is over, or is run by all.
                base = self.known[rows[0].placement_run]
                self.over |= self.known.keys() - {base.version}
                if rng.random() < 0.1:
                    self.propose(base)
        else:
            if all(
                self.board.seats[s].placement_run == self.proposed.version for s in self.members
            ):
                self.flips += 1
                self.proposed = None
            elif rng.random() < 0.02:
                self.board.withdraw()
                self.proposed = None
            elif rng.random() < 0.01:
                # Others may run it by now: then the next one is refused, or good all the same. So is one
                # that takes for granted that what was proposed runs.
                run = self.board.seats[self.members[0]].placement_run
                self.propose(rng.choice((self.known[run], self.proposed)))

    def entered(self) -> bool:
        return all(self.ranks[seat].group is not None for seat in self.members)

    def propose(self, base: Placement) -> None:
        spoilt = self.rng.random() < 0.2
        self.proposed = self.spoilt(base) if spoilt else self.moved(base)
        self.known[self.proposed.version] = self.proposed
        epoch = self.epoch
        if self.rng.random() < 0.1:  # an epoch that is over was told
            epoch -= 2
            self.over.add(self.proposed.version)
        self.board.propose(Proposal(epoch, msgspec.msgpack.encode(self.proposed)))

    def stop(self) -> None:
        """Somebody falls, or returns."""
        self.epoch += 1
        self.board.set_epoch(self.epoch, [])
        self.over |= self.known.keys()
        gone = [seat for seat in self.seats if seat not in self.members]
        self.ranks = {seat: self.ranks[seat] for seat in self.members}
        if gone:
            self.members = self.seats
            self.ranks |= {seat: SimRank(self, seat) for seat in gone}
        elif len(self.members) > 2 or self.rng.random() < 0.5:
            lost = self.rng.choice(self.members)
            self.members = [seat for seat in self.members if seat != lost]
            del self.ranks[lost]
        for rank in self.ranks.values():
            rank.acked = 0

    def try_go(self) -> None:
        if any(self.ranks[seat].acked != self.epoch for seat in self.members):
            return
        self.version += 1
        self.placement = self.known[self.version] = (
            self.dealt(self.members) if len(self.members) > 1 else self.alone()
        )
        self.proposed = None
        if self.rng.random() < 0.5:
            self.board.withdraw()
        self.inboxes = {seat: Inbox() for seat in self.members}
        self.epoch += 1
        self.board.set_epoch(self.epoch, [])
        for rank in self.ranks.values():
            rank.group = None

    def alone(self) -> Placement:
        layer = (tuple(range(EXPERTS)),)
        self.ranks[self.members[0]].held = [[EMPTY] * EXPERTS for _ in range(LAYERS)]
        return Placement(self.version, EXPERTS, EXPERTS, tuple(self.members), (layer,) * LAYERS)

    # ------------------------------------------------------------ the course of a run

    def note_round(self, group: Group, number: int) -> None:
        ran = self.ran.setdefault((group.epoch, number), group.version)
        assert ran == group.version, f"round {number}: placement {ran} and {group.version}"
        stopped = group.epoch != self.epoch  # not noticed yet
        assert stopped or group.version not in self.over, f"placement {group.version} was over"
        assert self.board.seats[group.seat].placement_run == group.version

    def run(self, turns: int = 4000) -> "World":
        """Faults, then calm, in which a last good placement comes to be run."""
        try:
            for _ in range(turns):
                self.somebody_turns()
                if self.rng.random() < 0.2:
                    self.supervise()
            self.calm()
        finally:
            self.board.close()
        return self

    def somebody_turns(self) -> None:
        rank = self.rng.choice(list(self.ranks.values()))
        for _ in range(self.rng.choice((1, 1, 2, 8))):
            rank.turn()

    def calm(self) -> None:
        self.copies_fail, self.busy, self.faults = 0.0, 0.5, 0.0
        self.board.withdraw()
        self.proposed = None
        steps = self.steps
        while self.epoch % 2 == 1 or not self.entered():
            self.somebody_turns()
            self.supervise() if self.epoch % 2 == 1 else None
        for _ in range(400):
            self.somebody_turns()
        self.board.propose(Proposal(self.epoch, msgspec.msgpack.encode(self.moved(self.current()))))
        for _ in range(400 * len(self.members)):
            self.somebody_turns()
        assert self.steps > steps, "nobody steps"
        for seat in self.members:
            row = self.board.seats[seat]
            wanted = self.version if len(self.members) > 1 else self.placement.version
            assert row.placement_run == row.placement_ready == wanted, "it is not run"

    def current(self) -> Placement:
        versions = {self.board.seats[seat].placement_run for seat in self.members}
        assert len(versions) == 1
        return self.known[versions.pop()]
