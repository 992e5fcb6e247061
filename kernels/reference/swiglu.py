"""The clamped gated activation of every expert (model.md C.7)."""

from torch import Tensor
from torch.nn.functional import silu

from phalanx.kernels.reference.quant import q8_roundtrip
from phalanx.kernels.reference.rows import lanewise, round_bf16


def swiglu(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """weight * silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args:
        gate, up: float32 [R, I].
        weights: float32 [R], the routing weights, applied before the down projection.

    Returns:
        bf16 values [R, I].
    """
    a = lanewise(silu, gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
    return round_bf16(a if weights is None else a.mul_(weights.unsqueeze(-1)))


def swiglu_q8(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """What is left of `swiglu` after Q8, as float32: the down projection's input."""
    return q8_roundtrip(swiglu(gate, up, limit, weights))
