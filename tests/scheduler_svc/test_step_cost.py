"""A gate on what a decode step costs in the scheduler, so that it cannot creep up over small changes."""

from phalanx.bench.scheduler import measure, run

CPU_US_MAX = 400.0  # several times what it takes: machines differ, and this one may be busy


def test_a_decode_step_of_64_sequences_is_cheap() -> None:
    assert measure(64, 300)["cpu_p50_us"] < CPU_US_MAX


def test_the_contract() -> None:
    (row,) = run((2,), 20)["rows"]
    assert {"running", "drafts", "p50_us", "p99_us"} <= set(row)
