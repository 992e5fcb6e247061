"""The whole system in virtual time under faults at random moments, each run from a seed that was never
used before: what must hold holds. A failure prints the command that tells the seed's story again."""

import time

import pytest

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


def test_a_seed_replays_exactly() -> None:
    """Event for event: else a failure could not be looked into."""

    def trace(seed: int) -> tuple[int, int, list[str]]:
        world = World(seed).run()
        assert world.node is not None
        return world.now_ns, world.steps, world.node.story

    assert all(trace(seed) == trace(seed) for seed in range(3))
