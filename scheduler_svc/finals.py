"""Sequences that have ended: kept until the gateway has their finals, remembered a while after. Pure.

A final that is not acknowledged is said again; a Submit that comes after the acknowledgement starts
nothing. Both memories are bounded, and losing an entry costs work, never a token: the gateway places
what it misses anew, and the same tokens come out.
"""

from collections import OrderedDict, deque

from phalanx.scheduler_svc.state import Key, Sequence

KEPT_MAX = 16_384  # beyond, the oldest is forgotten
KEPT_TTL_NS = 120 * 10**9  # and each after this long
REPEAT_NS = 10**9
REPEATS_PER_TURN = 64
ENDED_MAX = 16_384


class Finals:
    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Sequence] = OrderedDict()  # oldest first
        self._repeats: deque[tuple[int, Sequence]] = deque()  # (due_ns, sequence)
        self._ended: OrderedDict[Key, int] = OrderedDict()  # attempt

    def keep(self, sequence: Sequence, now_ns: int) -> Sequence | None:
        """Keep it until `drop`. Returns one that must be forgotten instead, if there are too many."""
        self._kept[sequence.key] = sequence
        sequence.finished_ns = now_ns
        self._repeats.append((now_ns + REPEAT_NS, sequence))
        return next(iter(self._kept.values())) if len(self._kept) > KEPT_MAX else None

    def drop(self, sequence: Sequence) -> None:
        """Acknowledged, or replaced by a later attempt."""
        self._kept.pop(sequence.key, None)
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
        """(finals to say again, sequences whose time is up)."""
        again: list[Sequence] = []
        over: list[Sequence] = []
        for _ in range(REPEATS_PER_TURN):
            if not self._repeats or self._repeats[0][0] > now_ns:
                break
            _, sequence = self._repeats.popleft()
            if self._kept.get(sequence.key) is not sequence:
                continue
            if now_ns - sequence.finished_ns > KEPT_TTL_NS:
                over.append(sequence)
            else:
                again.append(sequence)
                self._repeats.append((now_ns + REPEAT_NS, sequence))
        return again, over

    @property
    def next_due_ns(self) -> int | None:
        return self._repeats[0][0] if self._repeats else None
