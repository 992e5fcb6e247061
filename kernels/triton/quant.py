# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Cache records and activation formats as kernels: the bits of `kernels.reference.quant`.

Each program takes a block of groups, wherever they lie in their rows: a group of 16 or 32 values has
one scale and depends on nothing else, so a row's bits cannot depend on other rows. Exact for every
finite input: scales come from integer arithmetic on the bits or from an IEEE division, roundings
are to nearest, ties to even. Non-finite input never traps; what it becomes is unspecified.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.quant import GROUP, KV_GROUP
from phalanx.kernels.triton import formats
from phalanx.kernels.triton.configs import Config, config

_DEFAULT: Final[Config] = {"BLOCK": 32, "num_warps": 4}  # groups a program


@triton.jit(do_not_specialize=["num_groups"])
def _q8_kernel(x_ptr, out_ptr, num_groups, SHUFFLED: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (group < num_groups)[:, None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    values = formats.q8_values(x).to(out_ptr.dtype.element_ty)
    if SHUFFLED:
        values = formats.shuffled(values, BLOCK, 32)
    tl.store(out_ptr + at, values, mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def _qf4_idx_kernel(x_ptr, out_ptr, num_groups, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (group < num_groups)[:, None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    exponent = formats.exponent_of(
        tl.max(tl.abs(x), axis=1, keep_dims=True), formats.IDX_FLOOR, formats.PER_E2M1_MAX
    )
    codes = formats.to_e2m1(x * formats.inverse_of(exponent))
    values = formats.from_e2m1(codes) * formats.from_ue8m0(exponent)
    tl.store(out_ptr + at, values, mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def _decode_window_kernel(
    record_ptr, out_ptr, num_groups, record_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, g = (group // GROUPS).to(tl.int64), group % GROUPS
    lane = tl.arange(0, 32)[None, :]
    mask = (group < num_groups)[:, None]
    at = (row * record_stride + g * 32)[:, None] + lane
    codes = tl.load(record_ptr + at, mask=mask, other=0)
    scale_at = (row * record_stride + GROUPS * 32 + g)[:, None]
    scale = tl.load(record_ptr + scale_at, mask=mask, other=0)
    values = formats.from_e4m3(codes) * formats.from_ue8m0(scale)
    tl.store(out_ptr + ((row * GROUPS + g) * 32)[:, None] + lane, values, mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def _decode_fp4_kernel(
    record_ptr,
    out_ptr,
    num_groups,
    record_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, g = (group // GROUPS).to(tl.int64), group % GROUPS
    mask = (group < num_groups)[:, None]
    at = (row * record_stride + g * HALF)[:, None] + tl.arange(0, HALF)[None, :]
    packed = tl.load(record_ptr + at, mask=mask, other=0)
    scale_at = (row * record_stride + GROUPS * HALF + g)[:, None]
    scale = tl.load(record_ptr + scale_at, mask=mask, other=0)
    if GROUP == 16:
        factor = formats.from_e4m3(scale)
    else:
        factor = formats.from_ue8m0(scale)
    values = formats.unpack_e2m1(packed, BLOCK, GROUP) * factor
    lane = tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + ((row * GROUPS + g) * GROUP)[:, None] + lane, values, mask=mask)


def q8_roundtrip(
    x: Tensor, *, out_dtype: torch.dtype = torch.float32, settings: Config | None = None
) -> Tensor:
    """What is left of x after Q8: bf16 or float32 [..., K], K a multiple of 32 -> [..., K].

    Bits of the reference. The values are bf16 values: `out_dtype` bfloat16 loses nothing.
    """
    return _roundtrip(_q8_kernel, "q8_roundtrip", x, out_dtype, settings, SHUFFLED=False)


def q8_shuffled(x: Tensor) -> Tensor:
    """`q8_roundtrip` as bf16, in the order of columns that `formats.shuffled` gives."""
    return _roundtrip(_q8_kernel, "q8_roundtrip", x, torch.bfloat16, None, SHUFFLED=True)


def qf4_idx_roundtrip(
    x: Tensor, *, out_dtype: torch.dtype = torch.float32, settings: Config | None = None
) -> Tensor:
    """What is left of x after QF4_idx: bf16 or float32 [..., K], K a multiple of 32 -> [..., K].

    Bits of the reference. The values are bf16 values.
    """
    return _roundtrip(_qf4_idx_kernel, "qf4_idx_roundtrip", x, out_dtype, settings)


def _roundtrip(
    kernel: Any,
    name: str,
    x: Tensor,
    out_dtype: torch.dtype,
    settings: Config | None,
    **options: bool,
) -> Tensor:
    _check_width(x.shape[-1], GROUP)
    x = x.contiguous()
    out = torch.empty_like(x, dtype=out_dtype)
    num_groups = x.numel() // GROUP
    if num_groups:
        chosen = settings or config(name, str(x.shape[-1]), _DEFAULT)
        grid = (triton.cdiv(num_groups, chosen["BLOCK"]),)
        kernel[grid](x, out, num_groups, **options, **chosen)
    return out


def decode_window(
    record: Tensor, *, out_dtype: torch.dtype = torch.float32, settings: Config | None = None
) -> Tensor:
    """Window records uint8 [..., window_bytes(K)] -> [..., K], bf16 values for what the reference encoded."""
    dim = record.shape[-1] * GROUP // (GROUP + 1)
    return _decode(_decode_window_kernel, record, GROUP, dim, out_dtype, settings)


def decode_compressed(
    record: Tensor, *, out_dtype: torch.dtype = torch.float32, settings: Config | None = None
) -> Tensor:
    """Compressed records uint8 [..., compressed_bytes(K)] -> [..., K], bf16 values."""
    dim = record.shape[-1] * 16 // 9
    return _decode(_decode_fp4_kernel, record, KV_GROUP, dim, out_dtype, settings, GROUP=KV_GROUP)


def decode_index_key(
    record: Tensor, *, out_dtype: torch.dtype = torch.float32, settings: Config | None = None
) -> Tensor:
    """Index key records uint8 [..., index_key_bytes(K)] -> [..., K], bf16 values."""
    dim = record.shape[-1] * 32 // 17
    return _decode(_decode_fp4_kernel, record, GROUP, dim, out_dtype, settings, GROUP=GROUP)


def _decode(
    kernel: Any,
    record: Tensor,
    group: int,
    dim: int,
    out_dtype: torch.dtype,
    settings: Config | None,
    **shape: int,
) -> Tensor:
    rows = record.reshape(-1, record.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = record.new_empty((*record.shape[:-1], dim), dtype=out_dtype)
    num_groups = rows.shape[0] * (dim // group)
    if num_groups:
        chosen = settings or config("decode", f"{group}x{dim}", _DEFAULT)
        grid = (triton.cdiv(num_groups, chosen["BLOCK"]),)
        kernel[grid](rows, out, num_groups, rows.stride(0), GROUPS=dim // group, **shape, **chosen)
    return out


def _check_width(width: int, group: int) -> None:
    if width % group:
        raise ValueError(f"the last dimension is {width}; it must be a multiple of {group}")
