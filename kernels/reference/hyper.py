"""Manifold-constrained hyper-connections: several copies of the residual stream (model.md C.2).

The stream h is [R, copies, D]. A sublayer reads a weighted sum of the copies and writes its result
back to all of them, while a doubly stochastic matrix mixes the copies.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.reference.rows import lanewise, matmul_rows, rms_scale, round_bf16


@dataclass(frozen=True)
class MixWeights:
    """One sublayer's projection. n = copies; rows: n for pre, n for post, n*n for the matrix."""

    fn: Tensor  # float32 [(2 + n) * n, n * D]
    scale: Tensor  # float32 [(2 + n) * n]: the three stored scales, spread over their rows
    base: Tensor  # float32 [(2 + n) * n]

    @classmethod
    def from_stored(cls, fn: Tensor, scale: Tensor, base: Tensor, copies: int) -> "MixWeights":
        """Take the three stored scales (pre, post, matrix) apart."""
        counts = torch.tensor([copies, copies, copies * copies])
        return cls(fn, scale.repeat_interleave(counts), base)


@dataclass(frozen=True)
class Mix:
    """What a sublayer needs to read from and write to the stream; float32."""

    pre: Tensor  # [R, n]: weights with which the next sublayer reads
    post: Tensor  # [R, n]: weights with which this sublayer's result is added to each copy
    comb: Tensor  # [R, n, n]: copy k receives sum_j comb[j, k] * copy j


def mix(h: Tensor, weights: MixWeights, *, iters: int, hc_eps: float, eps: float) -> Mix:
    """Weights of one sublayer from the stream h, float32 [R, n, D]."""
    copies = h.shape[1]
    z = h.flatten(1)
    m = matmul_rows(z, weights.fn) * rms_scale(z, eps) * weights.scale + weights.base
    gates = lanewise(torch.sigmoid, m[:, : 2 * copies])
    comb = sinkhorn(m[:, 2 * copies :], copies, iters=iters, eps=hc_eps)
    return Mix(gates[:, :copies] + hc_eps, gates[:, copies:] * 2, comb)


def sinkhorn(logits: Tensor, copies: int, *, iters: int, eps: float) -> Tensor:
    """Make each row's square matrix doubly stochastic.

    Softmax over k plus eps, a pass over columns, then iters - 1 times rows and columns; a pass
    divides by (sum + eps).

    Args:
        logits: float32 [R, n * n], row-major (j, k).

    Returns:
        float32 [R, n, n].
    """
    # Rows of the batch lie innermost: numpy then works on whole vectors with little overhead, and
    # each sum of n values has a written order.
    a = logits.t().contiguous().view(copies, copies, -1)
    a = lanewise(torch.exp, a - a.amax(dim=1, keepdim=True))
    matrix: npt.NDArray[np.float32] = a.numpy()
    total = np.empty(matrix.shape[1:], np.float32)
    by_row, by_column = np.moveaxis(matrix, 1, 0), matrix
    _sum_slices(by_row, total)
    matrix /= total[:, None]
    matrix += np.float32(eps)
    _divide_by_sums(by_column, total, eps)
    for _ in range(iters - 1):
        _divide_by_sums(by_row, total, eps)
        _divide_by_sums(by_column, total, eps)
    return torch.from_numpy(matrix).permute(2, 0, 1).contiguous()


def _sum_slices(slices: npt.NDArray[np.float32], total: npt.NDArray[np.float32]) -> None:
    """total = slices[0] + slices[1] + ..., from left to right."""
    np.add(slices[0], slices[1], out=total)
    for part in slices[2:]:
        np.add(total, part, out=total)


def _divide_by_sums(
    slices: npt.NDArray[np.float32], total: npt.NDArray[np.float32], eps: float
) -> None:
    _sum_slices(slices, total)
    np.add(total, np.float32(eps), out=total)
    np.divide(slices, total, out=slices)


def collapse(h: Tensor, weights: Tensor) -> Tensor:
    """sum_c weights_c * h_c -> bf16 values [R, D]; h [R, n, D], weights [R, n]."""
    total = h[:, 0] * weights[:, :1]
    for copy in range(1, h.shape[1]):
        total += h[:, copy] * weights[:, copy : copy + 1]
    return round_bf16(total)


def expand(y: Tensor, h: Tensor, mixed: Mix) -> Tensor:
    """The stream after a sublayer: copy k = post_k * y + sum_j comb[j, k] * h_j, bf16 values.

    Args:
        y: float32 [R, D], the sublayer's result.
        h: float32 [R, n, D], the stream that the sublayer read.
    """
    comb = mixed.comb.unsqueeze(-1)
    total = comb[:, 0] * h[:, :1]
    for copy in range(1, h.shape[1]):
        total += comb[:, copy] * h[:, copy : copy + 1]
    return round_bf16(mixed.post.unsqueeze(-1) * y.unsqueeze(1) + total)


def mean_copies(h: Tensor) -> Tensor:
    """Plain mean of the copies, bf16 values [R, D]: what the draft model reads."""
    total = h[:, 0]
    for copy in range(1, h.shape[1]):
        total = total + h[:, copy]
    return round_bf16(total / h.shape[1])
