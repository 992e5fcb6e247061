"""The compiled passes decide as those in Python do, and leave every column and list the same."""

import pytest

from phalanx.bench import scheduler as bench
from phalanx.scheduler_svc import compiled
from sim import scheduler_world
from sim.scheduler_twin import Twin
from sim.scheduler_world import Options, World

pytestmark = pytest.mark.skipif(compiled.ROWS is None, reason=compiled.WHY_NOT)
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("options", [Options.of, Options.stored, Options.soak])
def test_the_same_in_every_world(options: object, monkeypatch: Patch) -> None:
    monkeypatch.setattr(scheduler_world, "Scheduler", Twin)
    for seed in range(3):
        World(seed, options=options).run()


@pytest.mark.parametrize("drafts", [0, 5])
def test_the_same_in_wide_steps(drafts: int, monkeypatch: Patch) -> None:
    """Many starts and ends in a step, rows that outgrow their regions."""
    monkeypatch.setattr(bench, "Scheduler", Twin)
    course = bench.Course(40, drafts, 0.1)
    for _ in range(120):
        course._turn(course._step)
