"""A node's whole life in virtual time, with faults at random and at the worst moments: what must hold
always holds, all is well when faults end, and bugs planted into the core are found."""

import pytest

from sim.host import Host


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_recovers_after_faults(first: int) -> None:
    for seed in range(first, first + 20):
        Host(seed).run()


def test_same_seed_same_history() -> None:
    assert Host(7).run().story == Host(7).run().story
