# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""From a projection's result straight into the caches: norm, rotation, encoding and scatter in one launch.

One warp or a few take one vector, so its record depends on nothing else. Rounding is the
reference's: bf16 after the norm and after the rotation, then the record's format. Places are
addressed with 64 bits. A negative block, or a row that is not kept, stores nothing: what fills a
captured graph's rows leaves the pools alone.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.quant import compressed_bytes, index_key_bytes, window_bytes
from phalanx.kernels.reference.rope import RopeTable
from phalanx.kernels.triton import formats
from phalanx.kernels.triton.rows import NO_FMA, aligned_rows, norm_row, row_warps, turn

_WINDOW: Final = 0
_COMPRESSED: Final = 1
_INDEX_KEY: Final = 2


@triton.jit
def _rotated(x, cos_ptr, sin_ptr, DIM: tl.constexpr, START: tl.constexpr):
    """The channels from START on turned and rounded, the others as they are: float32 [DIM]."""
    column = tl.arange(0, DIM)
    tail = column >= START
    cos = tl.load(cos_ptr + column - START, mask=tail, other=1.0)
    sin = tl.load(sin_ptr + column - START, mask=tail, other=0.0)
    even, odd = tl.split(tl.reshape(x, (DIM // 2, 2)))
    cos_even, cos_odd = tl.split(tl.reshape(cos, (DIM // 2, 2)))
    sin_even, sin_odd = tl.split(tl.reshape(sin, (DIM // 2, 2)))
    even, odd = turn(even, odd, cos_even, cos_odd, sin_even, sin_odd)
    turned = formats.round_bf16(tl.reshape(tl.join(even, odd), (DIM,)))
    return tl.where(tail, turned, x)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "blocks_ptr", "offsets_ptr"])
def _store_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    blocks_ptr,
    offsets_ptr,
    out_ptr,
    normed_ptr,
    x_stride,
    table_stride,
    block_stride,
    offset_stride,
    eps,
    DIM: tl.constexpr,
    START: tl.constexpr,
    FORMAT: tl.constexpr,
    NORMED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    x = tl.load(x_ptr + row * x_stride + column).to(tl.float32)
    x = norm_row(x, tl.load(weight_ptr + column).to(tl.float32), eps, DIM)
    if NORMED:
        tl.store(normed_ptr + row * DIM + column, x)
    at = row
    if GATHER:
        at = tl.load(positions_ptr + row).to(tl.int64)
    x = _rotated(x, cos_ptr + at * table_stride, sin_ptr + at * table_stride, DIM, START)
    if SCATTER:
        block = tl.load(blocks_ptr + row).to(tl.int64)
        offset = tl.load(offsets_ptr + row).to(tl.int64)
        stored = block >= 0
        out = out_ptr + tl.where(stored, block * block_stride + offset * offset_stride, 0)
    else:
        stored = True
        out = out_ptr + row * block_stride
    if FORMAT == 0:
        codes, exponent = formats.q8_codes(tl.reshape(x, (DIM // 32, 32)))
        scale = exponent.to(tl.uint8)
    elif FORMAT == 1:
        codes, scale = formats.qf4_kv(tl.reshape(x, (DIM // 16, 16)), DIM // 16)
    else:
        codes, exponent = formats.qf4_idx(tl.reshape(x, (DIM // 32, 32)), DIM // 32)
        scale = exponent.to(tl.uint8)
    BYTES: tl.constexpr = DIM if FORMAT == 0 else DIM // 2
    GROUPS: tl.constexpr = DIM // 16 if FORMAT == 1 else DIM // 32
    tl.store(out + tl.arange(0, BYTES), tl.reshape(codes, (BYTES,)), mask=stored)
    tl.store(out + BYTES + tl.arange(0, GROUPS), tl.reshape(scale, (GROUPS,)), mask=stored)


def window_records(
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: RopeTable,
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """`encode_window(rotate(rms_norm(kv)))`: the rows' window records, uint8 [R, window_bytes(d)].

    Args:
        kv: bf16 values [R, d], d a power of two from 32 on; rows may be strided.
        norm_weight: [d].
        table: float32 rows of the R positions [R, rope_dim], or of all positions if `positions`
            (int64 or int32 [R]) picks from them.

    Equal to the reference from the normed row on; the norm's bound is that of `rows.rms_norm`.
    """
    out = torch.empty((kv.shape[0], window_bytes(kv.shape[1])), dtype=torch.uint8, device=kv.device)
    _store(_WINDOW, kv, norm_weight, eps, table, positions, out, None, None)
    return out


@triton.jit
def _store_latent(x_ptr, weight_ptr, out_ptr, eps, RANK: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    mask = column < RANK
    x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    latent = formats.q8_row(norm_row(x, weight, eps, RANK), PADDED)
    tl.store(out_ptr + column, latent, mask=mask)


@triton.jit
def _store_window(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, eps, DIM: tl.constexpr, START: tl.constexpr
):
    column = tl.arange(0, DIM)
    x = tl.load(x_ptr + column).to(tl.float32)
    x = norm_row(x, tl.load(weight_ptr + column).to(tl.float32), eps, DIM)
    x = _rotated(x, cos_ptr, sin_ptr, DIM, START)
    codes, exponent = formats.q8_codes(tl.reshape(x, (DIM // 32, 32)))
    tl.store(out_ptr + column, tl.reshape(codes, (DIM,)))
    scale = tl.reshape(exponent.to(tl.uint8), (DIM // 32,))
    tl.store(out_ptr + DIM + tl.arange(0, DIM // 32), scale)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _latent_window_kernel(
    both_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    latent_ptr,
    records_ptr,
    both_stride,
    table_stride,
    eps,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    GATHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    both_ptr += row * both_stride
    if tl.program_id(1) == 0:
        _store_latent(both_ptr, q_weight_ptr, latent_ptr + row * RANK, eps, RANK, PADDED)
    else:
        if GATHER:
            at = tl.load(positions_ptr + row).to(tl.int64) * table_stride
        else:
            at = row * table_stride
        out = records_ptr + row * (DIM + DIM // 32)
        _store_window(
            both_ptr + RANK, kv_weight_ptr, cos_ptr + at, sin_ptr + at, out, eps, DIM, START
        )


def latent_and_window(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    eps: float,
    table: RopeTable,
    *,
    positions: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What follows the attention's first projection, in one launch.

    Args:
        both: bf16 values, contiguous [R, rank + d]: the queries' latent, then the window vector.
        q_norm, kv_norm: [rank], a multiple of 32, and [d], a power of two from 32 on.
        table, positions: as for `window_records`.

    Returns:
        `rms_norm_q8` of the latent, [R, rank], and `window_records` of the rest, to their bits.
    """
    rank, dim = q_norm.shape[0], kv_norm.shape[0]
    num_rows, rope_dim = both.shape[0], table.cos.shape[1]
    assert both.shape[1] == rank + dim and both.is_contiguous() and rank % 32 == 0
    assert q_norm.is_contiguous() and kv_norm.is_contiguous()
    assert table.cos.stride() == table.sin.stride()
    _check_turned(dim, rope_dim)
    latent = torch.empty((num_rows, rank), dtype=out_dtype, device=both.device)
    records = torch.empty((num_rows, window_bytes(dim)), dtype=torch.uint8, device=both.device)
    if num_rows:
        _latent_window_kernel[(num_rows, 2)](
            both,
            q_norm,
            kv_norm,
            table.cos,
            table.sin,
            both if positions is None else positions,
            latent,
            records,
            both.stride(0),
            table.cos.stride(0),
            eps,
            RANK=rank,
            PADDED=triton.next_power_of_2(rank),
            DIM=dim,
            START=dim - rope_dim,
            GATHER=positions is not None,
            num_warps=row_warps(rank),
            **NO_FMA,
        )
    return latent, records


def store_compressed(
    latent: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: RopeTable,
    blocks: Tensor,
    offsets: Tensor,
    pool: Tensor,
    *,
    positions: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Norm latents, and store them turned and encoded: pool[blocks, offsets] = records.

    Args:
        latent: bf16 values [M, d], as pooled or projected, d a power of two from 32 on.
        norm_weight: [d].
        table, positions: as for `window_records`.
        blocks, offsets: int64 or int32 [M]; a negative block stores nothing.
        pool: uint8 [num_blocks, entries, compressed_bytes(d)], records contiguous, blocks strided.

    Returns:
        The normed latents [M, d] before the turn, bf16 values: what index keys are made of.
    """
    assert pool.shape[2] == compressed_bytes(latent.shape[1])
    normed = torch.empty(latent.shape, dtype=out_dtype, device=latent.device)
    at = (blocks, offsets)
    _store(_COMPRESSED, latent, norm_weight, eps, table, positions, pool, at, normed)
    return normed


def store_index_keys(
    keys: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: RopeTable,
    blocks: Tensor,
    offsets: Tensor,
    pool: Tensor,
    *,
    positions: Tensor | None = None,
) -> None:
    """Norm, turn and encode index keys bf16 values [M, d], and store: pool[blocks, offsets] = records.

    Arguments as for `store_compressed`; records of `pool` have index_key_bytes(d).
    """
    assert pool.shape[2] == index_key_bytes(keys.shape[1])
    at = (blocks, offsets)
    _store(_INDEX_KEY, keys, norm_weight, eps, table, positions, pool, at, None)


def _store(
    form: int,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: RopeTable,
    positions: Tensor | None,
    out: Tensor,
    places: tuple[Tensor, Tensor] | None,
    normed: Tensor | None,
) -> None:
    num_rows, dim = x.shape
    rope_dim = table.cos.shape[1]
    _check_turned(dim, rope_dim)
    assert out.stride(-1) == 1 and table.cos.stride() == table.sin.stride()
    assert norm_weight.shape == (dim,) and norm_weight.is_contiguous()
    if num_rows == 0:
        return
    x = aligned_rows(x)
    blocks, offsets = places or (x, x)
    _store_kernel[(num_rows,)](
        x,
        norm_weight,
        table.cos,
        table.sin,
        x if positions is None else positions,
        blocks,
        offsets,
        out,
        x if normed is None else normed,
        x.stride(0),
        table.cos.stride(0),
        out.stride(0),
        out.stride(-2),
        eps,
        DIM=dim,
        START=dim - rope_dim,
        FORMAT=form,
        NORMED=normed is not None,
        GATHER=positions is not None,
        SCATTER=places is not None,
        num_warps=row_warps(dim),
        **NO_FMA,
    )


def _check_turned(dim: int, rope_dim: int) -> None:
    if dim & (dim - 1) or dim < 32 or rope_dim > dim:
        raise ValueError(
            f"vectors of {dim} with {rope_dim} turned: a power of two from 32 on is needed"
        )


# --- The commit of a step ----------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "places_ptr", "keep_ptr"],
)
def _keep_kernel(
    rows_ptr,
    pool_ptr,
    slots_ptr,
    places_ptr,
    keep_ptr,
    num_rows,
    slot_stride,
    ring_stride,
    place_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(keep_ptr + row) != 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        place = tl.load(places_ptr + row).to(tl.int64)
        out = pool_ptr + slot * slot_stride + layer * ring_stride + place * place_stride
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = column < SIZE
        x = tl.load(rows_ptr + (layer * num_rows + row) * SIZE + column, mask=mask)
        tl.store(out + column, x, mask=mask)


def store_window(
    records: Sequence[Tensor], rings: Tensor, slots: Tensor, places: Tensor, keep: Tensor
) -> None:
    """rings[slots[r], l, places[r]] = records[l][r] for every layer l and every row r that is kept.

    Args:
        records: uint8 [R, record] by layer.
        rings: uint8 [num_slots, L, ring_size, record], records contiguous, slots strided; a part of
            the rings is a view `rings[:, first:end]`.
        slots, places: int64 or int32 [R]; no two kept rows may share a place.
        keep: bool [R].
    """
    _keep(torch.stack(tuple(records)), rings, slots, places, keep)


def store_pairs(pairs: Sequence[Tensor], pool: Tensor, slots: Tensor, keep: Tensor) -> None:
    """pool[slots[r], l] = pairs[l][r] for every owner l and every row r that is kept.

    Args:
        pairs: float32 [R, 2, d] by owner: kv and score of tokens that wait for their partners.
        pool: float32 [num_slots, L, 2, d], slots strided.
        slots, keep: as for `store_window`.
    """
    rows = torch.stack(tuple(pairs)).flatten(2)
    _keep(rows, pool.flatten(2).unsqueeze(2), slots, slots, keep, place_stride=0)


def _keep(
    rows: Tensor,
    pool: Tensor,
    slots: Tensor,
    places: Tensor,
    keep: Tensor,
    place_stride: int | None = None,
) -> None:
    num_layers, num_rows, size = rows.shape
    assert num_layers == pool.shape[1] and size == pool.shape[3] and rows.dtype == pool.dtype
    assert pool.stride(3) == 1
    if num_rows == 0:
        return
    block = min(1024, triton.next_power_of_2(size))
    _keep_kernel[(num_rows, num_layers, triton.cdiv(size, block))](
        rows,
        pool,
        slots,
        places,
        keep,
        num_rows,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2) if place_stride is None else place_stride,
        SIZE=size,
        BLOCK=block,
        num_warps=1,
    )
