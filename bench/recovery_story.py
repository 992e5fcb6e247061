"""Where the time of one pause went: what the group, each rank and each step did between two tokens of a stream."""

from itertools import pairwise
from statistics import median
from typing import Any

from phalanx.bench.recovery_cpu import used
from phalanx.bench.recovery_fault import Fault
from phalanx.bench.recovery_load import Sequence

_MS = 1e6
_SLACK_NS = 3_000_000  # a step is noted after its tokens were sent
_STEPS_MAX = 24  # told of one rank: the longest ones


def longest_gap(sequence: Sequence, start_ns: int, end_ns: int) -> tuple[int, int]:
    """The two deliveries, ns, between which the sequence stood still longest in this time."""
    pairs = pairwise(sequence.arrivals)
    around = [(before, after) for before, after in pairs if before < end_ns and after > start_ns]
    return max(around, key=lambda pair: pair[1] - pair[0])


def normal_ns(sequence: Sequence) -> float:
    """The time between two of its deliveries, mostly; 0 of one whose longest gap is its only one.

    The longest is left out: in a short sequence it would be the measure of itself.
    """
    steps = sorted(after - before for before, after in pairwise(sequence.times))
    return median(steps[:-1]) if len(steps) > 1 else 0.0


def story(
    fault: Fault, sequence: Sequence, until_ns: int, since_ns: int | None = None
) -> dict[str, Any]:
    """The longest gap of the sequence from the fault, or from then, until then. All times in ms since the fault.

    `steps`: those of every rank that reach into the gap; `worker_ms` were in the worker, peers' parts included (0:
    abandoned). `delivery_ms`: from the end of the step that made the token after the gap until the client had it.
    `cpu_ms`: of each process, ms on a CPU and ms that its threads waited for one.
    """
    before_ns, after_ns = longest_gap(sequence, since_ns or fault.struck_ns, until_ns)
    name = (sequence.request_id, sequence.index)
    seat = fault.before.get(name, -1)
    last = fault.after.get(name, seat)

    def ms(at_ns: int) -> float:
        return round((at_ns - fault.struck_ns) / _MS, 1)

    told: dict[str, Any] = {
        "gap_ms": round((after_ns - before_ns - normal_ns(sequence)) / _MS, 1),
        "normal_ms": round(normal_ns(sequence) / _MS, 1),
        "rank": seat,
        "rank_after": last,
        "before": ms(before_ns),
        "after": ms(after_ns),
    }
    for change in fault.changes:
        if change.odd_ns < after_ns and change.even_ns > before_ns:
            told.setdefault("changes", []).append(
                {
                    "stop": ms(change.odd_ns),
                    "stopped": {seat: ms(at) for seat, at in change.stopped.items()},
                    "published": ms(change.published_ns),
                    "ready": {seat: ms(at) for seat, at in change.ready.items()},
                    "go": ms(change.even_ns),
                    "entered": {seat: ms(at) for seat, at in change.entered.items()},
                }
            )
    steps = [
        {
            "rank": seat,
            "began": ms(int(step["done_ns"]) - 1000 * int(step["us"])),
            "done": ms(int(step["done_ns"])),
            "worker_ms": round(int(step["worker_us"]) / 1e3, 1),
            "rows": int(step["rows"]),
            "prompt_rows": int(step["prompt_rows"]),
        }
        for seat, done in fault.steps.items()
        for step in done[
            (done["done_ns"] > before_ns)
            & (done["done_ns"] - 1000 * done["us"].astype("u8") < after_ns)
        ]
    ]
    longest = sorted(steps, key=lambda step: step["began"] - step["done"])
    told["steps"] = sorted(longest[:_STEPS_MAX], key=lambda step: step["done"])
    spoken = [
        after_ns - int(step["done_ns"])
        for step in fault.steps.get(last, ())
        if step["worker_us"] and before_ns < int(step["done_ns"]) < after_ns + _SLACK_NS
    ]
    told["delivery_ms"] = round(min(spoken) / _MS, 1) if spoken else None
    told["cpu_ms"] = used(fault.cpus, before_ns, after_ns)
    return told
