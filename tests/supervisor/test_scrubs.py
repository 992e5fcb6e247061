"""What scrubbers have found, told to people: who is wrong, as far as anyone can tell."""

import pytest

from phalanx.protocol.messages import (
    ExpertFinding,
    ExpertReport,
    ExpertsScrubbed,
    Finding,
    Scrubbed,
    ScrubReport,
)
from phalanx.supervisor.events import Doubt
from phalanx.supervisor.scrubs import Scrubs

WORKERS = dict.fromkeys(range(4), 1)


def slot(seat: int, layer: int = 3, expert: int = 5) -> ExpertFinding:
    return ExpertFinding((seat,), (1,), layer, expert)


def doubt(seat: int, other: int, layer: int = 3, expert: int = 5) -> ExpertFinding:
    """`seat` makes something else of what `other` had computed."""
    return ExpertFinding((seat, other), (1, 1), layer, expert)


def heard(*findings: ExpertFinding) -> Scrubs:
    scrubs = Scrubs()
    for seat in WORKERS:
        mine = tuple(f for f in findings if f.seats[0] == seat)
        scrubs.hear(ExpertReport(seat, 1, ExpertsScrubbed(10, 2, mine)))
    return scrubs


HOLDS = "the scrubber: worker-1 holds other bits of expert 5 of layer 3 than the checkpoint: phalanx restart worker-1, then phalanx kv clear"


def test_a_wrong_slot_is_named() -> None:
    assert heard(slot(1)).told(WORKERS) == [HOLDS]
    assert heard().told(WORKERS) == []


def test_a_wrong_slot_explains_what_is_computed_with_it() -> None:
    assert heard(doubt(0, 1), slot(1), doubt(1, 2)).told(WORKERS) == [HOLDS]
    assert len(heard(doubt(0, 1, expert=6), slot(1)).told(WORKERS)) == 2


def test_a_wrong_slot_explains_ranks_that_were_compared_when_it_became_wrong() -> None:
    """An innocent rank was blamed, and the node unhealthy, until that one was started again as well."""
    blamed = Finding((2,), (1,), (0, 1), "r1", 3)
    again = WORKERS | {1: 2}  # the worker that held it was started again

    def ranks(scrubs: Scrubs, *findings: Finding) -> None:
        scrubs.hear(ScrubReport(Scrubbed(9, len(findings), findings)))

    for first in (True, False):  # the comparison told first, or the slot
        scrubs = heard() if first else heard(slot(1))
        ranks(scrubs, blamed)
        scrubs.hear(ExpertReport(1, 1, ExpertsScrubbed(10, 2, (slot(1),))))
        assert len(scrubs.told(WORKERS)) == 2
        assert scrubs.told(again) == [] and scrubs.of_ranks(again).findings == ()
        ranks(scrubs, blamed)  # told once more
        assert scrubs.told(again) == []
        ranks(scrubs, Finding((2,), (1,), (0, 1), "r2", 0))
        assert len(scrubs.told(again)) == 1, "found again: it is broken"
    scrubs = heard()
    ranks(scrubs, blamed)
    assert len(scrubs.told(again)) == 1, "no slot was wrong"


def test_of_two_ranks_nobody_can_tell_which_computes_wrong() -> None:
    for doubts in ([doubt(0, 1)], [doubt(0, 1), doubt(1, 0)], [doubt(0, 1), doubt(0, 1, 7)]):
        (told,) = heard(*doubts).told(WORKERS)
        assert told.startswith("the scrubber: worker-0 and worker-1 compute different bits with")
        assert told.endswith(
            "one of them is wrong; phalanx restart worker-0 worker-1, then phalanx kv clear"
        )


@pytest.mark.parametrize(
    "doubts",
    [
        [doubt(0, 1), doubt(2, 1)],
        [doubt(1, 0), doubt(1, 2)],  # a rank that is wrong doubts all others
        [doubt(1, 0, 7), doubt(2, 1), doubt(0, 1)],
    ],
)
def test_who_differs_from_several_is_wrong(doubts: list[ExpertFinding]) -> None:
    (told,) = heard(*doubts).told(WORKERS)
    assert told.startswith("the scrubber: worker-1 computes other bits than worker-0 and worker-2")


def test_whose_expert_is_doubted_shall_look_at_it_once() -> None:
    scrubs = Scrubs()
    one = ExpertReport(0, 1, ExpertsScrubbed(10, 2, (slot(0), doubt(0, 2, 4, 6))))
    assert scrubs.hear(one) == [Doubt(2, 4, 6)] and scrubs.hear(one) == []
    more = ExpertReport(0, 1, ExpertsScrubbed(10, 3, (doubt(0, 2, 4, 6), doubt(0, 3, 4, 6))))
    assert scrubs.hear(more) == [Doubt(3, 4, 6)]
    assert scrubs.hear(ScrubReport(Scrubbed(1))) == []


def test_as_many_doubts_of_each_prove_nothing() -> None:
    told = heard(doubt(0, 1), doubt(2, 3)).told(WORKERS)
    assert len(told) == 2 and all("one of them is wrong" in text for text in told)


def test_a_worker_that_was_started_again_is_another() -> None:
    scrubs = heard(slot(1), doubt(2, 3))
    scrubs.hear(ScrubReport(Scrubbed(9, 1, (Finding((2,), (1,), (0, 1), "f" * 32, 4),))))
    assert len(scrubs.told(WORKERS)) == 3
    told, slots = scrubs.told(WORKERS | {3: 2})
    assert slots == HOLDS and told == (
        "the scrubber: worker-2 computes other bits than worker-0 and worker-1 (output 4 of request ffffffff):"
        " is its device broken? phalanx restart worker-2, then phalanx kv clear"
    )
    assert scrubs.of_experts(WORKERS) == ExpertsScrubbed(40, 8, (slot(1), doubt(2, 3)))
    assert scrubs.of_experts({0: 1, 1: 2, 2: 1}) == ExpertsScrubbed(20, 4)
    assert scrubs.of_ranks(WORKERS | {2: 2}) == Scrubbed(9, 1)


@pytest.mark.parametrize(
    "finding",
    [
        *(doubt(0, 64), doubt(0, -1), doubt(0, 1, layer=-1), doubt(0, 1, layer=2**40)),
        *(doubt(0, 1, expert=-1), doubt(0, 1, expert=2**32), doubt(1, 1)),
        *(ExpertFinding((), (), 3, 5), ExpertFinding((0, 1, 2), (1, 1, 1), 3, 5)),
    ],
)
def test_what_makes_no_sense_is_neither_told_nor_put_on_the_board(finding: ExpertFinding) -> None:
    scrubs = Scrubs()
    assert scrubs.hear(ExpertReport(0, 1, ExpertsScrubbed(10, 2, (finding, doubt(0, 2))))) == [
        Doubt(2, 3, 5)
    ]
    assert len(scrubs.told(WORKERS)) == 1 and scrubs.of_experts(WORKERS).slots == 10


def test_what_a_gateway_has_found_outlives_it() -> None:
    """Its successor tells of nothing, or of others; the worker's end is the end of it."""
    scrubs = Scrubs()
    first, second = (
        Finding((1,), (1,), (0, 2), "a" * 32, 3),
        Finding((2,), (1,), (0, 3), "b" * 32, 5),
    )
    scrubs.hear(ScrubReport(Scrubbed(9, 1, (first,))))
    for found in ((), (second,)):
        scrubs.hear(ScrubReport(Scrubbed(1, len(found), found)))
        assert scrubs.of_ranks(WORKERS) == Scrubbed(1, len(found), (first, *found))
    again = Finding((1,), (1,), (0, 2), "c" * 32, 7)
    scrubs.hear(ScrubReport(Scrubbed(2, 2, (second, again))))
    assert scrubs.of_ranks(WORKERS).findings == (second, again)
    assert scrubs.of_ranks({**WORKERS, 1: 2}).findings == (second,)
