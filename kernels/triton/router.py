# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Which experts a token goes to, from the gate's logits: one program a row, no floats compared twice.

Selection runs on integers that order like (score + bias, lower id first), so that ties, NaN and
infinities all have one outcome and no expert is picked twice.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.triton.rows import NO_FMA

_LONGEST: Final = 4096  # experts that one warp's registers take


@triton.jit
def _log1p(t):
    """log(1 + t) for t in [0, 1], within 2^-22: an odd series in t / (2 + t), at most 1/3."""
    s = tl.math.div_rn(t, 2.0 + t)
    z = s * s
    p = z * (1.0 / 15.0) + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    return 2.0 * s + 2.0 * s * (z * p)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), accurate relative to itself on both sides."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + _log1p(tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize_on_alignment=["idx_ptr", "weights_ptr"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    idx_ptr,
    weights_ptr,
    logits_stride,
    scaling,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOPK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    mask = expert < EXPERTS
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=mask, other=0.0)
    scores = tl.math.sqrt_rn(_softplus(logits))
    biased = scores + tl.load(bias_ptr + expert, mask=mask, other=0.0)
    biased = tl.where(biased == 0.0, 0.0, biased)  # -0 ties with 0
    bits = biased.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(mask, (ordered << 32) | (PADDED - 1 - expert).to(tl.int64), -(2**63))
    total = 0.0
    for pick in tl.static_range(TOPK):
        best = tl.max(key, axis=0)
        chosen = PADDED - 1 - (best & 0xFFFFFFFF)
        score = tl.sum(tl.where(expert == chosen, scores, 0.0), axis=0)
        total += score
        key = tl.where(expert == chosen, -(2**63), key)
        tl.store(idx_ptr + row * TOPK + pick, chosen)
        tl.store(weights_ptr + row * TOPK + pick, score)
    tl.debug_barrier()  # the scores of the picks are read back, all at once
    pick = tl.arange(0, triton.next_power_of_2(TOPK))
    at = weights_ptr + row * TOPK + pick
    score = tl.load(at, mask=pick < TOPK, other=0.0)
    total += 1e-20
    tl.store(at, tl.math.div_rn(score, total) * scaling, mask=pick < TOPK)


def route(logits: Tensor, bias: Tensor, *, num_topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts by score + bias, the lower id first among equals; weights from the scores alone.

    Args:
        logits: float32 [R, experts], the gate's product; rows may be strided.
        bias: float32 [experts].

    Returns:
        topk_idx int64 [R, k], best first, always k different experts, and topk_weights float32
        [R, k].

    From equal logits a score, sqrt(softplus), is within 2^-20 of the reference's where |logit| <= 20,
    so only experts whose biased scores lie closer than that may change places; the weights' sum and
    quotients are the reference's, in its order. A NaN logit counts as the best, as in the reference.
    """
    num_rows, num_experts = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert bias.shape == (num_experts,) and bias.is_contiguous()
    assert num_topk <= num_experts <= _LONGEST
    topk_idx = torch.empty((num_rows, num_topk), dtype=torch.int64, device=logits.device)
    topk_weights = torch.empty((num_rows, num_topk), dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            logits,
            bias,
            topk_idx,
            topk_weights,
            logits.stride(0),
            scaling,
            EXPERTS=num_experts,
            PADDED=triton.next_power_of_2(num_experts),
            TOPK=num_topk,
            num_warps=1,
            **NO_FMA,
        )
    return topk_idx, topk_weights
