"""Gathers expert counts, plans where copies should go, and asks for what is worth it. Pure: reports in, plans out.

A window is the last reports of every member rank; each report stands for one step of the window. A plan that
does not beat the placement in force by a margin is counted as refused; any other goes to the supervisor, which
has the running group use it, or says why not.
"""

from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.eplb_svc.planning import Planning
from phalanx.protocol.config import EplbConfig
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import (
    Error,
    ExpertCounts,
    LayerBalance,
    Rebalance,
    Rebalanced,
)
from phalanx.protocol.placement import Placement
from phalanx.protocol.topology import Topology

WINDOW_REPORTS = 64  # reports kept: the window a plan is made from
# After a plan that could not be applied: the first pause, doubled each time, and the longest.
PAUSE_S = 60.0
PAUSE_S_MAX = 600.0
REST = 9  # after each plan, times as long as it took: planning takes a tenth of a core at most
_S = 10**9

Int = npt.NDArray[np.int64]


class EplbCore:
    """Reports must be of the current epoch; a new epoch starts a new window."""

    def __init__(self, config: EplbConfig | None = None) -> None:
        self._config = config or EplbConfig()
        self._epoch = 0
        self._current: Placement | None = None
        self._reports: deque[Int] = deque(maxlen=WINDOW_REPORTS)
        self._fresh = False  # a report came since the last plan
        self._planned_ns: int | None = None  # when the last plan was begun
        self._planning: Planning | None = None
        self._asked: Rebalance | None = None  # and not answered yet
        self._ask_ns = 0  # when to say it, again
        self._call = 0
        self._pause_s = 0.0  # after the last plan that could not be applied
        self._paused_until_ns = 0
        self.balances: tuple[LayerBalance, ...] = ()
        self.placement: Placement | None = None
        self.applied = 0
        self.refused = 0
        self.refusal = ""  # why the last one that was refused was

    @property
    def busy(self) -> bool:
        """Whether a plan is in the making."""
        return self._planning is not None

    @property
    def members(self) -> tuple[int, ...]:
        return () if self._current is None else self._current.seats

    def on_topology(self, topology: Topology) -> None:
        """Plan for these members, from this placement, from now on."""
        if not topology.placement:
            return
        current = msgspec.msgpack.decode(topology.placement, type=Placement)
        if (topology.epoch, current) == (self._epoch, self._current):
            return
        self._planning = None
        if topology.epoch != self._epoch:
            self._reports.clear()
            self._fresh = False
            self._pause_s, self._paused_until_ns = 0.0, 0
        self._epoch, self._current = topology.epoch, current

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

    def on_answer(self, answer: Rebalanced | Error, now_ns: int) -> None:
        """What became of the plan that was asked for."""
        if self._asked is None or answer.call != self._asked.call:
            return
        elsewhere, self._asked = self._asked.epoch != self._epoch, None
        if isinstance(answer, Rebalanced):
            self.applied += 1
            self._pause_s = 0.0
            return
        self.refused += 1
        self.refusal = answer.message
        if not elsewhere:  # the same plan again would mostly end in the same way
            self._pause_s = min(max(PAUSE_S, 2 * self._pause_s), PAUSE_S_MAX)
            self._paused_until_ns = now_ns + int(self._pause_s * _S)

    def plan_age_s(self, now_ns: int) -> float | None:
        return None if self.placement is None else (now_ns - (self._planned_ns or 0)) / _S

    def tick(self, now_ns: int, slots: Mapping[int, int]) -> bool:
        """Begin a plan when one is due, or go a little further with it. Returns whether one is ready now.

        Args:
            slots: of each member, the expert slots of a layer that it has; 0: any number.
        """
        if self._planning is None and not self._begin(now_ns, slots):
            return False
        planning, current = self._planning, self._current
        assert planning is not None and current is not None and self._planned_ns is not None
        if not planning.step(self._config.margin):
            return False
        self._planning = None
        took_ns = now_ns - self._planned_ns
        self._paused_until_ns = max(self._paused_until_ns, now_ns + REST * took_ns)
        self.balances = tuple(planning.balances)
        self.placement = planning.placement or current
        if planning.placement is None:
            self.refused += 1
            self.refusal = (
                f"not worth it: the balance would go from {planning.before:.3f} to"
                f" {planning.after:.3f} by {planning.moved} copies, and"
                f" {self._config.margin} is asked for beside what they cost"
            )
        elif self._config.rebalance:
            self._call += 1
            self._asked = Rebalance(
                self._call,
                self._epoch,
                msgspec.msgpack.encode(planning.placement),
                planning.before,
                planning.after,
                round(took_ns / 1e6, 3),
            )
            self._ask_ns = now_ns
        return True

    def _begin(self, now_ns: int, slots: Mapping[int, int]) -> bool:
        if self._asked is not None or not self._fresh or self._current is None:
            return False
        period_ns = int(self._config.period_s * _S)
        if self._planned_ns is not None and now_ns - self._planned_ns < period_ns:
            return False
        window = np.stack(self._reports)  # [reports, layers, experts]
        if now_ns < self._paused_until_ns or int(window[:, 0].sum()) < self._config.min_rows:
            return False
        self._fresh, self._planned_ns = False, now_ns
        self._planning = Planning(window, self._current, slots, self._config.spare_slots)
        return True

    def take_ask(self, now_ns: int) -> Rebalance | None:
        """What to say to the supervisor now: until it answers, again and again."""
        if self._asked is None or now_ns < self._ask_ns:
            return None
        self._ask_ns = now_ns + COMMAND_RETRY_MS * 1_000_000
        return self._asked
