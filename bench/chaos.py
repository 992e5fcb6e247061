"""Random processes of a live node are killed and stopped under load; every stream must be the fault-free one.

First every request runs once without faults. Then as many clients as there are streams send them again and
again, some leaving midway, while faults come as `chaos_faults.py` draws them; a seed repeats the schedule, not
the moments it meets. At the end the node must be healthy, idle and whole.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bench.chaos_faults import Fault, Schedule
from phalanx.bench.chaos_streams import Outcome, difference, predicting, receive, requests
from phalanx.protocol.arena import names, owner_lives
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.messages import Inject, Injected, StatusQuery, StatusReply
from phalanx.protocol.queues import read_queues
from phalanx.services.client_async import AsyncClient
from phalanx.services.client_ended import Ended
from phalanx.supervisor.ask import ask

LEAVE_SHARE = 0.1  # of the requests that their client aborts midway
HEAL_S_MAX = 90.0
FAULTS_DUE_S = 15.0  # a longer run without a fault shows nothing
GAPS_TOLD = 3
JUST_BEFORE_S = 2.0  # a fault shows that much later at most
_ANSWER_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Gap:
    """The longest time that a sequence stood still."""

    ms: float
    end_s: float
    request_id: str
    index: int


@dataclass
class Wrong:
    """What should not be, for the report."""

    what: str
    position: int
    index: int
    request_id: str
    at_s: float
    detail: str


@dataclass
class Tally:
    compared: int = 0
    left: int = 0  # requests whose client left midway
    refused: int = 0  # before they were accepted
    gaps: list[Gap] = field(default_factory=list[Gap])
    firsts: list[Gap] = field(default_factory=list[Gap])  # until the first token
    faults: list[Fault] = field(default_factory=list[Fault])
    wrong: list[Wrong] = field(default_factory=list[Wrong])


class Chaos:
    """One run against the node of `run_dir`, which must have been started with `--inject`."""

    def __init__(self, run_dir: Path, seed: int, streams: int, say: Callable[[str], None]) -> None:
        self._run_dir, self._streams, self._say = run_dir, streams, say
        self._rng = random.Random(seed)
        self._schedule = Schedule(seed)
        self._specs = requests(self._rng)
        self._wanted: dict[tuple[int, int], Outcome] = {}
        self._tally = Tally()
        self._ended = Ended()
        self._started = self._seconds = 0.0

    async def run(self, seconds: float) -> dict[str, Any]:
        """Raises PhalanxError when the node does not take part: no such node, no `--inject`, unhealthy."""
        if not (await self._status()).healthy:
            raise PhalanxError("the node is not healthy: see phalanx status")
        await self._inject(Fault(0.0, "list", "worker"))
        self._seconds = seconds
        async with AsyncClient(self._run_dir) as client:
            self._ended = client.ended
            found = await asyncio.gather(*(receive(client, spec) for spec in self._specs))
            for position, (_, outcomes) in enumerate(found):
                for index, outcome in enumerate(outcomes):
                    if outcome.finals not in (["length"], ["stop"]):
                        raise PhalanxError("the run without faults did not complete")
                    self._wanted[position, index] = outcome
            self._specs = predicting(self._specs, self._wanted)
            self._say(f"{len(self._wanted)} sequences recorded without faults")
            self._started = time.monotonic()
            until = self._started + seconds
            clients = [
                asyncio.create_task(self._client(client, until)) for _ in range(self._streams)
            ]
            await self._break_things(until)
            await asyncio.gather(*clients)
        healed = await self._heal()
        return self._report(healed)

    async def _client(self, client: AsyncClient, until: float) -> None:
        rng = random.Random(self._rng.random())
        while time.monotonic() < until:
            position = rng.randrange(len(self._specs))
            leave = rng.random() < LEAVE_SHARE
            leave_after = rng.uniform(0.0, 1.0) if leave else None
            request_id, outcomes = await receive(client, self._specs[position], leave_after)
            self._compare(position, request_id, outcomes, leave)

    def _compare(
        self, position: int, request_id: str, outcomes: list[Outcome], leave: bool
    ) -> None:
        tally = self._tally
        tally.left += leave
        if not request_id and (leave or all(outcome.refused for outcome in outcomes)):
            tally.refused += not leave
            return
        for index, got in enumerate(outcomes):
            tally.compared += 1
            for gaps, ms, end in (
                (tally.gaps, got.longest_gap_ms, got.gap_end),
                (tally.firsts, got.first_ms, got.first_end),
            ):
                gaps.append(Gap(ms, round(end - self._started, 2), request_id, index))
            wrong = difference(self._wanted[position, index], got, leave)
            if wrong is not None:
                at_s = round(time.monotonic() - self._started, 2)
                what, detail = wrong
                tally.wrong.append(Wrong(what, position, index, request_id, at_s, detail))
                self._say(f"{at_s:.1f} s: {what}: request {request_id}, index {index}: {detail}")

    async def _break_things(self, until: float) -> None:
        names: list[str] = []
        while True:
            names = await self._living() or names
            fault = self._schedule.next(names)
            due = self._started + fault.at_s
            if due >= until:
                await asyncio.sleep(max(0.0, until - time.monotonic()))
                return
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                await self._inject(fault)
            except PhalanxError:
                continue  # the victim is dead already
            self._tally.faults.append(fault)
            lasting = f" for {fault.ms} ms" if fault.ms else ""
            self._say(f"{fault.at_s:.1f} s: {fault.kind} {fault.target}{lasting}")

    async def _living(self) -> list[str]:
        processes = (await self._status()).processes
        return sorted(p.name for p in processes if p.pid and p.name != "supervisor")

    async def _status(self) -> StatusReply:
        return await asyncio.to_thread(ask, self._run_dir, StatusQuery(1), StatusReply, _ANSWER_S)

    async def _inject(self, fault: Fault) -> None:
        question = Inject(1, fault.kind, fault.target, fault.ms)
        await asyncio.to_thread(ask, self._run_dir, question, Injected, _ANSWER_S)

    async def _heal(self) -> str:
        """Wait until the node is healthy, idle and whole; what is missing otherwise."""
        deadline = time.monotonic() + HEAL_S_MAX
        while True:
            missing = await self._missing()
            if not missing or time.monotonic() > deadline:
                return missing
            await asyncio.sleep(_POLL_S)

    async def _missing(self) -> str:
        if not (await self._status()).healthy:
            return "the node is not healthy"
        node = node_name(self._run_dir)
        if left := [name for name in names(node) if not owner_lives(name)]:
            return f"shared memory is left behind: {', '.join(left)}"
        found = read_queues(node)
        if found["requests"]:
            return f"{len(found['requests'])} sequences still run"
        for rank in found["ranks"]:
            for what in ("blocks", "slots"):
                free, total = rank[f"free_{what}"], rank[f"total_{what}"]
                if not free == total > 0:
                    return f"rank {rank['slot']} has {free} of {total} {what} free"
        return ""

    def _report(self, missing: str) -> dict[str, Any]:
        tally, late = self._tally, self._ended.counts
        kinds = Counter(wrong.what for wrong in tally.wrong)
        gaps = sorted(gap.ms for gap in tally.gaps) or [0.0]
        firsts = sorted(gap.ms for gap in tally.firsts) or [0.0]
        # A node that refuses everything changes nothing, and neither does one that no fault met: that proves nothing.
        shown = tally.compared > 0 and (bool(tally.faults) or self._seconds <= FAULTS_DUE_S)
        return {
            "faults": len(tally.faults),
            "faults_by_target": dict(
                sorted(Counter(f"{f.kind} {f.target}" for f in tally.faults).items())
            ),
            "streams_compared": tally.compared,
            "tokens_changed": kinds["changed"],
            "logprobs_changed": kinds["logprobs"],
            "streams_lost": kinds["lost"],
            "finals_wrong": kinds["finals"],
            "finals_contradicted": late["finals"],
            "tokens_after_final": late["tokens"],
            "after_final": self._ended.said,
            "clients_left": tally.left,
            "refused": tally.refused,
            "longest_gap_ms_p50": round(gaps[len(gaps) // 2], 1),
            "longest_gap_ms_max": round(gaps[-1], 1),
            "longest_gaps": longest(tally.gaps, tally.faults),
            "first_token_ms_p50": round(firsts[len(firsts) // 2], 1),
            "first_token_ms_max": round(firsts[-1], 1),
            "longest_first_tokens": longest(tally.firsts, tally.faults),
            "missing_at_the_end": missing,
            "wrong": [vars(wrong) for wrong in tally.wrong[:50]],
            "ok": shown and not tally.wrong and not missing and not late.total(),
        }


def longest(gaps: list[Gap], faults: list[Fault]) -> list[dict[str, Any]]:
    """The longest gaps, and which faults came in each of them or just before it."""
    told: list[dict[str, Any]] = []
    for gap in sorted(gaps, key=lambda gap: -gap.ms)[:GAPS_TOLD]:
        start_s = gap.end_s - gap.ms / 1000
        near = [f for f in faults if start_s - JUST_BEFORE_S <= f.at_s <= gap.end_s]
        said = [f"{f.at_s:.1f} s: {f.kind} {f.target}" + f" {f.ms} ms" * (f.ms > 0) for f in near]
        told.append(vars(gap) | {"ms": round(gap.ms, 1), "faults": said})
    return told


def run(
    run_dir: Path, minutes: float, seed: int, streams: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The fields of `phalanx chaos` (docs/cli.md)."""
    figures = asyncio.run(Chaos(run_dir, seed, streams, say).run(minutes * 60))
    return {"minutes": minutes, "seed": seed, "streams": streams, **figures}
