"""The clamped gated activation of every expert (model.md C.7)."""

import torch
from torch import Tensor

from phalanx.kernels.reference.rows import lanewise, round_bf16


def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """weight * silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args:
        gate_up: float32 [R, 2 * I], the gate half first.
        weights: float32 [R], the routing weights, applied before the down projection.

    Returns:
        bf16 values [R, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    a = lanewise(torch.nn.functional.silu, gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return round_bf16(a if weights is None else weights.unsqueeze(-1) * a)
