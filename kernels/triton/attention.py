"""Attention over cache records with a sink (model.md C.4): window, chosen entries, draft blocks."""

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from phalanx.kernels.reference.quant import compressed_bytes, window_bytes
from phalanx.kernels.triton.attention_kernels import values_kernel, weights_kernel
from phalanx.kernels.triton.configs import Config, config

TILE: Final = 128  # slots whose weights are relative to one score; part of the results' bits


@dataclass(frozen=True)
class _Rows:
    """What both kernels know of the rows, from the arguments of the public functions."""

    records: Tensor
    ring: Tensor
    slots: Tensor
    positions: Tensor
    within: Tensor
    window_from: Tensor
    window: int
    block: int  # rows of a draft block, or 0
    compressed: Tensor
    block_table: Tensor
    seqs: Tensor | None
    chosen: Tensor | None

    @property
    def topk(self) -> int:
        return 0 if self.chosen is None else self.chosen.shape[1]

    @property
    def alignment(self) -> int:
        """Bytes that every record's address is a multiple of, as far as it matters."""
        caches = (self.records, self.ring, self.compressed)
        numbers = [cache.data_ptr() for cache in caches]
        numbers += [stride for cache in caches for stride in cache.stride()[:-1]]
        return math.gcd(16, *numbers)

    def tensors(self) -> tuple[Tensor | int, ...]:
        """Arguments from `records` to `chosen_stride` of both kernels; a stand-in where there is none."""
        chosen = self.slots if self.chosen is None else self.chosen
        return (
            self.records,
            self.ring,
            self.ring.stride(0),
            self.ring.stride(1),
            self.slots,
            self.positions,
            self.within,
            self.window_from,
            self.compressed,
            self.compressed.stride(0),
            self.block_table,
            self.block_table.stride(0),
            self.slots if self.seqs is None else self.seqs,
            chosen,
            chosen.stride(0),
        )


def sparse_attention(
    queries: Tensor,
    records: Tensor,
    ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    within: Tensor,
    window_from: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed: Tensor | None = None,
    block_rows: Tensor | tuple[Tensor, Tensor] | None = None,
    chosen: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    settings: Config | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One softmax over a row's window and its chosen entries (`reference.attention.sink_attention`).

    A row at position t sees the positions t - window + 1 .. t that exist: those of this step from
    `records`, earlier ones from its slot's ring. Positions before `window_from` are hidden from rows
    at or after it.

    Args:
        queries: bf16, or float32 that holds bf16 values, [R, H, d], contiguous, rotated. d is a
            power of two from 64 on.
        records: uint8 [P, window record], contiguous, P >= R: the rows' own window records.
        ring: uint8 [slots, ring size, window record], the records contiguous; may be a view of one
            layer of a larger pool. Ring size at least window - 1.
        slots, positions, within, window_from: int32 or int64 [R], contiguous; `within` counts from
            the sequence's first row of this step, whose rows are neighbours in order.
        sink: float32 [H], an extra logit without a value.
        compressed: uint8 [blocks, entries per block, compressed record], the records of a block
            contiguous. None: no entries.
        block_rows: int32 or int64 [R, max blocks], a row's blocks; or a table [S, max blocks] and the
            rows' lines in it [R].
        chosen: int32 or int64 [R, top-k], distinct entries of the row's sequence, -1 where there is
            none.
        cos, sin: float32 [R, rope dim], contiguous: where given, the result's last channels are
            turned back, bit for bit as `reference.rope.rotate` turns by `RopeTable.inverse()`.
        settings: launch settings in place of the table's.
        out_dtype: of the result, float32 or bf16.

    Returns:
        bf16 values [R, H, d].

    Nothing of a slot without a position is read. Records lie at even addresses; at multiples of 16 they
    are read faster.

    Against the reference: weights are rounded to bf16 relative to the same largest score, the rest is
    float32 in another order, so nearly all elements are equal. Where a last bit of float32 moves a
    weight or the result to the other side of a rounding, an element differs by at most 2^-7 times
    (the weighted mean of its vectors' magnitudes, plus its own).

    A row's bits depend on itself, on H, d, window, and top-k alone.
    """
    assert (compressed is None) == (chosen is None) == (block_rows is None)
    table, seqs = block_rows if isinstance(block_rows, tuple) else (block_rows, None)
    rows = _Rows(
        records=records,
        ring=ring,
        slots=slots,
        positions=positions,
        within=within,
        window_from=window_from,
        window=window,
        block=0,
        compressed=records.unsqueeze(0) if compressed is None else compressed,
        block_table=slots.unsqueeze(1) if table is None else table,
        seqs=seqs,
        chosen=chosen,
    )
    return _attend(queries, rows, sink, scale, cos, sin, settings, out_dtype)


def block_attention(
    queries: Tensor,
    records: Tensor,
    ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    within: Tensor,
    block: int,
    window: int,
    sink: Tensor,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    settings: Config | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of draft blocks: the ring before the block, then the whole block in both directions.

    Rows come `block` to a sequence; row i of a block that starts at position s has position s + i.
    Each sees positions s - window .. s - 1 of its slot's ring, as far as they exist, and the block.

    Args:
        records: uint8 [P, window record], P >= R: what `encode_window` makes of the rows' vectors,
            which then count with their value after Q8.
        positions, within: int32 or int64 [R]: s + i and i.
        block: rows of a block; R is a multiple of it.

    The rest, the result and its bound are those of `sparse_attention`. Rows that fill up a tile must
    be left out.
    """
    assert queries.shape[0] % block == 0
    rows = _Rows(
        records=records,
        ring=ring,
        slots=slots,
        positions=positions,
        within=within,
        window_from=positions,
        window=window,
        block=block,
        compressed=records.unsqueeze(0),
        block_table=slots.unsqueeze(1),
        seqs=None,
        chosen=None,
    )
    return _attend(queries, rows, sink, scale, cos, sin, settings, out_dtype)


def _attend(
    queries: Tensor,
    rows: _Rows,
    sink: Tensor,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    settings: Config | None,
    out_dtype: torch.dtype,
) -> Tensor:
    num_rows, heads, dim = queries.shape
    out = torch.empty(queries.shape, dtype=out_dtype, device=queries.device)
    if num_rows == 0:
        return out
    _check(queries, rows)
    launch = launch_settings(num_rows, heads, dim, rows.window + rows.block, rows.topk) | (
        settings or {}
    )
    window_tiles = triton.cdiv(rows.window + rows.block, TILE)
    tiles = window_tiles + triton.cdiv(rows.topk, TILE)
    chunk = min(num_rows, launch["chunk"])
    weights = queries.new_empty((chunk, heads, tiles * TILE), dtype=torch.float32)
    places = queries.new_empty((chunk, tiles * TILE), dtype=torch.int64)
    tops = queries.new_empty((chunk, tiles, heads), dtype=torch.float32)
    totals = torch.empty_like(tops)
    head_tile = min(64, max(16, triton.next_power_of_2(heads)))
    head_tiles = triton.cdiv(heads, head_tile)
    overlap = bool(launch["overlap"]) and queries.is_cuda
    shape = {
        "HEADS": heads,
        "HEAD_TILE": head_tile,
        "DIM": dim,
        "WINDOW_TILES": window_tiles,
        "TILES": tiles,
        "SLOTS": TILE,
        "ALIGNMENT": rows.alignment,
        "OVERLAP": overlap,
    }
    pairs = max(16, dim // 2 // launch["parts"])
    for start in range(0, num_rows, chunk):
        count = min(chunk, num_rows - start)
        weights_kernel[(tiles, head_tiles, count)](
            queries,
            *rows.tensors(),
            weights,
            places,
            tops,
            totals,
            scale,
            start,
            RING=rows.ring.shape[1],
            WINDOW=rows.window,
            BLOCK=rows.block,
            TOPK=rows.topk,
            ENTRIES=rows.compressed.shape[1],
            PAIRS=min(launch["pairs"], dim // 2),
            SEQS=rows.seqs is not None,
            WIDE=queries.dtype == torch.float32,
            num_warps=launch["weights_warps"],
            num_stages=launch["weights_stages"],
            maxnreg=launch["weights_registers"] or None,
            enable_fp_fusion=False,  # scores are rounded before their largest is subtracted
            **shape,
        )
        values_kernel[(dim // 2 // pairs, head_tiles, count)](
            weights,
            places,
            tops,
            totals,
            sink,
            sink if cos is None else cos,
            sink if sin is None else sin,
            out,
            start,
            TILES_PADDED=triton.next_power_of_2(tiles),
            STEP=launch["step"],
            PAIRS=pairs,
            ROPE=0 if cos is None else cos.shape[1],
            num_warps=launch["values_warps"],
            num_stages=launch["values_stages"],
            maxnreg=launch["values_registers"] or None,
            launch_pdl=overlap,
            enable_fp_fusion=False,  # the rotation rounds its products, as its reference does
            **shape,
        )
    return out


def launch_settings(num_rows: int, heads: int, dim: int, window: int, topk: int) -> Config:
    """Settings for a shape. Only those that change no bit depend on the number of rows.

    In the first kernel `pairs` is the pairs of dimensions that a score adds at a time. In the second,
    `parts` is the programs that share a row's dimensions and `step` the slots that they take at a time.
    The rest are warps, pipeline stages and registers (0: as many as it takes) of each; `chunk`, the rows
    whose weights exist at a time, 164 kB each in the full model; and `overlap`, whether the second
    kernel starts while the first one ends. `pairs` and `weights_warps` decide orders of summation.
    """
    shape = f"{heads}x{dim}x{window}+{topk}"
    weights = {"pairs": 32, "weights_warps": 4, "weights_stages": 3, "weights_registers": 128}
    weights = config("attention_weights", shape, weights)
    if num_rows <= 16:
        values = {"parts": 8, "step": 64, "values_warps": 8, "values_registers": 0}
    elif num_rows <= 64:
        values = {"parts": 4, "step": 64, "values_warps": 8, "values_registers": 128}
    else:
        values = {"parts": 2, "step": 64, "values_warps": 4, "values_registers": 0}
    default = values | {"values_stages": 5, "chunk": 1024, "overlap": 1}
    return config("attention", f"{shape}:{row_limit(num_rows)}", default) | weights


def row_limit(num_rows: int) -> str:
    """The class of row counts that shares its settings."""
    return next((str(limit) for limit in (1, 16, 64, 256) if num_rows <= limit), "more")


def _check(queries: Tensor, rows: _Rows) -> None:
    num_rows, _, dim = queries.shape
    if dim < 64 or dim & (dim - 1):
        raise ValueError(f"vectors of {dim} dimensions; a power of two from 64 on is needed")
    if rows.records.shape[1] != window_bytes(dim) or rows.ring.shape[2] != window_bytes(dim):
        raise ValueError(f"window records of {dim} dimensions have {window_bytes(dim)} bytes")
    if rows.topk and rows.compressed.shape[2] != compressed_bytes(dim):
        raise ValueError(
            f"compressed records of {dim} dimensions have {compressed_bytes(dim)} bytes"
        )
    assert queries.is_contiguous() and rows.records.is_contiguous()
    assert rows.ring.stride(2) == 1 and rows.records.shape[0] >= num_rows
    assert rows.alignment % 2 == 0  # e4m3 codes are read in pairs
    assert not rows.topk or rows.compressed.stride()[1:] == (compressed_bytes(dim), 1)
