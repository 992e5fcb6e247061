"""Workers of a private node are killed under load: how long streams stand still, where that time goes, and
whether a token changed.

The load is one round of streams for each kill, and one without. The clock is CLOCK_MONOTONIC; when the
group stopped and ran again is read from the epoch word in shared memory, every quarter of a millisecond.
A gap is the longest time between two deliveries of one sequence from the kill until the group stops for the
rejoin, less the median of that sequence's gaps in the round: other prompts that are computed meanwhile count.
A pause is the same for the one gap in which the group was stopped.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from phalanx.bench.recovery_load import Load, Sequence, play, requests
from phalanx.bench.recovery_watch import Change, EpochWatch
from phalanx.protocol.config import node_name
from phalanx.protocol.queues import read_queues

_CLI = [sys.executable, "-P", "-m", "phalanx.supervisor.cli"]
_MS = 1e6
_DEADLINE_S = 120.0
_POLL_S = 0.02


@dataclass
class Kill:
    """One kill and what followed, times in ns."""

    killed_ns: int
    seat: int
    moved: set[tuple[str, int]]  # (request id, index) of what ran on the killed rank
    loss: Change
    rejoin: Change
    pool_used: float  # the fullest rank's share of KV blocks in use, when it came


@dataclass
class Figures:
    """What the rounds add up to, in ms."""

    phases: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    survivors: list[float] = field(default_factory=list[float])
    moved: list[float] = field(default_factory=list[float])
    rejoin: list[float] = field(default_factory=list[float])
    pool_used: list[float] = field(default_factory=list[float])
    pauses: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    changed: int = 0
    lost: int = 0
    compared: int = 0

    def note(self, phase: str, ns: float) -> None:
        self.phases.setdefault(phase, []).append(ns / _MS)


def run(
    kills: int,
    ranks: int = 3,
    streams: int = 12,
    model: str = "random-tiny",
    seed: int = 1,
    blocks: int = 0,
) -> dict[str, Any]:
    """The fields of `phalanx bench recovery` (docs/cli.md). `blocks`: of each rank's pool; 0: plenty."""
    with tempfile.TemporaryDirectory(prefix="phrecover") as directory:
        run_dir = Path(directory) / f"rec{os.getpid()}"
        where = ["--run-dir", str(run_dir), "--json"]
        config = Path(directory) / "config.json"
        config.write_bytes(msgspec.json.encode({"worker": {"num_blocks": blocks}}))
        node = ["--model", model, "--ranks", str(ranks), "--config", str(config)]
        _phalanx("up", *node, "--detach", *where)
        try:
            figures, baseline = asyncio.run(_measure(run_dir, ranks, kills, streams, seed))
            epochs = _phalanx("epochs", *where)
        finally:
            _phalanx("down", *where)
    losses = [record for record in epochs if "joined" not in record["cause"]][1:]
    gaps = figures.survivors + figures.moved
    return {
        "detect_ms_p50": _p50(figures.phases["detect"]),
        "resume_ms_p50": _p50(gaps),
        "resume_ms_max": _most(gaps),
        "survivors_gap_ms_max": _most(figures.survivors),
        "moved_gap_ms_max": _most(figures.moved),
        "rejoin_gap_ms_max": _most(figures.rejoin),
        "pause_ms_p50": {name: _p50(values) for name, values in figures.pauses.items()},
        "pause_ms_max": {name: _most(values) for name, values in figures.pauses.items()},
        "phases_ms": {name: _p50(values) for name, values in figures.phases.items()},
        "phases_ms_max": {name: _most(values) for name, values in figures.phases.items()},
        "epochs_ms": {
            name: _p50([record[name] for record in losses])
            for name in ("detected_ms", "resumed_ms")
        },
        "fault_free_gap_ms_max": baseline,
        "pool_used_max": _most(figures.pool_used),
        "tokens_changed": figures.changed,
        "streams_lost": figures.lost,
        "streams_compared": figures.compared,
        "gaps_measured": {"survivors": len(figures.survivors), "moved": len(figures.moved)},
        "kills": kills,
        "ranks": ranks,
        "streams": streams,
        "blocks": blocks,
        "model": model,
        "load_average": round(os.getloadavg()[0], 2),
    }


async def _measure(
    run_dir: Path, ranks: int, kills: int, streams: int, seed: int
) -> tuple[Figures, float | None]:
    rng = random.Random(seed)
    first = await play(run_dir, Load(requests(rng, streams)))
    wanted = {(s.position, s.index): s for s in first.sequences}
    if any(s.finish not in ("length", "stop") for s in first.sequences):
        raise RuntimeError("the run without faults did not complete")
    load = Load(requests(random.Random(seed), streams, wanted))
    calm = await play(
        run_dir, load
    )  # what is predicted, too, and the caches as the rounds find them
    figures = Figures()
    _compare(calm, wanted, load, figures)
    baseline = _most([_gap(s, s.times[0], s.times[-1]) for s in calm.sequences if len(s.times) > 2])
    whole_s = calm.first_round_s
    for _ in range(kills):
        load = Load(load.specs, going_on=True)
        pids = await asyncio.to_thread(_workers, run_dir)
        playing = asyncio.create_task(play(run_dir, load))
        delay_s = rng.uniform(0.05, 0.8) * whole_s
        try:
            kill = await asyncio.to_thread(_kill, run_dir, ranks, pids, delay_s, rng)
        finally:
            load.going_on = False
        result = await playing
        _compare(result, wanted, load, figures)
        _account(kill, result.sequences, figures)
    return figures, baseline


def _workers(run_dir: Path) -> dict[int, int]:
    """Seat -> pid of the workers."""
    status = _phalanx("status", "--run-dir", str(run_dir), "--json")
    rows = [p for p in status["processes"] if p["name"].startswith("worker-")]
    return {int(p["name"].removeprefix("worker-")): p["pid"] for p in rows}


def _kill(
    run_dir: Path, ranks: int, pids: dict[int, int], delay_s: float, rng: random.Random
) -> Kill:
    """Kill one worker after a while and watch until all ranks are members again."""
    node = node_name(run_dir)
    with EpochWatch(node) as watch:
        time.sleep(delay_s)
        seat = rng.choice(sorted(pids))
        queues = read_queues(node)
        held = queues["requests"]
        moved = {(r["request_id"], r["index"]) for r in held if r["slot"] == seat}
        used = max(1 - r["free_blocks"] / max(r["total_blocks"], 1) for r in queues["ranks"])
        killed_ns = time.monotonic_ns()
        os.kill(pids[seat], signal.SIGKILL)
        loss = _await(lambda: watch.change(killed_ns), f"worker-{seat} was not missed")
        rejoin = _await(lambda: watch.change(loss.even_ns), f"worker-{seat} did not come back")
        members = watch.members()
        if members != ranks:
            raise RuntimeError(f"{members} of {ranks} ranks are members after the rejoin")
        time.sleep(0.5)  # streams go on in the whole group
    return Kill(killed_ns, seat, moved, loss, rejoin, used)


def _await(found: Callable[[], Change | None], otherwise: str) -> Change:
    deadline = time.monotonic() + _DEADLINE_S
    while (change := found()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} within {_DEADLINE_S:g} s")
        time.sleep(_POLL_S)
    return change


def _account(kill: Kill, sequences: list[Sequence], figures: Figures) -> None:
    loss, rejoin = kill.loss, kill.rejoin
    figures.pool_used.append(kill.pool_used)
    figures.note("detect", loss.odd_ns - kill.killed_ns)
    figures.note("stop", loss.published_ns - loss.odd_ns)
    figures.note("go", loss.even_ns - loss.published_ns)
    figures.note("rejoin_stop", rejoin.published_ns - rejoin.odd_ns)
    figures.note("rejoin_go", rejoin.even_ns - rejoin.published_ns)
    figures.note("until_rejoined", rejoin.even_ns - kill.killed_ns)
    for sequence in sequences:
        if sequence.spans(kill.killed_ns, loss.even_ns):
            moved = (sequence.request_id, sequence.index) in kill.moved
            gaps = figures.moved if moved else figures.survivors
            gaps.append(_gap(sequence, kill.killed_ns, rejoin.odd_ns))
            pause = _gap(sequence, kill.killed_ns, loss.even_ns)
            figures.pauses.setdefault("moved" if moved else "survivors", []).append(pause)
            after_ns = min(at for at in sequence.times if at >= loss.even_ns) - loss.even_ns
            figures.note("moved_first_token" if moved else "survivor_first_token", after_ns)
        if sequence.spans(rejoin.odd_ns, rejoin.even_ns):
            figures.rejoin.append(_gap(sequence, rejoin.odd_ns, rejoin.even_ns))


def _gap(sequence: Sequence, start_ns: int, end_ns: int) -> float:
    """Milliseconds beyond its normal step that the sequence stood still at most in this time."""
    pairs = list(zip(sequence.times, sequence.times[1:], strict=False))
    normal = median(after - before for before, after in pairs)
    over = [after - before for before, after in pairs if before < end_ns and after > start_ns]
    return max(0.0, max(over) - normal) / _MS


def _compare(
    result: Any, wanted: dict[tuple[int, int], Sequence], load: Load, figures: Figures
) -> None:
    for sequence in result.sequences:
        figures.compared += 1
        want = wanted[sequence.position, sequence.index]
        if sequence.finish not in ("length", "stop"):
            figures.lost += 1
        elif load.specs[sequence.position].sampling.seed is not None:
            same = (sequence.tokens, sequence.finish) == (want.tokens, want.finish)
            figures.changed += not same


def _p50(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None


def _most(values: list[float]) -> float | None:
    return round(max(values), 3) if values else None


def _phalanx(*arguments: str) -> Any:
    done = subprocess.run([*_CLI, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"phalanx {arguments[0]} failed: {done.stderr.strip()[-2000:]}")
    return msgspec.json.decode(done.stdout)
