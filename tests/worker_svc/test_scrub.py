"""The worker's scrubber: what it looks at next, what it tells, and what a change of the group does to it."""

import threading
from collections.abc import Callable, Iterator

from phalanx.protocol.messages import ExpertFinding, ExpertReport, ExpertsScrubbed
from phalanx.worker_svc.scrub import Recomputed, Scrub, Slot

MS = 1_000_000
EVERY_MS = 1000


class Held:
    """A backend's part of it, whose numbers are its experts."""

    def __init__(self, *slots: Slot) -> None:
        self.slots = list(slots)
        self.fresh: list[Slot] = []
        self.wrong: set[Slot] = set()
        self.rows: list[Recomputed] = []
        self.compared: list[Slot] = []
        self.wanted = 0
        self.short_of_room = False
        self.disk = threading.Event()
        self.disk.set()

    def held(self) -> list[Slot]:
        return list(self.slots)

    def holds(self, held: Slot) -> bool:
        return held in self.slots

    def take_fresh(self) -> list[Slot]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def read(self, held: Slot) -> int:
        assert self.disk.wait(10)
        return held.expert

    def compare(self, held: Slot, stored: int) -> Iterator[bool | None]:
        assert stored == held.expert
        yield True
        if self.short_of_room:
            yield None
        self.compared.append(held)
        yield held not in self.wrong

    def want_row(self) -> None:
        self.wanted += 1

    def forget_row(self) -> None:
        self.rows.clear()

    def compute_again(self) -> Recomputed | None:
        return self.rows.pop(0) if self.rows else None


class Rank:
    def __init__(self, *slots: Slot, every_s: float = EVERY_MS / 1000) -> None:
        self.bits, self.told = Held(*slots), list[ExpertReport]()
        self.doubted: tuple[int, int] | None = (9, 9)  # of the worker before
        self.scrub = Scrub(self.bits, every_s, 1, 4, self.told.append, lambda: self.doubted)
        self.scrub.begin_epoch({0: 2, 1: 4})
        self.now_ms = 0

    def turns(self) -> int:
        """Until there is nothing more to do now."""
        count = 0
        while self.scrub.turn(self.now_ms * MS):
            count += 1
        return count

    def run(self, periods: int) -> None:
        for _ in range(periods):
            self.now_ms += EVERY_MS
            self.turns()
            self.scrub.close()  # what is read now is there the next time

    @property
    def findings(self) -> tuple[ExpertFinding, ...]:
        return self.told[-1].scrubbed.findings if self.told else ()


A, B, C = Slot(0, 0, 3), Slot(0, 1, 5), Slot(1, 0, 3)


def test_each_slot_in_turn_a_piece_a_turn() -> None:
    rank = Rank(A, B, C)
    rank.run(6)
    assert rank.bits.compared == [A, B, C, A, B]
    rank.now_ms += EVERY_MS
    assert rank.turns() == 4, "begun, two pieces, the end"
    assert rank.turns() == 0 and rank.bits.wanted == 7
    assert rank.scrub.wait_ms(rank.now_ms * MS, 400) == 400
    assert rank.scrub.wait_ms((rank.now_ms + 990) * MS, 400) == 10
    assert rank.told[-1] == ExpertReport(1, 4, ExpertsScrubbed(6, 0))


def test_never_unless_asked_for() -> None:
    rank = Rank(A, every_s=0)
    rank.run(3)
    assert not rank.bits.compared and not rank.told
    assert rank.scrub.wait_ms(rank.now_ms * MS, 400) == 400


def test_what_was_filled_while_it_runs_comes_first() -> None:
    rank = Rank(A, B)
    rank.run(2)
    rank.bits.slots.append(C)
    rank.bits.fresh = [C, Slot(7, 7, 7)]  # that one is gone already
    rank.run(3)
    assert rank.bits.compared == [A, B, C, A]


def test_what_others_doubt_comes_next_and_once() -> None:
    rank = Rank(A, B, C)
    rank.run(2)
    rank.doubted = (C.layer, C.expert)
    rank.run(4)
    assert rank.bits.compared == [A, B, C, C, A]


def test_a_wrong_slot_is_told_again_and_again_until_it_is_right() -> None:
    rank = Rank(A, B)
    rank.bits.wrong = {B}
    rank.run(4)
    finding = ExpertFinding((1,), (4,), B.layer, B.expert)
    assert rank.findings == (finding,)
    rank.run(10)
    assert sum(report.scrubbed.findings == (finding,) for report in rank.told) >= 3
    rank.bits.wrong.clear()
    rank.run(3)
    assert rank.findings == ()


def test_a_wrong_slot_that_holds_nothing_any_more_is_forgotten() -> None:
    rank = Rank(A, B)
    rank.bits.wrong = {B}
    rank.run(4)
    assert rank.findings
    rank.bits.slots.remove(B)
    rank.run(4)
    assert rank.findings == ()


def test_a_slot_that_is_given_away_meanwhile_proves_nothing() -> None:
    rank = Rank(A, B)
    rank.bits.wrong = {A}
    rank.run(1)
    rank.now_ms += EVERY_MS
    assert rank.scrub.turn(rank.now_ms * MS) and rank.scrub.turn(rank.now_ms * MS)
    rank.bits.slots[0] = Slot(0, 0, 6)
    rank.turns()
    rank.run(1)
    assert rank.findings == () and A not in rank.bits.compared


def dropped(change: Callable[[Rank], None]) -> None:
    rank = Rank(A, B)
    rank.bits.wrong = {A}
    rank.run(1)
    change(rank)
    rank.scrub.begin_epoch({1: 4})
    rank.run(1)
    assert not rank.bits.compared and rank.findings == ()
    rank.run(5)
    assert {A, B} == set(rank.bits.compared) and rank.findings != (), "its turn comes again"


def test_a_change_of_the_group_ends_a_check() -> None:
    def while_read(rank: Rank) -> None:
        rank.scrub.leave()

    def while_compared(rank: Rank) -> None:
        rank.now_ms += EVERY_MS
        assert rank.scrub.turn(rank.now_ms * MS) and rank.scrub.turn(rank.now_ms * MS)
        rank.scrub.leave()

    dropped(while_read)
    dropped(while_compared)


def test_a_disk_that_hangs_keeps_nobody() -> None:
    rank = Rank(A, B, C)
    rank.run(1)
    rank.bits.disk.clear()
    for _ in range(5):
        rank.now_ms += EVERY_MS
        rank.turns()
    assert rank.bits.compared == [A]
    rank.bits.disk.set()
    rank.run(4)
    assert rank.bits.compared == [A, B, C, A], "each in its turn all the same"


def test_what_finds_no_memory_proves_nothing() -> None:
    rank = Rank(A)
    rank.bits.wrong = {A}
    rank.run(2)
    finding = rank.findings
    assert finding
    rank.bits.short_of_room = True
    rank.bits.wrong.clear()
    rank.run(6)
    assert rank.findings == finding and rank.told[-1].scrubbed.slots == 1
    rank.bits.short_of_room = False
    rank.run(3)
    assert rank.findings == ()


def test_a_row_that_differs_is_told_with_both_ranks_and_the_own_slot_looked_at() -> None:
    rank = Rank(A, B, C)
    rank.run(1)
    rank.bits.rows = [Recomputed(0, 1, 3, True), Recomputed(0, 1, 3, False)]
    rank.run(4)
    assert rank.told[-1].scrubbed.rows == 2
    assert rank.findings == (ExpertFinding((1, 0), (4, 2), 1, 3),)
    rank.run(1)
    assert rank.bits.compared[-1] == C
    rank.scrub.begin_epoch({0: 2, 1: 4})
    rank.run(3)
    assert rank.findings, "the same workers"
    rank.scrub.begin_epoch({0: 3, 1: 4})
    rank.run(1)
    assert rank.findings == (), "that one is another worker"


def test_a_row_of_an_earlier_group_proves_nothing() -> None:
    """Who computed it may be gone."""
    rank = Rank(A)
    rank.run(1)
    rank.bits.rows = [Recomputed(0, 1, 3, False)]
    rank.scrub.leave()
    rank.scrub.begin_epoch({1: 4})
    rank.run(4)
    assert rank.findings == () and rank.told[-1].scrubbed.rows == 0
