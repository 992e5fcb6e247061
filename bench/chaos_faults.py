"""Which fault `phalanx chaos` makes next, and when. Pure: a seed gives the whole schedule."""

import random
from collections import deque
from dataclasses import dataclass

PREFIXES = ("worker", "worker", "scheduler", "gateway", "tokenizer", "kvstore", "eplb")
MEAN_GAP_S = 2.5
SOON_S = 0.12  # a second fault comes within this time, into the recovery from the first
SOON_SHARE = 0.3
STOP_SHARE = 0.25
STOP_MS = (50, 400, 1_200, 4_000)  # a pause is nothing, or a hang: 1.35 s is the bound
# The node gives a process up at its ninth death within a minute, which is not what chaos looks for.
DEATHS_MAX = 6
WINDOW_S = 60.0


@dataclass(frozen=True)
class Fault:
    """One `phalanx inject`, at a time in seconds from the start."""

    at_s: float
    kind: str
    target: str
    ms: int = 0


class Schedule:
    """Faults without end, in order of time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._at_s = 0.0
        self._recent: deque[tuple[float, str]] = deque()

    def next(self, living: list[str]) -> Fault:
        """The next fault, on one of the processes called `living` (sorted names)."""
        rng = self._rng
        soon = rng.random() < SOON_SHARE
        self._at_s += rng.uniform(0, SOON_S) if soon else rng.expovariate(1 / MEAN_GAP_S)
        while self._recent and self._recent[0][0] < self._at_s - WINDOW_S:
            self._recent.popleft()
        # A victim that has had its share leaves the field to others; with all of them spent, wait.
        spent = [name for _, name in self._recent]
        open_to = [name for name in living if spent.count(name) < DEATHS_MAX]
        if not open_to:
            self._at_s = self._recent[0][0] + WINDOW_S + 0.1
            open_to = [self._recent[0][1]]
        prefix = rng.choice(PREFIXES)
        victim = rng.choice([n for n in open_to if n.startswith(prefix)] or open_to)
        self._recent.append((self._at_s, victim))
        if rng.random() < STOP_SHARE:
            return Fault(self._at_s, "stop", victim, rng.choice(STOP_MS))
        return Fault(self._at_s, "kill", victim)
