"""Experts spread over the group: rows travel to a rank that holds the expert, results travel back.

Which copy of an expert a row takes depends on its request and position alone, and changes no number:
a pair's result is the same wherever, and beside whatever, it is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.protocol.placement import EMPTY, LayerSlots, Placement, choose_copy, copies
from phalanx.worker_svc.exchange import Exchange
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.moe import run_expert_pairs, run_picks, visit
from phalanx.worker_svc.sampled_rows import SampledRow, SampledRows


@dataclass(frozen=True)
class CopyTable:
    """Where the copies of one layer's experts are."""

    seats: Tensor  # int64 [experts, most copies]
    slots: Tensor  # int64 [experts, most copies], slot at that seat
    counts: Tensor  # int64 [experts]
    single: bool  # every expert has one copy

    @classmethod
    def of(cls, placement: Placement, layer: int, device: torch.device) -> "CopyTable":
        held = copies(placement, layer)
        counts = torch.tensor([len(places) for places in held])
        most = int(counts.max())
        padded = [places + [(0, 0)] * (most - len(places)) for places in held]
        seats, slots = torch.tensor(padded, dtype=torch.int64).permute(2, 0, 1).contiguous()
        return cls(seats.to(device), slots.to(device), counts.to(device), most == 1)

    def choose(self, topk_idx: Tensor, copy_keys: Tensor) -> tuple[Tensor, Tensor]:
        """(seat, slot) of each pick, int64 [R, k] both."""
        if self.single:  # nothing to choose, and no need to know the picks on the host
            return self.seats[topk_idx, 0], self.slots[topk_idx, 0]
        counts = self.counts[topk_idx].cpu()
        column = torch.from_numpy(choose_copy(copy_keys[:, None].numpy(), counts.numpy()))
        column = column.to(topk_idx.device)
        return self.seats[topk_idx, column], self.slots[topk_idx, column]


@dataclass(frozen=True)
class Sent:
    """A dispatch under way: which pairs went where."""

    layer: int
    num_rows: int
    num_topk: int
    pairs: dict[int, Tensor]  # seat -> int64 [n], flat (row, pick) indices, in the order stored
    local: tuple[Tensor, Tensor, Tensor]  # slots, rows, weights of the pairs that stay here
    sampled: SampledRow | None = None  # of those that went to peers


class OwnExperts:
    """The `Experts` of a rank that holds them all.

    Where they are is read from one table that stays in its place, so that recorded steps follow it.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        layers, experts = weights.config.num_hidden_layers, weights.config.n_routed_experts
        # The last column is that of pick -1, which is none.
        self._slots = torch.full(
            (layers, experts + 1), -1, dtype=torch.int64, device=weights.device
        )

    def enter_epoch(self, placement: Placement, seat: int) -> None:
        """Take the first copy of each expert at this seat: no copy changes a number."""
        index = placement.seats.index(seat)
        slots = torch.full(self._slots.shape, -1, dtype=torch.int64)
        for layer, seats in enumerate(placement.physical_to_logical):
            for slot, expert in reversed(list(enumerate(seats[index]))):
                if expert != EMPTY:
                    slots[layer, expert] = slot
        self._slots.copy_(slots)

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Tensor:
        return run_picks(self._weights, layer, x, self._slots[layer][topk_idx], topk_weights)

    def combine(self, handle: Tensor) -> Tensor:
        return handle


class GroupExperts:
    """The `Experts` of a rank within a group. `enter_epoch` before the first step of each epoch; while
    it runs, `lay_out` each layer of another placement, then `flip` to it between two steps.

    Attributes:
        own: what it does while there are no peers.
    """

    def __init__(
        self,
        weights: Weights,
        seat: int,
        on_layer: Callable[[], None],
        samples: SampledRows | None = None,
    ) -> None:
        """
        Args:
            on_layer: called once a layer: the sign of progress of a long step.
            samples: takes rows that peers computed, for the scrubber.
        """
        self._weights, self._seat, self._on_layer = weights, seat, on_layer
        self._samples = samples
        self._tables: list[CopyTable] = []
        self._coming: list[CopyTable] = []  # of a placement that is not in use yet
        self.own = OwnExperts(weights)
        self._exchange: Exchange | None = None

    @property
    def alone(self) -> bool:
        """Whether all experts are here, with nobody else to serve."""
        return self._exchange is not None and not self._exchange.peers

    def enter_epoch(self, placement: Placement, exchange: Exchange) -> None:
        self._exchange = exchange
        self.own.enter_epoch(placement, self._seat)
        # Layers are all alike until loads differ: work out each kind once, everybody waits for this.
        kinds: dict[LayerSlots, CopyTable] = {}
        for layer, held in enumerate(placement.physical_to_logical):
            if held not in kinds:
                kinds[held] = CopyTable.of(placement, layer, self._weights.device)
        self._tables = [kinds[held] for held in placement.physical_to_logical]
        self._coming = []

    def lay_out(self, placement: Placement, layer: int) -> None:
        """Where rows of the layer go under a placement that may come; layer 0 begins another one."""
        assert layer in (0, len(self._coming))
        self._coming[layer:] = [CopyTable.of(placement, layer, self._weights.device)]

    def flip(self) -> None:
        """Go by what was laid out, from the next step on."""
        assert len(self._coming) == len(self._tables)
        self._tables, self._coming = self._coming, []

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Sent | Tensor:
        """Store every pair at the rank that shall compute it (see `Experts.dispatch`)."""
        assert self._exchange is not None, "an epoch is entered before it runs"
        self._on_layer()
        self._exchange.begin()
        if not self._exchange.peers:
            return self.own.dispatch(layer, x, topk_idx, topk_weights, copy_keys)
        num_rows, num_topk = topk_idx.shape
        device = self._weights.device  # a visit without rows comes from the CPU
        x, topk_idx, topk_weights = x.to(device), topk_idx.to(device), topk_weights.to(device)
        seats, slots = self._tables[layer].choose(topk_idx, copy_keys)
        flat_seats, flat_slots, weights = seats.flatten(), slots.flatten(), topk_weights.flatten()
        pairs = {
            seat: (flat_seats == seat).nonzero()[:, 0]
            for seat in (*self._exchange.peers, self._seat)
        }
        for peer in self._exchange.peers:
            chosen = pairs[peer]
            self._exchange.send(
                peer,
                flat_slots[chosen].int().cpu(),
                weights[chosen].cpu(),
                x[chosen // num_topk].cpu(),
            )
        here = pairs[self._seat]
        local = (flat_slots[here], x[here // num_topk], weights[here])
        sampled = None
        if self._samples is not None and self._samples.wanted and num_rows:
            theirs = {peer: pairs[peer] for peer in self._exchange.peers}
            sampled = self._samples.look(layer, x, topk_idx, weights, theirs)
        return Sent(layer, num_rows, num_topk, pairs, local, sampled)

    def combine(self, handle: Sent | Tensor) -> Tensor:
        """Compute what arrived together with what stayed, send results back, gather ours."""
        if isinstance(handle, Tensor):
            return handle
        assert self._exchange is not None
        received = self._exchange.received()
        slots, rows, weights = handle.local
        device = self._weights.device
        computed = self._compute(
            handle.layer,
            [slots, *(peer_slots.long().to(device) for _, peer_slots, _, _ in received)],
            [rows, *(peer_rows.to(device) for _, _, _, peer_rows in received)],
            [weights, *(peer_weights.to(device) for _, _, peer_weights, _ in received)],
        )
        hidden = self._weights.config.hidden_size
        for (peer, *_), results in zip(received, computed[1:], strict=True):
            self._exchange.reply(peer, results.cpu())
        out = torch.empty(
            handle.num_rows * handle.num_topk, hidden, dtype=torch.bfloat16, device=device
        )
        out[handle.pairs[self._seat]] = computed[0]
        for peer, results in self._exchange.results().items():
            out[handle.pairs[peer]] = results.to(device)
            if handle.sampled is not None and handle.sampled.seat == peer:
                assert self._samples is not None
                self._samples.take(handle.sampled, results)
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
