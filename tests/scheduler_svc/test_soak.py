"""A short soak with seeds that nobody has run before: a failure prints its seed."""

import time

from sim.scheduler_world import Options, World

SECONDS = 8.0


def test_fresh_seeds() -> None:
    seed = time.time_ns() // 1_000_000 % (1 << 40)
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        try:
            World(seed, options=Options.soak).run()
        except Exception as error:
            error.add_note(f"again: python -P tests/sim/scheduler_soak.py --worlds 1 --seed {seed}")
            raise
        seed += 1
