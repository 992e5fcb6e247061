"""The whole path without a model serves what the benchmark asks, and its steps cost the control plane no
more than a multiple of what this machine needs for a fixed piece of work at the same time."""

import pytest

from phalanx.bench.loop import run
from phalanx.bench.scheduler import yardstick_us

RATIO_MAX = 40.0  # a dozen times what it takes on an idle machine: four processes share the cores


@pytest.mark.process
@pytest.mark.timed
def test_a_short_run_gives_all_figures_within_the_gate() -> None:
    figures = run("null", (1, 16), 120)
    rows = {row["requests"]: row for row in figures["rows"]}
    assert set(rows) == {1, 16}
    for row in rows.values():
        assert row["steps"] >= 119 and row["tokens_per_s"] > 0
        assert 0 < row["step_us_p50"] <= row["step_us_p99"]
    assert rows[16]["tokens_per_s"] > 2 * rows[1]["tokens_per_s"]  # a step serves all of them
    assert rows[16]["step_us_p50"] < RATIO_MAX * yardstick_us()
