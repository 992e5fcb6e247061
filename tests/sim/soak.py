"""`make soak`: many requests over four simulated ranks, with faults and aborts at random moments.

`python -P tests/sim/soak.py --requests 100000`. A failing seed is printed; `--seed N --worlds 1` runs it
again, event for event.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import multiprocess

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim.scheduler_world import Options, World


def run_world(seed: int) -> tuple[int, int, str]:
    """(seed, requests served, what went wrong or nothing)."""
    world = World(seed, options=Options.soak)
    try:
        world.run()
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return seed, len(world.gateway.requests), f"{type(error).__name__}: {error}"
    return seed, len(world.gateway.requests), ""


def soak(first: int, requests: int, worlds: int, jobs: int) -> Iterator[tuple[int, int, str]]:
    """Worlds with seeds from `first` on, until so many requests were served or so many worlds run."""
    served, last = 0, first + (worlds or 1 << 40)
    with multiprocess.Pool(jobs) as pool:
        while served < requests and first < last:
            seeds = range(first, min(last, first + 8 * jobs))
            for outcome in pool.imap_unordered(run_world, seeds):
                served += outcome[1]
                yield outcome
            first = seeds.stop


@click.command()
@click.option("--requests", default=100_000, help="Stop after so many.")
@click.option("--worlds", default=0, help="Stop after so many worlds; 0: by requests alone.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--seed", default=None, type=int, help="The first seed; without it, from the clock.")
def main(requests: int, worlds: int, jobs: int, seed: int | None) -> None:
    first = time.time_ns() // 1_000_000 % (1 << 40) if seed is None else seed
    click.echo(f"seeds from {first} on")
    served = failed = 0
    started = time.monotonic()
    for at, (number, count, failure) in enumerate(soak(first, requests, worlds, jobs), 1):
        served += count
        if failure:
            failed += 1
            click.echo(f"seed {number}: {failure}")
        if at % 20 == 0:
            click.echo(
                f"{served} requests in {at} worlds, {failed} failed, {time.monotonic() - started:.0f} s"
            )
    click.echo(f"{served} requests, {failed} worlds failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
