"""`phalanx chaos`: what it calls wrong, what its schedule keeps to, and a short run of it."""

import asyncio
import fcntl
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import phalanx.bench.chaos as chaos_module
from phalanx.bench.chaos import FAULTS_DUE_S, Chaos, Gap, longest
from phalanx.bench.chaos_faults import DEATHS_MAX, WINDOW_S, Fault, Schedule
from phalanx.bench.chaos_streams import Outcome, difference, predicting, receive, requests
from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.config import node_name
from phalanx.protocol.messages import Delta, Final, PromptLogprob, TokenLogprobs, Usage
from phalanx.services.client import Spec
from phalanx.services.client_async import AsyncClient

NAMES = ["gateway", "kvstore", "scheduler-0", "scheduler-1", "tokenizer-0", "worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("got", "left", "what"),
    [
        (Outcome([1, 2, 3], "abc", ["length"]), False, None),
        (Outcome([1, 9, 3], "abc", ["length"]), False, "changed"),
        (Outcome([1, 2], "ab", ["length"]), False, "changed"),
        (Outcome([1, 2, 3, 4], "abcd", ["length"]), False, "changed"),
        (Outcome([1, 2, 3], "abX", ["length"]), False, "changed"),
        (Outcome([1, 2, 3], "abc", ["stop"]), False, "changed"),
        (Outcome([1, 2], "ab", ["abort"]), False, "lost"),
        (Outcome([1, 2], "ab", ["error"]), False, "lost"),
        (Outcome([1, 2], "ab", ["abort"]), True, None),
        (Outcome([1, 9], "ab", ["abort"]), True, "changed"),
        (Outcome([1, 2, 3], "abc", ["length"]), True, None),
        (Outcome([1, 2, 3], "abc", ["length", "length"]), False, "finals"),
        (Outcome([1, 2, 3], "abc", []), False, "finals"),
    ],
)
def test_only_the_fault_free_stream_is_right(got: Outcome, left: bool, what: str | None) -> None:
    found = difference(Outcome([1, 2, 3], "abc", ["length"]), got, left)
    assert (found and found[0]) == what


def test_a_seed_gives_one_schedule_and_it_spares_the_restart_limit() -> None:
    first, again = Schedule(7), Schedule(7)
    faults = [first.next(NAMES) for _ in range(2000)]
    assert faults == [again.next(NAMES) for _ in range(2000)]
    assert faults == sorted(faults, key=lambda fault: fault.at_s)
    assert {fault.kind for fault in faults} == {"kill", "stop"}
    for name in NAMES:
        times = [fault.at_s for fault in faults if fault.target == name]
        assert len(times) > 20
        windows = [sum(at - WINDOW_S < t <= at for t in times) for at in times]
        assert max(windows) <= DEATHS_MAX
    assert Counter(f.target for f in faults).keys() == set(NAMES)


@pytest.mark.parametrize("left", [False, True])
def test_other_logprobs_are_seen(left: bool) -> None:
    mine, other = [TokenLogprobs(-0.5), TokenLogprobs(-0.25)], [TokenLogprobs(-0.5)]
    prompt = (None, PromptLogprob(-1.0, 3))
    finals = ["abort" if left else "length"]
    wanted = Outcome([1, 2], "ab", ["length"], mine, prompt)
    assert difference(wanted, Outcome([1, 2], "ab", finals, mine, prompt), left) is None
    for got in (
        Outcome([1, 2], "ab", finals, [*other, TokenLogprobs(-0.2500001)], prompt),
        Outcome([1, 2], "ab", finals, mine, (None, PromptLogprob(-1.0, 4))),
    ):
        found = difference(wanted, got, left)
        assert found is not None and found[0] == "logprobs"
    part = Outcome([1], "a", finals, other, prompt[:1])
    assert (difference(wanted, part, left) is None) is left


def test_it_asks_for_logprobs_drafts_and_forced_tokens() -> None:
    specs = requests(random.Random(1))
    wanted = {(at, index): Outcome([at]) for at in range(len(specs)) for index in range(2)}
    sampled = [spec.sampling for spec in predicting(specs, wanted)]
    assert [s.logprobs for s in sampled[:6]] == [2, None, None, None, None, 2]
    assert [at for at, s in enumerate(sampled) if s.prompt_logprobs] == [0, 7, 14, 21]
    assert [s.predicted_token_ids for s in sampled[:4]] == [(0,), (), (), (3,)]
    assert any(s.forced_token_ids for s in sampled)


def chaos_with_one_good_stream() -> Chaos:
    chaos = Chaos(Path("/tmp/none"), 1, 1, print)
    chaos._wanted[0, 0] = Outcome([1], "a", ["stop"])
    chaos._compare(0, "id", [Outcome([1], "a", ["stop"])], False)
    return chaos


def test_a_run_that_compared_nothing_is_not_ok() -> None:
    """All requests were refused, say."""
    chaos = Chaos(Path("/tmp/none"), 1, 1, print)
    assert not chaos._report("")["ok"]
    chaos._compare(0, "", [Outcome(finals=["Refused: no time"])], False)
    assert (chaos._report("")["ok"], chaos._report("")["refused"]) == (False, 1)
    chaos = chaos_with_one_good_stream()
    assert chaos._report("")["ok"] and not chaos._report("2 sequences still run")["ok"]


def test_a_run_without_a_fault_is_not_ok() -> None:
    chaos = chaos_with_one_good_stream()
    chaos._seconds = FAULTS_DUE_S + 1
    assert not chaos._report("")["ok"]
    chaos._tally.faults.append(Fault(1.0, "kill", "worker-0"))
    assert chaos._report("")["ok"]


@pytest.mark.parametrize("final", ["RequestTimeout: 240 s", "GatewaySilent: 60 s"])
def test_a_request_that_was_never_accepted_is_lost_unless_its_client_left(final: str) -> None:
    chaos = chaos_with_one_good_stream()
    never = Outcome(finals=[final], first_ms=240_000.0)
    chaos._compare(0, "", [never], True)
    assert chaos._report("")["ok"]
    chaos._compare(0, "", [never], False)
    found = chaos._report("")
    assert (found["ok"], found["streams_lost"], found["refused"]) == (False, 1, 0)
    assert found["first_token_ms_max"] == 240_000


def test_what_comes_after_a_final_is_not_ok() -> None:
    for what, told in (("finals", "finals_contradicted"), ("tokens", "tokens_after_final")):
        chaos = chaos_with_one_good_stream()
        assert chaos._report("")[told] == 0
        chaos._ended.counts[what] += 1
        assert (chaos._report("")[told], chaos._report("")["ok"]) == (1, False)


def test_the_wait_for_a_first_token_is_told_and_is_no_gap() -> None:
    class Stream:
        request_id, prompt_logprobs = "r", ()

        async def __aiter__(self) -> AsyncIterator[Delta | Final]:
            await asyncio.sleep(0.5)
            yield Delta("r", 0, 0, (1,), "a")
            yield Final("r", 0, 1, "length", Usage(1, 1))

    client = SimpleNamespace(generate=lambda spec, timeout: Stream())
    _, (outcome,) = asyncio.run(receive(cast(AsyncClient, client), Spec([5])))
    assert outcome.first_ms >= 500 > outcome.longest_gap_ms and outcome.finals == ["length"]


def test_shared_memory_that_is_left_behind_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def status(chaos: Chaos) -> SimpleNamespace:
        return SimpleNamespace(healthy=True)

    monkeypatch.setattr(Chaos, "_status", status)
    chaos = Chaos(tmp_path, 1, 1, print)
    with Arena.create(arena_name(node_name(tmp_path), "kv0", 1), 4096) as arena:
        assert asyncio.run(chaos._missing()) == ""
        fcntl.flock(arena._fd, fcntl.LOCK_UN)  # as if its owner had died
        assert asyncio.run(chaos._missing()) == f"shared memory is left behind: {arena.name}"


@pytest.mark.parametrize(
    ("free", "total", "told"), [(4, 4, ""), (3, 4, "rank 1 has 3 of 4 blocks free"), (0, 0, "rank 1 has 0 of 0 blocks free")]
)  # fmt: skip
def test_a_rank_without_all_its_blocks_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, told: str
) -> None:
    """One that has none has no worker, and takes nothing."""

    async def status(chaos: Chaos) -> SimpleNamespace:
        return SimpleNamespace(healthy=True)

    rank = {
        "slot": 1,
        "free_blocks": free,
        "total_blocks": total,
        "free_slots": 2,
        "total_slots": 2,
    }
    monkeypatch.setattr(Chaos, "_status", status)
    monkeypatch.setattr(chaos_module, "read_queues", lambda node: {"requests": [], "ranks": [rank]})
    assert asyncio.run(Chaos(tmp_path, 1, 1, print)._missing()) == told


def test_of_a_long_gap_it_tells_the_faults() -> None:
    gaps = [Gap(10.0 * at, 50.0, f"r{at}", 0) for at in range(8)] + [Gap(5000.0, 30.0, "worst", 1)]
    faults = [Fault(20.0, "kill", "worker-1"), Fault(24.0, "stop", "gateway", 400)]
    faults += [Fault(29.5, "kill", "worker-0"), Fault(31.0, "kill", "eplb")]
    first, second, third = longest(gaps, faults)
    assert (first["ms"], first["end_s"], first["request_id"], first["index"]) == (
        5000,
        30,
        "worst",
        1,
    )
    assert first["faults"] == ["24.0 s: stop gateway 400 ms", "29.5 s: kill worker-0"]
    assert (second["request_id"], second["faults"], third["request_id"]) == ("r7", [], "r6")


@pytest.mark.soak
def test_a_short_run_changes_nothing() -> None:
    command = [sys.executable, "-P", "-m", "phalanx.supervisor.cli", "chaos", "--json"]
    options = ["--minutes", "0.15", "--streams", "6", "--seed", "11"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["ok"] and found["faults"] > 0 and found["streams_compared"] > 0
    assert (found["tokens_changed"], found["streams_lost"], found["finals_wrong"]) == (0, 0, 0)
    assert found["first_token_ms_max"] >= found["first_token_ms_p50"] > 0
