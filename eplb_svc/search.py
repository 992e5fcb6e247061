"""Local search from a layout towards the bound: greedy commits early, this takes commitments back.

Two kinds of step, each kept only if the sum of peaks falls: two slots of different ranks swap their
experts (an empty slot makes it a move), or a spare copy of one expert becomes a copy of another. No
step ever puts an expert twice on a rank or takes its last copy away.
"""

import numpy as np

from phalanx.eplb_svc.balance import EMPTY, Counts, Layout, Loads, moe_lb

_BINS_MAX = 32  # steps are added into so many bins while searching; the result is judged on all


def improve(counts: Counts, layout: Layout, *, rounds_max: int = 200) -> Layout:
    """A layout at least as good as the given one on the whole window. Deterministic.

    Args:
        counts: [steps, experts].
        layout: no expert twice on a rank.
        rounds_max: steps taken at most; each costs some milliseconds at 384 experts on 8 ranks.
    """
    state = _State(_binned(counts), layout)
    for _ in range(rounds_max):
        if not (state.swap() or state.recopy()):
            break
    return state.layout if moe_lb(counts, state.layout) < moe_lb(counts, layout) else layout


def _binned(counts: Counts) -> Loads:
    """Counts of successive steps added together, so that a round's cost does not grow with the window."""
    edges = np.arange(0, counts.shape[0], max(1, -(-counts.shape[0] // _BINS_MAX)))
    if not edges.size:
        return np.zeros((1, counts.shape[1]))
    return np.add.reduceat(counts, edges, axis=0).astype(np.float64)


class _State:
    """A layout under search, with every rank's load at every step."""

    def __init__(self, counts: Loads, layout: Layout) -> None:
        self.layout = layout.copy()
        self._counts = counts
        self._experts = counts.shape[1]
        self._refresh()

    def _refresh(self) -> None:
        self._on_rank = np.zeros((self.layout.shape[0], self._experts), dtype=bool)
        rank, slot = np.nonzero(self.layout != EMPTY)
        self._on_rank[rank, self.layout[rank, slot]] = True
        self._copies = self._on_rank.sum(0)
        # A last column of zeros: what an empty slot (-1) weighs.
        share = self._counts / np.maximum(self._copies, 1)
        self._share = np.concatenate([share, np.zeros((len(share), 1))], axis=1)
        self._busy = self._share[:, self.layout].sum(2).T  # [ranks, steps]
        self._peaks = float(self._busy.max(0).sum())

    def _enough(self) -> float:
        """A sum of peaks below this is an improvement, not a rounding error."""
        return self._peaks * (1 - 1e-9)

    def swap(self) -> bool:
        """Take the best swap between the rank that is busiest most and any other; then of the next."""
        by_weight = np.argsort(
            -(self._busy * (self._busy == self._busy.max(0))).sum(1), kind="stable"
        )
        for rank in by_weight.tolist():
            offers = [self._best_swap(rank, o) for o in range(len(self._busy)) if o != rank]
            if not offers:
                return False
            peaks, other, mine, theirs = min(offers)
            if peaks < self._enough():
                cells = [rank, other], [mine, theirs]
                self.layout[cells] = self.layout[cells][::-1]
                self._refresh()
                return True
        return False

    def _best_swap(self, a: int, b: int) -> tuple[float, int, int, int]:
        """(sum of peaks, b, slot of a, slot of b)."""
        mine, theirs = self.layout[a], self.layout[b]
        moved = self._share[:, theirs][:, None, :] - self._share[:, mine][:, :, None]
        rest = np.delete(self._busy, [a, b], axis=0)
        others = rest.max(0) if len(rest) else np.zeros(self._busy.shape[1])
        peaks = np.maximum(
            self._busy[a][:, None, None] + moved, self._busy[b][:, None, None] - moved
        )
        total = np.maximum(peaks, others[:, None, None]).sum(0)
        total[(mine != EMPTY) & self._on_rank[b][mine], :] = np.inf
        total[:, (theirs != EMPTY) & self._on_rank[a][theirs]] = np.inf
        best = int(total.argmin())
        return float(total.flat[best]), b, *divmod(best, total.shape[1])

    def recopy(self) -> bool:
        """Turn the spare copy (or empty slot) that helps most into a copy of another expert."""
        best = (self._enough(), -1, -1, -1)
        for rank, slot in np.argwhere(
            (self.layout == EMPTY) | (self._copies[self.layout] > 1)
        ).tolist():
            total = self._recopied(rank, int(self.layout[rank, slot]))
            expert = int(total.argmin())
            if total[expert] < best[0]:
                best = (float(total[expert]), rank, slot, expert)
        _, rank, slot, expert = best
        if rank < 0:
            return False
        self.layout[rank, slot] = expert
        self._refresh()
        return True

    def _recopied(self, rank: int, old: int) -> Loads:
        """For each expert, the sum of peaks with it in the place of `old` on `rank`; [experts]."""
        busy = self._busy.copy()
        if old != EMPTY:
            busy[rank] -= self._share[:, old]
            rise = self._counts[:, old] / (self._copies[old] - 1) - self._share[:, old]
            for other in np.flatnonzero(self._on_rank[:, old]):
                if other != rank:
                    busy[other] += rise
        share = self._counts / (self._copies + 1)  # [steps, experts]
        fall = share - self._share[:, :-1]
        added = np.where(self._on_rank[:, None, :], fall[None], 0.0)  # [ranks, steps, experts]
        added[rank] = share
        total: Loads = (busy[:, :, None] + added).max(0).sum(0)
        total[self._on_rank[rank]] = np.inf
        return total
