"""Free blocks hold what no token ever made: a step that still writes one, or a copy that reads one, is found."""

from phalanx.scheduler_svc.blocks import BlockPool
from sim.hash_worker import HashWorker

POISON = -13


class Poison:
    """Of one scheduler's pool, whichever it has now."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._free: set[int] = set()

    def look(self, pool: BlockPool, worker: HashWorker | None) -> None:
        """After whatever the scheduler did: what it has freed is poisoned."""
        if worker is None:
            self._pool, self._free = None, set()
            return
        if pool is not self._pool:
            self._pool, self._free = pool, set()
        free = set(pool._free)
        worker.blocks[list(free - self._free)] = POISON
        self._free = free

    def check(self, worker: HashWorker) -> None:
        """After a step: raises AssertionError when it has written a block that was free."""
        at = sorted(self._free)
        written = [at[i] for i in (worker.blocks[at] != POISON).any(axis=1).nonzero()[0]]
        assert not written, f"free blocks {written} were written"
