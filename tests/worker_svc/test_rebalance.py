"""Experts move while the group runs: every rule by itself, then ranks at random, and planted bugs."""

import uuid
from collections.abc import Callable, Iterator

import msgspec
import pytest

import phalanx.worker_svc.rebalance as rebalance_module
from phalanx.protocol.board import Board, Vote
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.placement import EMPTY, LayerSlots, Placement
from phalanx.protocol.topology import Proposal
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.rebalance import NotReady, Rebalance, unsuited
from sim.rebalance_world import SimRank, Waits, World

Patch = pytest.MonkeyPatch
SEEDS = 15
EPOCH = 4


def placement(version: int, *layers: LayerSlots) -> Placement:
    return Placement(version, 3, max(map(len, layers[0])), (0, 1), layers)


RUNS = placement(5, ((0, 1, -1), (2, 0, -1)), ((0, 1, -1), (2, -1, -1)))
COMES = placement(6, ((0, 1, 2), (2, 0, -1)), ((0, -1, -1), (2, 1, 0)))


class Held:
    """What a backend is told."""

    slots = 3

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.fails = False

    def bring(self, layer: int, slot: int, expert: int) -> None:
        if self.fails:
            raise NotReady("no room")
        self.told.append(("bring", layer, slot, expert))

    def lay_out(self, placement: Placement, layer: int) -> None:
        self.told.append(("lay out", placement.version, layer))

    def flip(self) -> None:
        self.told.append(("flip",))


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, **fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(f"{event} {fields}")


class Pair:
    """Two ranks on one board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.groups = [
            Group(board, seat, [0, 1], EPOCH, lambda: None, RUNS.version) for seat in (0, 1)
        ]
        self.held, self.log = [Held(), Held()], Log()
        self.ranks = [
            Rebalance(board, group, RUNS, held, self.log)
            for group, held in zip(self.groups, self.held, strict=True)
        ]
        for row in self.rows:
            row.placement_run = row.placement_ready = RUNS.version

    @property
    def rows(self) -> list[object]:
        return self.board.seats[:2]  # type: ignore[return-value]

    def propose(self, placement: Placement, epoch: int = EPOCH) -> None:
        self.board.propose(Proposal(epoch, msgspec.msgpack.encode(placement)))

    def get_ready(self, *seats: int) -> None:
        for seat in seats:
            while self.ranks[seat].turn():
                pass

    def post(self, *seats: int) -> None:
        for seat in seats:
            self.groups[seat].post(Vote.PLAN)

    def end_round(self, *seats: int) -> list[int]:
        """The versions that they run from it on."""
        for seat in seats:
            assert self.groups[seat].complete()
            self.groups[seat].votes()
            self.ranks[seat].follow()
        return [self.groups[seat].version for seat in seats]

    def round(self) -> list[int]:
        self.post(0, 1)
        return self.end_round(0, 1)

    def words(self) -> list[tuple[int, int]]:
        """(ready, run) of each."""
        rows = self.board.seats[:2]
        return [(row.placement_ready, row.placement_run) for row in rows]


@pytest.fixture
def pair() -> Iterator[Pair]:
    board = Board.create(f"reb{uuid.uuid4().hex[:8]}")
    board.set_epoch(EPOCH, [])
    yield Pair(board)
    board.close()


def test_a_piece_a_turn_then_all_flip_in_one_round(pair: Pair) -> None:
    assert pair.round() == [5, 5]
    pair.propose(COMES)
    rank, held = pair.ranks[0], pair.held[0]
    assert rank.turn() and held.told == []  # it is looked at
    for done in range(1, 4):
        assert rank.turn() and len(held.told) == done
        assert pair.board.seats[0].placement_copied == done
        assert pair.words() == [(5, 5), (5, 5)]
    assert held.told == [("bring", 0, 2, 2), ("lay out", 6, 0), ("lay out", 6, 1)]
    rung = pair.board.supervisor_bell.value
    assert rank.turn() and not rank.turn()
    assert pair.words() == [(6, 5), (5, 5)] and pair.board.supervisor_bell.value > rung
    assert pair.round() == [5, 5], "not all are ready"
    pair.get_ready(1)
    assert pair.held[1].told[:2] == [("bring", 1, 1, 1), ("bring", 1, 2, 0)]
    assert pair.words() == [(6, 5), (6, 5)]
    rung = pair.board.supervisor_bell.value
    assert pair.round() == [6, 6]
    assert pair.words() == [(6, 6), (6, 6)] and pair.board.supervisor_bell.value == rung + 2
    assert [held.told.count(("flip",)) for held in pair.held] == [1, 1]
    assert pair.round() == [6, 6] and pair.log.lines == []


def test_a_rank_that_is_not_ready_when_it_votes_holds_all(pair: Pair) -> None:
    pair.propose(COMES)
    pair.get_ready(0)
    pair.post(0, 1)
    pair.get_ready(1)  # too late for this round
    assert pair.end_round(0, 1) == [5, 5]
    assert pair.round() == [6, 6]


def test_what_is_withdrawn_is_let_go_of(pair: Pair) -> None:
    pair.propose(COMES)
    pair.get_ready(0, 1)
    pair.board.withdraw()
    assert pair.ranks[0].turn() and pair.words() == [(5, 5), (6, 5)]
    assert pair.round() == [5, 5]
    assert pair.ranks[1].turn() and pair.words() == [(5, 5), (5, 5)]
    assert pair.round() == [5, 5]
    assert ("flip",) not in pair.held[0].told + pair.held[1].told


def test_who_runs_it_when_it_is_withdrawn_goes_on_with_it(pair: Pair) -> None:
    pair.propose(COMES)
    pair.get_ready(0, 1)
    pair.post(0, 1)
    pair.board.withdraw()
    assert pair.end_round(0, 1) == [6, 6]
    pair.get_ready(0, 1)
    assert pair.words() == [(6, 6), (6, 6)] and pair.round() == [6, 6]


def test_two_that_are_ready_for_different_ones_stay(pair: Pair) -> None:
    """One has seen that another was proposed instead, one has not."""
    pair.propose(COMES)
    pair.get_ready(0, 1)
    later = msgspec.structs.replace(COMES, version=8)
    pair.propose(later)
    pair.get_ready(1)
    assert pair.words() == [(6, 5), (8, 5)]
    assert pair.round() == [5, 5]
    pair.get_ready(0)
    assert pair.round() == [8, 8]


def test_what_cannot_be_copied_is_given_up_until_another_comes(pair: Pair) -> None:
    pair.propose(COMES)
    pair.held[0].fails = True
    pair.get_ready(0, 1)
    assert pair.words() == [(5, 5), (6, 5)] and "no room" in pair.log.lines[0]
    assert pair.round() == [5, 5] and not pair.ranks[0].turn()
    pair.held[0].fails = False
    pair.propose(msgspec.structs.replace(COMES, version=7))
    pair.get_ready(0, 1)
    assert pair.round() == [7, 7]


def test_what_was_proposed_to_another_epoch_is_not_for_us(pair: Pair) -> None:
    pair.propose(COMES, EPOCH - 2)
    pair.get_ready(0, 1)
    assert pair.words() == [(5, 5), (5, 5)] and pair.held[0].told == [] == pair.log.lines


def test_a_rank_alone_has_nothing_to_move(pair: Pair) -> None:
    group = Group(pair.board, 0, [0], EPOCH, lambda: None, RUNS.version)
    pair.propose(COMES)
    assert not Rebalance(pair.board, group, RUNS, pair.held[0], pair.log).turn()


def test_a_peer_that_runs_an_earlier_one_is_an_error(pair: Pair) -> None:
    pair.propose(COMES)
    pair.get_ready(0, 1)
    assert pair.round() == [6, 6]
    pair.groups[1].ready = 5
    pair.post(0, 1)
    with pytest.raises(PhalanxError, match=r"runs placement 6, a rank of \[1\] only 5"):
        pair.groups[0].votes()


@pytest.mark.parametrize(
    ("proposed", "seat", "why"),
    [
        (COMES, 0, ""),
        (COMES, 1, ""),
        (placement(4, *COMES.physical_to_logical), 0, "its version is 4, and 5 runs"),
        (msgspec.structs.replace(COMES, seats=(0, 2)), 0, "it is for (0, 2)"),
        (placement(6, COMES.physical_to_logical[0]), 0, "layers 2 run; it is for (0, 1), 3, 1"),
        (
            placement(6, ((0, 2, 1), (2, 0, -1)), RUNS.physical_to_logical[1]),
            0,
            "layer 0, slot 1: expert 1 is in use, it puts 2 there",
        ),
        (
            placement(6, RUNS.physical_to_logical[0], ((0, -1, 2), (2, -1, 0))),
            1,
            "layer 1 has no copy of expert 1",
        ),
        (
            placement(6, ((0, 1, -1, 2), (2, 0, -1, -1)), RUNS.physical_to_logical[1]),
            0,
            "it uses 4 slots of a layer, and rank 0 has 3",
        ),
    ],
)
def test_what_is_refused(proposed: Placement, seat: int, why: str) -> None:
    found = unsuited(RUNS, proposed, seat, 3)
    assert why in found and bool(why) == bool(found)


def test_slots_that_are_not_there_are_any_number_where_nothing_is_held() -> None:
    wide = placement(6, ((0, 1, -1, 2), (2, 0, -1, EMPTY)), RUNS.physical_to_logical[1])
    assert unsuited(RUNS, wide, 0, 0) == ""


# ------------------------------------------------------------ at random


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_row_meets_its_expert(seed: int) -> None:
    World(seed).run()


def test_worlds_come_to_run_much_of_what_is_proposed() -> None:
    worlds = [World(seed).run() for seed in range(6)]
    assert sum(world.flips for world in worlds) > 20


# ------------------------------------------------------------ planted bugs


def flips_when_it_is_ready_itself(patch: Patch) -> None:
    votes = Group.votes

    def hasty(self: Group) -> list[int]:
        found = votes(self)
        self.version = self.ready
        return found

    patch.setattr(Group, "votes", hasty)


def flips_when_anybody_is_ready(patch: Patch) -> None:
    votes = Group.votes

    def hasty(self: Group) -> list[int]:
        said = [self.board.seats[member].vote(self.round)[1] for member in self.members]
        found = votes(self)
        if self.ready == max(said):
            self.version = self.ready
        return found

    patch.setattr(Group, "votes", hasty)


def says_that_it_is_ready_first(patch: Patch) -> None:
    get_ready = Rebalance._get_ready

    def eager(self: Rebalance, placement: Placement) -> Iterator[None]:
        self._could_run(placement.version)
        yield from get_ready(self, placement)

    patch.setattr(Rebalance, "_get_ready", eager)


def forgets_to_copy(patch: Patch) -> None:
    patch.setattr(rebalance_module, "_new_here", lambda running, proposed, seat: [])


def puts_experts_into_slots_in_use(patch: Patch) -> None:
    def blind(running: Placement, proposed: Placement, seat: int, slots: int) -> str:
        why = unsuited(running, proposed, seat, slots)
        return "" if "in use" in why else why

    patch.setattr(rebalance_module, "unsuited", blind)


def takes_slots_before_all_have_flipped(patch: Patch) -> None:
    """What it is ready for counts as what runs, when the next one comes."""
    right, last = unsuited, dict[int, Placement]()

    def early(running: Placement, proposed: Placement, seat: int, slots: int) -> str:
        before = last.get(seat, running)
        if before.version < running.version or before.seats != running.seats:
            before = running
        why = right(before, proposed, seat, slots)
        if not why:
            last[seat] = proposed
        return why

    patch.setattr(rebalance_module, "unsuited", early)


def lets_go_with_a_vote_posted(patch: Patch) -> None:
    go_on = SimRank.go_on

    def careless(self: SimRank) -> None:
        if self.posted:
            self.rebalance.turn()
        go_on(self)

    patch.setattr(SimRank, "go_on", careless)


def keeps_what_is_withdrawn(patch: Patch) -> None:
    consider = Rebalance._consider

    def deaf(self: Rebalance, proposal: Proposal | None) -> None:
        if proposal is not None:
            consider(self, proposal)

    def keep(self: Rebalance) -> None:
        pass

    patch.setattr(Rebalance, "_consider", deaf)
    patch.setattr(Rebalance, "_let_go", keep)


def takes_what_another_epoch_was_told(patch: Patch) -> None:
    consider = Rebalance._consider

    def any_epoch(self: Rebalance, proposal: Proposal | None) -> None:
        if proposal is not None:
            proposal = msgspec.structs.replace(proposal, epoch=self._group.epoch)
        consider(self, proposal)

    patch.setattr(Rebalance, "_consider", any_epoch)


def goes_by_the_new_one_a_step_late(patch: Patch) -> None:
    """The step of the round in which all were ready still goes by the old placement."""
    round_ = SimRank.round

    def late(self: SimRank, group: Group) -> Waits:
        follow, self.rebalance.follow = self.rebalance.follow, lambda: None  # type: ignore[method-assign]
        yield from round_(self, group)
        self.rebalance.follow = follow  # type: ignore[method-assign]
        follow()

    patch.setattr(SimRank, "round", late)


PLANTED: list[tuple[Callable[[Patch], None], int]] = [
    (flips_when_it_is_ready_itself, 10),
    (flips_when_anybody_is_ready, 10),
    (says_that_it_is_ready_first, 10),
    (forgets_to_copy, 10),
    (puts_experts_into_slots_in_use, 10),
    (takes_slots_before_all_have_flipped, 30),
    (lets_go_with_a_vote_posted, 30),
    (keeps_what_is_withdrawn, 10),
    (takes_what_another_epoch_was_told, 20),
    (goes_by_the_new_one_a_step_late, 10),
]


@pytest.mark.parametrize(("plant", "seeds"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_bug_is_found(
    plant: Callable[[Patch], None], seeds: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    for seed in range(seeds):
        try:
            World(seed).run()
        except (AssertionError, IndexError, KeyError, PhalanxError) as found:
            print(f"seed {seed}: {found!r}")
            return
    pytest.fail(f"{plant.__name__} was not found within {seeds} seeds")
