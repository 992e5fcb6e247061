"""Products with a weight as the model speaks of them (model.md C.0): plain, quantized, and in groups."""

import torch
from torch import Tensor

from phalanx.kernels.matrix import Fp8Matrix, Matrix
from phalanx.kernels.reference.quant import q8_roundtrip
from phalanx.kernels.reference.rows import matmul_rows, round_bf16


def linear(x: Tensor, weight: Matrix) -> Tensor:
    """A quantized linear: Q8 of the input, bf16 result.

    Args:
        x: bf16 values [R, K].
        weight: [N, K], float32 with the values of FP8 codes times scales, or as stored.

    Returns:
        bf16 values as float32 [R, N].
    """
    return round_bf16(matmul_rows(q8_roundtrip(x), weight))


def grouped_linear(x: Tensor, weights: Matrix) -> Tensor:
    """Each group of columns with a weight of its own; no Q8 of the input.

    Args:
        x: bf16 values [R, groups, K].
        weights: [groups, N, K], or quantized [groups * N, K], one group's rows after the other's.

    Returns:
        bf16 values as float32 [R, groups * N].
    """
    groups = x.shape[1]
    if isinstance(weights, Fp8Matrix):
        weights = weights.dequantize().view(groups, -1, x.shape[2])
    parts = [matmul_rows(x[:, group], weights[group]) for group in range(groups)]
    return round_bf16(torch.cat(parts, dim=-1))
