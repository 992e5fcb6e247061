"""The whole system in virtual time under faults at random moments, each run from a seed that was never
used before: what must hold holds. A failure prints the command that tells the seed's story again."""

import time

import pytest

from phalanx.protocol.errors import Code
from sim.world import World

SEEDS, BATCH = 300, 30
BASE = time.time_ns() // 1_000_000 % (1 << 40)


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_stream_is_that_of_a_quiet_run(first: int) -> None:
    print(f"seeds {BASE + first} to {BASE + first + BATCH - 1}")
    for seed in range(BASE + first, BASE + first + BATCH):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"again: python -P tests/sim/world.py --seed {seed} -v")
            raise


QUIET = {
    "faults": 0,
    "changes": 0,
    "step_death": 0.0,
    "protocol_death": 0.0,
    "spawn_failure": 0.0,
    "node_deaths": 0,
    "crash_looper": False,
    "shut_down": False,
}


@pytest.mark.parametrize("poison", [1, 2])
def test_requests_over_which_workers_die_end_alone(poison: int) -> None:
    """Every other stream is that of a quiet run, and no node gives up."""
    print(f"seeds {BASE} to {BASE + 5}")
    given_up = 0
    for seed in range(BASE, BASE + 6):
        try:
            world = World(seed, poison=poison, aborts=0.0, **QUIET).run()
            assert world.lives == 1
        except Exception as error:
            error.add_note(f"again: World({seed}, poison={poison}, aborts=0.0, **QUIET).run()")
            raise
        given_up += sum(final.code is Code.INTERNAL for final in world.finals.values())
    assert given_up >= 3, "of six, some may be refused"


def test_what_schedulers_run_may_be_told_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.scheduler_svc.listing.LIST_SEQUENCES_MAX", 1)
    print(f"seeds {BASE} to {BASE + 9}")
    for seed in range(BASE, BASE + 10):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}, with LIST_SEQUENCES_MAX = 1")
            raise


def test_a_seed_replays_exactly() -> None:
    """Event for event: else a failure could not be looked into."""

    def trace(seed: int) -> tuple[int, int, list[str]]:
        world = World(seed).run()
        assert world.node is not None
        return world.now_ns, world.steps, world.node.story

    assert all(trace(seed) == trace(seed) for seed in range(3))
