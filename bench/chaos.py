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
from phalanx.protocol.arena import names, owner_lives
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import PhalanxError, Refused
from phalanx.protocol.messages import (
    Delta,
    Inject,
    Injected,
    Sampling,
    StatusQuery,
    StatusReply,
)
from phalanx.protocol.queues import read_queues
from phalanx.services.client import GatewaySilent, RequestTimeout, Spec
from phalanx.services.client_async import AsyncClient
from phalanx.supervisor.ask import ask

REQUESTS = 24
LEAVE_SHARE = 0.1  # of the requests that their client aborts midway
REQUEST_S_MAX = 240.0
HEAL_S_MAX = 90.0
GAPS_TOLD = 3
JUST_BEFORE_S = 2.0  # a fault shows that much later at most
_ANSWER_S = 10.0
_POLL_S = 0.1


@dataclass
class Outcome:
    """One sequence as it arrived."""

    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    finals: list[str] = field(default_factory=list[str])  # finish reasons: exactly one is right
    longest_gap_ms: float = 0.0
    gap_end: float = 0.0  # when that gap was over, time.monotonic


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
    faults: list[Fault] = field(default_factory=list[Fault])
    wrong: list[Wrong] = field(default_factory=list[Wrong])


def requests(rng: random.Random, count: int = REQUESTS) -> list[Spec]:
    """Requests of many kinds; all of them with a seed, since without one there is nothing to compare."""
    specs: list[Spec] = []
    for position in range(count):
        prompt = [rng.randrange(10, 200) for _ in range(rng.choice([1, 3, 17, 64, 129, 300, 900]))]
        sampling = Sampling(
            temperature=rng.choice([0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            seed=position,
            max_tokens=rng.choice([16, 48, 120]),
            ignore_eos=True,
            frequency_penalty=0.5 if position % 4 == 1 else 0.0,
            repetition_penalty=1.1 if position % 4 == 2 else 1.0,
            stop=("zq", "\x00never") if position % 6 == 3 else (),
        )
        specs.append(Spec(tuple(prompt), sampling, n=2 if position % 5 == 4 else 1))
    return specs


class Chaos:
    """One run against the node of `run_dir`, which must have been started with `--inject`."""

    def __init__(self, run_dir: Path, seed: int, streams: int, say: Callable[[str], None]) -> None:
        self._run_dir, self._streams, self._say = run_dir, streams, say
        self._rng = random.Random(seed)
        self._schedule = Schedule(seed)
        self._specs = requests(self._rng)
        self._wanted: dict[tuple[int, int], Outcome] = {}
        self._tally = Tally()
        self._started = 0.0

    async def run(self, seconds: float) -> dict[str, Any]:
        """Raises PhalanxError when the node does not take part: no such node, no `--inject`, unhealthy."""
        if not (await self._status()).healthy:
            raise PhalanxError("the node is not healthy: see phalanx status")
        await self._inject(Fault(0.0, "list", "worker"))
        async with AsyncClient(self._run_dir) as client:
            found = await asyncio.gather(*(self._receive(client, spec) for spec in self._specs))
            for position, (_, outcomes) in enumerate(found):
                for index, outcome in enumerate(outcomes):
                    if outcome.finals not in (["length"], ["stop"]):
                        raise PhalanxError("the run without faults did not complete")
                    self._wanted[position, index] = outcome
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
            request_id, outcomes = await self._receive(client, self._specs[position], leave_after)
            self._compare(position, request_id, outcomes, leave)

    async def _receive(
        self, client: AsyncClient, spec: Spec, leave_after_s: float | None = None
    ) -> tuple[str, list[Outcome]]:
        outcomes = [Outcome() for _ in range(spec.n)]
        stream = client.generate(spec, timeout=REQUEST_S_MAX)
        leaving = None
        if leave_after_s is not None:
            leaving = asyncio.get_running_loop().call_later(leave_after_s, stream.abort)
        last = [time.monotonic()] * spec.n
        try:
            async for event in stream:
                outcome, now = outcomes[event.index], time.monotonic()
                if outcome.tokens:
                    gap_ms = (now - last[event.index]) * 1000
                    if gap_ms > outcome.longest_gap_ms:
                        outcome.longest_gap_ms, outcome.gap_end = gap_ms, now
                last[event.index] = now
                if isinstance(event, Delta):
                    outcome.tokens.extend(event.token_ids)
                    outcome.text += event.text
                else:
                    outcome.finals.append(event.finish_reason)
        except (Refused, RequestTimeout, GatewaySilent) as error:
            for outcome in outcomes:
                outcome.finals.append(f"{type(error).__name__}: {error}")
        finally:
            if leaving is not None:
                leaving.cancel()
        return stream.request_id, outcomes

    def _compare(
        self, position: int, request_id: str, outcomes: list[Outcome], leave: bool
    ) -> None:
        tally = self._tally
        if not request_id:  # refused, or its client left before it was accepted
            tally.refused += not leave
            tally.left += leave
            return
        tally.left += leave
        for index, got in enumerate(outcomes):
            tally.compared += 1
            end_s = round(got.gap_end - self._started, 2)
            tally.gaps.append(Gap(got.longest_gap_ms, end_s, request_id, index))
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
                if free != total:
                    return f"rank {rank['slot']} has {free} of {total} {what} free"
        return ""

    def _report(self, missing: str) -> dict[str, Any]:
        tally = self._tally
        kinds = Counter(wrong.what for wrong in tally.wrong)
        gaps = sorted(gap.ms for gap in tally.gaps) or [0.0]
        return {
            "faults": len(tally.faults),
            "faults_by_target": dict(
                sorted(Counter(f"{f.kind} {f.target}" for f in tally.faults).items())
            ),
            "streams_compared": tally.compared,
            "tokens_changed": kinds["changed"],
            "streams_lost": kinds["lost"],
            "finals_wrong": kinds["finals"],
            "clients_left": tally.left,
            "refused": tally.refused,
            "longest_gap_ms_p50": round(gaps[len(gaps) // 2], 1),
            "longest_gap_ms_max": round(gaps[-1], 1),
            "longest_gaps": longest(tally.gaps, tally.faults),
            "missing_at_the_end": missing,
            "wrong": [vars(wrong) for wrong in tally.wrong[:50]],
            # A node that refuses everything changes nothing, which proves nothing.
            "ok": tally.compared > 0 and not tally.wrong and not missing,
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


def difference(wanted: Outcome, got: Outcome, left: bool) -> tuple[str, str] | None:
    """(`lost`, `changed` or `finals`, in words), or None for the stream that it should have been.

    A client that left midway has the first part of the stream, and one final all the same.
    """
    if len(got.finals) != 1:
        return "finals", f"final messages: {got.finals}"
    (final,) = got.finals
    tokens = wanted.tokens
    if left and final == "abort":
        tokens = tokens[: len(got.tokens)]
    elif final not in ("length", "stop"):
        return "lost", f"ended with {final} after {len(got.tokens)} of {len(tokens)} tokens"
    elif final != wanted.finals[0]:
        return "changed", f"finish reason {final}, without faults {wanted.finals[0]}"
    if got.tokens == tokens:
        if got.text == wanted.text or left:
            return None
        return "changed", f"the text: {got.text!r}, without faults {wanted.text!r}"
    pairs = zip(got.tokens, wanted.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got.tokens), len(tokens)))
    return (
        "changed",
        f"from token {at} on: {got.tokens[at : at + 3]}, without faults {wanted.tokens[at : at + 3]}",
    )


def run(
    run_dir: Path, minutes: float, seed: int, streams: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The fields of `phalanx chaos` (docs/cli.md)."""
    figures = asyncio.run(Chaos(run_dir, seed, streams, say).run(minutes * 60))
    return {"minutes": minutes, "seed": seed, "streams": streams, **figures}
