"""Rows that another rank computed with an expert which is here, too: taken from a step, computed again.

A pair's result depends on the expert, the row and the routing weight alone. So this rank's copy of the
expert must make the same bits of it as the rank that the row went to.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.moe import run_expert_pairs


@dataclass(frozen=True)
class SampledRow:
    """One pair of a step. `seat` computed it."""

    layer: int
    expert: int
    seat: int
    place: int  # among the pairs of this layer that went there
    x: Tensor  # bf16 [D]
    weight: Tensor  # float32 []


class SampledRows:
    """Takes one row of the next step that has any, when told to.

    Attributes:
        wanted: a step is looked at as it goes; costs nothing otherwise.
        taken: the row, and what the other rank made of it, bf16 [D].
    """

    def __init__(self, weights: Weights, rng: random.Random) -> None:
        self._weights, self._rng = weights, rng
        self._first = 0  # the first layer that is looked at
        self.wanted = False
        self.taken: tuple[SampledRow, Tensor] | None = None

    def want(self) -> None:
        """Look at the next step, from some layer on."""
        self._first = self._rng.randrange(self._weights.config.num_hidden_layers)
        self.wanted = True

    def forget(self) -> None:
        self.wanted, self.taken = False, None

    def look(
        self, layer: int, x: Tensor, topk_idx: Tensor, weights: Tensor, pairs: Mapping[int, Tensor]
    ) -> SampledRow | None:
        """One of the pairs that go to peers, if this rank holds its expert.

        Args:
            x: bf16 [R, D]; topk_idx: int64 [R, k]; weights: float32 [R * k].
            pairs: peer -> flat (row, pick) indices of what goes there.
        """
        if layer < self._first:
            return None
        self.wanted = layer + 1 < self._weights.config.num_hidden_layers  # else not in this step
        held, experts = set(self._weights.slots(layer)), topk_idx.flatten().tolist()
        found = [
            (seat, place, pair)
            for seat, chosen in pairs.items()
            for place, pair in enumerate(chosen.tolist())
            if experts[pair] in held
        ]
        if not found:
            return None
        seat, place, pair = self._rng.choice(found)
        row = x[pair // topk_idx.shape[1]].clone()
        return SampledRow(layer, experts[pair], seat, place, row, weights[pair].clone())

    def take(self, row: SampledRow, results: Tensor) -> None:
        """The peer's results of that layer are here: bf16 [n, D]."""
        self.wanted, self.taken = False, (row, results[row.place].clone())

    def compute_again(self) -> tuple[SampledRow, bool] | None:
        """The row that was taken, which is let go of, and whether our copy of the expert makes the same of it.
        None when there is none, or the expert is not here any more."""
        if self.taken is None:
            return None
        (row, result), self.taken = self.taken, None
        slots = self._weights.slots(row.layer)
        if row.expert not in slots:
            return None
        slot = torch.tensor([slots.index(row.expert)], device=row.x.device)
        ours = run_expert_pairs(
            self._weights, row.layer, slot, row.x.unsqueeze(0), row.weight.unsqueeze(0)
        )[0]
        return row, torch.equal(ours.view(torch.int16), result.to(ours.device).view(torch.int16))
