"""Sequences that have ended: kept until the gateway has their finals, remembered a while after. Pure.

A final that is not acknowledged is said again; a Submit that comes after the acknowledgement starts
nothing. Both memories are bounded, and losing an entry costs work, never a token: the gateway places
what it misses anew, and the same tokens come out.
"""

from collections import OrderedDict
from itertools import islice

from phalanx.scheduler_svc.state import Key, Sequence

KEPT_MAX = 16_384  # beyond, one is forgotten
KEPT_TTL_NS = 120 * 10**9  # and each after this long
REPEAT_NS = 10**9
REPEATS_PER_TURN = 64
ENDED_MAX = 16_384


class Finals:
    def __init__(self) -> None:
        # Until `drop`; the one due first, first.
        self.kept: OrderedDict[Key, Sequence] = OrderedDict()
        self._ended: OrderedDict[Key, int] = OrderedDict()  # attempt

    def keep(self, sequences: list[Sequence], now_ns: int) -> None:
        for sequence in sequences:
            self.kept[sequence.key] = sequence
            sequence.finished_ns, sequence.final_due_ns = now_ns, now_ns + REPEAT_NS

    def too_many(self) -> list[Sequence]:
        """Those that must be forgotten, so that no more than KEPT_MAX are kept."""
        more = len(self.kept) - KEPT_MAX
        return list(islice(self.kept.values(), more)) if more > 0 else []

    def drop(self, sequence: Sequence) -> None:
        """Acknowledged, or replaced by a later attempt."""
        self.kept.pop(sequence.key, None)
        self.remember(sequence.key, sequence.attempt)

    def remember(self, key: Key, attempt: int) -> None:
        """Attempts up to this one have ended and never start again."""
        self._ended[key] = max(attempt, self._ended.pop(key, -1))
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def last_attempt(self, key: Key) -> int:
        """The newest attempt that has ended and was acknowledged; -1: none known."""
        return self._ended.get(key, -1)

    def due(self, now_ns: int) -> tuple[list[Sequence], list[Sequence]]:
        """(finals to say again, sequences whose time is up, to be dropped)."""
        again: list[Sequence] = []
        over: list[Sequence] = []
        for _ in range(REPEATS_PER_TURN):
            first = self._first()
            if first is None or first.final_due_ns > now_ns:
                break
            if now_ns - first.finished_ns > KEPT_TTL_NS:
                over.append(self.kept.pop(first.key))
            else:
                again.append(first)
                first.final_due_ns = now_ns + REPEAT_NS
                self.kept.move_to_end(first.key)
        return again, over

    @property
    def next_due_ns(self) -> int | None:
        first = self._first()
        return None if first is None else first.final_due_ns

    def _first(self) -> Sequence | None:
        return next(iter(self.kept.values()), None)
