"""The routed experts on one GPU: (row, slot) pairs through packed FP4 experts.

Two kernels over the same tiles of pairs: rows through gate and up to the activation, and the
activation through down. Each tile of outputs runs alone along all columns in one order, 32 columns
to a matrix product, so a pair's bits depend neither on the other pairs nor on the tile's height.
On Hopper many pairs go through `experts_hopper`, to the same bits.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import importlib
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.expert_dot import (
    PLAIN,
    as_bf16,
    product,
    q8_roundtrip,
    swiglu,
    to_bf16,
    unpack,
)
from phalanx.kernels.triton.expert_groups import group_pairs
from phalanx.kernels.triton.expert_pool import ExpertPool

__all__ = ["DEFAULTS", "ExpertPool", "key_for", "run_experts"]


_NAMES: Final = "n", "warps", "stages"  # outputs of a program

_Kernel = tuple[int, int, int]


def _settings(m: int, up: _Kernel, down: _Kernel, hopper: int = 0) -> Config:
    return {
        "hopper": hopper,  # whether by `experts_hopper`, where it runs; else the rest counts
        "m": m,  # pairs of a tile
        **{f"up_{name}": value for name, value in zip(_NAMES, up, strict=True)},
        **{f"down_{name}": value for name, value in zip(_NAMES, down, strict=True)},
    }


# For up to so many pairs a slot on average: few pairs are bound by the weights' bytes, many by the
# products. None of it changes a bit of a pair.
DEFAULTS: Final = {
    8: _settings(16, (64, 4, 4), (128, 4, 4)),
    20: _settings(32, (64, 4, 4), (128, 4, 4)),
    1 << 30: _settings(128, (64, 4, 3), (128, 4, 3), 1),
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
    matrix = slot * (2 * ROW_TILES * K_TILES)
    # A block that is wider than what is left reads the last tile again and stores nothing of it.
    row_tile = tl.minimum(block * (N // 64) + n // 64, ROW_TILES - 1) * K_TILES
    words = weights_ptr + matrix * 2048 + (row_tile * 2048 + n % 64 * 32)[:, None] + c[None, :]
    scales = scales_ptr + matrix * 64 + row_tile * 64 + n % 64

    m = tl.arange(0, M)
    mask = m < count
    pair = tl.load(order_ptr + first + m, mask=mask, other=0)
    row = tl.load(row_index_ptr + pair, mask=mask, other=0) if INDEXED else pair
    x = x_ptr + (row.to(tl.int64) * stride)[:, None] + c[None, :]
    gate = tl.zeros((N, M), tl.float32)
    up = tl.zeros((N, M), tl.float32)
    for k in range(K_TILES):
        gate_words = tl.load(words)
        up_words = tl.load(words + ROW_TILES * K_TILES * 2048)
        gate_scales = tl.load(scales)
        up_scales = tl.load(scales + ROW_TILES * K_TILES * 64)
        for piece in tl.static_range(4):
            column = k * 128 + 32 * piece + c
            right = _read_rows(x + 32 * piece, column, mask, HIDDEN, EVEN)
            gate = product(unpack(gate_words, gate_scales, piece), right, gate)
            up = product(unpack(up_words, up_scales, piece), right, up)
        words += 2048
        scales += 64
        x += 128

    gate *= tl.load(raised_ptr + slot * 3)
    up *= tl.load(raised_ptr + slot * 3 + 1)
    weight = tl.load(pair_weights_ptr + pair, mask=mask, other=0.0)
    a = swiglu(to_bf16(gate), to_bf16(up), limit, weight[None, :])
    a = q8_roundtrip(a, N, M).to(tl.bfloat16)
    output = block * N + n
    target = out_ptr + ((first + m).to(tl.int64) * INTER)[None, :] + output[:, None]
    tl.store(target, a, mask=mask[None, :] & (output < INTER)[:, None])


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
    output = block * N + n
    m = tl.arange(0, M)
    mask = m < count
    pair = tl.load(order_ptr + first + m, mask=mask, other=0).to(tl.int64)
    target = out_ptr + (pair * HIDDEN)[None, :] + output[:, None]
    stored = mask[None, :] & (output < HIDDEN)[:, None]
    if slot < 0:
        tl.store(target, tl.zeros((N, M), tl.bfloat16), mask=stored)
        return

    matrix = slot * (ROW_TILES * K_TILES)
    row_tile = tl.minimum(block * (N // 64) + n // 64, ROW_TILES - 1) * K_TILES
    words = weights_ptr + matrix * 2048 + (row_tile * 2048 + n % 64 * 32)[:, None] + c[None, :]
    scales = scales_ptr + matrix * 64 + row_tile * 64 + n % 64
    a = a_ptr + ((first + m).to(tl.int64) * INTER)[:, None] + c[None, :]
    acc = tl.zeros((N, M), tl.float32)
    for k in range(K_TILES):
        packed = tl.load(words)
        packed_scales = tl.load(scales)
        for piece in tl.static_range(4):
            column = k * 128 + 32 * piece + c
            right = _read_rows(a + 32 * piece, column, mask, INTER, EVEN)
            acc = product(unpack(packed, packed_scales, piece), right, acc)
        words += 2048
        scales += 64
        a += 128
    tl.store(target, as_bf16(acc * tl.load(raised_ptr + slot * 3 + 2)), mask=stored)


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
    a = torch.empty((num_pairs, inter), dtype=torch.bfloat16, device=x_rows.device)
    hopper = _hopper(x_rows.device) if chosen["hopper"] and _suits_hopper(pool) else None
    if hopper is not None:
        _run_on_hopper(
            hopper,
            pool,
            slot_ids,
            x_rows,
            pair_weights,
            limit,
            row_index,
            a,
            out,
            compile_only,
        )
        return out
    order, tiles = group_pairs(slot_ids, pool.num_slots, chosen["m"])
    shape: dict[str, int] = {"HIDDEN": hidden, "INTER": inter, "M": chosen["m"]}

    def launch(kernel: Any, part: str, outputs: int, *args: Any, **constants: bool) -> None:
        n, warps, stages = (chosen[f"{part}_{name}"] for name in _NAMES)
        grid = triton.cdiv(outputs, n), tiles.shape[0]
        options = shape | constants | {"N": n, "num_warps": warps, "num_stages": stages}
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


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernels for Hopper's tensor cores, if this is one and Triton has what they are written in."""
    if PLAIN or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        return importlib.import_module("phalanx.kernels.triton.experts_hopper")
    except ImportError:  # an experimental part of Triton
        return None


def _suits_hopper(pool: ExpertPool) -> bool:
    return pool.hidden % 256 == 0 and pool.inter % 128 == 0


def _run_on_hopper(
    kernels: ModuleType,
    pool: ExpertPool,
    slot_ids: Tensor,
    x_rows: Tensor,
    pair_weights: Tensor,
    limit: float,
    row_index: Tensor | None,
    a: Tensor,
    out: Tensor,
    compile_only: bool,
) -> None:
    x_rows = x_rows.bfloat16()
    if x_rows.stride(0) % 16 or x_rows.data_ptr() % 16:
        x_rows = x_rows.contiguous()
    hidden, inter = pool.hidden, pool.inter
    order, tiles = group_pairs(slot_ids, pool.num_slots, kernels.HEIGHT)
    shape = {"HIDDEN": hidden, "INTER": inter}
    programs = torch.cuda.get_device_properties(x_rows.device).multi_processor_count

    def launch(kernel: Any, blocks: int, *args: Any, **constants: bool) -> None:
        items = blocks * tiles.shape[0]
        grid = (min(programs, items),)
        options = shape | constants | kernels.OPTIONS
        if compile_only:
            kernel.warmup(*args, items, grid=grid, **options)
        else:
            kernel[grid](*args, items, **options)

    launch(
        kernels.up_kernel,
        inter // 128,
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
        kernels.down_kernel,
        hidden // 256,
        a,
        pool.down,
        pool.down_scales,
        pool.raised,
        order,
        tiles,
        out,
    )
