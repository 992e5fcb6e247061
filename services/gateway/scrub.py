"""The scrubber: the same steps on two ranks, compared bit for bit, so that a bad GPU is found. Pure.

Now and then the beginning of a request that has ended is made again on the two ranks that were compared
least recently. Its tokens are given (`forced_token_ids`), so both compute the same positions whatever they
think of them, and the log-probabilities that the model itself gives the likeliest tokens are compared.
When two ranks differ, others are asked, until two agree: what differs from those is wrong.

What it cannot see is a number that is wrong in the same way for both. Routed experts are: both ranks ask
the same copy of each, wherever that is. Those have a scrubber of their own (`worker_svc/scrub.py`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import TOP_LOGPROBS_MAX
from phalanx.protocol.messages import Finding, Sampling, Scrubbed, ScrubReport, TokenLogprobs
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.streams import Stream

PROMPT_TOKENS_MAX = 1024  # of a request that is made again for this
OUTPUTS_MAX = 16
FINDINGS_MAX = 64

Bits = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]  # what a rank made of a probe


def probe_of(request: Request, vocab_size: int) -> Entry | None:
    """What is made again of this request; None when it is too long, or its tokens are not at hand."""
    entry, stream = request.entry, request.streams[0]
    end = stream.final
    if end is None or entry.prompt_tokens > PROMPT_TOKENS_MAX:
        return None
    forced = tuple(stream.tokens[: min(OUTPUTS_MAX, end.offset)])
    if not forced:
        return None
    sampling = Sampling(
        seed=entry.sampling.seed,
        max_tokens=len(forced),
        ignore_eos=True,
        logprobs=min(TOP_LOGPROBS_MAX, vocab_size),
        raw_logprobs=True,
        forced_token_ids=forced,
    )
    return msgspec.structs.replace(entry, sampling=sampling, n=1)


def bits_of(stream: Stream) -> Bits | None:
    """What a rank made of a probe; None when it did not get to make it."""
    end = stream.end
    if end is None:
        return None
    # NaN is a number as well; an end for want of KV blocks (a `length` with a code) says nothing of any.
    if end.code is not Code.NAN_LOGITS and (end.code or end.reason not in ("stop", "length")):
        return None
    count = min(len(stream.tokens), len(stream.logprobs))
    return tuple(stream.tokens[:count]), tuple(stream.logprobs[:count])


@dataclass(eq=False)
class Check:
    """One comparison on its way."""

    entry: Entry
    asked: list[int]  # seats
    workers: dict[int, int]  # incarnations of all ranks' workers, when it began
    answers: dict[int, Bits] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        return len(self.answers) < len(self.asked)

    def agreed(self) -> list[int]:
        """The seats that say the same, if at least two do and more than say anything else."""
        (bits, most), *rest = Counter(self.answers.values()).most_common(2)
        if most < 2 or (rest and rest[0][1] == most):
            return []
        return [seat for seat, other in self.answers.items() if other == bits]

    def first_difference(self) -> int:
        """The first output that they do not all agree on."""
        one, *others = (list(zip(*bits, strict=True)) for bits in self.answers.values())
        for at, output in enumerate(one):
            if any(at >= len(other) or other[at] != output for other in others):
                return at
        return len(one)


class Scrubber:
    def __init__(self, every_ns: int) -> None:
        """`every_ns`: from the end of one comparison to the next; 0: never."""
        self._every_ns = every_ns
        self._due_ns = 0
        self._turns = 0
        self._last_turn: dict[int, int] = {}  # in which each seat was compared last
        self._check: Check | None = None
        self._checked = self._differed = 0
        self._findings: list[Finding] = []
        self._news = False

    def due(self, now_ns: int) -> bool:
        return self._every_ns > 0 and self._check is None and now_ns >= self._due_ns

    def put_off(self, now_ns: int) -> None:
        """There is nothing to compare now."""
        self._due_ns = now_ns + self._every_ns

    def begin(self, entry: Entry, seats: Iterable[int], workers: dict[int, int]) -> list[int]:
        """Compare on two of these seats: those to ask. `workers`: the incarnations of all ranks' now."""
        pair = sorted(seats, key=lambda seat: (self._last_turn.get(seat, 0), seat))[:2]
        for seat in pair:  # each a turn of its own: so the pairs change
            self._turns += 1
            self._last_turn[seat] = self._turns
        self._check = Check(entry, pair, workers)
        return pair

    def give_up(self, now_ns: int) -> None:
        """A rank was lost meanwhile, or could not answer: that says nothing of its numbers."""
        self._check = None
        self.put_off(now_ns)

    def on_answer(
        self, seat: int, bits: Bits, seats: Sequence[int], workers: dict[int, int], now_ns: int
    ) -> int | None:
        """What a seat made of the probe. Returns one more seat to ask, if that is needed.

        Args:
            seats: those that could be asked now.
            workers: the incarnations of all ranks' workers now. Each has experts that the others' rows go through:
                where one was replaced since the comparison began, a difference says nothing of those compared.
        """
        check = self._check
        if check is None:
            return None
        check.answers[seat] = bits
        if check.waits:
            return None
        agreed = check.agreed()
        others = [other for other in seats if other not in check.answers]
        if len(set(check.answers.values())) > 1 and not agreed and others:
            check.asked.append(others[0])
            return others[0]
        if workers == check.workers or len(agreed) == len(check.answers):
            self._settle(check, agreed)
        self.give_up(now_ns)
        return None

    def _settle(self, check: Check, agreed: list[int]) -> None:
        self._checked += 1
        self._news = True
        if len(agreed) == len(check.answers):
            return
        self._differed += 1
        suspects = tuple(sorted(seat for seat in check.answers if seat not in agreed))
        finding = Finding(
            suspects,
            tuple(check.workers[seat] for seat in suspects),
            tuple(sorted(agreed)),
            check.entry.request_id,
            check.first_difference(),
        )
        # Of the same ranks, the newest is enough.
        others = [f for f in self._findings if (f.seats, f.against) != (suspects, finding.against)]
        self._findings = [*others, finding][-FINDINGS_MAX:]

    def forget(self, incarnations: dict[int, int]) -> None:
        """A worker that was started again is not the one that was found."""
        kept = [
            finding
            for finding in self._findings
            if all(
                incarnations.get(seat) == incarnation
                for seat, incarnation in zip(finding.seats, finding.incarnations, strict=True)
            )
        ]
        self._news |= len(kept) < len(self._findings)
        self._findings = kept

    def take_report(self) -> ScrubReport | None:
        """What is known, if it is news."""
        if not self._news:
            return None
        self._news = False
        return ScrubReport(Scrubbed(self._checked, self._differed, tuple(self._findings)))
