"""A gate on what a decode step costs in the scheduler, so that it cannot creep up over small changes.

It counts the instructions that the interpreter executes, which no busy machine changes. The bounds leave a
quarter of room over what they were when written, for other versions of Python; who comes near one should
know why.
"""

import pytest

from phalanx.bench.scheduler import Course, run
from phalanx.scheduler_svc import compiled

STEPS = 20
SHARE = 0.05  # of the sequences end with a step, and as many start
STEP_MAX = {"python": 3_300, "compiled": 1_450}  # of 256 sequences with drafts
TURNOVER_MAX = {"python": 1_250, "compiled": 60}  # for a sequence that ends and one that starts
PASSES = [
    "python",
    pytest.param(
        "compiled", marks=pytest.mark.skipif(compiled.ROWS is None, reason=compiled.WHY_NOT)
    ),
]


def cost(passes: str, running: int, drafts: int, churn: float) -> int:
    return Course(running, drafts, churn, compiled=passes == "compiled").bytecodes(STEPS)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_decode_step_is_cheap(drafts: int, passes: str) -> None:
    assert cost(passes, 256, drafts, 0.0) < STEP_MAX[passes]


@pytest.mark.parametrize("passes", PASSES)
def test_a_step_does_not_grow_with_the_batch(passes: str) -> None:
    """Vectors, not loops. (With drafts it grows by the new blocks, which Python tells one by one.)"""
    assert cost(passes, 256, 0, 0.0) == cost(passes, 16, 0, 0.0)


@pytest.mark.parametrize("passes", PASSES)
def test_starts_and_ends_are_cheap(passes: str) -> None:
    calm, lively = (cost(passes, 256, 5, share) for share in (0.0, SHARE))
    assert (lively - calm) / (SHARE * 256) < TURNOVER_MAX[passes]


def test_the_documented_fields() -> None:
    figures = run((2,), 20)
    rows = figures["rows"]
    assert {"running", "drafts", "p50_us", "p99_us", "bytecodes", "intake_p50_us"} <= set(rows[0])
    assert [(row["drafts"], row["churn"]) for row in rows] == [(0, 0), (5, 0), (0, 0.05), (5, 0.05)]
    assert (figures["peer"] is None) == ("peer_missing" in figures)
    assert figures["passes"] == compiled.which()
