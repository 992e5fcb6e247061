"""A gate on what a decode step costs in the scheduler, so that it cannot creep up over small changes.

It counts the instructions that the interpreter executes, which no busy machine changes. The bounds leave a
quarter of room over what they were when written, for other versions of Python; who comes near one should
know why.
"""

import pytest

from phalanx.bench.scheduler import Course, run

STEPS = 20
STEP_MAX = 3_400  # of 256 sequences with drafts
TURNOVER_MAX = 1_250  # for a sequence that ends and one that starts
SHARE = 0.05


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_decode_step_is_cheap(drafts: int) -> None:
    assert Course(256, drafts, 0.0).bytecodes(STEPS) < STEP_MAX


def test_a_step_does_not_grow_with_the_batch() -> None:
    """Vectors, not loops. (With drafts it grows by the new blocks, which are told one by one.)"""
    assert Course(256, 0, 0.0).bytecodes(STEPS) == Course(16, 0, 0.0).bytecodes(STEPS)


def test_starts_and_ends_are_cheap() -> None:
    calm, lively = (Course(256, 5, share).bytecodes(STEPS) for share in (0.0, SHARE))
    assert (lively - calm) / (SHARE * 256) < TURNOVER_MAX


def test_the_documented_fields() -> None:
    figures = run((2,), 20)
    rows = figures["rows"]
    assert {"running", "drafts", "p50_us", "p99_us", "bytecodes", "intake_p50_us"} <= set(rows[0])
    assert [(row["drafts"], row["churn"]) for row in rows] == [(0, 0), (5, 0), (0, 0.05), (5, 0.05)]
    assert (figures["peer"] is None) == ("peer_missing" in figures)
