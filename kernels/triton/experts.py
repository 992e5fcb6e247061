"""The routed experts on one GPU: (row, slot) pairs through packed FP4 experts.

Two kernels over the same tiles of pairs: rows through gate and up to the activation, and the
activation through down. Each tile of outputs runs alone along all columns in one order, 32 columns
to a matrix product, so a pair's bits depend neither on the other pairs nor on the tile's height.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.expert_dot import (
    as_bf16,
    left_operand,
    product,
    q8_roundtrip,
    swiglu,
    to_bf16,
)
from phalanx.kernels.triton.expert_groups import group_pairs
from phalanx.kernels.triton.expert_pool import ExpertPool

__all__ = ["DEFAULTS", "ExpertPool", "key_for", "run_experts"]


_NAMES: Final = "n", "pieces", "warps", "stages"  # outputs of a program, products a K step

_Kernel = tuple[int, int, int, int]


def _settings(m: int, more: int, up: _Kernel, down: _Kernel) -> Config:
    return {
        "m": m,  # pairs of a tile: one product of m, and one of `more` beside it
        "more": more,
        **{f"up_{name}": value for name, value in zip(_NAMES, up, strict=True)},
        **{f"down_{name}": value for name, value in zip(_NAMES, down, strict=True)},
    }


# For up to so many pairs a slot on average: few pairs are bound by the weights' bytes, many by the
# products, and then padding counts. None of it changes a bit of a pair.
DEFAULTS: Final = {
    8: _settings(16, 0, (64, 4, 4, 4), (128, 4, 4, 4)),
    20: _settings(32, 0, (64, 4, 4, 4), (128, 4, 4, 4)),
    44: _settings(64, 0, (128, 1, 8, 3), (256, 1, 8, 3)),
    68: _settings(64, 16, (128, 1, 8, 3), (256, 1, 8, 3)),
    90: _settings(64, 32, (128, 1, 8, 3), (256, 1, 8, 3)),
    1 << 30: _settings(128, 0, (128, 1, 8, 3), (256, 1, 8, 3)),
}


def key_for(num_pairs: int, num_slots: int, hidden: int, inter: int) -> tuple[str, Config]:
    """The name of a launch's settings in the table, and what they are without a table.

    They depend on the number of pairs and never on where these go.
    """
    mean = num_pairs / max(1, min(num_pairs, num_slots))
    most = min(most for most in DEFAULTS if mean <= most)
    return f"{hidden}x{inter}@{most}", DEFAULTS[most]


@triton.jit
def _read_rows(
    pointers: tl.tensor, column: tl.tensor, mask: tl.tensor, ALL: tl.constexpr, EVEN: tl.constexpr
) -> tl.tensor:
    """Some columns of the rows as the right operand: [M, K] at `pointers` -> bf16 [K, M]."""
    if EVEN:
        x = tl.load(pointers, mask=mask[:, None], other=0.0)
    else:
        x = tl.load(pointers, mask=mask[:, None] & (column < ALL)[None, :], other=0.0)
    return tl.trans(x.to(tl.bfloat16))


@triton.jit
def _up_kernel(
    x_ptr,
    row_index_ptr,
    weights_ptr,
    scales_ptr,
    raised_ptr,
    pair_weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    limit,
    stride,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    INDEXED: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    MORE: tl.constexpr,
    PIECES: tl.constexpr,
):
    ROW_TILES: tl.constexpr = (INTER + 63) // 64
    K_TILES: tl.constexpr = (HIDDEN + 127) // 128
    EVEN: tl.constexpr = HIDDEN % 128 == 0
    block = tl.program_id(0)
    tile = tiles_ptr + 3 * tl.program_id(1)
    slot = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if (count == 0) | (slot < 0):
        return

    n = tl.arange(0, N)
    c = tl.arange(0, 32)
    WIDTH: tl.constexpr = 128 // PIECES
    x_c = tl.arange(0, WIDTH)
    matrix = slot * (2 * ROW_TILES * K_TILES)
    # A block that is wider than what is left reads the last tile again and stores nothing of it.
    row_tile = tl.minimum(block * (N // 64) + n // 64, ROW_TILES - 1) * K_TILES
    words = weights_ptr + matrix * 2048 + (row_tile * 2048 + n % 64 * 32)[:, None] + c[None, :]
    scales = scales_ptr + matrix * 64 + row_tile * 64 + n % 64

    m0 = tl.arange(0, M)
    mask0 = m0 < count
    pair0 = tl.load(order_ptr + first + m0, mask=mask0, other=0)
    row0 = tl.load(row_index_ptr + pair0, mask=mask0, other=0) if INDEXED else pair0
    x0 = x_ptr + (row0.to(tl.int64) * stride)[:, None] + x_c[None, :]
    gate0 = tl.zeros((N, M), tl.float32)
    up0 = tl.zeros((N, M), tl.float32)
    if MORE > 0:
        m1 = M + tl.arange(0, MORE)
        mask1 = m1 < count
        pair1 = tl.load(order_ptr + first + m1, mask=mask1, other=0)
        row1 = tl.load(row_index_ptr + pair1, mask=mask1, other=0) if INDEXED else pair1
        x1 = x_ptr + (row1.to(tl.int64) * stride)[:, None] + x_c[None, :]
        gate1 = tl.zeros((N, MORE), tl.float32)
        up1 = tl.zeros((N, MORE), tl.float32)

    for k in range(K_TILES):
        gate_words = tl.load(words)
        up_words = tl.load(words + ROW_TILES * K_TILES * 2048)
        gate_scales = tl.load(scales)
        up_scales = tl.load(scales + ROW_TILES * K_TILES * 64)
        for piece in tl.static_range(PIECES):
            column = k * 128 + WIDTH * piece + x_c
            gate = left_operand(gate_words, gate_scales, piece, PIECES, N)
            up = left_operand(up_words, up_scales, piece, PIECES, N)
            right0 = _read_rows(x0 + WIDTH * piece, column, mask0, HIDDEN, EVEN)
            gate0 = product(gate, right0, gate0)
            up0 = product(up, right0, up0)
            if MORE > 0:
                right1 = _read_rows(x1 + WIDTH * piece, column, mask1, HIDDEN, EVEN)
                gate1 = product(gate, right1, gate1)
                up1 = product(up, right1, up1)
        words += 2048
        scales += 64
        x0 += 128
        if MORE > 0:
            x1 += 128

    gate_raised = tl.load(raised_ptr + slot * 3)
    up_raised = tl.load(raised_ptr + slot * 3 + 1)
    output = block * N + n
    weight0 = tl.load(pair_weights_ptr + pair0, mask=mask0, other=0.0)
    a = swiglu(to_bf16(gate0 * gate_raised), to_bf16(up0 * up_raised), limit, weight0)
    a = q8_roundtrip(a, N, M).to(tl.bfloat16)
    target = out_ptr + ((first + m0).to(tl.int64) * INTER)[None, :] + output[:, None]
    tl.store(target, a, mask=mask0[None, :] & (output < INTER)[:, None])
    if MORE > 0:
        weight1 = tl.load(pair_weights_ptr + pair1, mask=mask1, other=0.0)
        a1 = swiglu(to_bf16(gate1 * gate_raised), to_bf16(up1 * up_raised), limit, weight1)
        a1 = q8_roundtrip(a1, N, MORE).to(tl.bfloat16)
        target1 = out_ptr + ((first + m1).to(tl.int64) * INTER)[None, :] + output[:, None]
        tl.store(target1, a1, mask=mask1[None, :] & (output < INTER)[:, None])


@triton.jit
def _down_kernel(
    a_ptr,
    weights_ptr,
    scales_ptr,
    raised_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    MORE: tl.constexpr,
    PIECES: tl.constexpr,
):
    ROW_TILES: tl.constexpr = (HIDDEN + 63) // 64
    K_TILES: tl.constexpr = (INTER + 127) // 128
    EVEN: tl.constexpr = INTER % 128 == 0
    block = tl.program_id(0)
    tile = tiles_ptr + 3 * tl.program_id(1)
    slot = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return

    n = tl.arange(0, N)
    c = tl.arange(0, 32)
    WIDTH: tl.constexpr = 128 // PIECES
    x_c = tl.arange(0, WIDTH)
    output = block * N + n
    m0 = tl.arange(0, M)
    mask0 = m0 < count
    pair0 = tl.load(order_ptr + first + m0, mask=mask0, other=0).to(tl.int64)
    target0 = out_ptr + (pair0 * HIDDEN)[None, :] + output[:, None]
    stored0 = mask0[None, :] & (output < HIDDEN)[:, None]
    if MORE > 0:
        m1 = M + tl.arange(0, MORE)
        mask1 = m1 < count
        pair1 = tl.load(order_ptr + first + m1, mask=mask1, other=0).to(tl.int64)
        target1 = out_ptr + (pair1 * HIDDEN)[None, :] + output[:, None]
        stored1 = mask1[None, :] & (output < HIDDEN)[:, None]
    if slot < 0:
        tl.store(target0, tl.zeros((N, M), tl.bfloat16), mask=stored0)
        if MORE > 0:
            tl.store(target1, tl.zeros((N, MORE), tl.bfloat16), mask=stored1)
        return

    matrix = slot * (ROW_TILES * K_TILES)
    row_tile = tl.minimum(block * (N // 64) + n // 64, ROW_TILES - 1) * K_TILES
    words = weights_ptr + matrix * 2048 + (row_tile * 2048 + n % 64 * 32)[:, None] + c[None, :]
    scales = scales_ptr + matrix * 64 + row_tile * 64 + n % 64
    a0 = a_ptr + ((first + m0).to(tl.int64) * INTER)[:, None] + x_c[None, :]
    acc0 = tl.zeros((N, M), tl.float32)
    if MORE > 0:
        a1 = a_ptr + ((first + m1).to(tl.int64) * INTER)[:, None] + x_c[None, :]
        acc1 = tl.zeros((N, MORE), tl.float32)
    for k in range(K_TILES):
        packed = tl.load(words)
        packed_scales = tl.load(scales)
        for piece in tl.static_range(PIECES):
            column = k * 128 + WIDTH * piece + x_c
            left = left_operand(packed, packed_scales, piece, PIECES, N)
            acc0 = product(left, _read_rows(a0 + WIDTH * piece, column, mask0, INTER, EVEN), acc0)
            if MORE > 0:
                acc1 = product(
                    left, _read_rows(a1 + WIDTH * piece, column, mask1, INTER, EVEN), acc1
                )
        words += 2048
        scales += 64
        a0 += 128
        if MORE > 0:
            a1 += 128

    raised = tl.load(raised_ptr + slot * 3 + 2)
    tl.store(target0, as_bf16(acc0 * raised), mask=stored0)
    if MORE > 0:
        tl.store(target1, as_bf16(acc1 * raised), mask=stored1)


def run_experts(
    pool: ExpertPool,
    slot_ids: Tensor,
    x_rows: Tensor,
    pair_weights: Tensor,
    limit: float,
    *,
    row_index: Tensor | None = None,
    settings: Config | None = None,
    compile_only: bool = False,
) -> Tensor:
    """Run (row, expert) pairs; a pair's bits do not depend on the other pairs.

    Args:
        pool: the experts of a layer.
        slot_ids: int32 or int64 [P]. A pair with any other number than that of a slot is multiplied
            by nothing; its result is zeros.
        x_rows: bf16, or float32 with bf16 values, [P, D], already through Q8; rows may be strided,
            by a multiple of 16 elements for speed.
        pair_weights: float32 [P], routing weights; they enter before the down projection.
        limit: of the activation.
        row_index: int32 or int64 [P], the row of `x_rows` [R, D] that each pair multiplies; it
            must be in range also for pairs without a slot.
        compile_only: make the kernels ready and compute nothing; under `triton.AsyncCompileMode`
            several sets of settings are compiled side by side.

    Returns:
        bf16 [P, D].

    Reference: `worker_svc.model.moe.run_expert_pairs`. Every product of a weight and an activation
    is exact, and sums are float32, so results differ by the order of summation alone: a sum that
    falls to the other side of a rounding to bf16 or e4m3 moves one value of the activation by one
    step of it, 2^-8 or 2^-3 of the value. At the model's shapes the relative error of a row against
    the reference stays below 5e-3, which is less than the rounding of the activation itself.
    """
    num_pairs, hidden, inter = slot_ids.shape[0], pool.hidden, pool.inter
    out = torch.empty((num_pairs, hidden), dtype=torch.bfloat16, device=x_rows.device)
    if num_pairs == 0:
        return out
    assert x_rows.shape[1] == hidden and x_rows.stride(1) == 1
    assert row_index is not None or x_rows.shape[0] == num_pairs
    assert slot_ids.is_contiguous() and pair_weights.is_contiguous()
    assert pair_weights.dtype == torch.float32 and pair_weights.shape == (num_pairs,)
    chosen = settings or config("experts", *key_for(num_pairs, pool.num_slots, hidden, inter))
    m, more = chosen["m"], chosen["more"]
    order, tiles = group_pairs(slot_ids, pool.num_slots, m + more)
    a = torch.empty((num_pairs, inter), dtype=torch.bfloat16, device=x_rows.device)
    shape: dict[str, int] = {"HIDDEN": hidden, "INTER": inter, "M": m, "MORE": more}

    def launch(kernel: Any, part: str, outputs: int, *args: Any, **constants: bool) -> None:
        n, pieces, warps, stages = (chosen[f"{part}_{name}"] for name in _NAMES)
        grid = triton.cdiv(outputs, n), tiles.shape[0]
        options = shape | constants | {"N": n, "PIECES": pieces}
        options |= {"num_warps": warps, "num_stages": stages}
        if compile_only:
            kernel.warmup(*args, grid=grid, **options)
        else:
            kernel[grid](*args, **options)

    launch(
        _up_kernel,
        "up",
        inter,
        x_rows,
        order if row_index is None else row_index.contiguous(),
        pool.up,
        pool.up_scales,
        pool.raised,
        pair_weights,
        order,
        tiles,
        a,
        limit,
        x_rows.stride(0),
        INDEXED=row_index is not None,
    )
    launch(
        _down_kernel,
        "down",
        hidden,
        a,
        pool.down,
        pool.down_scales,
        pool.raised,
        order,
        tiles,
        out,
    )
    return out
