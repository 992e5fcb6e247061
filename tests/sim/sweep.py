"""A simulation from seed to seed, over several processes. What fails is told with its seed and the command that
shows it again: also a run that never ends, and one over which its process dies."""

import itertools
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import click

AHEAD = 4  # runs that wait for each process
RUN_CPU_S_MAX = 120.0  # the longest ever seen took 10
TOLD_EVERY_S = 10.0

Run = Callable[[int], int]  # seed -> requests served; raises if something was wrong


class Outcome(NamedTuple):
    seed: int
    requests: int
    failure: str = ""


def outcome_of(run: Run, seed: int, cpu_s_max: float) -> Outcome:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not over after {cpu_s_max:.0f} s of CPU time")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s_max)
    try:
        return Outcome(seed, run(seed))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        frames = traceback.extract_tb(error.__traceback__)
        where = [frame for frame in frames if frame.filename != __file__][-1]
        said = str(error).partition("\n")[0]
        at = f"{Path(where.filename).name}:{where.lineno}"
        return Outcome(seed, 0, f"{type(error).__name__}: {said} ({at})")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def outcomes(
    run: Run, seeds: Iterable[int], jobs: int, cpu_s_max: float = RUN_CPU_S_MAX
) -> Iterator[Outcome]:
    """In the order in which they come; no more are begun than somebody asks for, but for a few."""
    left, lost = iter(seeds), list[int]()
    while True:
        running: dict[Future[Outcome], int] = {}
        with ProcessPoolExecutor(jobs) as pool:
            try:
                while not lost:
                    for seed in itertools.islice(left, AHEAD * jobs - len(running)):
                        running[_submit(pool, run, seed, cpu_s_max)] = seed
                    if not running:
                        return
                    done = wait(running, return_when=FIRST_COMPLETED).done
                    for future in sorted(done, key=running.__getitem__):
                        seed = running.pop(future)
                        try:
                            yield future.result()
                        except BrokenProcessPool:
                            lost.append(seed)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        for seed in sorted({*lost, *running.values()}):
            yield outcome_alone(run, seed, cpu_s_max)
        lost.clear()


def _submit(pool: ProcessPoolExecutor, run: Run, seed: int, cpu_s_max: float) -> Future[Outcome]:
    try:
        return pool.submit(outcome_of, run, seed, cpu_s_max)
    except BrokenProcessPool as error:  # noticed before its runs are asked for
        broken: Future[Outcome] = Future()
        broken.set_exception(error)
        return broken


def outcome_alone(run: Run, seed: int, cpu_s_max: float) -> Outcome:
    """In a process of its own, so that one that dies is known by its seed."""
    with ProcessPoolExecutor(1) as pool:
        try:
            return pool.submit(outcome_of, run, seed, cpu_s_max).result()
        except BrokenProcessPool:
            return Outcome(seed, 0, "its process died")


def command(run: Run, what: str, again: str, worlds: int, requests: int) -> click.Command:
    """The command line of a sweep; `again` shows a seed ("{seed}") again. 0: no such limit."""

    @click.command(help=sys.modules[run.__module__].__doc__)
    @click.option("--worlds", default=worlds, help="Stop after so many runs; 0: no limit.")
    @click.option("--requests", default=requests, help="Stop after so many; 0: no limit.")
    @click.option("--seconds", default=0.0, help="Stop after so long; 0: no limit.")
    @click.option("--jobs", default=2, help="Processes.")
    @click.option("--seed", default=None, type=int, help="The first seed; else from the clock.")
    @click.option("--record", type=click.Path(path_type=Path), help="Append lines of JSON here.")
    def main(
        worlds: int, requests: int, seconds: float, jobs: int, seed: int | None, record: Path | None
    ) -> None:
        first = time.time_ns() // 1_000_000 % (1 << 40) if seed is None else seed
        click.echo(f"{what}: seeds from {first} on, {jobs} at a time")
        started = told = time.monotonic()
        done = served = 0
        failures: list[Outcome] = []
        kept = {"worlds": 0, "requests": 0}

        def keep(**more: Any) -> None:
            if record:
                with record.open("a") as file:
                    file.write(json.dumps({"sweep": what, **kept, **more}) + "\n")
            kept.update(worlds=0, requests=0)

        def tell(outcome: Outcome) -> None:
            click.echo(f"seed {outcome.seed}: {outcome.failure}")
            click.echo(f"    again: {again.format(seed=outcome.seed)}")

        seeds = range(first, first + worlds) if worlds else itertools.count(first)
        for outcome in outcomes(run, seeds, jobs):
            done, served = done + 1, served + outcome.requests
            kept["worlds"] += 1
            kept["requests"] += outcome.requests
            now = time.monotonic()
            if outcome.failure:
                failures.append(outcome)
                tell(outcome)
                keep(seed=outcome.seed, failure=outcome.failure)
            elif now > told + TOLD_EVERY_S:
                told = now
                keep()
                click.echo(
                    f"{done} runs, {served} requests, {len(failures)} failed, {now - started:.0f} s"
                )
            if 0 < requests <= served or 0 < seconds < now - started:
                break
        keep()
        click.echo(f"{what}: {done} runs, {served} requests, {len(failures)} runs failed")
        for outcome in failures:
            tell(outcome)
        sys.exit(bool(failures))

    return main
