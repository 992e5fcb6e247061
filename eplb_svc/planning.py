"""A plan for the group that runs: a better layout within reach of the one in force. Pure, a little at a time.

The running placement stays in use until every rank has its new copies, so these need slots in which it has
no expert. Therefore the plan is an improvement of what is there: at each rank at most as many further experts
of a layer as it has such slots, and afterwards at most as many experts as its fullest layer has now. What
stays at a rank stays in its slot. So the slots that one plan leaves are there for the next one.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from phalanx.eplb_svc.balance import EMPTY, Layout, lower_bound, moe_lb, worth_applying
from phalanx.eplb_svc.search import Limits, Search
from phalanx.protocol.messages import LayerBalance
from phalanx.protocol.placement import Placement, SeatSlots

# In the unit of `moe_lb`, of one layer. An expert that is copied costs memory traffic once; one that keeps a
# single copy costs a load, which everybody waits for, when its rank falls.
MOVE_COST = 0.001
SINGLE_COST = 0.001
_ROUNDS_MAX = 64  # of a layer

Window = npt.NDArray[np.int64]  # [reports, layers, experts]


class Planning:
    """One plan in the making. `step` until it says that it is done; then the attributes are what it came to.

    Args:
        slots: Of each seat, the expert slots of a layer that it has; 0: any number.
        spare: How many more than its fullest layer needs now a rank may use for the change.

    Attributes:
        balances: Of every layer, as planned.
        before, after: Balance over all layers, as it is and as planned.
        placement: What to apply; None while it is being made, and when it is not worth it.
        moved: Experts to be copied.
    """

    def __init__(
        self, window: Window, current: Placement, slots: Mapping[int, int], spare: int
    ) -> None:
        self._window, self._current = window, current
        fullest = [
            max((_held(layer[i]) for layer in current.physical_to_logical), default=0)
            for i in range(len(current.seats))
        ]
        self._fullest = np.array(fullest, np.int64)
        self._limits = [
            min(full + spare, slots.get(seat, 0) or full + spare)
            for seat, full in zip(current.seats, fullest, strict=True)
        ]
        self._search: Search | None = None
        self._rounds = 0
        self._layers: list[tuple[SeatSlots, ...]] = []
        self._gains = 0.0
        self._before = self._after = 0.0
        self.balances: list[LayerBalance] = []
        self.placement: Placement | None = None
        self.moved = 0

    @property
    def before(self) -> float:
        return self._before / max(1, len(self.balances))

    @property
    def after(self) -> float:
        return self._after / max(1, len(self.balances))

    def step(self, margin: float) -> bool:
        """Go a little further: one round of one layer. Returns whether the plan is done.

        Args:
            margin: what it must gain over all layers, its moves paid for, to be worth it.
        """
        if len(self._layers) == len(self._current.physical_to_logical):
            return True
        layer = len(self._layers)
        if self._search is None:
            self._search, self._rounds = self._begun(layer), 0
        self._rounds += 1
        if self._rounds <= _ROUNDS_MAX and self._search.best():
            return False
        self._end(layer, self._search.layout)
        self._search = None
        if len(self._layers) < len(self._current.physical_to_logical):
            return False
        if self.moved and self._gains >= margin * len(self._layers):
            self.placement = self._placed()
        return True

    def _begun(self, layer: int) -> Search:
        rows = self._current.physical_to_logical[layer]
        layout = self._packed(layer)
        closed = np.arange(layout.shape[1])[None] >= self._fullest[:, None]
        taken = [_held(row[:limit]) for row, limit in zip(rows, self._limits, strict=True)]
        free = np.array([limit - n for limit, n in zip(self._limits, taken, strict=True)], np.int64)
        return Search(self._window[:, layer], layout, Limits(free, closed, MOVE_COST, SINGLE_COST))

    def _packed(self, layer: int) -> Layout:
        """Experts of each rank, then empty slots, as many as its fullest layer needs."""
        layout = np.full((len(self._fullest), int(self._fullest.max())), EMPTY, np.int64)
        for index, row in enumerate(self._current.physical_to_logical[layer]):
            held = [expert for expert in row if expert != EMPTY]
            layout[index, : len(held)] = held
        return layout

    def _end(self, layer: int, found: Layout) -> None:
        """Keep what was found if it pays; the layer stays as it is otherwise."""
        counts, rows = self._window[:, layer], self._current.physical_to_logical[layer]
        layout = self._packed(layer)
        planned = tuple(
            _aligned(row, set(wanted.tolist()) - {EMPTY}, limit)
            for row, wanted, limit in zip(rows, found, self._limits, strict=True)
        )
        moved = sum(
            len(set(new) - set(old) - {EMPTY}) for old, new in zip(rows, planned, strict=True)
        )
        before, after = moe_lb(counts, layout), moe_lb(counts, found)
        cost = moved * MOVE_COST
        if moved and worth_applying(counts, layout, found, margin=0.0, moving_cost=cost):
            self.moved += moved
            self._gains += before - after - cost
        else:
            planned, found, after = rows, layout, before
        bound = lower_bound(counts, len(rows), layout.shape[1])
        used = int((found != EMPTY).sum())
        self.balances.append(LayerBalance(layer, after, bound, used, before))
        self._before, self._after = self._before + before, self._after + after
        self._layers.append(planned)

    def _placed(self) -> Placement:
        current = self._current
        width = max(current.slots_per_rank, *(len(row) for layer in self._layers for row in layer))
        padded = tuple(
            tuple((*row, *(EMPTY,) * (width - len(row))) for row in layer) for layer in self._layers
        )
        return Placement(current.version + 1, current.num_experts, width, current.seats, padded)


def _held(row: SeatSlots) -> int:
    return sum(expert != EMPTY for expert in row)


def _aligned(row: SeatSlots, wanted: set[int], limit: int) -> SeatSlots:
    """The wanted experts with those that stay in their slots, and new ones in slots that are empty now."""
    slots = [expert if expert in wanted else EMPTY for expert in row]
    slots += [EMPTY] * (limit - len(slots))
    empty = (at for at in range(limit) if at >= len(row) or row[at] == EMPTY)
    for expert in sorted(wanted - set(row)):
        slots[next(empty)] = expert
    while len(slots) > len(row) and slots[-1] == EMPTY:
        slots.pop()
    return tuple(slots)
