# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The latent of a pair of tokens as a kernel, element by element."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.triton import formats
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.rows import NO_FMA

_DEFAULT: Final[Config] = {"BLOCK": 512, "num_warps": 2}


@triton.jit
def pool(kv0, kv1, score0, score1):
    """Two tokens' channels, weighted by the softmax of their scores: bf16 values as float32."""
    m = tl.maximum(score0, score1)
    first, second = tl.exp(score0 - m), tl.exp(score1 - m)
    total = first + second
    first, second = tl.math.div_rn(first, total), tl.math.div_rn(second, total)
    return formats.round_bf16(first * kv0 + second * kv1)


@triton.jit
def _pool_pairs_kernel(
    kv_ptr,
    scores_ptr,
    out_ptr,
    kv_stride,
    kv_token,
    scores_stride,
    scores_token,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DIM
    kv = kv_ptr + pair * kv_stride + column
    scores = scores_ptr + pair * scores_stride + column
    y = pool(
        tl.load(kv, mask=mask, other=0.0),
        tl.load(kv + kv_token, mask=mask, other=0.0),
        tl.load(scores, mask=mask, other=0.0),
        tl.load(scores + scores_token, mask=mask, other=0.0),
    )
    tl.store(out_ptr + pair * DIM + column, y, mask=mask)


def pool_pairs(
    kv: Tensor,
    scores: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """Per-channel softmax over the scores of two tokens, then their weighted sum.

    Args:
        kv, scores: float32 [M, 2, d], the even token first; only the last dimension contiguous.

    Returns:
        bf16 values [M, d], not yet normed: before rounding within 2^-21 of the larger |kv| of the
        reference's (the exponential is the GPU's), the rest in its order.
    """
    num_pairs, two, dim = kv.shape
    assert two == 2 and scores.shape == kv.shape and kv.stride(2) == scores.stride(2) == 1
    assert kv.dtype == scores.dtype == torch.float32
    out = torch.empty((num_pairs, dim), dtype=out_dtype, device=kv.device)
    if num_pairs:
        chosen = dict(settings or config("pool_pairs", str(dim), _DEFAULT))
        chosen["BLOCK"] = min(chosen["BLOCK"], triton.next_power_of_2(dim))
        _pool_pairs_kernel[(num_pairs, triton.cdiv(dim, chosen["BLOCK"]))](
            kv,
            scores,
            out,
            kv.stride(0),
            kv.stride(1),
            scores.stride(0),
            scores.stride(1),
            DIM=dim,
            **chosen,
            **NO_FMA,
        )
    return out
