"""Manifold-constrained hyper-connections: several copies of the residual stream (model.md C.2).

The stream h is [R, copies, D]. A sublayer reads a weighted sum of the copies and writes its result
back to all of them, while a doubly stochastic matrix mixes the copies.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.reference.rows import (
    constant,
    lanewise,
    matmul_rows,
    rms_norm,
    rms_scale,
    round_bf16,
)


@dataclass(frozen=True)
class MixWeights:
    """One sublayer's projection. n = copies; rows: n for pre, n for post, n*n for the matrix."""

    fn: Tensor  # float32 [(2 + n) * n, n * D]
    scale: Tensor  # float32 [(2 + n) * n]: the three stored scales, spread over their rows
    base: Tensor  # float32 [(2 + n) * n]

    @classmethod
    def from_stored(cls, fn: Tensor, scale: Tensor, base: Tensor, copies: int) -> "MixWeights":
        """Take the three stored scales (pre, post, matrix) apart."""
        counts = torch.tensor([copies, copies, copies * copies], device=scale.device)
        rows = copies * (2 + copies)
        return cls(fn, scale.repeat_interleave(counts, output_size=rows), base)


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
    m = matmul_rows(z, weights.fn).mul_(rms_scale(z, eps)).mul_(weights.scale).add_(weights.base)
    gates = lanewise(torch.sigmoid, m[:, : 2 * copies])
    comb = sinkhorn(m[:, 2 * copies :], copies, iters=iters, eps=hc_eps)
    return Mix(gates[:, :copies] + constant(hc_eps), gates[:, copies:] * constant(2.0), comb)


def sinkhorn(logits: Tensor, copies: int, *, iters: int, eps: float) -> Tensor:
    """Make each row's square matrix doubly stochastic.

    Softmax over k plus eps, a pass over columns, then iters - 1 times rows and columns; a pass
    divides by (sum + eps).

    Args:
        logits: float32 [R, n * n], row-major (j, k).

    Returns:
        float32 [R, n, n].
    """
    # Rows of the batch lie innermost: numpy then adds whole vectors, from the first to the last of
    # the n summands, and has little overhead.
    a = logits.t().contiguous().view(copies, copies, -1)
    a = lanewise(torch.exp, a - a.amax(dim=1, keepdim=True))
    if a.is_cuda:
        return _sinkhorn_passes(a, iters=iters, eps=eps).permute(2, 0, 1).contiguous()
    by_column: npt.NDArray[np.float32] = a.numpy()
    by_row = by_column.transpose(1, 0, 2)
    total = np.add.reduce(by_row, axis=0)
    small = np.full_like(total, eps)
    np.divide(by_row, total, out=by_row)
    by_row += np.float32(eps)
    for half in range(2 * iters - 1):
        parts = by_row if half % 2 else by_column
        np.add.reduce(parts, axis=0, out=total)
        np.add(total, small, out=total)
        np.divide(parts, total, out=parts)
    return a.permute(2, 0, 1).contiguous()


def _sinkhorn_passes(a: Tensor, *, iters: int, eps: float) -> Tensor:
    """The passes of `sinkhorn` without numpy: float32 [n, n, R], from exp on."""
    a = a / _sum_slices(a, 1) + eps
    for half in range(2 * iters - 1):
        a = a / (_sum_slices(a, half % 2) + eps)
    return a


def _sum_slices(a: Tensor, dim: int) -> Tensor:
    """Sum over a dimension, from the first slice to the last; the dimension stays."""
    total = a.narrow(dim, 0, 1)
    for place in range(1, a.shape[dim]):
        total = total + a.narrow(dim, place, 1)
    return total


def collapse(h: Tensor, weights: Tensor) -> Tensor:
    """sum_c weights_c * h_c -> bf16 values [R, D]; h [R, n, D], weights [R, n]."""
    return round_bf16(_sum_copies(weights.unsqueeze(-1) * h))


def collapse_norm(h: Tensor, weights: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of what `collapse` gives: a sublayer's input, bf16 values [R, D]."""
    return rms_norm(collapse(h, weights), norm_weight, eps)


def expand(y: Tensor, h: Tensor, mixed: Mix) -> Tensor:
    """The stream after a sublayer: copy k = post_k * y + sum_j comb[j, k] * h_j, bf16 values.

    Args:
        y: float32 [R, D], the sublayer's result.
        h: float32 [R, n, D], the stream that the sublayer read.
    """
    copies = _sum_copies(mixed.comb.unsqueeze(-1) * h.unsqueeze(2))
    return round_bf16((mixed.post.unsqueeze(-1) * y.unsqueeze(1)).add_(copies))


def expand_collapse_norm(
    y: Tensor, h: Tensor, mixed: Mix, pre: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """From one sublayer's result to the next one's input: `expand`, and `collapse_norm` of that."""
    h = expand(y, h, mixed)
    return h, collapse_norm(h, pre, norm_weight, eps)


def mean_copies(h: Tensor) -> Tensor:
    """Plain mean of the copies, bf16 values [R, D]: what the draft model reads."""
    return round_bf16(_sum_copies(h) / h.shape[1])


def _sum_copies(x: Tensor) -> Tensor:
    """Sum over dimension 1, from the first copy to the last.

    Torch adds whole slices along a dimension that is not the innermost; tests compare with the
    written-out sum.
    """
    return x.sum(dim=1)
