# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Scores of compressed entries over paged 68-byte keys, and candidate blocks (model.md C.6, E).

A tile of keys lies in one block of the pool. Its codes become bf16 in the registers from which they
are multiplied with the queries of one row, or of several rows of one sequence side by side. A row's
numbers never depend on the rows beside it: every (row, tile) is the same product, its dimensions in
one order.

How codes become bf16: with a code `s ee m` at the right place of a 16-bit half, sign at bit 15 and
`ee m` at bits 8 to 6, the half is 2^-126 times the e2m1 value, also where that is subnormal. One
product with a power of two brings it to its size, exactly.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.quant import index_key_bytes
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.topk import load_bits, ordered_key, select_top

# `tile` is the entries of a product, `tiles` what a program takes of them; `registers` limits those
# of a thread, so that more programs fit, and 0 leaves them to the compiler.
CANDIDATES: Final[list[Config]] = [
    {
        "rows": 1,
        "tile": tile,
        "tiles": 4096 // tile,
        "num_warps": warps,
        "num_stages": stages,
        "registers": registers,
    }
    for tile, warps, stages, registers in (
        (128, 4, 3, 0),
        (128, 4, 5, 0),
        (128, 4, 7, 0),
        (128, 4, 5, 96),
        (128, 8, 5, 0),
        (64, 4, 5, 0),
    )
]
CANDIDATES_MANY: Final[list[Config]] = [
    {
        "rows": rows,
        "tile": tile,
        "tiles": entries // tile,
        "num_warps": warps,
        "num_stages": stages,
        "registers": registers,
    }
    for rows, tile, warps, stages, registers in (
        (2, 64, 4, 5, 0),
        (2, 128, 4, 5, 0),
        (4, 64, 4, 5, 0),
        (4, 64, 4, 5, 168),
        (4, 128, 4, 5, 0),
        (8, 64, 4, 5, 0),
        (8, 128, 8, 5, 0),
    )
    for entries in (4096, 8192)
]
_DEFAULT: Final[Config] = {
    "rows": 1,
    "tile": 128,
    "tiles": 32,
    "num_warps": 4,
    "num_stages": 5,
    "registers": 0,
}
_DEFAULT_PAIRS: Final[Config] = _DEFAULT | {"rows": 2}
_DEFAULT_MANY: Final[Config] = _DEFAULT | {"rows": 4, "tile": 64, "tiles": 64, "registers": 168}
_DEFAULTS: Final = {"": _DEFAULT, "_pairs": _DEFAULT_PAIRS, "_many": _DEFAULT_MANY}
_PROGRAMS: Final = 528  # an H200 runs four on each of its multiprocessors
_MANY_ROWS: Final = 512  # from here on rows usually share their sequence


# The interpreter knows no machine instructions, cuts off where a GPU rounds to bf16, and multiplies
# the bits of bf16 operands.
_INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _round(x):
    """float32 -> the nearest bf16 values, as float32; for the interpreter."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, nearest)  # NaN stays


@triton.jit
def _dot(left, right, total):
    """total + left @ right, bf16 in float32."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(left, right, total)


@triton.jit
def _quad(QUADS: tl.constexpr, GROUPS: tl.constexpr):
    """The order of a key's words of four codes within a product, [QUADS].

    In an operand of the tensor cores a thread holds every eighth pair of a row. In this order these
    pairs are of one group, so that it unpacks one scale.
    """
    place = tl.arange(0, QUADS)
    return place // 2 % GROUPS * 8 + place // (2 * GROUPS) * 2 + place % 2


@triton.jit
def _factors(scales, shift, QUADS: tl.constexpr):
    """2^(126 - 32) times the scales: int32 [T, 1], int32 [G] -> bf16 [T, QUADS]."""
    TILE: tl.constexpr = scales.shape[0]
    GROUPS: tl.constexpr = shift.shape[0]
    bits = (((scales >> shift[None, :]) & 0xFF) + 94) << 7
    factors = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    wide = tl.broadcast_to(factors[:, None, :, None], (TILE, QUADS // (2 * GROUPS), GROUPS, 2))
    return wide.reshape(TILE, QUADS)


@triton.jit
def _part(codes, factors, PART: tl.constexpr):
    """Code PART of every four: int16 [T, W], bf16 [T, W] -> bf16 [T, W], 2^-32 times the key."""
    if _INTERPRETED:
        code = codes.to(tl.int32) >> (4 * PART)
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        value = bits.to(tl.float32, bitcast=True) * factors.to(tl.float32)
        return value.to(tl.bfloat16)
    elif PART == 0:
        return _asm_keys(codes, factors, "and.b32 t, $1, 0x000F000F; mul.lo.u32 t, t, 0x1040;")
    elif PART == 1:
        return _asm_keys(codes, factors, "and.b32 t, $1, 0x00F000F0; mul.lo.u32 t, t, 0x104;")
    elif PART == 2:
        return _asm_keys(
            codes,
            factors,
            "shr.u32 t, $1, 8; and.b32 t, t, 0x000F000F; mul.lo.u32 t, t, 0x1040;",
        )
    else:
        return _asm_keys(
            codes,
            factors,
            "shr.u32 t, $1, 8; and.b32 t, t, 0x00F000F0; mul.lo.u32 t, t, 0x104;",
        )


@triton.jit
def _asm_keys(codes, factors, PLACE: tl.constexpr):
    """Two codes at a time: brought to their PLACE in t, then multiplied.

    A product with 2^a + 2^b sets two copies of a nibble: one for its sign, one for the rest.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; " + PLACE + " and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2; }",
        "=r,r,r",
        [codes, factors],
        tl.bfloat16,
        True,
        2,
    )


@triton.jit
def _keys(codes, factors):
    """All parts, one after the other: bf16 [T, 4 W]."""
    even = tl.join(_part(codes, factors, 0), _part(codes, factors, 2))
    odd = tl.join(_part(codes, factors, 1), _part(codes, factors, 3))
    parts = tl.join(even, odd)  # [T, W, part // 2, part % 2]
    return parts.trans(0, 2, 3, 1).reshape(codes.shape[0], 4 * codes.shape[1])


@triton.jit
def _shift(pointer, never, GROUPS: tl.constexpr):
    """Where each group's scale starts in a record's word, in bits: int32 [GROUPS].

    Comes out of a load that never happens (`never` is 0): the compiler moves the layout of an
    operand up to loads, so that keys are unpacked where they are multiplied, but not up to a range.
    """
    group = tl.arange(0, GROUPS)
    return tl.load(pointer + group, mask=group < never, other=group * 8).to(tl.int32)


@triton.jit
def _load_queries(queries, head, known, QUADS: tl.constexpr, COLUMNS: tl.constexpr):
    """2^32 times the queries, in the order of `_keys`: bf16 [4 QUADS, COLUMNS].

    `head` counts the heads of all rows; it is read where `known`.
    """
    source = head.to(tl.int64)[:, None] * (4 * QUADS) + tl.arange(0, 4 * QUADS)[None, :]
    values = tl.load(queries + source, mask=known[:, None], other=0.0)
    values = (values.to(tl.float32) * 4294967296.0).to(tl.bfloat16)
    # Dimensions are (group, i, pair, part), places (part, i, group, pair): see `_quad`.
    values = values.reshape(COLUMNS, QUADS // 8, 4, 2, 4).trans(4, 2, 1, 3, 0)
    return values.reshape(4 * QUADS, COLUMNS)


@triton.jit
def _weighted(dots, weights):
    """bf16(weight * relu(bf16(dot))): float32 [T, H] and bf16 [T, H] -> bf16 [T, H]."""
    if _INTERPRETED:
        dots = _round(tl.where(dots < 0, 0.0, dots))
        return _round(dots * weights.to(tl.float32)).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            cvt.rn.relu.bf16x2.f32 t, $2, $1;
            mul.rn.bf16x2 $0, t, $3;
            }""",
            "=r,r,r,r",
            [dots, weights],
            tl.bfloat16,
            True,
            2,
        )


@triton.jit
def _load_keys(
    keys,
    block_table,
    tile,
    block_stride,
    quad,
    shift,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Codes int16 [TILE, QUADS] in the order of `quad`, and the factors of their groups."""
    PER_BLOCK: tl.constexpr = ENTRIES // TILE
    block = tl.load(block_table + tile // PER_BLOCK).to(tl.int64)
    base = keys + block * block_stride + (tile % PER_BLOCK) * (TILE * RECORD)
    records = base + (tl.arange(0, TILE) * RECORD)[:, None]
    codes = tl.load(records + quad[None, :])
    if QUADS == 32:
        scales = tl.load((records + QUADS).to(tl.pointer_type(tl.int32)))
    else:
        scales = tl.load(records + QUADS).to(tl.int32)
    return codes, _factors(scales, shift, QUADS)


@triton.jit
def _either(left, right):
    return left


@triton.jit
def _one_column(total):
    """[M, 16] whose columns are all alike -> [M]."""
    if _INTERPRETED:
        return tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, total, 0.0), axis=1)
    else:
        return tl.reduce(total, 1, _either)


@triton.jit
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
    never,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    QUADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of ROWS neighbouring rows over `num_tiles` tiles; `keys` points to int16, four codes each.

    Neighbours of one sequence are served by one pass over its keys, the heads of all ROWS rows side
    by side; neighbours of several sequences take a pass each.
    """
    start = tl.program_id(0) * ROWS
    stop = tl.minimum(start + ROWS, num_rows)
    first = tl.program_id(1) * num_tiles
    end = tl.minimum(first + num_tiles, tl.cdiv(num_entries, TILE))
    member = start + tl.arange(0, ROWS)
    seqs_here = tl.load(seqs + member, mask=member < stop, other=-1)
    seen_here = tl.load(visible + member, mask=member < stop, other=0)
    seen_here = tl.minimum(seen_here, num_entries).to(tl.int32)

    quad = _quad(QUADS, QUADS // 8)
    shift = _shift(visible, never, QUADS // 8)
    column = tl.arange(0, ROWS * HEADS)
    known = (column % HEADS < num_heads) & (start + column // HEADS < stop)
    known &= first * TILE < tl.max(seen_here)
    head = (start + column // HEADS) * num_heads + column % HEADS
    q = _load_queries(queries, head, known, QUADS, ROWS * HEADS)
    weights = tl.load(head_weights + head, mask=known, other=0.0).to(tl.bfloat16)
    weights = tl.broadcast_to(weights[None, :], (TILE, ROWS * HEADS))
    ones = tl.full((HEADS, 16), 1.0, tl.float32).to(tl.bfloat16)

    # The results, row after row.
    place = tl.arange(0, ROWS * TILE)
    row, entry = start + place // TILE, place % TILE
    seen = tl.minimum(tl.load(visible + row, mask=row < stop, other=0), num_entries).to(tl.int32)
    target = out + row.to(tl.int64) * out_stride + entry
    while start < stop:
        seq = tl.load(seqs + start).to(tl.int64)
        next_start = tl.min(tl.where((member > start) & (seqs_here != seq), member, stop))
        ours = (member >= start) & (member < next_start)
        most = tl.max(tl.where(ours, seen_here, 0))
        shown = tl.maximum(tl.minimum(end, tl.cdiv(most, TILE)), first)
        table = block_table + seq * table_stride
        written = (row >= start) & (row < next_start)
        for tile in tl.range(first, shown, num_stages=STAGES):
            codes, factors = _load_keys(
                keys, table, tile, block_stride, quad, shift, ENTRIES, TILE, RECORD, QUADS
            )
            dots = tl.zeros((TILE, ROWS * HEADS), tl.float32)
            dots = _dot(_keys(codes, factors), q, dots)
            parts = _weighted(dots, weights)
            if ROWS > 1:
                parts = parts.reshape(TILE, ROWS, HEADS).trans(1, 0, 2).reshape(ROWS * TILE, HEADS)
            total = _dot(parts, ones, tl.zeros((ROWS * TILE, 16), tl.float32))
            total = _one_column(total)
            _store(target + tile * TILE, total, written & (tile * TILE + entry < seen))
        # What no row sees, and the rest of the tiles in which a row's entries end.
        least = tl.min(tl.where(ours, seen_here, num_entries))
        hidden = tl.full((ROWS * TILE,), float("-inf"), tl.float32)
        for tile in range(tl.maximum(first, least // TILE), end):
            at = tile * TILE + entry
            _store(target + tile * TILE, hidden, written & (at >= seen) & (at < num_entries))
        start = next_start


@triton.jit
def _store(target, total, mask):
    """The nearest bf16 values, in the type of `target`."""
    if _INTERPRETED:
        total = _round(total)
    if target.dtype.element_ty == tl.float32:
        total = total.to(tl.bfloat16)
    tl.store(target, total.to(target.dtype.element_ty), mask=mask)


def _kind(num_rows: int, rows_per_seq: int) -> str:
    if num_rows >= _MANY_ROWS:
        return "_many"
    return "_pairs" if rows_per_seq > 1 else ""


def settings_key(num_rows: int, num_heads: int, dim: int, rows_per_seq: int = 1) -> str:
    """The key of `paged_scores` in the table of settings."""
    return f"{num_heads}x{dim}{_kind(num_rows, rows_per_seq)}"


def paged_scores(
    queries: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    seqs: Tensor,
    visible: Tensor,
    num_entries_max: int,
    *,
    rows_per_seq: int = 1,
    out_dtype: torch.dtype = torch.bfloat16,
    settings: Config | None = None,
) -> Tensor:
    """Index scores of the entries that each row may see: sum_h w_h * relu(q_h . k).

    Rounded as in `reference.entry_scores`: the dot to bf16, the product with the weight to bf16,
    the sum of the heads to bf16.

    Args:
        queries: bf16, or float32 that holds bf16 values, [R, heads, dim]; after their
            QF4 round trip. dim is 64 or 128; below 2^95.
        head_weights: bf16, or float32 that holds bf16 values, [R, heads].
        index_keys: uint8 [num_blocks, N, index_key_bytes(dim)], a view whose blocks may lie apart
            and whose records may not; N a multiple of 64; blocks aligned to 4 bytes (dim 64: 2). A
            key's scale is in 2^-100 .. 2^33: others give no error and an unspecified score.
        block_table: integers [S, max_blocks], rows contiguous. Read only where a row sees entries.
        seqs: integers [R], the row of `block_table`.
        visible: integers [R], of the same type: entries that the row may see.
        num_entries_max: columns of the result, at most max_blocks * N.
        rows_per_seq: neighbouring rows that mostly share a sequence, where there are few rows in
            all: such rows are taken in pairs. A hint; it changes no bit.
        settings: as in CANDIDATES. They change no bit.

    Returns:
        bf16 values [R, num_entries_max] of type `out_dtype`; -inf from `visible` on.
        Bound: tensor cores sum the dimensions, and then the heads, in float32, each in one order for
        all rows. Where these sums are exact, which the few bits of codes and weights make the rule,
        the result is the reference's bit for bit; elsewhere it may round to a neighbour.

    Raises:
        ValueError: a shape or an alignment that is not supported.
    """
    num_rows, num_heads, dim = queries.shape
    _, entries, record = index_keys.shape
    _check(index_keys, dim)
    out = torch.empty((num_rows, num_entries_max), dtype=out_dtype, device=queries.device)
    if out.numel() == 0:
        return out
    keys = index_keys.view(torch.int16)
    default = _DEFAULTS[_kind(num_rows, rows_per_seq)]
    key = settings_key(num_rows, num_heads, dim, rows_per_seq)
    use = settings or config("paged_scores", key, default)
    tile = min(use["tile"], entries & -entries)
    num_groups, num_tiles = triton.cdiv(num_rows, use["rows"]), triton.cdiv(num_entries_max, tile)
    each = use["tiles"]
    if settings is None:  # few rows: rather fill the GPU than set up the queries less often
        each = min(each, triton.cdiv(num_groups * num_tiles, _PROGRAMS))
    grid = (num_groups, triton.cdiv(num_tiles, each))
    _score_kernel[grid](
        queries.contiguous(),
        head_weights.contiguous(),
        keys,
        block_table,
        seqs,
        visible,
        out,
        num_rows,
        num_entries_max,
        num_heads,
        each,
        keys.stride(0),
        block_table.stride(0),
        num_entries_max,
        0,
        ENTRIES=entries,
        TILE=tile,
        RECORD=record // 2,
        QUADS=dim // 4,
        HEADS=max(16, triton.next_power_of_2(num_heads)),
        ROWS=use["rows"],
        STAGES=use["num_stages"],
        num_warps=use["num_warps"],
        maxnreg=use["registers"] or None,
    )
    return out


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


@triton.jit
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
):
    """The best entry of each candidate block, +inf for the newest visible one's."""
    row = tl.program_id(0).to(tl.int64)
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


@triton.jit
def _mark_kernel(
    kept, mask, count, num_entries, SIZE: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr
):
    """True for all entries of the blocks in a row's list."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    block = tl.load(kept + row * count + slot, mask=slot < count, other=-1)
    inner = tl.arange(0, WIDTH)
    entry = block[:, None] * SIZE + inner[None, :]
    inside = (block >= 0)[:, None] & (inner < SIZE)[None, :] & (entry < num_entries)
    tl.store(mask + row * num_entries + entry, tl.full((COUNT, WIDTH), 1, tl.uint8), mask=inside)


def candidate_mask(
    scores: Tensor, num_visible: Tensor, *, block_size: int, num_blocks: int
) -> Tensor:
    """Entries of the best blocks, among which later layers choose.

    Equal (`==`) to `reference.candidate_mask`, but for NaN with the sign bit set, which counts as
    -inf. `select_top` takes the result as `candidates`.

    Args:
        scores: bf16, or float32 that holds bf16 values, [R, E]; the last dimension contiguous.
        num_visible: integers [R].
        block_size: entries per candidate block.
        num_blocks: blocks that are kept.

    Returns:
        bool [R, E].
    """
    num_rows, num_entries = scores.shape
    mask = torch.zeros((num_rows, num_entries), dtype=torch.bool, device=scores.device)
    if mask.numel() == 0:
        return mask
    width = triton.next_power_of_2(block_size)
    in_all = triton.cdiv(num_entries, block_size)
    best = torch.empty((num_rows, in_all), dtype=torch.bfloat16, device=scores.device)
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
    )
    kept = select_top(best, num_blocks)
    _mark_kernel[(num_rows, triton.cdiv(num_blocks, 256))](
        kept,
        mask.view(torch.uint8),
        num_blocks,
        num_entries,
        SIZE=block_size,
        WIDTH=width,
        COUNT=256,
    )
    return mask
