# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Engram as kernels: hash, gather of table rows from host memory, gate and addition in one pass.

The tables, about 100 GB each, stay in host memory that is registered with CUDA (a tensor over a
registered mapping, or a pinned one). A warp that reads host memory waits about a microsecond, so
`gather` gives every 256-byte row a warp of its own and has all rows in flight at once.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.quant import dequant_engram_rows
from phalanx.kernels.triton import formats
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.rows import NO_FMA

_HASH: Final[Config] = {"BLOCK": 32, "num_warps": 4}
_GATE: Final[Config] = {"BLOCK": 1024, "num_warps": 4, "num_stages": 3}


# --- Which rows ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["units_ptr"])
def _hash_kernel(
    units_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    units_stride,
    GRAMS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, PADDED)
    mask = row < num_rows
    both = mask[:, None] & (head < HEADS)[None, :]
    units = units_ptr + row * units_stride
    hashes = tl.load(units, mask=mask, other=0) * tl.load(multipliers_ptr)
    for back in tl.static_range(1, GRAMS):
        unit = tl.load(units + back, mask=mask, other=0)
        hashes = hashes ^ (unit * tl.load(multipliers_ptr + back))
        column = (back - 1) * HEADS + head
        prime = tl.load(primes_ptr + column, mask=head < HEADS, other=1)
        offset = tl.load(offsets_ptr + column, mask=head < HEADS, other=0)
        left = hashes[:, None] % prime[None, :]
        left = tl.where(left < 0, left + prime[None, :], left)  # the sign of the divisor
        out = out_ptr + row[:, None] * ((GRAMS - 1) * HEADS) + column[None, :]
        tl.store(out, left + offset[None, :], mask=both)


def hash_rows(
    units: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    *,
    settings: Config | None = None,
) -> Tensor:
    """Table rows of the n-grams that end at each position, equal to the reference.

    Args:
        units: int64 [R, n], compressed ids, nearest first; rows may be strided.
        multipliers: int64 [n].
        primes: int64 [n - 1, heads], positive.
        offsets: int64 [(n - 1) * heads].

    Returns:
        int64 [R, (n - 1) * heads]. Products wrap around at 64 bits, remainders are not negative.
    """
    num_rows, grams = units.shape
    heads = primes.shape[1]
    assert primes.shape[0] == grams - 1 and units.stride(1) == 1
    assert primes.is_contiguous() and offsets.is_contiguous() and multipliers.is_contiguous()
    out = torch.empty((num_rows, (grams - 1) * heads), dtype=torch.int64, device=units.device)
    if num_rows:
        chosen = settings or config("hash_rows", str(heads), _HASH)
        _hash_kernel[(triton.cdiv(num_rows, chosen["BLOCK"]),)](
            units,
            multipliers,
            primes,
            offsets,
            out,
            num_rows,
            units.stride(0),
            GRAMS=grams,
            HEADS=heads,
            PADDED=triton.next_power_of_2(heads),
            **chosen,
        )
    return out


# --- Their vectors ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_table_rows"], do_not_specialize_on_alignment=["ids_ptr"])
def _gather_kernel(
    codes_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,
    num_table_rows,
    DIM: tl.constexpr,
    Q8: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + at)
    known = (row >= 0) & (row < num_table_rows)
    row = tl.where(known, row, 0)
    group = tl.arange(0, DIM // 32)
    lane = tl.arange(0, 32)
    column = group[:, None] * 32 + lane[None, :]
    codes = tl.load(codes_ptr + row * DIM + column)
    scales = tl.load(scales_ptr + row * (DIM // 32) + group)
    values = formats.from_e4m3(codes) * formats.from_ue8m0(scales)[:, None]
    values = tl.where(known, values, 0.0)
    if Q8:
        values = formats.q8_values(values)
    tl.store(out_ptr + at * DIM + column, formats.round_bf16(values))


def gather(
    codes: Tensor,
    scales: Tensor,
    ids: Tensor,
    *,
    q8: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Rows of a table, dequantized, equal to `dequant_engram_rows(codes[ids], scales[ids])`.

    Args:
        codes: e4m3 bytes (uint8 or float8_e4m3fn), contiguous [rows, dim], dim a power of two from
            32 on; in host memory that the GPU can read (pinned or registered), or on the GPU.
        scales: ue8m0 bytes, contiguous [rows, dim / 32], likewise.
        ids: int64, contiguous [...], on the GPU; an id outside the table gives zeros.
        q8: also `q8_roundtrip`, what the linear after it multiplies.

    Returns:
        bf16 values [..., dim] on the GPU.
    """
    num_table_rows, dim = codes.shape
    assert dim >= 32 and dim & (dim - 1) == 0 and scales.shape == (num_table_rows, dim // 32)
    assert codes.is_contiguous() and scales.is_contiguous() and ids.is_contiguous()
    out = torch.empty((*ids.shape, dim), dtype=out_dtype, device=ids.device)
    if ids.numel():
        _gather_kernel[(ids.numel(),)](
            codes.view(torch.uint8),
            scales.view(torch.uint8),
            ids,
            out,
            num_table_rows,
            DIM=dim,
            Q8=q8,
            num_warps=1,
        )
    return out


def gather_on_host(codes: Tensor, scales: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """The plain way for ids that the host knows: the host picks the rows, one copy brings them over.

    Args:
        codes, scales: host tensors as for `gather`.
        ids: int64 [...] on the host.
        out: bf16 [..., dim] on the GPU; the copy is asynchronous if the picked rows are pinned, which
            costs an allocation on first use only.
    """
    picked = dequant_engram_rows(codes.view(torch.uint8)[ids], scales.view(torch.uint8)[ids])
    if out.device.type == "cuda":
        picked = picked.pin_memory()
    return out.copy_(picked, non_blocking=True)


# --- Into the stream -------------------------------------------------------------------------------


@triton.jit
def _gate_kernel(
    h_ptr,
    key_ptr,
    weight_ptr,
    value_ptr,
    gates_ptr,
    out_ptr,
    key_stride,
    key_copy,
    value_stride,
    eps,
    root,
    COPIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row, copy = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h_ptr += (row * COPIES + copy) * DIM
    key_ptr += row * key_stride + copy * key_copy
    weight_ptr += copy * DIM
    dots = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    key_squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, DIM, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        mask = column < DIM
        h = tl.load(h_ptr + column, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        dots += h * weight * key
        squares += h * h
        key_squares += key * key
    mean = tl.math.div_rn(tl.sum(squares, axis=0), DIM * 1.0)
    key_mean = tl.math.div_rn(tl.sum(key_squares, axis=0), DIM * 1.0)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
    scale = scale * tl.math.div_rn(1.0, tl.math.sqrt_rn(key_mean + eps))
    dot = tl.sum(dots, axis=0) * scale * root
    size = tl.math.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
    size = tl.where(dot > 0.0, size, tl.where(dot < 0.0, -size, 0.0))
    gate = 1.0 / (1.0 + tl.exp(-size))
    tl.store(gates_ptr + row * COPIES + copy, gate)
    value_ptr += row * value_stride
    out_ptr += (row * COPIES + copy) * DIM
    for start in tl.range(0, DIM, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        mask = column < DIM
        h = tl.load(h_ptr + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + column, formats.round_bf16(h + gate * value), mask=mask)


def gate_add_value(
    h: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    eps: float,
    *,
    settings: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Each copy with as much of the n-gram's value as its gate lets in, and the gates.

    Args:
        h: bf16 values, contiguous [R, n, D].
        key: bf16 values [R, n, D], the last dimension contiguous.
        value: bf16 values [R, D], the last dimension contiguous.
        weight: float32 or bf16, contiguous [n, D], the product of the stored weights.

    Returns:
        The stream, bf16 values of h's dtype, from equal gates the reference's bits; and the gates
        float32 [R, n], in (0, 1). Their three sums run in another order than the reference's: a gate
        is within 2^-12 of it where the dot product nearly cancels (its root is steep there), within
        2^-18 elsewhere.
    """
    num_rows, copies, dim = h.shape
    assert h.is_contiguous() and weight.is_contiguous()
    assert key.stride(2) == 1 and value.stride(1) == 1
    gates = torch.empty((num_rows, copies), dtype=torch.float32, device=h.device)
    out = torch.empty_like(h)
    if num_rows == 0:
        return out, gates
    chosen = settings or config("engram_gate", str(dim), _GATE)
    _gate_kernel[(num_rows, copies)](
        h,
        key,
        weight,
        value,
        gates,
        out,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        eps,
        dim**-0.5,
        COPIES=copies,
        DIM=dim,
        BLOCK=min(chosen["BLOCK"], triton.next_power_of_2(dim)),
        STAGES=chosen["num_stages"],
        num_warps=chosen["num_warps"],
        **NO_FMA,
    )
    return out, gates
