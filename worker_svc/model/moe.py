"""The mixture-of-experts sublayer, and the interface through which rows reach their experts."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.ops import (
    add_picks,
    matmul_rows,
    q8_roundtrip,
    route,
    run_experts,
    swiglu,
    swiglu_q8,
)
from phalanx.kernels.reference.rows import TILE, round_bf16
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.gpu_weights import GpuWeights
from phalanx.worker_svc.model.layers import MoeWeights
from phalanx.worker_svc.model.step import LayerContext


class Experts(Protocol):
    """Runs rows on routed experts, wherever those are."""

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Any:
        """Start.

        Args:
            layer: backbone layer, or num_hidden_layers + draft stage.
            x: bf16 [R, D], what the experts multiply: already through Q8.
            topk_idx: int64 [R, k], logical experts; of a captured step -1 for no expert, whose result is
                multiplied by nothing.
            topk_weights: float32 [R, k].
            copy_keys: int64 [R], chooses among copies of an expert.

        Returns:
            What `combine` needs.
        """

    def combine(self, handle: Any) -> Tensor:
        """Finish: the result of each row and pick, bf16 [R, k, D], not summed."""


class LocalExperts:
    """All experts on this rank: expert e in slot e."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Tensor:
        return run_picks(self._weights, layer, x, topk_idx, topk_weights)

    def combine(self, handle: Tensor) -> Tensor:
        return handle


def run_picks(
    weights: Weights, layer: int, x: Tensor, slots: Tensor, topk_weights: Tensor
) -> Tensor:
    """Rows [R, D] through the experts in these slots [R, k], all of them here: bf16 [R, k, D]."""
    num_rows, num_topk = slots.shape
    rows = x.repeat_interleave(num_topk, dim=0)
    pairs = run_expert_pairs(weights, layer, slots.flatten(), rows, topk_weights.flatten())
    return pairs.view(num_rows, num_topk, x.shape[1])


def visit(experts: Experts, config: ModelConfig, layer: int) -> None:
    """Take part in a layer without rows: other ranks' rows may need the experts that are here."""
    num_topk = config.num_experts_per_tok
    handle = experts.dispatch(
        layer,
        torch.empty((0, config.hidden_size), dtype=torch.bfloat16),
        torch.empty((0, num_topk), dtype=torch.int64),
        torch.empty((0, num_topk)),
        torch.empty(0, dtype=torch.int64),
    )
    experts.combine(handle)


def run_expert_pairs(
    weights: Weights, layer: int, slot_ids: Tensor, x_rows: Tensor, pair_weights: Tensor
) -> Tensor:
    """Run (row, expert) pairs; a pair's result does not depend on the other pairs.

    Args:
        layer: backbone layer, or num_hidden_layers + draft stage.
        slot_ids: int64 [P], slots of this rank.
        x_rows: bf16 [P, D], already through Q8.
        pair_weights: float32 [P], routing weights; they enter before the down projection.

    Returns:
        bf16 [P, D].
    """
    dim, inter = weights.config.hidden_size, weights.config.moe_intermediate_size
    if len(slot_ids) == 0:
        return x_rows.new_empty((0, dim))
    if isinstance(weights, GpuWeights):
        limit = weights.config.swiglu_limit
        return run_experts(weights.pool(layer), slot_ids, x_rows, pair_weights, limit)
    # Packed experts are unpacked one at a time, to bound what is unpacked at once.
    longest = 1 if weights.packs_experts else len(slot_ids)
    places, spans, num_tiles = _tiles(slot_ids.numpy(), len(weights.slots(layer)), longest)
    x = torch.zeros((num_tiles * TILE, dim))
    x[places] = x_rows.float()
    scale = torch.zeros(num_tiles * TILE)
    scale[places] = pair_weights
    x = x.view(num_tiles, TILE, dim)
    gate = torch.empty((num_tiles, TILE, inter))
    up = torch.empty_like(gate)
    for slots, tiles in spans:
        _products(x[tiles], weights.expert_matrices(layer, 0, slots), gate[tiles])
        _products(x[tiles], weights.expert_matrices(layer, 1, slots), up[tiles])
    a = swiglu(
        round_bf16(gate).view(-1, inter),
        round_bf16(up).view(-1, inter),
        weights.config.swiglu_limit,
        scale,
    )
    a = q8_roundtrip(a).view(num_tiles, TILE, inter)
    y = torch.empty((num_tiles, TILE, dim))
    for slots, tiles in spans:
        _products(a[tiles], weights.expert_matrices(layer, 2, slots), y[tiles])
    return y.view(-1, dim)[places].bfloat16()


def _products(tiles: Tensor, weights: Tensor, out: Tensor) -> None:
    """Tile by tile, with a weight [out, in] each or one for all."""
    torch.bmm(tiles, weights.transpose(1, 2).expand(tiles.shape[0], -1, -1), out=out)


def _tiles(
    slot_ids: npt.NDArray[np.int64], num_slots: int, longest: int
) -> tuple[Tensor, list[tuple[slice, slice]], int]:
    """Gather the pairs of each slot in tiles.

    Returns:
        Each pair's row in the tiled array, int64 [P]; spans of slots with their spans of tiles,
        either one slot or up to `longest` neighbours of one tile each; and the number of tiles.
    """
    counts = np.bincount(slot_ids, minlength=num_slots)
    tiles = -(-counts // TILE)
    ends = np.cumsum(tiles)
    order = np.argsort(slot_ids, kind="stable")
    first_pair = np.cumsum(counts) - counts
    shift = (ends - tiles) * TILE - first_pair
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) + shift[slot_ids[order]]
    return torch.from_numpy(places), _spans(tiles.tolist(), longest), int(ends[-1])


def _spans(tiles: list[int], longest: int) -> list[tuple[slice, slice]]:
    spans: list[tuple[slice, slice]] = []
    end = 0
    for slot, count in enumerate(tiles):
        if count == 0:
            continue
        beside = count == 1 and bool(spans) and spans[-1][0].stop == slot and tiles[slot - 1] == 1
        if beside and slot - spans[-1][0].start < longest:
            slots, before = spans.pop()
            spans.append((slice(slots.start, slot + 1), slice(before.start, end + 1)))
        else:
            spans.append((slice(slot, slot + 1), slice(end, end + count)))
        end += count
    return spans


def moe(
    context: LayerContext, weights: MoeWeights, experts: Experts, layer: int, x: Tensor
) -> Tensor:
    """The sublayer on normed input x, float32 [P, D] -> bf16 values [P, D]."""
    config = context.config
    num_topk = (
        config.num_experts_per_tok
        if layer < config.num_hidden_layers
        else config.dspark_num_experts_per_tok
    )
    topk_idx, topk_weights = route(
        matmul_rows(x, weights.gate),
        weights.bias,
        num_topk=num_topk,
        scaling=config.routed_scaling_factor,
    )
    context.note("router_experts", layer, topk_idx)
    context.note("router_weights", layer, topk_weights)
    num_rows = context.num_rows  # rows that fill the last tile visit no expert
    if context.filling is not None:
        topk_idx = topk_idx.masked_fill(context.filling.unsqueeze(1), -1)
    context.expert_picks[layer] = topk_idx[:num_rows]
    x = q8_roundtrip(x)
    handle = experts.dispatch(
        layer,
        x[:num_rows].bfloat16(),
        topk_idx[:num_rows],
        topk_weights[:num_rows],
        context.copy_keys[:num_rows],
    )
    total = _shared_expert(weights, config, x)  # while rows travel
    if num_rows == len(total):
        return add_picks(total, experts.combine(handle))
    total[:num_rows] = add_picks(total[:num_rows], experts.combine(handle))
    return total


def _shared_expert(weights: MoeWeights, config: ModelConfig, x: Tensor) -> Tensor:
    gate, up = matmul_rows(x, weights.shared_up, rounded=True).chunk(2, dim=-1)
    a = swiglu_q8(gate, up, config.swiglu_limit)
    return matmul_rows(a, weights.shared_down, rounded=True)
