"""`make soak`: the whole system through thousands of runs with faults at random moments.

`python -P tests/sim/world_soak.py --worlds 10000`. A failing seed is printed;
`python -P tests/sim/world.py --seed N -v` tells its story.
"""

import sys
import time
from pathlib import Path

import click
import multiprocess

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim.world import World

BATCH = 8


def run_world(seed: int) -> tuple[int, int, str]:
    """(seed, requests served, what went wrong or nothing)."""
    world = World(seed)
    try:
        world.run()
    except (
        AssertionError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        first_line = str(error).partition("\n")[0]
        return seed, len(world.readings), f"{type(error).__name__}: {first_line}"
    return seed, len(world.readings), ""


@click.command()
@click.option("--worlds", default=10_000, help="How many runs.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--seed", default=None, type=int, help="The first seed; without it, from the clock.")
@click.option("--seconds", default=0, help="Stop after so long; 0: after all runs.")
def main(worlds: int, jobs: int, seed: int | None, seconds: int) -> None:
    first = time.time_ns() // 1_000_000 % (1 << 40) if seed is None else seed
    click.echo(f"seeds from {first} on")
    started, served, failed, at = time.monotonic(), 0, 0, 0
    with multiprocess.Pool(jobs) as pool:
        outcomes = pool.imap_unordered(run_world, range(first, first + worlds), BATCH)
        for at, (number, requests, failure) in enumerate(outcomes, 1):
            served += requests
            if failure:
                failed += 1
                click.echo(f"seed {number}: {failure}")
            lasted = time.monotonic() - started
            if at % 500 == 0:
                click.echo(f"{at} runs, {served} requests, {failed} failed, {lasted:.0f} s")
            if seconds and lasted > seconds:
                break
    click.echo(f"{at} runs, {served} requests, {failed} runs failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
