"""A gate on what a decode step costs in the scheduler, so that it cannot creep up over small changes.

Both sides are CPU time of the same run: a busy or slow machine makes both larger.
"""

import pytest

from phalanx.bench.scheduler import Course, run, yardstick_us

RATIO_MAX = 3.0  # about three times what it takes


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_decode_step_of_64_sequences_is_cheap(drafts: int) -> None:
    figures = Course(64, drafts, 0.0).measure(300)
    assert figures["cpu_p50_us"] < RATIO_MAX * yardstick_us()


def test_a_step_grows_little_with_the_batch() -> None:
    """Vectors, not loops: sixteen times the sequences cost far less than sixteen times as much."""
    few, many = (Course(count, 5, 0.0).measure(200)["cpu_p50_us"] for count in (16, 256))
    assert many < 4 * few


def test_the_documented_fields() -> None:
    rows = run((2,), 20)["rows"]
    assert {"running", "drafts", "p50_us", "p99_us"} <= set(rows[0])
    assert [(row["drafts"], row["churn"]) for row in rows] == [(0, 0), (5, 0), (0, 0.05), (5, 0.05)]
