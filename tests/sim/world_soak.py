"""`make soak`: the whole system through thousands of runs with faults at random moments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim.sweep import command
from sim.world import World


def run_world(seed: int) -> int:
    world = World(seed)
    world.run()
    return len(world.readings)


main = command(
    run_world,
    what="worlds",
    again=".venv/bin/python -P tests/sim/world.py -v --seed {seed}",
    worlds=10_000,
    requests=0,
)

if __name__ == "__main__":
    main()
