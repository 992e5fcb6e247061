"""`phalanx chaos`: what it calls wrong, what its schedule keeps to, and a short run of it."""

import asyncio
import fcntl
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.bench.chaos import Chaos, Gap, Outcome, difference, longest
from phalanx.bench.chaos_faults import DEATHS_MAX, WINDOW_S, Fault, Schedule
from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.config import node_name

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


def test_a_run_that_compared_nothing_is_not_ok() -> None:
    """All requests were refused, say."""
    chaos = Chaos(Path("/tmp/none"), 1, 1, print)
    assert not chaos._report("")["ok"]
    chaos._compare(0, "", [], False)
    assert (chaos._report("")["ok"], chaos._report("")["refused"]) == (False, 1)
    chaos._wanted[0, 0] = Outcome([1], "a", ["stop"])
    chaos._compare(0, "id", [Outcome([1], "a", ["stop"])], False)
    assert chaos._report("")["ok"] and not chaos._report("2 sequences still run")["ok"]


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
