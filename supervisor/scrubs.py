"""What the scrubbers have found, and who is to blame. Pure.

The gateway's compares ranks with each other, those of the workers compare routed experts with the
checkpoint and rows with what a peer made of them. A finding is about certain workers: when one of them was
started again it is over.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import structs

from phalanx.protocol.limits import MAX_SEATS
from phalanx.protocol.messages import (
    ExpertFinding,
    ExpertReport,
    ExpertsScrubbed,
    Finding,
    Scrubbed,
    ScrubReport,
)
from phalanx.supervisor.events import Doubt

RANK_FINDINGS_MAX = 256  # that are remembered
Workers = Mapping[int, int]  # seat -> incarnation


class Scrubs:
    def __init__(self) -> None:
        self._ranks = Scrubbed()
        self._experts: dict[int, ExpertReport] = {}  # by seat
        self._wrong: set[tuple[int, int]] = (
            set()
        )  # workers that held a wrong expert: seat, incarnation
        self._explained: frozenset[Finding] = frozenset()  # by one of them

    def hear(self, report: ScrubReport | ExpertReport) -> list[Doubt]:
        """Whose slots are to be looked at, now that somebody computed otherwise."""
        if isinstance(report, ScrubReport):
            self._ranks = self._with_earlier(report.scrubbed)
            return []
        findings = tuple(filter(_makes_sense, report.scrubbed.findings))
        report = structs.replace(
            report, scrubbed=structs.replace(report.scrubbed, findings=findings)
        )
        self._wrong |= {(f.seats[0], f.incarnations[0]) for f in findings if len(f.seats) == 1}
        before = self._experts.get(report.seat)
        self._experts[report.seat] = report
        known = before.scrubbed.findings if before is not None else ()
        fresh = [f for f in report.scrubbed.findings if len(f.seats) == 2 and f not in known]
        return [Doubt(finding.seats[1], finding.layer, finding.expert) for finding in fresh]

    def _with_earlier(self, scrubbed: Scrubbed) -> Scrubbed:
        """What an earlier gateway has found is true of those workers as long as they run: its successor begins
        without it. Of the same ranks, the newest is enough."""
        told = {(finding.seats, finding.against) for finding in scrubbed.findings}
        earlier = (f for f in self._ranks.findings if (f.seats, f.against) not in told)
        found = (*earlier, *scrubbed.findings)[-RANK_FINDINGS_MAX:]
        return structs.replace(scrubbed, findings=found)

    def of_ranks(self, workers: Workers) -> Scrubbed:
        self._explain(workers)
        alive = (f for f in self._ranks.findings if _alive(f, workers))
        found = tuple(f for f in alive if f not in self._explained)
        return structs.replace(self._ranks, findings=found)

    def _explain(self, workers: Workers) -> None:
        """Ranks that were compared just when a bit of an expert changed differ for that, whichever of them came later.
        So when the worker that held it is gone, what ranks were found to compute till then blames nobody any more:
        a device that is broken is found again."""
        if gone := {worker for worker in self._wrong if workers.get(worker[0]) != worker[1]}:
            self._wrong -= gone
            self._explained = frozenset(self._ranks.findings)

    def of_experts(self, workers: Workers) -> ExpertsScrubbed:
        """All that workers which still run have told."""
        told = [r for r in self._experts.values() if workers.get(r.seat) == r.incarnation]
        found = (f for report in told for f in report.scrubbed.findings if _alive(f, workers))
        return ExpertsScrubbed(
            sum(report.scrubbed.slots for report in told),
            sum(report.scrubbed.rows for report in told),
            tuple(found),
        )

    def told(self, workers: Workers) -> list[str]:
        """For people."""
        experts = _told_experts(self.of_experts(workers).findings)
        return [*map(_told, self.of_ranks(workers).findings), *experts]


def _makes_sense(finding: ExpertFinding) -> bool:
    """It comes from outside, and goes to the board."""
    seats, places = set(finding.seats), (finding.layer, finding.expert)
    known = all(0 <= seat < MAX_SEATS for seat in seats) and 0 < len(seats) <= 2
    return known and len(seats) == len(finding.seats) and all(0 <= at < 2**31 for at in places)


def _alive(finding: Finding | ExpertFinding, workers: Workers) -> bool:
    return tuple(map(workers.get, finding.seats)) == finding.incarnations


def _told(finding: Finding) -> str:
    names = _names(finding.seats)
    where = f"output {finding.at} of request {finding.request_id[:8]}"
    if not finding.against:
        text = f"the scrubber: {names} compute different bits ({where}): one of them is wrong;"
        return f"{text} {_remedy(finding.seats)}"
    others = _names(finding.against)
    return (
        f"the scrubber: {names} computes other bits than {others} ({where}): is its device broken?"
        f" {_remedy(finding.seats)}"
    )


def _told_experts(findings: Iterable[ExpertFinding]) -> list[str]:
    wrong = {(f.seats[0], f.layer, f.expert) for f in findings if len(f.seats) == 1}
    told = [
        f"the scrubber: worker-{seat} holds other bits of expert {expert} of layer {layer} than the checkpoint:"
        f" {_remedy((seat,))}"
        for seat, layer, expert in sorted(wrong)
    ]
    # A rank whose copy is wrong computes other bits with it: that is told.
    doubts = [
        f
        for f in findings
        if len(f.seats) == 2 and not any((seat, f.layer, f.expert) in wrong for seat in f.seats)
    ]
    return told + _told_doubts(doubts)


def _told_doubts(doubts: list[ExpertFinding]) -> list[str]:
    """Who differs from more ranks than any other is wrong; of two that differ nobody can tell."""
    by_ranks = {frozenset(doubt.seats): doubt for doubt in doubts}
    told = []
    while by_ranks:
        counts = Counter(seat for ranks in by_ranks for seat in ranks).most_common(2)
        (seat, most), (_, next_most) = counts
        if most == next_most:
            break
        mine = {ranks: doubt for ranks, doubt in by_ranks.items() if seat in ranks}
        where = next(iter(mine.values()))
        others = sorted(frozenset.union(*mine) - {seat})
        told.append(
            f"the scrubber: worker-{seat} computes other bits than {_names(others)} with expert"
            f" {where.expert} of layer {where.layer}: is its device broken? {_remedy((seat,))}"
        )
        by_ranks = {ranks: doubt for ranks, doubt in by_ranks.items() if seat not in ranks}
    return told + [
        f"the scrubber: {_names(sorted(ranks))} compute different bits with expert {doubt.expert} of layer"
        f" {doubt.layer}: one of them is wrong; {_remedy(sorted(ranks))}"
        for ranks, doubt in by_ranks.items()
    ]


def _remedy(seats: Iterable[int]) -> str:
    """What makes it right again, unless the device is broken for good."""
    return f"phalanx restart {' '.join(f'worker-{seat}' for seat in seats)}, then phalanx kv clear"


def _names(seats: Iterable[int]) -> str:
    return " and ".join(f"worker-{seat}" for seat in seats)
