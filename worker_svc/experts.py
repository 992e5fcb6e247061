"""Experts spread over the group: rows travel to a rank that holds the expert, results travel back.

Which copy of an expert a row takes depends on its request and position alone, and changes no number:
a pair's result is the same wherever, and beside whatever, it is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.protocol.placement import Placement, choose_copy, copies
from phalanx.worker_svc.exchange import Exchange
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.moe import run_expert_pairs, visit


@dataclass(frozen=True)
class CopyTable:
    """Where the copies of one layer's experts are."""

    seats: Tensor  # int64 [experts, most copies]
    slots: Tensor  # int64 [experts, most copies], slot at that seat
    counts: Tensor  # int64 [experts]

    @classmethod
    def of(cls, placement: Placement, layer: int) -> "CopyTable":
        held = copies(placement, layer)
        shape = (len(held), max(map(len, held)))
        seats, slots = torch.zeros(2, *shape, dtype=torch.int64)
        for expert, places in enumerate(held):
            for column, (seat, slot) in enumerate(places):
                seats[expert, column], slots[expert, column] = seat, slot
        return cls(seats, slots, torch.tensor([len(places) for places in held]))

    def choose(self, topk_idx: Tensor, copy_keys: Tensor) -> tuple[Tensor, Tensor]:
        """(seat, slot) of each pick, int64 [R, k] both."""
        counts = self.counts[topk_idx]
        column = torch.from_numpy(choose_copy(copy_keys[:, None].numpy(), counts.numpy()))
        return self.seats[topk_idx, column], self.slots[topk_idx, column]


@dataclass(frozen=True)
class Sent:
    """A dispatch under way: which pairs went where."""

    layer: int
    num_rows: int
    num_topk: int
    pairs: dict[int, Tensor]  # seat -> int64 [n], flat (row, pick) indices, in the order stored
    local: tuple[Tensor, Tensor, Tensor]  # slots, rows, weights of the pairs that stay here


class GroupExperts:
    """The `Experts` of a rank within a group. `enter_epoch` before the first step of each epoch."""

    def __init__(self, weights: Weights, seat: int, on_layer: Callable[[], None]) -> None:
        """`on_layer` is called once a layer: the sign of progress of a long step."""
        self._weights, self._seat, self._on_layer = weights, seat, on_layer
        self._tables: list[CopyTable] = []

    def enter_epoch(self, placement: Placement, exchange: Exchange) -> None:
        self._exchange = exchange
        layers = range(self._weights.config.num_hidden_layers)
        self._tables = [CopyTable.of(placement, layer) for layer in layers]

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Sent:
        """Store every pair at the rank that shall compute it (see `Experts.dispatch`)."""
        self._on_layer()
        num_rows, num_topk = topk_idx.shape
        seats, slots = self._tables[layer].choose(topk_idx, copy_keys)
        flat_seats, flat_slots, weights = seats.flatten(), slots.flatten(), topk_weights.flatten()
        self._exchange.begin()
        pairs = {
            seat: (flat_seats == seat).nonzero()[:, 0]
            for seat in (*self._exchange.peers, self._seat)
        }
        for peer in self._exchange.peers:
            chosen = pairs[peer]
            self._exchange.send(
                peer, flat_slots[chosen].int(), weights[chosen], x[chosen // num_topk]
            )
        here = pairs[self._seat]
        local = (flat_slots[here], x[here // num_topk], weights[here])
        return Sent(layer, num_rows, num_topk, pairs, local)

    def combine(self, handle: Sent) -> Tensor:
        """Compute what arrived together with what stayed, send results back, gather ours."""
        received = self._exchange.received()
        slots, rows, weights = handle.local
        computed = self._compute(
            handle.layer,
            [slots, *(peer_slots.long() for _, peer_slots, _, _ in received)],
            [rows, *(peer_rows for _, _, _, peer_rows in received)],
            [weights, *(peer_weights for _, _, peer_weights, _ in received)],
        )
        for (peer, *_), results in zip(received, computed[1:], strict=True):
            self._exchange.reply(peer, results)
        hidden = self._weights.config.hidden_size
        out = torch.empty(handle.num_rows * handle.num_topk, hidden, dtype=torch.bfloat16)
        out[handle.pairs[self._seat]] = computed[0]
        for peer, results in self._exchange.results().items():
            out[handle.pairs[peer]] = results
        return out.view(handle.num_rows, handle.num_topk, hidden)

    def serve(self) -> None:
        """A placeholder step: no rows of ours, but every layer's experts for our peers."""
        config = self._weights.config
        for layer in range(config.num_hidden_layers):
            visit(self, config, layer)

    def _compute(
        self, layer: int, slots: list[Tensor], rows: list[Tensor], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        joined = torch.cat(slots)
        if not len(joined):
            return tuple(row_group.clone() for row_group in rows)
        results = run_expert_pairs(
            self._weights, layer, joined, torch.cat(rows), torch.cat(weights)
        )
        return torch.split(results, [len(group) for group in slots])
