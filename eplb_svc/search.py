"""Local search from a layout towards the bound: greedy commits early, this takes commitments back.

Two kinds of step, each kept only if the sum of peaks falls by more than it costs: two slots of different
ranks swap their experts (an empty slot makes it a move), or a spare copy of one expert becomes a copy of
another. No step ever puts an expert twice on a rank or takes its last copy away.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.eplb_svc.balance import EMPTY, Counts, Layout, Loads, moe_lb

_BINS_MAX = 32  # steps are added into so many bins while searching; the result is judged on all
_COPIED_MAX = 32  # experts for which a further copy is tried: those that weigh most where it counts


def improve(counts: Counts, layout: Layout, *, rounds_max: int = 200) -> Layout:
    """A layout at least as good as the given one on the whole window. Deterministic.

    Args:
        counts: [steps, experts].
        layout: no expert twice on a rank.
        rounds_max: steps taken at most; each costs some milliseconds at 384 experts on 8 ranks.
    """
    search = Search(counts, layout)
    for _ in range(rounds_max):
        if not (search.swap() or search.recopy()):
            break
    return search.layout if moe_lb(counts, search.layout) < moe_lb(counts, layout) else layout


@dataclass(frozen=True)
class Limits:
    """How far a search may go from where it begins.

    Attributes:
        free: [ranks], the experts that each rank may take at most.
        closed: bool [ranks, slots], empty slots that stay empty.
        move: what it costs that a rank takes an expert, in the unit of `moe_lb`.
        single: what it costs that an expert keeps one copy of two: who loses that rank loads it.
    """

    free: npt.NDArray[np.int64]
    closed: npt.NDArray[np.bool_]
    move: float
    single: float


@dataclass(frozen=True)
class _Step:
    """Cells that change: rank, slot, the expert that is there then."""

    peaks: float  # the sum of peaks after it, with what it costs
    cells: tuple[tuple[int, int, int], ...] = ()


def _binned(counts: Counts) -> Loads:
    """Counts of successive steps added together, so that a round's cost does not grow with the window."""
    edges = np.arange(0, counts.shape[0], max(1, -(-counts.shape[0] // _BINS_MAX)))
    if not edges.size:
        return np.zeros((1, counts.shape[1]))
    return np.add.reduceat(counts, edges, axis=0).astype(np.float64)


class Search:
    """A layout under search, with every rank's load at every step."""

    def __init__(self, counts: Counts, layout: Layout, limits: Limits | None = None) -> None:
        self.layout = layout.copy()
        self._counts = _binned(counts)
        self._experts = counts.shape[1]
        ranks = len(layout)
        self._free = np.full(ranks, layout.size) if limits is None else limits.free.copy()
        self._closed = np.zeros(layout.shape, bool) if limits is None else limits.closed
        mean = float(counts.sum()) / ranks
        self._move = self._single = 0.0
        if limits is not None:
            self._move, self._single = limits.move * mean, limits.single * mean
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

    def _nothing(self) -> _Step:
        """A sum of peaks below this is an improvement, not a rounding error."""
        return _Step(self._peaks * (1 - 1e-9))

    def best(self) -> bool:
        """Take the better one of the best swap and the best new copy, if there is one."""
        return self._take(min(self._find_swap(), self._find_recopy(), key=lambda step: step.peaks))

    def swap(self) -> bool:
        """Take the best swap between the rank that is busiest most and any other; then of the next."""
        return self._take(self._find_swap())

    def recopy(self) -> bool:
        """Turn the spare copy (or empty slot) that helps most into a copy of another expert."""
        return self._take(self._find_recopy())

    def _take(self, step: _Step) -> bool:
        for rank, slot, expert in step.cells:
            self.layout[rank, slot] = expert
            self._free[rank] -= expert != EMPTY
        if step.cells:
            self._refresh()
        return bool(step.cells)

    def _find_swap(self) -> _Step:
        by_weight = np.argsort(
            -(self._busy * (self._busy == self._busy.max(0))).sum(1), kind="stable"
        )
        for rank in by_weight.tolist():
            offers = [self._best_swap(rank, o) for o in range(len(self._busy)) if o != rank]
            if not offers:
                break
            peaks, other, mine, theirs = min(offers)
            if peaks < self._nothing().peaks:
                given, taken = int(self.layout[rank, mine]), int(self.layout[other, theirs])
                return _Step(peaks, ((rank, mine, taken), (other, theirs, given)))
        return self._nothing()

    def _best_swap(self, a: int, b: int) -> tuple[float, int, int, int]:
        """(sum of peaks, b, slot of a, slot of b)."""
        if max(self._free[a], self._free[b]) < 1:
            return np.inf, b, 0, 0
        mine, theirs = self.layout[a], self.layout[b]
        moved = self._share[:, theirs][:, None, :] - self._share[:, mine][:, :, None]
        rest = np.delete(self._busy, [a, b], axis=0)
        others = rest.max(0) if len(rest) else np.zeros(self._busy.shape[1])
        peaks = np.maximum(
            self._busy[a][:, None, None] + moved, self._busy[b][:, None, None] - moved
        )
        total = np.maximum(peaks, others[:, None, None]).sum(0)
        gives, takes = mine != EMPTY, theirs != EMPTY
        total += self._move * (gives[:, None] * 1.0 + takes)
        total[gives & self._on_rank[b][mine], :] = np.inf
        total[:, takes & self._on_rank[a][theirs]] = np.inf
        total[self._closed[a], :] = total[:, self._closed[b]] = np.inf
        if self._free[a] < 1:
            total[:, takes] = np.inf
        if self._free[b] < 1:
            total[gives, :] = np.inf
        best = int(total.argmin())
        return float(total.flat[best]), b, *divmod(best, total.shape[1])

    def _find_recopy(self) -> _Step:
        best = self._nothing()
        may = (self.layout == EMPTY) | (self._copies[self.layout] > 1)
        heavy = self._heavy()
        for rank, slot in np.argwhere(may & ~self._closed & (self._free[:, None] > 0)).tolist():
            old = int(self.layout[rank, slot])
            total = self._recopied(rank, old, heavy) + self._move
            if old != EMPTY and self._copies[old] == 2:
                total += self._single
            at = int(total.argmin())
            if total[at] < best.peaks:
                best = _Step(float(total[at]), ((rank, slot, int(heavy[at])),))
        return best

    def _heavy(self) -> npt.NDArray[np.int64]:
        """The experts that make most of the peaks: only a copy of one of them lowers any. Ascending."""
        on_busiest = self._on_rank[self._busy.argmax(0)]  # [steps, experts]
        weight = (self._share[:, :-1] * on_busiest).sum(0)
        return np.sort(np.argsort(-weight, kind="stable")[:_COPIED_MAX])

    def _recopied(self, rank: int, old: int, experts: npt.NDArray[np.int64]) -> Loads:
        """For each of these, the sum of peaks with it in the place of `old` on `rank`."""
        busy = self._busy.copy()
        if old != EMPTY:
            busy[rank] -= self._share[:, old]
            rise = self._counts[:, old] / (self._copies[old] - 1) - self._share[:, old]
            for other in np.flatnonzero(self._on_rank[:, old]):
                if other != rank:
                    busy[other] += rise
        share = self._counts[:, experts] / (self._copies[experts] + 1)  # [steps, experts]
        fall = share - self._share[:, experts]
        added = np.where(
            self._on_rank[:, None, experts], fall[None], 0.0
        )  # [ranks, steps, experts]
        added[rank] = share
        total: Loads = (busy[:, :, None] + added).max(0).sum(0)
        total[self._on_rank[rank, experts]] = np.inf
        return total
