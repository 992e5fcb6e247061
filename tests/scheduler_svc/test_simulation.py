"""Whole runs from seeds: whatever the faults, every request ends once, with the tokens of a quiet run."""

import pytest

from sim.scheduler_world import Options, World

SEEDS, BATCH = 50, 25  # `make soak` runs 100,000


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_seed_ends_well(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}: World({seed}).run() shows it again")
            raise


def test_prompts_that_come_again() -> None:
    for seed in range(25):
        try:
            World(seed, options=Options.stored).run()
        except Exception as error:
            error.add_note(
                f"seed {seed}: World({seed}, options=Options.stored).run() shows it again"
            )
            raise


def test_a_seed_replays_exactly() -> None:
    """The same seed gives the same run, event for event: else a failure could not be looked into."""

    def trace(seed: int) -> tuple[int, list[tuple[int, int, list[int]]]]:
        world = World(seed)
        world.run()
        requests = world.gateway.requests.values()
        return world.now_ns, [(r.attempt, r.seat, r.outputs) for r in requests]

    assert all(trace(seed) == trace(seed) for seed in range(5))
