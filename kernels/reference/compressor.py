"""Compressed entries: how the tokens of a group become one latent vector (model.md C.5)."""

import torch
from torch import Tensor

from phalanx.kernels.reference.rows import lanewise, round_bf16


def pool_pairs(kv: Tensor, scores: Tensor) -> Tensor:
    """Per-channel softmax over the scores of two tokens, then their weighted sum.

    Args:
        kv, scores: float32 [M, 2, d], the even token first.

    Returns:
        bf16 values [M, d], not yet normed.
    """
    weights = lanewise(torch.exp, scores - scores.amax(dim=1, keepdim=True))
    first, second = weights[:, 0], weights[:, 1]
    total = first + second
    return round_bf16(first / total * kv[:, 0] + second / total * kv[:, 1])
