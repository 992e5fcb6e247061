"""`make soak`: many requests over four simulated ranks, with faults and aborts at random moments.

A failing seed is printed; `--seed N --worlds 1` runs it again, event for event.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim.scheduler_world import Options, World
from sim.sweep import command


def run_world(seed: int) -> int:
    world = World(seed, options=Options.soak)
    world.run()
    return len(world.gateway.requests)


main = command(
    run_world,
    what="schedulers",
    again=".venv/bin/python -P tests/sim/scheduler_soak.py --worlds 1 --seed {seed}",
    worlds=0,
    requests=100_000,
)

if __name__ == "__main__":
    main()
