"""Attention over cache records with a sink (model.md C.4): window, chosen entries, draft blocks."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from phalanx.kernels.reference.quant import compressed_bytes, window_bytes
from phalanx.kernels.triton import attention_hopper, attention_kernels

_TILE: Final = 64  # slots that are weighed at a time where there is no kernel for the GPU
_CHUNK: Final = 1024  # rows at a time on Hopper: 128 KiB each for what its programs hand each other


@dataclass(frozen=True)
class _Rows:
    """What a kernel knows of the rows, from the arguments of the public functions."""

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
        """Arguments from `records` to `chosen_stride` of a kernel; a stand-in where there is none."""
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
        out_dtype: of the result, float32 or bf16.

    Returns:
        bf16 values [R, H, d].

    Nothing of a slot without a position is read. Records lie at even addresses; on Hopper, those of 512
    dimensions at multiples of 16 have a kernel of their own, which is many times as fast.

    Against the reference: on Hopper, weights are rounded to bf16 relative to the largest score so far
    rather than the largest of all, so differently, by at most 2^-8 of themselves; and their sum is that
    of the rounded ones, so that what is rounded away of a weight that outweighs the others is not
    missing. An element differs by at most 2^-8 times (the weighted mean of its vectors' magnitudes, plus one
    and a half times its own); all of them together are as close to the exact result.
    Elsewhere weights are rounded as the reference rounds them, and nearly all elements are equal.

    A row's bits depend on itself, on H, d, window, top-k, and the alignment of records alone.
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
    return _attend(queries, rows, sink, scale, cos, sin, out_dtype)


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
    return _attend(queries, rows, sink, scale, cos, sin, out_dtype)


def _attend(
    queries: Tensor,
    rows: _Rows,
    sink: Tensor,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(queries.shape, dtype=out_dtype, device=queries.device)
    if len(queries) == 0:
        return out
    _check(queries, rows)
    shape: dict[str, int] = {
        "HEADS": queries.shape[1],
        "RING": rows.ring.shape[1],
        "WINDOW": rows.window,
        "BLOCK": rows.block,
        "TOPK": rows.topk,
        # Of a stand-in it would be the number of rows, and each number a kernel of its own.
        "ENTRIES": rows.compressed.shape[1] if rows.topk else 1,
        "SEQS": rows.seqs is not None,
        "WIDE": queries.dtype == torch.float32,
        "ROPE": 0 if cos is None else cos.shape[1],
    }
    rotation = (sink if cos is None else cos, sink if sin is None else sin)
    if _for_hopper(queries, rows, shape["ROPE"]):
        _attend_on_hopper(queries, rows, sink, *rotation, out, scale, shape)
    else:
        _attend_anywhere(queries, rows, sink, *rotation, out, scale, shape)
    return out


def _attend_anywhere(
    queries: Tensor,
    rows: _Rows,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    scale: float,
    shape: dict[str, int],
) -> None:
    num_rows, heads, dim = queries.shape
    head_tile = min(64, max(16, triton.next_power_of_2(heads)))
    attention_kernels.attention_kernel[(triton.cdiv(heads, head_tile), num_rows)](
        queries,
        *rows.tensors(),
        sink,
        cos,
        sin,
        out,
        scale * math.log2(math.e),
        HEAD_TILE=head_tile,
        DIM=dim,
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=False,  # the rotation rounds its products, as its reference does
        **shape,
    )


def _for_hopper(queries: Tensor, rows: _Rows, rope: int) -> bool:
    """Whether these rows have the one form that the kernel for Hopper is made for."""
    return (
        queries.is_cuda
        and _capability(queries.device) == (9, 0)
        and queries.shape[2] == attention_hopper.DIM.value
        and rope <= attention_hopper.DIM.value // 8
        and rows.alignment == 16
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _attend_on_hopper(
    queries: Tensor,
    rows: _Rows,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    scale: float,
    shape: dict[str, int],
) -> None:
    num_rows, heads, dim = queries.shape
    tile, head_tile = attention_hopper.TILE.value, attention_hopper.HEAD_TILE.value
    programs = 2 * num_rows * triton.cdiv(heads, head_tile)
    parts = 1 if programs <= _multiprocessors(queries.device) else 2  # of a program
    window_tiles = _tiles_of_a_part(rows.window + rows.block, tile)
    entry_tiles = _tiles_of_a_part(rows.topk, tile)
    head_tiles = triton.cdiv(heads, head_tile)
    chunk = min(num_rows, _CHUNK)
    halves = queries.new_empty((chunk, head_tiles, head_tile * dim), dtype=torch.float32)
    tops = queries.new_empty((chunk, 2, heads), dtype=torch.float32)
    totals = torch.empty_like(tops)
    flags = _flags(queries.device, head_tiles)
    for start in range(0, num_rows, chunk):
        attention_hopper.attention_kernel[(2 // parts, head_tiles, min(chunk, num_rows - start))](
            queries,
            *rows.tensors(),
            halves,
            tops,
            totals,
            flags,
            sink,
            cos,
            sin,
            out,
            scale * math.log2(math.e),
            start,
            WINDOW_TILES=window_tiles,
            TILES=window_tiles + entry_tiles,
            WINDOW_SLOTS=triton.next_power_of_2(parts * window_tiles * tile),
            ENTRY_SLOTS=triton.next_power_of_2(parts * entry_tiles * tile) if entry_tiles else 0,
            EARLY=True,
            PARTS=parts,
            num_warps=8,
            launch_pdl=True,
            enable_fp_fusion=False,  # the rotation rounds its products, as its reference does
            **shape,
        )


def _tiles_of_a_part(slots: int, tile: int) -> int:
    return -(-slots // (2 * tile))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _flags(device: torch.device, head_tiles: int) -> Tensor:
    """Zeros by which the two programs of a row wait for each other; each launch leaves them zero.

    So attention on one GPU must run on one stream, and once before it is captured into a graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention must run once before it is captured into a graph")
    return torch.zeros(_CHUNK * head_tiles * 2, dtype=torch.int32, device=device)


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
