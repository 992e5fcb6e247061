"""Processes of a private node are killed under load: how long streams stand still, where that time goes, and
whether a token changed.

The load is one round of streams for each fault, and one without in each node. The clock is CLOCK_MONOTONIC;
when the group stopped and ran again is read from the epoch word in shared memory, every quarter of a
millisecond. A gap is the longest time between two deliveries of one sequence from the fault until the group
stops for the rejoin (or, when the victim is no worker, until its successor is ready), less the median of that
sequence's gaps in the round: other prompts that are computed meanwhile count. A pause is the same for the one
gap in which the group was stopped.

The control (`noise`) is the same with one rank that computes one ulp wrong once the streams are known: then tokens
must change, or the comparison could not see it if they did.
"""

import asyncio
import os
import random
import threading
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.bench.recovery_fault import Fault, open_to, status, strike
from phalanx.bench.recovery_load import Load, Played, Sequence, play, requests
from phalanx.bench.recovery_story import longest_gap, normal_ns, story
from phalanx.protocol.config import NodeConfig, WorkerConfig
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.messages import EpochRecord, Inject, Injected
from phalanx.supervisor.ask import ask
from phalanx.supervisor.commands.node import private_node

_MS = 1e6
_ANSWER_S = 30.0
_NOISY = "worker-0"
_ENDS = (RuntimeError, PhalanxError, OSError, KeyboardInterrupt)


@dataclass
class Gaps:
    """What the faults of one kind of process cost, in ms."""

    faults: int = 0
    survivors: list[float] = field(default_factory=list[float])
    moved: list[float] = field(default_factory=list[float])  # what ran on the victim's rank
    begun: list[float] = field(default_factory=list[float])  # see `_begun`
    whole: list[float] = field(default_factory=list[float])
    died: list[float] = field(default_factory=list[float])

    def row(self, victim: str) -> dict[str, Any]:
        return {
            "victim": victim,
            "faults": self.faults,
            "died_ms_p50": _p50(self.died),
            "died_ms_max": _most(self.died),
            "survivors_gap_ms_p50": _p50(self.survivors),
            "survivors_gap_ms_max": _most(self.survivors),
            "moved_gap_ms_p50": _p50(self.moved),
            "moved_gap_ms_max": _most(self.moved),
            "begun_ms_p50": _p50(self.begun),
            "begun_ms_max": _most(self.begun),
            "whole_ms_p50": _p50(self.whole),
        }


@dataclass
class Figures:
    """What the rounds add up to, in ms."""

    phases: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    gaps: dict[str, Gaps] = field(default_factory=dict[str, Gaps])  # by the victim's kind
    rejoin: list[float] = field(default_factory=list[float])
    pool_used: list[float] = field(default_factory=list[float])
    pauses: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    changed: int = 0
    lost: int = 0
    compared: int = 0
    fault_free: list[float] = field(default_factory=list[float])  # longest gaps of the calm round
    losses: list[EpochRecord] = field(default_factory=list[EpochRecord])
    worst: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # of each fault
    failed: str = ""  # why it ended early; the figures are of what was done

    def all(self, which: str) -> list[float]:
        return [ms for gaps in self.gaps.values() for ms in getattr(gaps, which)]

    def note(self, phase: str, ns: float) -> None:
        self.phases.setdefault(phase, []).append(ns / _MS)


def run(
    kills: int,
    ranks: int = 3,
    streams: int = 12,
    model: str = "random-tiny",
    seed: int = 1,
    blocks: int = 0,
    victims: Many[str] = ("worker",),
    how: str = "kill",
    noise: bool = False,
) -> dict[str, Any]:
    """The fields of `phalanx bench recovery` (docs/cli.md).

    Args:
        blocks: of each rank's pool; 0: plenty.
        victims: `kinds of processes`, which take turns.
        how: `recovery_fault.SIGNALS`.
        noise: one rank is one ulp off (`worker_svc/model/noise.py`).
    """
    figures = Figures()
    config = NodeConfig(worker=WorkerConfig(num_blocks=blocks))
    todo = [victims[at % len(victims)] for at in range(kills)]
    measure = _Measure(todo, streams, seed, how, noise)
    try:
        while measure.todo and not figures.failed:
            with private_node(model, ranks, inject=noise, base=config) as (node, _):
                try:
                    asyncio.run(measure.node(node, figures))
                except _ENDS as error:
                    figures.failed = _said(error)
                records = status(node.run_path).epochs
                figures.losses += [r for r in records if "joined" not in r.cause][1:]
    except _ENDS as error:
        figures.failed = figures.failed or _said(error)
    survivors, moved = figures.all("survivors"), figures.all("moved")
    return {
        "failed": figures.failed,
        "detect_ms_p50": _p50(figures.phases.get("detect", [])),
        "resume_ms_p50": _p50(survivors + moved),
        "resume_ms_max": _most(survivors + moved),
        "survivors_gap_ms_max": _most(survivors),
        "moved_gap_ms_max": _most(moved),
        "rejoin_gap_ms_max": _most(figures.rejoin),
        "rows": [gaps.row(victim) for victim, gaps in figures.gaps.items()],
        "pause_ms_p50": {name: _p50(values) for name, values in figures.pauses.items()},
        "pause_ms_max": {name: _most(values) for name, values in figures.pauses.items()},
        "phases_ms": {name: _p50(values) for name, values in figures.phases.items()},
        "phases_ms_max": {name: _most(values) for name, values in figures.phases.items()},
        "epochs_ms": {
            name: _p50([getattr(record, name) for record in figures.losses])
            for name in ("detected_ms", "resumed_ms")
        },
        "worst": figures.worst,
        "fault_free_gap_ms_max": _most(figures.fault_free),
        "pool_used_max": _most(figures.pool_used),
        "tokens_changed": figures.changed,
        "streams_lost": figures.lost,
        "streams_compared": figures.compared,
        "gaps_measured": {"survivors": len(survivors), "moved": len(moved)},
        "kills": len(figures.pool_used),
        "victims": list(victims),
        "how": how,
        "noise": _NOISY if noise else None,
        "control": _control(figures) if noise else None,
        "ranks": ranks,
        "streams": streams,
        "blocks": blocks,
        "model": model,
        "load_average": round(os.getloadavg()[0], 2),
    }


class _Measure:
    """The faults that are to be made, in one node after another (`recovery_fault.open_to` says why)."""

    def __init__(self, todo: list[str], streams: int, seed: int, how: str, noise: bool) -> None:
        self.todo = todo  # kinds of victims
        self._streams, self._seed, self._how, self._noise = streams, seed, how, noise
        self._rng = random.Random(seed)
        self._wanted: dict[tuple[int, int], Sequence] = {}

    async def node(self, config: NodeConfig, figures: Figures) -> None:
        """Make the faults that this node can still take, one at least. Raises RuntimeError if it can take none."""
        load = await self._record(config.run_path, figures)
        if self._noise:
            inject = Inject(1, "ulp", _NOISY)
            await asyncio.to_thread(ask, config.run_path, inject, Injected, _ANSWER_S)
        calm = await play(config.run_path, load)  # also the caches are as the rounds find them
        _compare(calm, self._wanted, load, figures)
        figures.fault_free += [
            _gap(s, s.times[0], s.times[-1]) for s in calm.sequences if len(s.times) > 2
        ]
        whole_s = calm.first_round_s
        spent: set[str] = set()
        if not open_to(config.run_path, self.todo[0], spent):
            living = ", ".join(p.name for p in status(config.run_path).processes)
            text = f"no {self.todo[0]} is alive in a node that is ready, so none can fall"
            raise RuntimeError(f"{text}; there are: {living}")
        while self.todo and (victims := open_to(config.run_path, self.todo[0], spent)):
            load = Load(load.specs, going_on=True)
            playing = asyncio.create_task(play(config.run_path, load))
            delay_s, over = self._rng.uniform(0.05, 0.8) * whole_s, threading.Event()
            try:
                name, fault = await asyncio.to_thread(
                    strike, config, victims, self._how, delay_s, self._rng, over
                )
            finally:
                load.going_on = False
                over.set()
            result = await playing
            spent.add(name)
            del self.todo[0]
            _compare(result, self._wanted, load, figures)
            _account(fault, result.sequences, figures)

    async def _record(self, run_dir: Path, figures: Figures) -> Load:
        """Once, what every sequence is without faults; the load of the rounds."""
        if not self._wanted:
            first = await play(run_dir, Load(requests(random.Random(self._seed), self._streams)))
            if any(s.finish not in ("length", "stop") for s in first.sequences):
                raise RuntimeError("the run without faults did not complete")
            self._wanted = {(s.position, s.index): s for s in first.sequences}
        return Load(requests(random.Random(self._seed), self._streams, self._wanted))


def _account(fault: Fault, sequences: list[Sequence], figures: Figures) -> None:
    gaps = figures.gaps.setdefault(fault.victim, Gaps())
    gaps.faults += 1
    gaps.died.append((fault.died_ns - fault.struck_ns) / _MS)
    gaps.whole.append((fault.whole_ns - fault.struck_ns) / _MS)
    gaps.begun += _begun(fault, sequences)
    figures.pool_used.append(fault.pool_used)
    loss = fault.changes[0] if fault.changes else None
    rejoin = fault.changes[1] if len(fault.changes) > 1 else None
    until_ns = rejoin.odd_ns if rejoin is not None else fault.whole_ns
    if loss is not None:
        figures.note("detect", loss.odd_ns - fault.struck_ns)
        figures.note("stop", loss.published_ns - loss.odd_ns)
        figures.note("go", loss.even_ns - loss.published_ns)
        figures.note("until_rejoined", fault.whole_ns - fault.struck_ns)
    if rejoin is not None:
        figures.note("rejoin_stop", rejoin.published_ns - rejoin.odd_ns)
        figures.note("rejoin_go", rejoin.even_ns - rejoin.published_ns)
    worst: dict[str, tuple[float, Sequence]] = {}
    for sequence in sequences:
        moved = (sequence.request_id, sequence.index) in fault.moved
        if sequence.spans(fault.struck_ns, loss.even_ns if loss else fault.struck_ns):
            found = gaps.moved if moved else gaps.survivors
            found.append(gap := _gap(sequence, fault.struck_ns, until_ns))
            who = "moved" if moved else "survivor"
            worst[who] = max(worst.get(who, (-1.0, sequence)), (gap, sequence), key=lambda w: w[0])
            if loss is not None:
                _account_pause(sequence, fault.struck_ns, loss.even_ns, moved, figures)
        if rejoin is not None and sequence.spans(rejoin.odd_ns, rejoin.even_ns):
            figures.rejoin.append(_gap(sequence, rejoin.odd_ns, rejoin.even_ns))
    told = {who: story(fault, sequence, until_ns) for who, (_, sequence) in worst.items()}
    figures.worst.append({"victim": fault.victim, **told})


def _account_pause(
    sequence: Sequence, struck_ns: int, even_ns: int, moved: bool, figures: Figures
) -> None:
    pause = _gap(sequence, struck_ns, even_ns)
    figures.pauses.setdefault("moved" if moved else "survivors", []).append(pause)
    after_ns = min(at for at in sequence.times if at >= even_ns) - even_ns
    figures.note("moved_first_token" if moved else "survivor_first_token", after_ns)


def _begun(fault: Fault, sequences: list[Sequence]) -> list[float]:
    """How long requests waited for their first token that were sent from the fault until the node was whole."""
    return [
        (s.times[0] - s.sent_ns) / _MS
        for s in sequences
        if s.times and fault.struck_ns <= s.sent_ns <= fault.whole_ns
    ]


def _gap(sequence: Sequence, start_ns: int, end_ns: int) -> float:
    """Milliseconds beyond its normal step that the sequence stood still at most in this time."""
    before_ns, after_ns = longest_gap(sequence, start_ns, end_ns)
    return max(0.0, after_ns - before_ns - normal_ns(sequence)) / _MS


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


def _control(figures: Figures) -> str:
    if figures.changed:
        return "the comparison can see it"
    return "no token changed: either no stream ran on that rank, or the comparison is blind"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else "it was ended from outside"


def _p50(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None


def _most(values: list[float]) -> float | None:
    return round(max(values), 3) if values else None
