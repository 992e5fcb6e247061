"""Gathers expert counts and keeps a plan of where copies should go. Pure: reports in, plans out.

A window is the last reports of every member rank; each report stands for one step of the window. A
plan is published, with the balance it predicts, and counted as refused when it would not beat the
placement in force by a margin: applying plans to a running group is the supervisor's business.
"""

from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.eplb_svc.balance import EMPTY, lower_bound, moe_lb, plan, worth_applying
from phalanx.protocol.messages import ExpertCounts, LayerBalance
from phalanx.protocol.placement import Placement
from phalanx.protocol.topology import Topology

WINDOW_REPORTS = 64  # reports kept: the window a plan is made from
PLAN_PERIOD_NS = 10 * 10**9  # a new plan at most this often
MARGIN = 0.02  # of moe_lb: less is not worth moving weights for
_MEANINGFUL_ROWS = 1024  # fewer rows in the window say nothing about the load

Int = npt.NDArray[np.int64]


class EplbCore:
    """Reports must be of the current epoch; a new epoch starts a new window."""

    def __init__(self) -> None:
        self._epoch = 0
        self._current: Placement | None = None
        self._reports: deque[Int] = deque(maxlen=WINDOW_REPORTS)
        self._fresh = False  # a report came since the last plan
        self._planned_ns: int | None = None
        self.balances: tuple[LayerBalance, ...] = ()
        self.placement: Placement | None = None
        self.applied = 0
        self.refused = 0

    def on_topology(self, topology: Topology) -> None:
        """Plan for these members from now on."""
        if topology.epoch == self._epoch or not topology.placement:
            return
        self._epoch = topology.epoch
        self._current = msgspec.msgpack.decode(topology.placement, type=Placement)
        self._reports.clear()
        self._fresh = False

    def on_counts(self, report: ExpertCounts) -> str | None:
        """Take a report into the window. Returns why not, if it is not usable."""
        if self._current is None or report.epoch != self._epoch:
            return None  # of another membership: expected around a change, worth nothing now
        shape = (len(self._current.physical_to_logical), self._current.num_experts)
        if (report.layers, report.experts) != shape or len(report.counts) != 8 * shape[0] * shape[
            1
        ]:
            return f"counts for {report.layers} layers x {report.experts} experts, the model has {shape}"
        self._reports.append(np.frombuffer(report.counts, np.int64).reshape(shape))
        self._fresh = True
        return None

    def plan_age_s(self, now_ns: int) -> float | None:
        return None if self._planned_ns is None else (now_ns - self._planned_ns) / 1e9

    def tick(self, now_ns: int) -> bool:
        """Make a new plan when one is due. Returns whether it was made."""
        due = self._planned_ns is None or now_ns - self._planned_ns >= PLAN_PERIOD_NS
        if not (due and self._fresh and self._current is not None):
            return False
        window = np.stack(self._reports)  # [reports, layers, experts]
        if int(window[:, 0].sum()) < _MEANINGFUL_ROWS:
            return False
        self._fresh, self._planned_ns = False, now_ns
        current = self._current
        ranks = len(current.seats)
        layouts, balances, better = [], [], 0
        for layer, seats in enumerate(current.physical_to_logical):
            counts = window[:, layer]
            layout = plan(counts, ranks, current.slots_per_rank)
            better += worth_applying(counts, np.array(seats), layout, margin=MARGIN)
            bound = lower_bound(counts, ranks, current.slots_per_rank)
            used = int((layout != EMPTY).sum())
            balances.append(LayerBalance(layer, moe_lb(counts, layout), bound, used))
            layouts.append(tuple(tuple(int(e) for e in rank) for rank in layout))
        self.balances = tuple(balances)
        self.refused += better == 0
        self.placement = Placement(
            current.version + 1,
            current.num_experts,
            current.slots_per_rank,
            current.seats,
            tuple(layouts),
        )
        return True
