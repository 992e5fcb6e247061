"""Slow work of the supervisor waits for streams, but not for long."""

import pytest

from phalanx.supervisor.events import Spawn, Sweep
from phalanx.supervisor.later import CALM_NS, LATER_NS, Later

SPAWN = Spawn("worker-1", 2)
NOW = 7_000_000_000


def put_off(forks: bool = False) -> Later:
    later = Later(lambda name: forks and name == SPAWN.name)
    later.put_off(SPAWN, NOW)
    later.put_off(Sweep(), NOW)
    return later


def test_all_of_it_waits_while_the_group_changes_and_for_its_first_steps() -> None:
    later = put_off()
    assert not later.due(NOW, changing=True, spare_cpus=9)
    later.group_runs(NOW)
    assert not later.due(NOW + CALM_NS - 1, changing=False, spare_cpus=9)
    assert later.due(NOW + CALM_NS, changing=False, spare_cpus=0)
    assert later.take() == [SPAWN, Sweep()]
    assert not later.due(NOW + CALM_NS, changing=False, spare_cpus=9)


@pytest.mark.parametrize(("spare_cpus", "due"), [(1, True), (0, False), (-1, False)])
def test_a_fork_is_made_beside_the_first_steps_if_ranks_leave_a_cpu(
    spare_cpus: int, due: bool
) -> None:
    later = put_off(forks=True)
    assert not later.due(NOW, changing=True, spare_cpus=9)
    later.group_runs(NOW)
    assert later.due(NOW + 1, changing=False, spare_cpus=spare_cpus) is due


def test_nothing_waits_for_a_group_that_changes_again_and_again() -> None:
    later = put_off()
    assert not later.due(NOW + LATER_NS, changing=True, spare_cpus=0)
    later.put_off(Sweep(), NOW + LATER_NS)  # the clock is that of the first
    assert later.due(NOW + LATER_NS + 1, changing=True, spare_cpus=0)
