"""A node's whole life in virtual time, with faults at random and at the worst moments: what must hold
always holds, all is well when faults end, and bugs planted into the core are found."""

import pytest

from sim.host import Host
from sim.host_checks import Violated


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_recovers_after_faults(first: int) -> None:
    for seed in range(first, first + 20):
        Host(seed).run()


def test_same_seed_same_history() -> None:
    assert Host(7).run().story == Host(7).run().story


def test_a_worker_that_is_deaf_while_it_loads_is_found() -> None:
    """The control: somebody falls while another loads many experts and does not look at the epoch. It cannot
    acknowledge the next STOP, and is killed though nothing is wrong with it."""
    with pytest.raises(Violated, match=r"worker-\d was well"):
        for seed in range(150):
            Host(seed, looks_while_it_loads=False).run()
