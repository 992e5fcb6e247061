"""What faults add up to: gaps and pauses of streams, phases of the group, tokens that changed."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from phalanx.bench.recovery_fault import Fault
from phalanx.bench.recovery_load import Load, Played, Sequence
from phalanx.bench.recovery_story import longest_gap, normal_ns, story
from phalanx.protocol.messages import EpochRecord

_MS = 1e6
_SETTLED_NS = 500_000_000  # after a rejoin


@dataclass
class Gaps:
    """What the faults of one kind of process cost, in ms."""

    faults: int = 0
    survivors: list[float] = field(default_factory=list[float])
    moved: list[float] = field(default_factory=list[float])  # what ran on the victim's rank
    later: list[float] = field(default_factory=list[float])  # what spoke first after the fault
    begun: list[float] = field(default_factory=list[float])  # see `_begun`
    unspoken: list[float] = field(default_factory=list[float])  # see `_unspoken`
    whole: list[float] = field(default_factory=list[float])
    died: list[float] = field(default_factory=list[float])

    def row(self, victim: str) -> dict[str, Any]:
        return {
            "victim": victim,
            "faults": self.faults,
            "died_ms_p50": p50(self.died),
            "died_ms_max": most(self.died),
            "survivors_gap_ms_p50": p50(self.survivors),
            "survivors_gap_ms_max": most(self.survivors),
            "moved_gap_ms_p50": p50(self.moved),
            "moved_gap_ms_max": most(self.moved),
            "later_gap_ms_max": most(self.later),
            "begun_ms_p50": p50(self.begun),
            "begun_ms_max": most(self.begun),
            "unspoken_ms_max": most(self.unspoken),
            "whole_ms_p50": p50(self.whole),
        }


@dataclass
class Figures:
    """What the rounds add up to, in ms."""

    phases: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    gaps: dict[str, Gaps] = field(default_factory=dict[str, Gaps])  # by the victim's kind
    rejoin: dict[str, list[float]] = field(default_factory=lambda: {"survivors": [], "moved": []})
    pool_used: list[float] = field(default_factory=list[float])
    pauses: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    unseen: int = 0  # changes of which the watch saw no part
    changed: int = 0
    scores_changed: int = 0  # log-probabilities, of the same tokens
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


def account(fault: Fault, sequences: list[Sequence], figures: Figures) -> None:
    gaps = figures.gaps.setdefault(fault.victim, Gaps())
    gaps.faults += 1
    gaps.died.append((fault.died_ns - fault.struck_ns) / _MS)
    gaps.whole.append((fault.whole_ns - fault.struck_ns) / _MS)
    gaps.begun += _begun(fault, sequences)
    gaps.unspoken += _unspoken(fault, sequences)
    figures.pool_used.append(fault.pool_used)
    loss = fault.changes[0] if fault.changes else None
    # A death meanwhile makes the group change more than twice: it is whole after the last one.
    rejoin = fault.changes[-1] if len(fault.changes) > 1 else None
    until_ns = rejoin.odd_ns if rejoin is not None else fault.whole_ns
    figures.unseen += sum(not change.seen for change in fault.changes)
    if loss is not None:
        figures.note("until_rejoined", fault.whole_ns - fault.struck_ns)
    if loss is not None and loss.seen:
        figures.note("detect", loss.odd_ns - fault.struck_ns)
        figures.note("stop", loss.published_ns - loss.odd_ns)
        figures.note("go", loss.even_ns - loss.published_ns)
    if rejoin is not None and rejoin.seen:
        figures.note("rejoin_stop", rejoin.published_ns - rejoin.odd_ns)
        figures.note("rejoin_go", rejoin.even_ns - rejoin.published_ns)
    worst: dict[str, tuple[float, Sequence]] = {}
    joined: tuple[float, Sequence] | None = None
    for sequence in sequences:
        moved = (sequence.request_id, sequence.index) in fault.moved
        if sequence.runs_in(fault.struck_ns, until_ns):
            later = sequence.arrivals[0] > fault.struck_ns
            who = "later" if later else "moved" if moved else "survivor"
            found = gaps.later if later else gaps.moved if moved else gaps.survivors
            found.append(gap := gap_ms(sequence, fault.struck_ns, until_ns))
            worst[who] = max(worst.get(who, (-1.0, sequence)), (gap, sequence), key=lambda w: w[0])
            if loss is not None and loss.seen and sequence.spans(fault.struck_ns, loss.even_ns):
                _account_pause(sequence, fault.struck_ns, loss.even_ns, moved, figures)
        # The newcomer's first steps are part of the rejoin: all ranks wait for them.
        after_ns = rejoin.even_ns + _SETTLED_NS if rejoin is not None else 0
        if rejoin is not None and sequence.runs_in(rejoin.odd_ns, after_ns):
            gap = gap_ms(sequence, rejoin.odd_ns, after_ns)
            figures.rejoin["moved" if moved else "survivors"].append(gap)
            if not moved:
                joined = max(joined or (gap, sequence), (gap, sequence), key=lambda w: w[0])
    told = {who: story(fault, sequence, until_ns) for who, (_, sequence) in worst.items()}
    if joined is not None and rejoin is not None:
        after_ns = rejoin.even_ns + _SETTLED_NS
        told["rejoin"] = story(fault, joined[1], after_ns, rejoin.odd_ns)
    figures.worst.append({"victim": fault.victim, **told})


def _account_pause(
    sequence: Sequence, struck_ns: int, even_ns: int, moved: bool, figures: Figures
) -> None:
    pause = gap_ms(sequence, struck_ns, even_ns)
    figures.pauses.setdefault("moved" if moved else "survivors", []).append(pause)
    after_ns = min(at for at in sequence.arrivals if at >= even_ns) - even_ns
    figures.note("moved_first_token" if moved else "survivor_first_token", after_ns)


def _begun(fault: Fault, sequences: list[Sequence]) -> list[float]:
    """How long requests waited for their first token that were sent from the fault until the node was whole."""
    return [
        (s.times[0] - s.sent_ns) / _MS
        for s in sequences
        if s.times and fault.struck_ns <= s.sent_ns <= fault.whole_ns
    ]


def _unspoken(fault: Fault, sequences: list[Sequence]) -> list[float]:
    """How long those waited from the fault for their first token that had been sent before, and had none yet."""
    return [
        (s.times[0] - fault.struck_ns) / _MS
        for s in sequences
        if s.times and s.sent_ns < fault.struck_ns < s.times[0]
    ]


def gap_ms(sequence: Sequence, start_ns: int, end_ns: int) -> float:
    """Milliseconds beyond its normal step that the sequence stood still at most in this time."""
    before_ns, after_ns = longest_gap(sequence, start_ns, end_ns)
    return max(0.0, after_ns - before_ns - normal_ns(sequence)) / _MS


def compare(
    result: Played, wanted: dict[tuple[int, int], Sequence], load: Load, figures: Figures
) -> list[Sequence]:
    """Count what came out otherwise than without faults. Those without a seed are told back: the node drew one,
    so what they were to be is known only once they were run again with that (`compare_drawn`)."""
    drawn: list[Sequence] = []
    for sequence in result.sequences:
        figures.compared += 1
        if sequence.finish not in ("length", "stop"):
            figures.lost += 1
        elif load.specs[sequence.position].sampling.seed is None:
            drawn.append(sequence)
        else:
            _count(sequence, wanted[sequence.position, sequence.index], figures)
    return drawn


def compare_drawn(drawn: list[Sequence], again: list[Sequence], figures: Figures) -> None:
    """`again`: what came of the same requests with the seeds that the node had drawn for these, each by its place."""
    found = {(sequence.position, sequence.index): sequence for sequence in again}
    for position, sequence in enumerate(drawn):
        _count(sequence, found[position, sequence.index], figures)


def _count(sequence: Sequence, wanted: Sequence, figures: Figures) -> None:
    if sequence.said != wanted.said:
        figures.changed += 1
    else:
        figures.scores_changed += sequence.scores != wanted.scores


def p50(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None


def most(values: list[float]) -> float | None:
    return round(max(values), 3) if values else None


def least(values: list[float]) -> float | None:
    return round(min(values), 3) if values else None
