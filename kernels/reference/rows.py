"""Arithmetic whose result for a row never depends on the other rows: the base of exact serving.

A library may choose another order of summation for another number of rows, and the last elements of
a vector loop may take a scalar path with other rounding. Both would change a token when a neighbour
joins the batch. So every matrix product runs as a batch of equal products of `TILE` rows, and every
transcendental runs over whole groups of vector lanes. `worker_svc.model.invariance` checks both on
the machine at hand. `exact_rows(False)` gives all of that up: the yardstick that
exactness is measured against (`phalanx bench model`), and a control in the tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Final

import torch
from torch import Tensor

from phalanx.kernels.matrix import Fp8Matrix, Matrix
from phalanx.kernels.reference.quant import q8_roundtrip

TILE: Final = 8  # rows of one matrix product
LANES: Final = 64  # at least two vectors of every instruction set, the unit of torch's vector loops

_exact = True


def exact_rows(on: bool) -> None:
    """Whether the rows of this process are computed alike in every batch; they are unless told."""
    global _exact
    _exact = on


def are_rows_exact() -> bool:
    return _exact


@cache
def constant(value: float) -> Tensor:
    """A number as a float32 tensor: with a Python number torch takes twice as long for small tensors."""
    return torch.tensor(value, dtype=torch.float32)


def round_bf16(x: Tensor) -> Tensor:
    """float32 -> the nearest bf16 values, kept as float32."""
    return x.bfloat16().float()


def padded(num_rows: int) -> int:
    """The number of rows after filling the last tile."""
    return -(-num_rows // TILE) * TILE if _exact else num_rows


def pad_rows(x: Tensor, fill: float = 0.0) -> Tensor:
    """[R, ...] -> [padded(R), ...]; the new rows hold `fill`."""
    missing = padded(x.shape[0]) - x.shape[0]
    if missing == 0:
        return x
    return torch.cat((x, x.new_full((missing, *x.shape[1:]), fill)))


def matmul_rows(x: Tensor, weight: Matrix, *, rounded: bool = False) -> Tensor:
    """x @ weight.T, each row alone.

    Args:
        x: float32 [R, K].
        weight: [N, K]; float32, or a form that is widened to it first.
        rounded: round the result to bf16 values.

    Returns:
        float32 [R, N]. Not `torch.matmul`, which would fold the tiles into one product of R rows.
    """
    product = _matmul_rows(x, weight)
    return round_bf16(product) if rounded else product


def _matmul_rows(x: Tensor, weight: Matrix) -> Tensor:
    num_rows, depth = x.shape
    weight = weight.dequantize() if isinstance(weight, Fp8Matrix) else weight.float()
    if not _exact:
        return x @ weight.t()
    if num_rows == 0:
        return x.new_empty((0, weight.shape[0]))
    if weight.shape[0] == 1:  # would become a product with a vector, which has no tiles
        return _matmul_rows(x, weight.expand(2, -1))[:, :1]
    tiles = pad_rows(x).view(-1, TILE, depth)
    product = torch.bmm(tiles, weight.t().expand(tiles.shape[0], -1, -1))
    product = product.view(-1, weight.shape[0])
    return product if num_rows % TILE == 0 else product[:num_rows]


def lanewise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an element-wise function so that no element falls into a scalar remainder loop."""
    count = x.numel()
    missing = -count % LANES
    if missing == 0 or not _exact:
        return function(x.contiguous())
    flat = torch.cat((x.reshape(-1), x.new_zeros(missing)))
    return function(flat)[:count].view(x.shape)


def sum_columns(x: Tensor) -> Tensor:
    """[..., n] -> [..., 1], added from left to right."""
    total = x[..., :1]
    for column in range(1, x.shape[-1]):
        total = total + x[..., column : column + 1]
    return total


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, [..., 1]."""
    return x.square().mean(dim=-1, keepdim=True).add_(constant(eps)).rsqrt_()


def rms_norm_q8(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What is left of `rms_norm` after Q8, as float32."""
    return q8_roundtrip(rms_norm(x, weight, eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (model.md C.0): float32 [..., D], weight [D] -> bf16 values as float32."""
    return round_bf16((x * rms_scale(x, eps)).mul_(weight))
