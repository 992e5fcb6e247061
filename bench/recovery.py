"""Processes of a private node are killed under load: how long streams stand still, where that time goes, and
whether a token changed.

The load is one round of streams for each fault, and one without in each node. The clock is CLOCK_MONOTONIC;
when the group stopped and ran again is read from the epoch word in shared memory, every quarter of a
millisecond. A gap is the longest time between two deliveries of one sequence from the fault until the group
stops for the last rejoin (or, when the victim is no worker, until its successor is ready), less the median of that
sequence's other gaps in the round: other prompts that are computed meanwhile count. The wait for a first token is none.
A pause is the same for the one gap in which the group was stopped.

The control (`noise`) is the same with one rank that computes one ulp wrong once the streams are known: then tokens
must change, or the comparison could not see it if they did.
"""

import asyncio
import os
import random
import threading
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from phalanx.bench.recovery_fault import open_to, status, strike
from phalanx.bench.recovery_figures import (
    Figures,
    account,
    compare,
    compare_drawn,
    gap_ms,
    least,
    most,
    p50,
)
from phalanx.bench.recovery_load import USUAL, Load, Sequence, Sizes, play, requests, with_seeds
from phalanx.protocol.config import NodeConfig, SchedulerConfig, WorkerConfig
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.messages import Inject, Injected
from phalanx.services.client import Spec
from phalanx.supervisor.ask import ask
from phalanx.supervisor.commands.node import private_node

_MS = 1e6
_ANSWER_S = 30.0
_NOISY = "worker-0"
_ENDS = (RuntimeError, PhalanxError, OSError, KeyboardInterrupt)


def run(
    kills: int,
    ranks: int = 3,
    streams: int = 12,
    model: str = "random-tiny",
    seed: int = 1,
    blocks: int = 0,
    target_itl_ms: float = 0.0,
    victims: Many[str] = ("worker",),
    how: str = "kill",
    noise: bool = False,
    sizes: Sizes = USUAL,
) -> dict[str, Any]:
    """The fields of `phalanx bench recovery` (docs/cli.md).

    Args:
        blocks: of each rank's pool; 0: plenty.
        target_itl_ms: of the schedulers (docs/configuration.md): no step is longer, so none that is lost.
        victims: `kinds of processes`, which take turns.
        how: `recovery_fault.SIGNALS`, or `RESTART`.
        noise: one rank is one ulp off (`worker_svc/model/noise.py`).
        sizes: of prompts and outputs.
    """
    figures = Figures()
    config = NodeConfig(
        worker=WorkerConfig(num_blocks=blocks),
        scheduler=SchedulerConfig(target_itl_ms=target_itl_ms),
    )
    todo = [victims[at % len(victims)] for at in range(kills)]
    measure = _Measure(todo, streams, seed, how, noise, sizes)
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
    survivors, moved, later = map(figures.all, ("survivors", "moved", "later"))
    return {
        "failed": figures.failed,
        "detect_ms_p50": p50(figures.phases.get("detect", [])),
        "resume_ms_p50": p50(survivors + moved),
        "resume_ms_max": most(survivors + moved + later),
        "survivors_gap_ms_max": most(survivors),
        "moved_gap_ms_max": most(moved),
        "later_gap_ms_max": most(later),
        "rejoin_gap_ms_max": most(figures.rejoin["survivors"] + figures.rejoin["moved"]),
        "rejoin_survivors_gap_ms_max": most(figures.rejoin["survivors"]),
        "rows": [gaps.row(victim) for victim, gaps in figures.gaps.items()],
        "pause_ms_p50": {name: p50(values) for name, values in figures.pauses.items()},
        "pause_ms_max": {name: most(values) for name, values in figures.pauses.items()},
        "phases_ms": {name: p50(values) for name, values in figures.phases.items()},
        "phases_ms_max": {name: most(values) for name, values in figures.phases.items()},
        "epochs_ms": {
            name: p50([getattr(record, name) for record in figures.losses])
            for name in ("detected_ms", "resumed_ms")
        },
        "worst": figures.worst,
        "fault_free_gap_ms_max": most(figures.fault_free),
        "pool_used_min": least(figures.pool_used),
        "pool_used_p50": p50(figures.pool_used),
        "pool_used_max": most(figures.pool_used),
        "changes_unseen": figures.unseen,
        "tokens_changed": figures.changed,
        "logprobs_changed": figures.scores_changed,
        "streams_lost": figures.lost,
        "streams_compared": figures.compared,
        "gaps_measured": {
            "survivors": len(survivors),
            "moved": len(moved),
            "later": len(later),
        },
        "kills": len(figures.pool_used),
        "victims": list(victims),
        "how": how,
        "noise": _NOISY if noise else None,
        "control": _control(figures) if noise else None,
        "ranks": ranks,
        "streams": streams,
        "blocks": blocks,
        "target_itl_ms": target_itl_ms,
        "outputs": sizes.outputs,
        "model": model,
        "load_average": round(os.getloadavg()[0], 2),
    }


class _Measure:
    """The faults that are to be made, in one node after another (`recovery_fault.open_to` says why)."""

    def __init__(
        self, todo: list[str], streams: int, seed: int, how: str, noise: bool, sizes: Sizes
    ) -> None:
        self.todo = todo  # kinds of victims
        self._streams, self._seed, self._how, self._noise = streams, seed, how, noise
        self._sizes = sizes
        self._rng = random.Random(seed)
        self._wanted: dict[tuple[int, int], Sequence] = {}

    async def node(self, config: NodeConfig, figures: Figures) -> None:
        """Make the faults that this node can still take, one at least. Raises RuntimeError if it can take none."""
        load = await self._record(config.run_path, figures)
        if self._noise:
            inject = Inject(1, "ulp", _NOISY)
            await asyncio.to_thread(ask, config.run_path, inject, Injected, _ANSWER_S)
        calm = await play(config.run_path, load)  # also the caches are as the rounds find them
        drawn = compare(calm, self._wanted, load, figures)
        figures.fault_free += [
            gap_ms(s, s.arrivals[0], s.arrivals[-1]) for s in calm.sequences if len(s.arrivals) > 1
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
            drawn += compare(result, self._wanted, load, figures)
            account(fault, result.sequences, figures)
        if drawn:
            again = await play(config.run_path, Load(with_seeds(load.specs, drawn)))
            compare_drawn(drawn, again.sequences, figures)

    async def _record(self, run_dir: Path, figures: Figures) -> Load:
        """Once, what every sequence is without faults; the load of the rounds."""
        if not self._wanted:
            first = await play(run_dir, Load(self._requests()))
            if any(s.finish not in ("length", "stop") for s in first.sequences):
                raise RuntimeError("the run without faults did not complete")
            self._wanted = {(s.position, s.index): s for s in first.sequences}
        return Load(self._requests(self._wanted))

    def _requests(self, known: dict[tuple[int, int], Sequence] | None = None) -> list[Spec]:
        return requests(random.Random(self._seed), self._streams, known, self._sizes)


def _control(figures: Figures) -> str:
    if figures.changed:
        return "the comparison can see it"
    return "no token changed: either no stream ran on that rank, or the comparison is blind"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else "it was ended from outside"
