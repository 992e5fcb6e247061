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
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.bench.recovery_load import Load, Played, Sequence, play, requests
from phalanx.bench.recovery_watch import Change, EpochWatch
from phalanx.protocol.config import NodeConfig, WorkerConfig, node_name
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.messages import EpochRecord, StatusQuery, StatusReply
from phalanx.protocol.queues import read_queues
from phalanx.supervisor.ask import ask
from phalanx.supervisor.commands.node import private_node

_MS = 1e6
_DEADLINE_S = 120.0
_POLL_S = 0.02
_ANSWER_S = 30.0
_ENDS = (RuntimeError, PhalanxError, OSError, KeyboardInterrupt)


@dataclass
class Kill:
    """One kill and what followed, times in ns."""

    killed_ns: int
    seat: int
    moved: set[tuple[str, int]]  # (request id, index) of what ran on the killed rank
    loss: Change
    rejoin: Change | None  # None: it was back before the others ran again
    whole_ns: int  # when all ranks ran again
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
    fault_free: list[float] = field(default_factory=list[float])  # longest gaps of the calm round
    epochs: tuple[EpochRecord, ...] = ()
    failed: str = ""  # why it ended early; the figures are of what was done

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
    figures = Figures()
    config = NodeConfig(worker=WorkerConfig(num_blocks=blocks))
    try:
        with private_node(model, ranks, base=config) as (node, _):
            try:
                asyncio.run(_measure(node.run_path, ranks, kills, streams, seed, figures))
            except _ENDS as error:
                figures.failed = _said(error)
            figures.epochs = _status(node.run_path).epochs
    except _ENDS as error:
        figures.failed = figures.failed or _said(error)
    losses = [record for record in figures.epochs if "joined" not in record.cause][1:]
    gaps = figures.survivors + figures.moved
    return {
        "failed": figures.failed,
        "detect_ms_p50": _p50(figures.phases.get("detect", [])),
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
            name: _p50([getattr(record, name) for record in losses])
            for name in ("detected_ms", "resumed_ms")
        },
        "fault_free_gap_ms_max": _most(figures.fault_free),
        "pool_used_max": _most(figures.pool_used),
        "tokens_changed": figures.changed,
        "streams_lost": figures.lost,
        "streams_compared": figures.compared,
        "gaps_measured": {"survivors": len(figures.survivors), "moved": len(figures.moved)},
        "kills": len(figures.pool_used),
        "ranks": ranks,
        "streams": streams,
        "blocks": blocks,
        "model": model,
        "load_average": round(os.getloadavg()[0], 2),
    }


async def _measure(
    run_dir: Path, ranks: int, kills: int, streams: int, seed: int, figures: Figures
) -> None:
    rng = random.Random(seed)
    first = await play(run_dir, Load(requests(rng, streams)))
    wanted = {(s.position, s.index): s for s in first.sequences}
    if any(s.finish not in ("length", "stop") for s in first.sequences):
        raise RuntimeError("the run without faults did not complete")
    load = Load(requests(random.Random(seed), streams, wanted))
    calm = await play(
        run_dir, load
    )  # what is predicted, too, and the caches as the rounds find them
    _compare(calm, wanted, load, figures)
    figures.fault_free = [
        _gap(s, s.times[0], s.times[-1]) for s in calm.sequences if len(s.times) > 2
    ]
    whole_s = calm.first_round_s
    for _ in range(kills):
        load = Load(load.specs, going_on=True)
        playing = asyncio.create_task(play(run_dir, load))
        delay_s, over = rng.uniform(0.05, 0.8) * whole_s, threading.Event()
        try:
            kill = await asyncio.to_thread(_kill, run_dir, ranks, delay_s, rng, over)
        finally:
            load.going_on = False
            over.set()
        result = await playing
        _compare(result, wanted, load, figures)
        _account(kill, result.sequences, figures)


def _workers(run_dir: Path) -> dict[int, int]:
    """Seat -> pid of the workers."""
    rows = [p for p in _status(run_dir).processes if p.name.startswith("worker-")]
    return {int(p.name.removeprefix("worker-")): p.pid for p in rows}


def _kill(
    run_dir: Path, ranks: int, delay_s: float, rng: random.Random, over: threading.Event
) -> Kill:
    """Kill one worker after a while and watch until all ranks are members again, or it is `over`."""
    node = node_name(run_dir)
    with EpochWatch(node) as watch:
        over.wait(delay_s)
        pids = _workers(run_dir)
        seat = rng.choice(sorted(pids))
        queues = read_queues(node)
        held = queues["requests"]
        moved = {(r["request_id"], r["index"]) for r in held if r["slot"] == seat}
        used = max(1 - r["free_blocks"] / max(r["total_blocks"], 1) for r in queues["ranks"])
        killed_ns = time.monotonic_ns()
        os.kill(pids[seat], signal.SIGKILL)
        deadline = time.monotonic() + _DEADLINE_S
        while not (changes := watch.changes(killed_ns)) or watch.members() < ranks:
            if time.monotonic() > deadline or over.is_set():
                said = f"{len(changes)} changes, {watch.members()} of {ranks} ranks run"
                raise RuntimeError(
                    f"worker-{seat} was killed; within {_DEADLINE_S:g} s: {said}; {_state(run_dir)}"
                )
            time.sleep(_POLL_S)
        over.wait(0.5)  # streams go on in the whole group
        changes = watch.changes(killed_ns)
    loss, rejoin = changes[0], changes[1] if len(changes) > 1 else None
    return Kill(killed_ns, seat, moved, loss, rejoin, changes[-1].even_ns, used)


def _state(run_dir: Path) -> str:
    """What the node says of itself, for whoever has to find out why it does not go on."""
    status = _status(run_dir)
    out = [f"{p.name} is {p.state}" for p in status.processes if p.state != "ready"]
    return "; ".join([*out, *(f"epoch {e.epoch}: {e.cause}" for e in status.epochs[-4:])])


def _status(run_dir: Path) -> StatusReply:
    return ask(run_dir, StatusQuery(1), StatusReply, _ANSWER_S)


def _account(kill: Kill, sequences: list[Sequence], figures: Figures) -> None:
    loss, rejoin = kill.loss, kill.rejoin
    figures.pool_used.append(kill.pool_used)
    figures.note("detect", loss.odd_ns - kill.killed_ns)
    figures.note("stop", loss.published_ns - loss.odd_ns)
    figures.note("go", loss.even_ns - loss.published_ns)
    figures.note("until_rejoined", kill.whole_ns - kill.killed_ns)
    if rejoin is not None:
        figures.note("rejoin_stop", rejoin.published_ns - rejoin.odd_ns)
        figures.note("rejoin_go", rejoin.even_ns - rejoin.published_ns)
    until_ns = rejoin.odd_ns if rejoin is not None else kill.whole_ns
    for sequence in sequences:
        if sequence.spans(kill.killed_ns, loss.even_ns):
            moved = (sequence.request_id, sequence.index) in kill.moved
            gaps = figures.moved if moved else figures.survivors
            gaps.append(_gap(sequence, kill.killed_ns, until_ns))
            pause = _gap(sequence, kill.killed_ns, loss.even_ns)
            figures.pauses.setdefault("moved" if moved else "survivors", []).append(pause)
            after_ns = min(at for at in sequence.times if at >= loss.even_ns) - loss.even_ns
            figures.note("moved_first_token" if moved else "survivor_first_token", after_ns)
        if rejoin is not None and sequence.spans(rejoin.odd_ns, rejoin.even_ns):
            figures.rejoin.append(_gap(sequence, rejoin.odd_ns, rejoin.even_ns))


def _gap(sequence: Sequence, start_ns: int, end_ns: int) -> float:
    """Milliseconds beyond its normal step that the sequence stood still at most in this time."""
    pairs = list(zip(sequence.times, sequence.times[1:], strict=False))
    normal = median(after - before for before, after in pairs)
    over = [after - before for before, after in pairs if before < end_ns and after > start_ns]
    return max(0.0, max(over) - normal) / _MS


def _compare(
    result: Played, wanted: dict[tuple[int, int], Sequence], load: Load, figures: Figures
) -> None:
    for sequence in result.sequences:
        figures.compared += 1
        want = wanted[sequence.position, sequence.index]
        if sequence.finish not in ("length", "stop"):
            figures.lost += 1
        elif load.specs[sequence.position].sampling.seed is not None:
            same = (sequence.tokens, sequence.finish) == (want.tokens, want.finish)
            figures.changed += not same


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else "it was ended from outside"


def _p50(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None


def _most(values: list[float]) -> float | None:
    return round(max(values), 3) if values else None
