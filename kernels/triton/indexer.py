# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
"""Scores of compressed entries over paged 68-byte keys, and candidate blocks (model.md C.6, E).

A program takes some tiles of keys for one row, or for several rows of one sequence; a tile is of
neighbouring entries, or of a row's list of candidate blocks. A row's numbers never depend on the
rows beside it nor on the tile: every score is the same products and sums in one order.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.quant import index_key_bytes
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.index_keys import (
    INTERPRETED,
    load_keys,
    load_queries,
    rounded,
    tile_scores,
)
from phalanx.kernels.triton.topk import load_bits, ordered_key, select_top, vector

# `rows` of a program, `side` of them by a product; `tile` is the entries of a turn, `tiles` the most
# that a program takes of them, `programs` how many an H200 runs at once; `piece` is the groups of 32
# dimensions that are read side by side: few meet in fewer banks of the shared memory; `registers`
# limits those of a thread, so that more programs fit, and 0 leaves them to the compiler.
_NAMES: Final = (
    "rows",
    "side",
    "piece",
    "tile",
    "tiles",
    "programs",
    "num_warps",
    "num_stages",
    "registers",
)


def _settings(*values: int) -> Config:
    return dict(zip(_NAMES, values, strict=True))


CANDIDATES: Final[list[Config]] = [
    _settings(1, 1, piece, tile, 32768 // tile, programs, 4, stages, registers)
    for piece in (1, 2, 4)
    for tile, programs, stages, registers in (
        (128, 396, 5, 0),
        (128, 528, 5, 128),
        (128, 396, 7, 0),
        (64, 924, 5, 0),
    )
]
CANDIDATES_LISTED: Final[list[Config]] = [
    _settings(1, 1, piece, 128, 64, 528, 4, stages, 0) for piece in (1, 2, 4) for stages in (5, 7)
]
CANDIDATES_MANY: Final[list[Config]] = [
    _settings(rows, side, piece, tile, 8192 // tile, programs, 4, 5, registers)
    for rows, side, tile, programs, registers in (
        (2, 2, 128, 264, 0),
        (2, 2, 64, 528, 128),
        (4, 2, 64, 396, 168),
        (8, 2, 64, 396, 168),
        (8, 4, 64, 264, 0),
    )
    for piece in (1, 4)
]
_DEFAULT: Final = _settings(1, 1, 2, 128, 256, 396, 4, 5, 0)
_DEFAULT_LISTED: Final = _settings(1, 1, 1, 128, 64, 528, 4, 5, 0)
_DEFAULTS: Final = {
    "": _DEFAULT,
    "_pairs": _settings(2, 2, 1, 128, 64, 264, 4, 5, 0),
    "_many": _settings(8, 2, 4, 64, 128, 396, 4, 5, 168),
}
_MANY_ROWS: Final = 8  # of a sequence: a part of a prompt, more than a row and its drafts
_ROWS_ON_HOPPER: Final = 24  # with sequences of their own, from which `indexer_hopper` is quicker
# Entries up to which so many rows score all quicker than each its own candidates.
_ALL_UNTIL: Final = 36864


# What varies with the batch and with the length of its contexts shall not make another variant of a
# kernel: a rank compiles all of them before it serves.
_BATCH_SIZES: Final = [
    "num_rows",
    "num_entries",
    "num_columns",
    "num_tiles",
    "num_blocks",
    "table_stride",
    "out_stride",
    "score_stride",
]
_BATCH_TENSORS: Final = ["block_table", "seqs", "visible"]


@triton.jit
def _tile_records(
    keys,
    block_table,
    tile,
    block_stride,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Where the records of a tile start, which lies in one block: pointers [TILE]."""
    PER_BLOCK: tl.constexpr = ENTRIES // TILE
    block = tl.load(block_table + tile // PER_BLOCK).to(tl.int64)
    base = keys + block * block_stride + tile % PER_BLOCK * (TILE * RECORD)
    return base + tl.arange(0, TILE) * RECORD


@triton.jit
def _listed_entries(blocks, column, num_columns, seen, SIZE: tl.constexpr):
    """Entries int32 of the columns of a row's list of blocks of SIZE; -1 where it sees none."""
    block = tl.load(blocks + column // SIZE, mask=column < num_columns, other=-1).to(tl.int32)
    entry = block * SIZE + column % SIZE
    return tl.where((block >= 0) & (entry < seen), entry, -1)


@triton.jit
def _listed_pointers(
    keys, block_table, entry, block_stride, ENTRIES: tl.constexpr, RECORD: tl.constexpr
):
    """Where the records of entries start; of any record for -1."""
    block = tl.load(block_table + entry // ENTRIES, mask=entry >= 0, other=0).to(tl.int64)
    return keys + block * block_stride + tl.maximum(entry, 0) % ENTRIES * RECORD


@triton.jit(do_not_specialize=_BATCH_SIZES, do_not_specialize_on_alignment=_BATCH_TENSORS)
def _score_kernel(
    queries,
    head_weights,
    keys,
    block_table,
    seqs,
    visible,
    out,
    num_rows,
    num_entries,
    num_heads,
    num_tiles,
    block_stride,
    table_stride,
    out_stride,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of ROWS neighbouring rows over `num_tiles` tiles.

    Neighbours of one sequence are served by one pass over its keys, SIDE of them by a product, the
    heads of these rows side by side; neighbours of several sequences take a pass each.
    """
    start = tl.program_id(0) * ROWS
    stop = tl.minimum(start + ROWS, num_rows)
    first = tl.program_id(1) * num_tiles
    end = tl.minimum(first + num_tiles, tl.cdiv(num_entries, TILE))
    member = start + tl.arange(0, ROWS)
    seqs_here = tl.load(seqs + member, mask=member < stop, other=-1)
    seen_here = tl.load(visible + member, mask=member < stop, other=0)
    seen_here = tl.minimum(seen_here, num_entries).to(tl.int32)

    column = tl.arange(0, SIDE * HEADS)
    place = tl.arange(0, SIDE * TILE)
    visible_here = first * TILE < tl.max(seen_here)
    sides = ()
    for side in tl.static_range(ROWS // SIDE):
        row = start + side * SIDE + column // HEADS
        known = (column % HEADS < num_heads) & (row < stop) & visible_here
        head = row * num_heads + column % HEADS
        sides += (load_queries(queries, head_weights, head, known, DIM),)

    # The results, row after row.
    row, entry = start + place // TILE, place % TILE
    target = out + row.to(tl.int64) * out_stride + entry
    seen = ()
    for side in tl.static_range(ROWS // SIDE):
        at = row + side * SIDE
        seen += (
            tl.minimum(tl.load(visible + at, mask=at < stop, other=0), num_entries).to(tl.int32),
        )
    while start < stop:
        seq = tl.load(seqs + start).to(tl.int64)
        next_start = tl.min(tl.where((member > start) & (seqs_here != seq), member, stop))
        ours = (member >= start) & (member < next_start)
        most = tl.max(tl.where(ours, seen_here, 0))
        shown = tl.maximum(tl.minimum(end, tl.cdiv(most, TILE)), first)
        table = block_table + seq * table_stride
        for tile in tl.range(first, shown, num_stages=STAGES):
            records = _tile_records(keys, table, tile, block_stride, ENTRIES, TILE, RECORD)
            operands, scales = load_keys(records, DIM, PIECE)
            for side in tl.static_range(ROWS // SIDE):
                total = tile_scores(operands, scales, sides[side][0], sides[side][1], HEADS)
                mask = _within(row + side * SIDE, start, next_start)
                mask &= tile * TILE + entry < seen[side]
                _store(target + side * SIDE * out_stride.to(tl.int64) + tile * TILE, total, mask)
        # What no row sees, and the rest of the tiles in which a row's entries end.
        least = tl.min(tl.where(ours, seen_here, num_entries))
        hidden = tl.full((SIDE * TILE,), float("-inf"), tl.float32)
        for tile in range(tl.maximum(first, least // TILE), end):
            at = tile * TILE + entry
            for side in tl.static_range(ROWS // SIDE):
                mask = _within(row + side * SIDE, start, next_start)
                mask &= (at >= seen[side]) & (at < num_entries)
                _store(target + side * SIDE * out_stride.to(tl.int64) + tile * TILE, hidden, mask)
        start = next_start


@triton.jit(do_not_specialize=_BATCH_SIZES, do_not_specialize_on_alignment=_BATCH_TENSORS)
def _candidate_kernel(
    queries,
    head_weights,
    keys,
    block_table,
    seqs,
    visible,
    blocks,
    out,
    num_columns,
    num_heads,
    num_tiles,
    block_stride,
    table_stride,
    list_stride,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of the entries of one row's list of blocks of SIZE, over `num_tiles` tiles."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_tiles
    end = tl.minimum(first + num_tiles, tl.cdiv(num_columns, TILE))
    seen = tl.load(visible + row).to(tl.int32)
    # The list holds no more blocks than the row sees, and the first of it.
    shown = tl.maximum(tl.minimum(end, tl.cdiv(tl.cdiv(seen, SIZE) * SIZE, TILE)), first)
    table = block_table + tl.load(seqs + row).to(tl.int64) * table_stride

    head = tl.arange(0, HEADS)
    known = (head < num_heads) & (first < shown)
    head = row.to(tl.int32) * num_heads + head
    of_queries, weights = load_queries(queries, head_weights, head, known, DIM)
    inner = tl.arange(0, TILE)
    for tile in tl.range(first, shown, num_stages=STAGES):
        column = tile * TILE + inner
        entry = _listed_entries(blocks + row * list_stride, column, num_columns, seen, SIZE)
        pointers = _listed_pointers(keys, table, entry, block_stride, ENTRIES, RECORD)
        operands, scales = load_keys(pointers, DIM, PIECE)
        total = tile_scores(operands, scales, of_queries, weights, HEADS)
        total = tl.where(entry >= 0, total, float("-inf"))
        _store(out + row * num_columns + column, total, column < num_columns)
    for tile in range(shown, end):
        column = tile * TILE + inner
        hidden = tl.full((TILE,), float("-inf"), tl.float32)
        _store(out + row * num_columns + column, hidden, column < num_columns)


@triton.jit(do_not_specialize=_BATCH_SIZES, do_not_specialize_on_alignment=["blocks"])
def _pick_kernel(
    scores,
    blocks,
    out,
    num_entries,
    num_blocks,
    score_stride,
    list_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The scores of a row's list of blocks of SIZE, side by side, from those of all entries."""
    row = tl.program_id(0).to(tl.int64)
    score_stride = score_stride // VECTOR * VECTOR
    num_entries = num_entries // VECTOR * VECTOR
    place = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, WIDTH)[None, :]
    block = tl.load(blocks + row * list_stride + place, mask=place < num_blocks, other=-1)
    entry = block[:, None].to(tl.int32) * SIZE + inner
    seen = (block >= 0)[:, None] & (inner < SIZE) & (entry < num_entries)
    score = tl.load(scores + row * score_stride + entry, mask=seen, other=float("-inf"))
    column = place[:, None] * SIZE + inner
    out += row * (num_blocks * SIZE)
    tl.store(out + column, score, mask=(place < num_blocks)[:, None] & (inner < SIZE))


@triton.jit
def _within(row, start, stop):
    return (row >= start) & (row < stop)


@triton.jit
def _store(target, total, mask):
    """The nearest bf16 values, in the type of `target`."""
    tl.store(target, rounded(total).to(target.dtype.element_ty), mask=mask)


def settings_key(num_rows: int, num_seqs: int, num_heads: int, dim: int) -> str:
    """The key of `paged_scores` in the table of settings: how many rows share a sequence changes how
    many are taken side by side, and no bit."""
    return f"{num_heads}x{dim}{_kind(num_rows, num_seqs)}"


def _kind(num_rows: int, num_seqs: int) -> str:
    if num_rows >= _MANY_ROWS * num_seqs:
        return "_many"
    return "_pairs" if num_rows >= 2 * num_seqs else ""


def paged_scores(
    queries: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    seqs: Tensor,
    visible: Tensor,
    num_entries_max: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    settings: Config | None = None,
) -> Tensor:
    """Index scores of the entries that each row may see: sum_h w_h * relu(q_h . k).

    Rounded as in `reference.entry_scores`: the dot to bf16, the product with the weight to bf16,
    the sum of the heads to bf16. There are three variants of the kernel for each N: for rows with
    sequences of their own, for several rows a sequence, and for many.

    Args:
        queries: bf16, or float32 that holds bf16 values, [R, heads, dim]; after their QF4 round
            trip, that is with two significant bits. dim is 64 or 128. Dimensions below 2^-30 of
            their head's largest are rounded to that.
        head_weights: bf16, or float32 that holds bf16 values, [R, heads].
        index_keys: uint8 [num_blocks, N, index_key_bytes(dim)], a view whose blocks may lie apart
            and whose records may not; N a multiple of 64; blocks aligned to 4 bytes (dim 64: 2), for
            speed to 16. A key's scale is in 2^-126 .. 2^127: others give no error and an
            unspecified score.
        block_table: integers [S, max_blocks], rows contiguous. Read only where a row sees entries.
            Where R is more than S, neighbouring rows had better share their sequence.
        seqs: integers [R], the row of `block_table`.
        visible: integers [R], of the same type: entries that the row may see.
        num_entries_max: columns of the result, at most max_blocks * N.
        settings: as in CANDIDATES, and not to go through `indexer_hopper`. They change no bit.

    Returns:
        bf16 values [R, num_entries_max] of type `out_dtype`; -inf from `visible` on.
        Bound: the sums over 32 dimensions are exact, their sums and those of the heads are float32,
        each in one order for all rows. Where these are exact, too, which the few bits of codes and
        weights make the rule, the result is the reference's bit for bit; elsewhere it may round to
        a neighbour.

    Raises:
        ValueError: a shape or an alignment that is not supported.
    """
    num_rows, num_heads, dim = queries.shape
    _, entries, record = index_keys.shape
    _check(index_keys, dim)
    out = torch.empty((num_rows, num_entries_max), dtype=out_dtype, device=queries.device)
    if out.numel() == 0:
        return out
    num_seqs = block_table.shape[0]
    # Several rows of a sequence are quicker side by side, and few rows by more programs.
    alone = num_rows >= _ROWS_ON_HOPPER and _kind(num_rows, num_seqs) == ""
    hopper = _hopper(out.device) if alone and settings is None else None
    if hopper is not None and hopper.suits(queries, index_keys, num_entries_max):
        hopper.scores(
            queries.contiguous(),
            head_weights.contiguous(),
            index_keys,
            block_table,
            seqs,
            visible,
            out,
        )
        return out
    key = settings_key(num_rows, num_seqs, num_heads, dim)
    use = settings or config("paged_scores", key, _DEFAULTS[_kind(num_rows, num_seqs)])
    tile = min(use["tile"], entries & -entries)
    num_groups, num_tiles = triton.cdiv(num_rows, use["rows"]), triton.cdiv(num_entries_max, tile)
    tiles = _tiles(num_groups, num_tiles, tile, use)
    grid = (num_groups, triton.cdiv(num_tiles, tiles))
    _score_kernel[grid](
        queries.contiguous(),
        head_weights.contiguous(),
        index_keys,
        block_table,
        seqs,
        visible,
        out,
        num_rows,
        num_entries_max,
        num_heads,
        tiles,
        index_keys.stride(0),
        block_table.stride(0),
        num_entries_max,
        ENTRIES=entries,
        TILE=tile,
        RECORD=record,
        DIM=dim,
        HEADS=max(16, triton.next_power_of_2(num_heads)),
        ROWS=use["rows"],
        SIDE=use["side"],
        PIECE=min(use["piece"], dim // 32),
        STAGES=use["num_stages"],
        num_warps=use["num_warps"],
        maxnreg=use["registers"] or None,
    )
    return out


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernel for Hopper's tensor cores, if this is one and Triton has what it is written in."""
    if (
        INTERPRETED.value
        or device.type != "cuda"
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return None
    try:
        return importlib.import_module("phalanx.kernels.triton.indexer_hopper")
    except ImportError:  # an experimental part of Triton
        return None


def candidate_scores(
    queries: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    seqs: Tensor,
    visible: Tensor,
    blocks: Tensor,
    block_size: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    settings: Config | None = None,
) -> Tensor:
    """`paged_scores` of the entries of each row's candidate blocks alone, side by side.

    Where many rows share a sequence, and none is long by `block_table`'s width, all scores are computed
    and those of candidates picked, which is quicker there: one key serves many rows.

    Args: as for `paged_scores`, and
        blocks: int64 [R, B], of `block_size` entries each, rising, -1 at the end for none; as from
            `candidate_blocks`.
        settings: as in CANDIDATES_LISTED, for candidates alone. They change no bit.

    Returns:
        bf16 values [R, B * block_size] of type `out_dtype`, bit for bit as from `paged_scores`; -inf
        where a row sees no such entry.

    Raises:
        ValueError: a shape or an alignment that is not supported.
    """
    num_rows, num_heads, dim = queries.shape
    _, entries, record = index_keys.shape
    _check(index_keys, dim)
    num_columns = blocks.shape[1] * block_size
    out = torch.empty((num_rows, num_columns), dtype=out_dtype, device=queries.device)
    if out.numel() == 0:
        return out
    use = settings or config("candidate_scores", f"{num_heads}x{dim}", _DEFAULT_LISTED)
    num_seqs, num_entries = block_table.shape[0], block_table.shape[1] * entries
    if num_rows >= _MANY_ROWS * num_seqs and num_entries <= _ALL_UNTIL:
        scores = paged_scores(
            queries,
            head_weights,
            index_keys,
            block_table,
            seqs,
            visible,
            num_entries,
            out_dtype=out_dtype,
        )
        _pick(scores, blocks, block_size, out)
        return out
    num_tiles = triton.cdiv(num_columns, use["tile"])
    tiles = _tiles(num_rows, num_tiles, use["tile"], use)
    _candidate_kernel[(num_rows, triton.cdiv(num_tiles, tiles))](
        queries.contiguous(),
        head_weights.contiguous(),
        index_keys,
        block_table,
        seqs,
        visible,
        blocks,
        out,
        num_columns,
        num_heads,
        tiles,
        index_keys.stride(0),
        block_table.stride(0),
        blocks.stride(0),
        ENTRIES=entries,
        TILE=use["tile"],
        RECORD=record,
        DIM=dim,
        HEADS=max(16, triton.next_power_of_2(num_heads)),
        SIZE=block_size,
        PIECE=min(use["piece"], dim // 32),
        STAGES=use["num_stages"],
        num_warps=use["num_warps"],
        maxnreg=use["registers"] or None,
    )
    return out


def _pick(scores: Tensor, blocks: Tensor, block_size: int, out: Tensor) -> None:
    """Scores of all entries [R, E] -> of those of the listed blocks [R, B * block_size]."""
    num_rows, num_blocks = blocks.shape
    width = triton.next_power_of_2(block_size)
    tile = max(1, 2048 // width)
    _pick_kernel[(num_rows, triton.cdiv(num_blocks, tile))](
        scores,
        blocks,
        out,
        scores.shape[1],
        num_blocks,
        scores.stride(0),
        blocks.stride(0),
        SIZE=block_size,
        WIDTH=width,
        BLOCKS=tile,
        VECTOR=vector(scores),
    )


def _tiles(num_groups: int, num_tiles: int, tile: int, use: Config) -> int:
    """Tiles of a program, so that the last programs do not run beside an empty GPU."""
    at_once = use["programs"] * max(1, use["tile"] // tile)  # smaller ones take less room
    set_up = 4  # tiles that take as long as setting up the queries
    fewest = max(triton.cdiv(num_tiles, use["tiles"]), at_once // num_groups, 1)
    times: list[tuple[int, int]] = []
    for parts in range(fewest, fewest + 5):
        tiles = triton.cdiv(num_tiles, parts)
        programs = num_groups * triton.cdiv(num_tiles, tiles)
        times.append((triton.cdiv(programs, at_once) * (tiles + set_up), tiles))
    return min(times)[1]


def _check(index_keys: Tensor, dim: int) -> None:
    """Raises ValueError where the kernels would read in the wrong place."""
    _, entries, record = index_keys.shape
    if dim not in (64, 128) or record != index_key_bytes(dim):
        raise ValueError(f"records of {record} bytes and dimension {dim}; it must be 64 or 128")
    if entries % 64:
        raise ValueError(f"blocks of {entries} entries; it must be a multiple of 64")
    align = 4 if dim == 128 else 2
    if index_keys.stride()[1:] != (record, 1) or index_keys.stride(0) % align:
        raise ValueError(f"index keys have strides {index_keys.stride()}")
    if index_keys.data_ptr() % align:
        raise ValueError(f"index keys are not aligned to {align} bytes")


@triton.jit(do_not_specialize=_BATCH_SIZES, do_not_specialize_on_alignment=_BATCH_TENSORS)
def _block_maxima_kernel(
    scores,
    visible,
    best,
    num_entries,
    num_blocks,
    score_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The best entry of each candidate block, +inf for the newest visible one's."""
    row = tl.program_id(0).to(tl.int64)
    num_entries = num_entries // VECTOR * VECTOR
    score_stride = score_stride // VECTOR * VECTOR
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, WIDTH)
    entry = block[:, None] * SIZE + inner[None, :]
    inside = (inner < SIZE)[None, :] & (entry < num_entries)
    key = tl.max(ordered_key(load_bits(scores + row * score_stride + entry, inside)), axis=1)
    bits = tl.where(key < 0, 0x8000 - key, key)
    seen = tl.load(visible + row)
    bits = tl.where((seen > 0) & (block == (seen - 1) // SIZE), 0x7F80, bits)
    value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(best + row * num_blocks + block, value, mask=block < num_blocks)


def candidate_blocks(
    scores: Tensor, num_visible: Tensor, *, block_size: int, num_blocks: int
) -> Tensor:
    """The best blocks of entries, among which later layers choose.

    Equal (`==`) to `reference.candidate_blocks`, but for NaN with the sign bit set, which counts as
    -inf. `candidate_scores` and `select_top` take the result.

    Args:
        scores: bf16, or float32 that holds bf16 values, [R, E]; the last dimension contiguous.
        num_visible: integers [R].
        block_size: entries per candidate block.
        num_blocks: blocks that are kept.

    Returns:
        int64 [R, num_blocks], rising, filled up with -1 at the end.
    """
    num_rows, num_entries = scores.shape
    width = triton.next_power_of_2(block_size)
    in_all = triton.cdiv(num_entries, block_size)
    best = torch.empty((num_rows, in_all), dtype=torch.bfloat16, device=scores.device)
    if best.numel() > 0:
        tile = max(1, 4096 // width)
        _block_maxima_kernel[(num_rows, triton.cdiv(in_all, tile))](
            scores,
            num_visible,
            best,
            num_entries,
            in_all,
            scores.stride(0),
            SIZE=block_size,
            WIDTH=width,
            BLOCKS=tile,
            VECTOR=vector(scores),
        )
    return select_top(best, num_blocks)
