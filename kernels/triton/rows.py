# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Work on one row at a time: RMS norm, rotation, the gated activation, each with Q8 where it follows.

A row is summed by one program whose shape depends on the row's width alone, so its bits depend on
nothing else. Products that the reference rounds before it adds are not contracted (`NO_FMA`).
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.rope import RopeTable
from phalanx.kernels.triton import formats
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.quant import q8_roundtrip

__all__ = [
    "add_picks",
    "q8_roundtrip",
    "rms_norm",
    "rms_norm_q8",
    "rotate",
    "swiglu",
    "swiglu_q8",
]

NO_FMA: Final[dict[str, Any]] = {"enable_fp_fusion": False}
_SWIGLU: Final[Config] = {"BLOCK": 32, "num_warps": 4}  # groups of 32 a program
_ROTATE: Final[Config] = {"HEADS": 16, "num_warps": 4}


# --- RMS norm --------------------------------------------------------------------------------------


@triton.jit
def norm_row(x, weight, eps, DIM: tl.constexpr):
    """A row, float32 [...], zeros past its DIM values -> bf16 values, as float32."""
    mean = tl.math.div_rn(tl.sum(x * x, axis=0), DIM * 1.0)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
    return formats.round_bf16(x * scale * weight)


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    eps,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    Q8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < DIM
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = norm_row(x, weight, eps, DIM)
    if Q8:
        y = formats.q8_row(y, PADDED)
    tl.store(out_ptr + row * DIM + column, y, mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """RMSNorm (model.md C.0): bf16 or float32 [..., D], weight [D] -> bf16 values [..., D].

    The mean of squares is summed in another order than the reference's: the scale is within 2^-21 of
    it, so a value is at most one bf16 step away, and equal unless it lies that near a midpoint.
    """
    return _norm(x, weight, eps, out_dtype, q8=False)


def rms_norm_q8(
    x: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`q8_roundtrip(rms_norm(x))` in one pass, the same bits as the two; D a multiple of 32."""
    if x.shape[-1] % 32:
        raise ValueError(f"the last dimension is {x.shape[-1]}; it must be a multiple of 32")
    return _norm(x, weight, eps, out_dtype, q8=True)


def _norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, q8: bool) -> Tensor:
    dim = x.shape[-1]
    rows = aligned_rows(x.reshape(-1, dim))
    assert weight.shape == (dim,) and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if rows.shape[0]:
        _norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            eps,
            DIM=dim,
            PADDED=max(32, triton.next_power_of_2(dim)),
            Q8=q8,
            num_warps=row_warps(dim),
            **NO_FMA,
        )
    return out


def aligned_rows(x: Tensor) -> Tensor:
    """[R, D], copied if rows are not dense or not aligned: how a row is loaded decides how it is summed."""
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def row_warps(dim: int) -> int:
    """Warps for a row of this width: part of the order of summation, hence not tuned by rows."""
    return 1 if dim <= 128 else 4 if dim <= 4096 else 8


# --- Rotary embedding ------------------------------------------------------------------------------


@triton.jit
def turn(even, odd, cos_even, cos_odd, sin_even, sin_odd):
    """Turn pairs of channels; the sines carry the sign of the partner channel. float32, unrounded."""
    return even * cos_even + odd * sin_even, odd * cos_odd + even * sin_odd


@triton.jit
def pairs_of(ptr, PAIRS: tl.constexpr):
    """The even and the odd elements of 2 * PAIRS consecutive ones, float32 [PAIRS] each."""
    both = tl.load(ptr + tl.arange(0, 2 * PAIRS)).to(tl.float32)
    return tl.split(tl.reshape(both, (PAIRS, 2)))


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    num_heads,
    x_stride,
    head_stride,
    table_stride,
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
    GATHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = row
    if GATHER:
        at = tl.load(positions_ptr + row).to(tl.int64)
    cos_even, cos_odd = pairs_of(cos_ptr + at * table_stride, PAIRS)
    sin_even, sin_odd = pairs_of(sin_ptr + at * table_stride, PAIRS)
    if INVERSE:
        sin_even, sin_odd = -sin_even, -sin_odd
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 2 * PAIRS)
    places = row * x_stride + (head * head_stride)[:, None] + START + column[None, :]
    mask = (head < num_heads)[:, None]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
    even, odd = turn(
        even, odd, cos_even[None, :], cos_odd[None, :], sin_even[None, :], sin_odd[None, :]
    )
    y = tl.reshape(tl.join(even, odd), (HEADS, 2 * PAIRS))
    tl.store(x_ptr + places, formats.round_bf16(y), mask=mask)


def rotate(
    x: Tensor,
    table: RopeTable,
    *,
    positions: Tensor | None = None,
    inverse: bool = False,
    settings: Config | None = None,
) -> Tensor:
    """Turn the last channels of each vector in place, to the reference's bits.

    Args:
        x: bf16 or float32 [R, d] or [R, heads, d], the last dimension contiguous; overwritten.
        table: float32 rows of the R positions, [R, rope_dim], rope_dim a power of two; or of all
            positions, if `positions` picks from them.
        positions: int64 or int32 [R], within the table.
        inverse: turn back, as `table.inverse()` would.

    Returns:
        x itself.
    """
    vectors = x if x.dim() == 3 else x.unsqueeze(1)
    num_rows, num_heads, dim = vectors.shape
    rope_dim = table.cos.shape[-1]
    assert vectors.stride(2) == 1 and table.cos.stride() == table.sin.stride()
    assert table.cos.stride(1) == 1 and rope_dim <= dim
    if num_rows == 0:
        return x
    chosen = dict(settings or config("rotate", str(rope_dim), _ROTATE))
    chosen["HEADS"] = min(chosen["HEADS"], triton.next_power_of_2(num_heads))
    _rotate_kernel[(num_rows, triton.cdiv(num_heads, chosen["HEADS"]))](
        vectors,
        table.cos,
        table.sin,
        table.cos if positions is None else positions,
        num_heads,
        vectors.stride(0),
        vectors.stride(1),
        table.cos.stride(0),
        START=dim - rope_dim,
        PAIRS=rope_dim // 2,
        INVERSE=inverse,
        GATHER=positions is not None,
        **chosen,
        **NO_FMA,
    )
    return x


# --- The gated activation --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=["weights_ptr"])
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    weights_ptr,
    out_ptr,
    num_groups,
    gate_stride,
    up_stride,
    limit,
    GROUPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    Q8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = group // GROUPS, group % GROUPS * 32
    lane = tl.arange(0, 32)[None, :]
    mask = (group < num_groups)[:, None]
    gate_at = (row * gate_stride + column)[:, None] + lane
    up_at = (row * up_stride + column)[:, None] + lane
    gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    a = gate / (1.0 + tl.exp(-gate)) * up
    if WEIGHTED:
        a = a * tl.load(weights_ptr + row, mask=group < num_groups, other=0.0)[:, None]
    a = formats.round_bf16(a)
    if Q8:
        a = formats.q8_values(a)
    tl.store(out_ptr + (group * 32)[:, None] + lane, a, mask=mask)


def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    weights: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """weight * silu(min(gate, limit)) * clamp(up, -limit, limit), bf16 values [R, I].

    Args:
        gate, up: bf16 or float32 [R, I], I a multiple of 32; rows may be strided (halves of one
            tensor).
        weights: float32 [R].

    Before it is rounded to bf16, a value is within 2^-19 of the reference's (the GPU's exponential
    and quotient): at most one bf16 step away, and equal unless it lies that near a midpoint.
    """
    return _swiglu(gate, up, limit, weights, out_dtype, settings, q8=False)


def swiglu_q8(
    gate: Tensor,
    up: Tensor,
    limit: float,
    weights: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """`q8_roundtrip(swiglu(...))` in one pass, the same bits as the two."""
    return _swiglu(gate, up, limit, weights, out_dtype, settings, q8=True)


def _swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    weights: Tensor | None,
    out_dtype: torch.dtype,
    settings: Config | None,
    q8: bool,
) -> Tensor:
    num_rows, width = gate.shape
    assert up.shape == gate.shape and gate.stride(1) == up.stride(1) == 1
    assert weights is None or (weights.shape == (num_rows,) and weights.is_contiguous())
    if width % 32:
        raise ValueError(f"the last dimension is {width}; it must be a multiple of 32")
    out = torch.empty((num_rows, width), dtype=out_dtype, device=gate.device)
    num_groups = num_rows * (width // 32)
    if num_groups:
        chosen = settings or config("swiglu", str(width), _SWIGLU)
        _swiglu_kernel[(triton.cdiv(num_groups, chosen["BLOCK"]),)](
            gate,
            up,
            gate if weights is None else weights,
            out,
            num_groups,
            gate.stride(0),
            up.stride(0),
            limit,
            GROUPS=width // 32,
            WEIGHTED=weights is not None,
            Q8=q8,
            **chosen,
            **NO_FMA,
        )
    return out


# --- The experts' results --------------------------------------------------------------------------


@triton.jit
def _add_picks_kernel(
    shared_ptr, routed_ptr, out_ptr, DIM: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DIM
    total = tl.load(shared_ptr + row * DIM + column, mask=mask, other=0.0).to(tl.float32)
    for pick in tl.static_range(PICKS):
        at = (row * PICKS + pick) * DIM + column
        total += tl.load(routed_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + column, formats.round_bf16(total), mask=mask)


def add_picks(
    shared: Tensor,
    routed: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """The experts' sublayer's result: shared + routed[:, 0] + routed[:, 1] + ..., bf16 values [R, D].

    Args:
        shared: bf16 values, contiguous [R, D].
        routed: bf16 values, contiguous [R, k, D].

    Added in float32 in this order, as in `worker_svc.model.moe`, to its bits.
    """
    num_rows, picks, dim = routed.shape
    assert shared.shape == (num_rows, dim)
    assert shared.is_contiguous() and routed.is_contiguous()
    out = torch.empty((num_rows, dim), dtype=out_dtype, device=routed.device)
    if num_rows:
        chosen = dict(settings or config("add_picks", str(dim), {"BLOCK": 1024, "num_warps": 4}))
        chosen["BLOCK"] = min(chosen["BLOCK"], triton.next_power_of_2(dim))
        _add_picks_kernel[(num_rows, triton.cdiv(dim, chosen["BLOCK"]))](
            shared, routed, out, DIM=dim, PICKS=picks, **chosen
        )
    return out
