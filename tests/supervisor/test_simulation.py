"""A node's whole life in virtual time, with faults at random and at the worst moments: what must hold
always holds, all is well when faults end, and bugs planted into the core are found."""

import pytest

from phalanx.protocol.patience import Patience
from sim.host import Host
from sim.host_checks import Violated
from sim.host_pauses import PausedHost


@pytest.mark.parametrize(
    "first",
    [*range(0, 160, 20), *(pytest.param(at, marks=pytest.mark.soak) for at in range(160, 300, 20))],
)
def test_recovers_after_faults(first: int) -> None:
    for seed in range(first, first + 20):
        (PausedHost if seed % 4 == 0 else Host)(seed).run()


def test_same_seed_same_history() -> None:
    assert Host(7).run().story == Host(7).run().story


def test_a_worker_that_is_deaf_while_it_loads_is_found() -> None:
    """The control: somebody falls while another loads many experts and does not look at the epoch. It cannot
    acknowledge the next STOP, and is killed though nothing is wrong with it."""
    with pytest.raises(Violated, match=r"worker-\d was well"):
        for seed in range(150):
            Host(seed, looks_while_it_loads=False).run()


def test_waits_of_a_time_that_does_not_count_are_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: who waited for a CPU while the supervisor was stopped might hang for as long afterwards."""

    def credulous(life: Patience, state: str, waited_ns: int, asleep_ns: int, now_ns: int) -> None:
        since_ns, life.since_ns = life.since_ns, 0
        right(life, state, waited_ns, asleep_ns, now_ns)
        life.since_ns = since_ns

    right = Patience.inspected
    monkeypatch.setattr(Patience, "inspected", credulous)
    with pytest.raises(Violated, match=r"hangs for \d+ ms"):
        for seed in range(30):
            PausedHost(seed).run()
