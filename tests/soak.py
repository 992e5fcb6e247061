"""`make soak`: what takes too long for every change. 100,000 requests through simulated schedulers, 10,000 lives of the
whole simulated system under faults, then every test that takes minutes. It uses all processors, ends with a summary,
and goes on where it was stopped: what has passed on this very code is not run again."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
CODE = {".py", ".c", ".json", ".toml", ".mjs", ".jinja"}
SLOWEST = 8
MANY = 20  # tests of a file: then they go to all processes, each with a node; else file by file
SWEEPS = {  # name -> (file, of what there shall be so much)
    "schedulers": ("tests/sim/scheduler_soak.py", "requests", 100_000),
    "worlds": ("tests/sim/world_soak.py", "worlds", 10_000),
}
PARTS = (*SWEEPS, "tests")
OVER = {"passed", "skipped"}


def digest() -> str:
    """Of everything that could make a difference; what was found on other code says nothing."""
    found = hashlib.sha256()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(f for f in folders if f[0] != "." and f not in ("build", "__pycache__"))
        for path in (Path(folder, name) for name in sorted(files)):
            if path.suffix in CODE:
                found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


class Found:
    """What is in the record so far."""

    def __init__(self, record: Path) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # (sweep, worlds or requests)
        self.seeds: dict[tuple[str, int], str] = {}
        self.timed: dict[str, bool] = {}
        self.tests: dict[str, dict[str, Any]] = {}  # the last that is known
        self.once_failed: set[str] = set()
        for line in record.read_text().splitlines() if record.exists() else ():
            self._read(json.loads(line))

    def _read(self, row: dict[str, Any]) -> None:
        if "sweep" in row:
            for kind in ("worlds", "requests"):
                self.counts[row["sweep"], kind] += row[kind]
            if "failure" in row:
                self.seeds[row["sweep"], row["seed"]] = row["failure"]
        elif row["outcome"] == "due":
            self.timed[row["test"]] = row["timed"]
        else:
            self.tests[row["test"]] = row
            if row["outcome"] == "failed":
                self.once_failed.add(row["test"])

    def due(self, timed: bool, share: tuple[int, int] = (1, 1)) -> list[str]:
        """Tests to run, those first that failed or were cut off; of all of them the second of three, say."""
        ours = {*list(self.timed)[share[0] - 1 :: share[1]]}
        tests = [t for t in ours if self.timed[t] is timed and self._of(t) not in OVER]
        tests.sort(key=list(self.timed).index)
        return sorted(tests, key=lambda test: self._of(test) in ("", "left"))

    def spread(self, tests: Collection[str]) -> tuple[list[str], list[str]]:
        """Those that go file by file, since those of a file share a node; and those of which a file has many."""
        files = Counter(test.partition("::")[0] for test in self.timed)
        many = {test for test in tests if files[test.partition("::")[0]] >= MANY}
        return [test for test in tests if test not in many], [t for t in tests if t in many]

    def _of(self, test: str) -> str:
        return str(self.tests.get(test, {}).get("outcome", ""))

    def missing(self, sweep: str) -> int:
        _, kind, wanted = SWEEPS[sweep]
        return max(0, wanted - self.counts[sweep, kind])

    def summary(self, parts: Collection[str] = PARTS) -> Iterator[str]:
        for sweep in (part for part in parts if part in SWEEPS):
            failed = sum(of == sweep for of, _ in self.seeds)
            yield (
                f"{sweep}: {self.counts[sweep, 'worlds']} runs, {self.counts[sweep, 'requests']}"
                f" requests, {failed} runs failed, {self.missing(sweep)} {SWEEPS[sweep][1]} to go"
            )
        if "tests" in parts:
            yield from self._of_tests()
        for (sweep, seed), failure in self.seeds.items():
            yield f"failed: {sweep}, seed {seed}: {failure}"

    def _of_tests(self) -> Iterator[str]:
        by = Counter(map(self._of, self.timed))
        known = sum(by[outcome] for outcome in ("passed", "skipped", "failed", "began"))
        yield (
            f"tests: {by['passed']} passed, {by['skipped']} skipped, {by['failed']} failed,"
            f" {by['began']} cut off, {by.total() - known if self.timed else 'all'} to go"
        )
        took = {t: row["seconds"] for t, row in self.tests.items() if row.get("seconds", 0) > 1}
        for test in sorted(took, key=lambda t: -took[t])[:SLOWEST]:
            yield f"  {took[test]:6.1f} s  {test}"
        for test in sorted(self.once_failed):
            if self._of(test) in OVER:
                yield f"failed once, and passed when it was run again: {test}"
        for outcome, told in (("skipped",) * 2, ("began", "cut off"), ("failed",) * 2):
            for test, row in self.tests.items():
                if row["outcome"] == outcome:
                    last = str(row.get("said", "")).partition("\n---")[0].strip().rpartition("\n")
                    yield f"{told}: {test}  {last[2]}".rstrip()

    def left(self, parts: tuple[str, ...]) -> bool:
        tests = "tests" in parts and (not self.timed or any(map(self.due, (False, True))))
        return bool(tests) or any(self.missing(part) for part in parts if part in SWEEPS)

    def failed(self) -> bool:
        return bool(self.seeds) or any(r["outcome"] == "failed" for r in self.tests.values())


class Soak:
    def __init__(self, record: Path, jobs: int, seconds: float, share: tuple[int, int]) -> None:
        self._record, self._jobs, self._share = record, jobs, share
        self._ends = time.time() + seconds if seconds else None

    def sweep(self, name: str) -> None:
        file, kind, _ = SWEEPS[name]
        missing = Found(self._record).missing(name)
        if missing and self._has_time():
            limits = {"worlds": 0, "requests": 0, kind: missing}
            options = [f"--{limit}={count}" for limit, count in limits.items()]
            if self._ends:
                options.append(f"--seconds={self._ends - time.time():.0f}")
            self._run(file, *options, f"--jobs={self._jobs}", f"--record={self._record}")

    def tests(self) -> None:
        """Those that need the machine to themselves come last, one after the other."""
        if not Found(self._record).timed and self._has_time():
            self._pytest("-q", "-q", "--collect-only", "-m", "soak")
        jobs = ["-n", str(self._jobs), "--dist"]
        found = Found(self._record)
        few, many = found.spread(found.due(False, self._share))
        self._run_tests(few, *jobs, "loadfile")
        self._run_tests(many, *jobs, "load", "--maxschedchunk", "1")
        self._run_tests(found.due(True, self._share), "-n", "0")

    def _run_tests(self, tests: list[str], *options: str) -> None:
        if tests and self._has_time():
            chosen = self._record.with_suffix(".chosen")
            chosen.write_text("\n".join(tests) + "\n")
            until = ["--until", str(self._ends)] if self._ends else []
            self._pytest("-v", *options, *until, f"@{chosen}")

    def _pytest(self, *arguments: str) -> None:
        # One word each: pytest looks for its settings beside every word that is the path of a file.
        self._run("-m", "pytest", f"--rootdir={ROOT}", f"--record={self._record}", *arguments)

    def _has_time(self) -> bool:
        return not self._ends or time.time() < self._ends

    def _run(self, *arguments: str) -> None:
        # No planted bug is left to a draw: all of them are looked for here.
        environment = os.environ | {"PLANT_SEED": "none"}
        command = [sys.executable, "-P", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code not in (0, 1):  # 1: something was found
            click.echo(f"soak: {' '.join(arguments)} ended with exit code {code}: not all was run")


@click.command(help=__doc__)
@click.option("--jobs", default=len(os.sched_getaffinity(0)), help="Processes; else one for each.")
@click.option("--seconds", default=0.0, help="Begin nothing after so long; 0: no limit.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these.")
@click.option(
    "--share", type=(int, int), default=(1, 1), help="Of the tests: 1 3, a third of them."
)
@click.option("--again", is_flag=True, help="Forget what was found before.")
@click.option("--show", is_flag=True, help="Run nothing, tell what was found.")
@click.option("--dir", "folder", default=ROOT / ".soak", type=click.Path(path_type=Path))
def main(
    jobs: int,
    seconds: float,
    parts: tuple[str, ...],
    share: tuple[int, int],
    again: bool,
    show: bool,
    folder: Path,
) -> None:
    folder.mkdir(exist_ok=True)
    record = folder / f"{digest()}.jsonl"
    if again:
        record.unlink(missing_ok=True)
    elif record.exists():
        click.echo(f"goes on: {record}")
    parts, started = parts or PARTS, time.monotonic()
    soak = Soak(record, jobs, seconds, share)
    try:
        for part in () if show else parts:
            soak.tests() if part == "tests" else soak.sweep(part)
    except KeyboardInterrupt:
        click.echo("stopped")
    found = Found(record)
    click.echo(f"--- soak: {time.monotonic() - started:.0f} s, {jobs} jobs; all of it in {record}")
    for line in found.summary(parts):
        click.echo(line)
    sys.exit(1 if found.failed() else 3 if found.left(parts) else 0)


if __name__ == "__main__":
    main()
