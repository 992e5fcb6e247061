"""A rank that waits for its peers: it says for whom, and only time in which it ran counts."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from phalanx.protocol.board import ROUNDS, Board, ProcessPhase
from phalanx.protocol.errors import EpochChanged, PhalanxError
from phalanx.protocol.limits import EXCHANGE_DEADLINE_MS
from phalanx.worker_svc import group as module
from phalanx.worker_svc.group import Group

EPOCH = 2
SLICE_NS = 20_000_000


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(f"wait{uuid.uuid4().hex[:8]}")
    made.set_epoch(EPOCH, [])
    yield made
    made.close()


class Waits:
    """Time passes with each look; `paused_ns` more of it before the look of that number."""

    def __init__(self, board: Board, patch: pytest.MonkeyPatch, paused_ns: int = 0) -> None:
        self.now_ns, self.looks, self.paused_ns = 1, 0, paused_ns
        self.seen: list[tuple[ProcessPhase, int]] = []
        self.group = Group(board, 1, [0, 1, 2], EPOCH, self.beat)
        self.row = board.processes[1]
        self.row.phase = ProcessPhase.BUSY
        patch.setattr(module.time, "monotonic_ns", self.monotonic_ns)
        patch.setattr(module, "_SLICE_MS", 0.0)

    def monotonic_ns(self) -> int:
        self.looks += 1
        self.now_ns += SLICE_NS + (self.paused_ns if self.looks % 10 == 0 else 0)
        return self.now_ns

    def beat(self) -> None:
        self.seen.append((self.row.phase, self.row.awaits))


def test_it_says_for_whom_it_waits(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(board, monkeypatch)

    def beat() -> None:
        waits.beat()
        if len(waits.seen) == 2:
            board.seats[2].post(EPOCH, 1, 0, 0)
        if len(waits.seen) == 4:
            board.seats[0].post(EPOCH, 1, 0, 0)

    waits.group._beat = beat
    waits.group.enter(0)
    waiting = ProcessPhase.WAITING
    assert waits.seen == [(waiting, 0b101)] * 2 + [(waiting, 0b001)] * 2
    assert waits.row.phase is ProcessPhase.BUSY, "the step goes on"


def test_a_wait_ends_with_the_epoch(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(board, monkeypatch)
    waits.group._beat = lambda: board.set_epoch(EPOCH + 1, [])
    with pytest.raises(EpochChanged):
        waits.group.enter(0)
    assert waits.row.phase is ProcessPhase.BUSY


class Step:
    """Rank 1 waits for rows of rank 0 in a step, while the epoch moves."""

    def __init__(self, board: Board, patch: pytest.MonkeyPatch) -> None:
        self.waits, self.stored, self.looks = Waits(board, patch), False, 0

    def wait(self, then: Callable[[int], None]) -> int:
        """`then` is called at each look, with its number. Returns how often."""

        def beat() -> None:
            self.looks += 1
            then(self.looks)

        self.waits.group._beat = beat
        behind = lambda: [] if self.stored else [0]
        self.waits.group.wait(lambda: self.stored, "dispatch", behind, in_step=True)
        return self.looks

    def store(self) -> None:
        self.stored = True


def test_a_step_is_finished_when_nobody_fell(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(board, monkeypatch)
    odd = EPOCH + 1
    does = {1: lambda: board.set_epoch(odd, [], ends_steps=False), 5: step.store}
    assert step.wait(lambda look: does.get(look, lambda: None)()) == 5
    with pytest.raises(EpochChanged):
        step.waits.group.enter(0)  # but no other one begins


def test_a_step_ends_when_somebody_falls_meanwhile(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(board, monkeypatch)
    does = {
        1: lambda: board.set_epoch(EPOCH + 1, [], ends_steps=False),
        4: lambda: board.set_epoch(EPOCH + 3, []),
    }
    with pytest.raises(EpochChanged):
        step.wait(lambda look: does.get(look, lambda: None)())
    assert step.looks == 4


def test_a_step_ends_when_a_peer_has_stopped_without_it(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is waited for; others may have finished it and stopped."""
    step = Step(board, monkeypatch)
    odd = EPOCH + 1

    def stops(seat: int) -> None:
        board.seats[seat].stop_ack = odd

    does = {
        1: lambda: board.set_epoch(odd, [], ends_steps=False),
        3: lambda: stops(2),
        6: lambda: stops(0),
    }
    with pytest.raises(EpochChanged):
        step.wait(lambda look: does.get(look, lambda: None)())
    assert step.looks == 6


def test_what_a_peer_stored_before_it_stopped_counts(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does both between our look for its rows and the one at its answer."""
    group = Waits(board, monkeypatch).group
    board.set_epoch(EPOCH + 1, [], ends_steps=False)
    looks: list[bool] = []

    def ready() -> bool:
        looks.append(board.seats[0].stop_ack == EPOCH + 1)
        if len(looks) == 1:
            board.seats[0].stop_ack = EPOCH + 1
        return looks[-1]

    group.wait(ready, "combine", lambda: [0], in_step=True)
    assert looks == [False, True]


def test_an_epoch_outlives_the_numbers_of_its_rounds(board: Board) -> None:
    """The word on the board has 32 bits for them, beside the epoch."""
    ranks = [Group(board, seat, [0, 1], EPOCH, lambda: None) for seat in (0, 1)]
    for rank in ranks:
        rank.round = ROUNDS - 3
    quick, slow = ranks
    for vote in range(8):
        assert not slow.peer_waits()
        quick.post(vote)
        assert slow.peer_waits() and not quick.complete() and quick.behind() == [1]
        slow.post(vote + 10)
        assert quick.complete() and slow.complete() and slow.behind() == []
        for rank in ranks:
            assert rank.votes() == [vote, vote + 10]
    assert board.seats[0].posted == (EPOCH, 4)
    board.seats[0].post(EPOCH + 2, 1, 0, 0)
    assert slow.peer_waits(), "who is in a later epoch does not wait for this round's vote"


@pytest.mark.parametrize("paused_s", [0, 120])
def test_time_in_which_it_did_not_run_is_nobodys_delay(
    board: Board, monkeypatch: pytest.MonkeyPatch, paused_s: int
) -> None:
    """Were it counted, a paused container would end every rank that happened to wait."""
    waits = Waits(board, monkeypatch, paused_s * 10**9)
    with pytest.raises(PhalanxError, match=r"for its peers \[0, 2\] in vote of round 1"):
        waits.group.enter(0)
    least = EXCHANGE_DEADLINE_MS * 1_000_000 / SLICE_NS
    assert waits.looks > 0.8 * least
