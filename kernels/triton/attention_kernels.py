"""Attention over cache records in plain Triton, for vectors and GPUs that have no kernel of their own.

A row's slots are gone through twice: for the largest of its scores, relative to which weights are
rounded as in the reference, and for the sums. A record is decoded into its even and its odd dimensions apart: so two e2m1 codes lie in a byte,
two e4m3 codes in 16 bits, and the two halves of a rotary pair in two tensors.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import os

import triton
import triton.language as tl

# The interpreter knows no machine instructions, multiplies no bf16 and cuts off where it should round.
PLAIN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# What an e2m1 code put into bf16 bits lacks is 2^126; 2^119 times the largest scale is still
# finite. The missing 2^7 is made up for in the scores' factor and in the weights, without rounding.
ENTRY_BOOST = tl.constexpr(128.0)
LOG2_E = tl.constexpr(1.4426950408889634)
_UP_120 = tl.constexpr(2.0**120)
_UP_119 = tl.constexpr(2.0**119)
_NOWHERE = tl.constexpr(-1e30)  # the largest score where there is none

# Two e4m3 pairs (even, odd, even, odd) -> bf16 even, even and odd, odd. 0x7b80 is 2^120.
_FP8_PTX = tl.constexpr("""{
.reg .b32 s, m, up;
mov.b32 up, 0x7b807b80;
shl.b32 s, $2, 8;
and.b32 s, s, 0x80008000;
shl.b32 m, $2, 4;
and.b32 m, m, 0x07f007f0;
or.b32 m, m, s;
mul.rn.bf16x2 m, m, up;
mul.rn.bf16x2 $0, m, $3;
and.b32 s, $2, 0x80008000;
shr.u32 m, $2, 4;
and.b32 m, m, 0x07f007f0;
or.b32 m, m, s;
mul.rn.bf16x2 m, m, up;
mul.rn.bf16x2 $1, m, $3;
}""")

# Four bytes of e2m1 -> four bf16 of the low, four of the high nibbles. One product puts a nibble to
# two places at once: its sign to bit 15, the rest to bits 8..6.
_FP4_PTX = tl.constexpr("""{
.reg .b32 x, y, t;
prmt.b32 x, $4, 0, 0x4140;
prmt.b32 y, $4, 0, 0x4342;
and.b32 t, x, 0x000f000f;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $0, t, $5;
and.b32 t, y, 0x000f000f;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $1, t, $6;
and.b32 t, x, 0x00f000f0;
mul.lo.u32 t, t, 0x0104;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $2, t, $5;
and.b32 t, y, 0x00f000f0;
mul.lo.u32 t, t, 0x0104;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $3, t, $6;
}""")


@triton.jit
def _operand(x):
    """A factor of a matrix product; the interpreter multiplies no bf16, but float32 of the same value."""
    return _widened(x) if PLAIN else x


@triton.jit
def _widened(x):
    """bf16 -> float32."""
    if not PLAIN:
        return x.to(tl.float32)
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """float32 -> the nearest bf16, ties to even; the interpreter's own conversion cuts off."""
    if not PLAIN:
        return x.to(tl.bfloat16)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _exp2(x):
    """2^x; what is below 2^-126 may become zero."""
    if PLAIN:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fp8_pairs(pairs, scale):
    """int16 pairs of e4m3 codes times bf16 powers of two -> bf16 of the low and the high bytes."""
    if not PLAIN:
        return tl.inline_asm_elementwise(
            _FP8_PTX,
            "=&r,=&r,r,r",
            [pairs, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    word = pairs.to(tl.int32) & 0xFFFF
    factor = _widened(scale)
    low = ((word & 0x80) << 24) | ((word & 0x7F) << 20)
    high = ((word & 0x8000) << 16) | ((word & 0x7F00) << 12)
    low = low.to(tl.float32, bitcast=True) * _UP_120 * factor
    high = high.to(tl.float32, bitcast=True) * _UP_120 * factor
    return _rounded(low), _rounded(high)


@triton.jit
def _fp4_pairs(codes, scale):
    """Bytes of two e2m1 codes times bf16 -> 2^-126 times the low and the high nibbles, bf16."""
    if not PLAIN:
        return tl.inline_asm_elementwise(
            _FP4_PTX,
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    word = codes.to(tl.int32)
    factor = _widened(scale)
    low = ((word & 0x08) << 28) | ((word & 0x07) << 22)
    high = ((word & 0x80) << 24) | ((word & 0x70) << 18)
    low = low.to(tl.float32, bitcast=True) * factor
    high = high.to(tl.float32, bitcast=True) * factor
    return _rounded(low), _rounded(high)


@triton.jit
def _window_places(
    i,
    row,
    slot,
    position,
    within,
    first,
    records,
    ring,
    ring_slot_stride,
    ring_entry_stride,
    DIM: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the records of window slots i lie, and which slots have one."""
    if BLOCK == 0:
        back = WINDOW - 1 - i
        at = position - back
        near = back <= within
        there = (back >= 0) & (at >= 0) & ((at >= first) | (position < first))
    else:
        back = WINDOW + within - i  # from the row to the ring's or the block's vector
        at = position - back
        near = i >= WINDOW
        there = (i < WINDOW + BLOCK) & (at >= 0)
    here = records + (row - back) * (DIM + DIM // 32)
    far = ring + slot * ring_slot_stride + (tl.maximum(at, 0) % RING) * ring_entry_stride
    return tl.where(near, here, far), there


@triton.jit
def _entry_places(
    i,
    chosen,
    blocks,
    compressed,
    block_stride,
    DIM: tl.constexpr,
    TOPK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The same of a row's chosen entries i."""
    entry = tl.load(chosen + i, mask=i < TOPK, other=-1).to(tl.int32)
    there = entry >= 0
    entry = tl.maximum(entry, 0)
    block = tl.load(blocks + entry // ENTRIES, mask=there, other=0).to(tl.int64)
    return compressed + block * block_stride + (entry % ENTRIES) * (DIM // 2 + DIM // 16), there


@triton.jit
def _side_by_side(even, odd):
    """[rows, n] twice -> [rows, 2 n], without moving anything between threads."""
    both = tl.permute(tl.join(even, odd), (0, 2, 1))
    return tl.reshape(both, (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _apart(both):
    """The inverse of `_side_by_side`."""
    pairs: tl.constexpr = both.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(both, (both.shape[0], 2, pairs)), (0, 2, 1)))


@triton.jit
def _window_values(record, there, DIM: tl.constexpr):
    """Window records: even dimensions, then odd ones, bf16 [slots, DIM]."""
    words = record.to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, DIM // 2)[None, :]
    words = tl.load(words, mask=there[:, None], other=0)
    place = record[:, None] + (DIM + tl.arange(0, DIM // 32))[None, :]
    scale = tl.load(place, mask=there[:, None], other=0).to(tl.int32)
    scale = (scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    words = tl.reshape(words, (words.shape[0], DIM // 32, 16))
    even, odd = _fp8_pairs(words, tl.broadcast_to(scale[:, :, None], words.shape))
    shape: tl.constexpr = (words.shape[0], DIM // 2)
    return _side_by_side(tl.reshape(even, shape), tl.reshape(odd, shape))


@triton.jit
def _entry_values(record, there, DIM: tl.constexpr):
    """The same of compressed records, times 1 / ENTRY_BOOST."""
    codes = record[:, None] + tl.arange(0, DIM // 2)[None, :]
    codes = tl.load(codes, mask=there[:, None], other=0)
    place = record[:, None] + (DIM // 2 + tl.arange(0, DIM // 16))[None, :]
    scale = tl.load(place, mask=there[:, None], other=0).to(tl.int32)
    scale = ((scale & 0x80) << 24) | ((scale & 0x7F) << 20)
    scale = _rounded(scale.to(tl.float32, bitcast=True) * _UP_120 * _UP_119)
    codes = tl.reshape(codes, (codes.shape[0], DIM // 16, 8))
    even, odd = _fp4_pairs(codes, tl.broadcast_to(scale[:, :, None], codes.shape))
    shape: tl.constexpr = (codes.shape[0], DIM // 2)
    return _side_by_side(tl.reshape(even, shape), tl.reshape(odd, shape))


@triton.jit
def _queries(queries, place, mask, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Queries at `place` (in pairs): even dimensions, then odd ones."""
    place += tl.arange(0, DIM // 2)[None, :]
    if WIDE:
        both = tl.load(queries.to(tl.pointer_type(tl.int64)) + place, mask=mask, other=0)
        even = _rounded(both.to(tl.int32).to(tl.float32, bitcast=True))
        odd = _rounded((both >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    else:
        both = tl.load(queries.to(tl.pointer_type(tl.int32)) + place, mask=mask, other=0)
        even = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return _side_by_side(even, odd)


@triton.jit
def _scores(ours, values, there, scale):
    """Scores of a tile of slots, float32 [heads, slots]."""
    scores = tl.dot(_operand(ours), tl.trans(_operand(values))) * scale
    return tl.where(there[None, :], scores, float("-inf"))


@triton.jit
def _add_tile(ours, values, there, scale, boost, top, total, sums):
    """The softmax with one tile of slots more; `boost`, a power of two, is what the values lack."""
    weight = _exp2(_scores(ours, values, there, scale * boost) - top[:, None])
    total += tl.sum(weight, axis=1)
    sums = tl.dot(_operand(_rounded(weight * boost)), _operand(values), sums)
    return total, sums


@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    queries,
    records,
    ring,
    ring_slot_stride,
    ring_entry_stride,
    slots,
    positions,
    within,
    window_from,
    compressed,
    block_stride,
    block_table,
    table_stride,
    seqs,
    chosen,
    chosen_stride,
    sink,
    cos,
    sin,
    out,
    scale,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    WIDE: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Attention of one row: grid (ceil(HEADS / HEAD_TILE), rows). `scale` includes log2(e)."""
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    mask = head < HEADS
    ours = _queries(queries, (row * HEADS + head)[:, None] * (DIM // 2), mask[:, None], DIM, WIDE)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    inside = tl.load(within + row).to(tl.int32)
    first = tl.load(window_from + row).to(tl.int32)
    seq = tl.load(seqs + row).to(tl.int64) if SEQS else row
    top = tl.full((HEAD_TILE,), _NOWHERE, tl.float32)
    for tile in range(0, WINDOW + BLOCK, TILE):
        record, there = _window_places(
            tile + tl.arange(0, TILE), row, slot, position, inside, first, records, ring,
            ring_slot_stride, ring_entry_stride, DIM, RING, WINDOW, BLOCK,
        )  # fmt: skip
        scores = _scores(ours, _window_values(record, there, DIM), there, scale)
        top = tl.maximum(top, tl.max(scores, axis=1))
    for tile in range(0, TOPK, TILE):
        record, there = _entry_places(
            tile + tl.arange(0, TILE), chosen + row * chosen_stride,
            block_table + seq * table_stride, compressed, block_stride, DIM, TOPK, ENTRIES,
        )  # fmt: skip
        scores = _scores(ours, _entry_values(record, there, DIM), there, scale * ENTRY_BOOST)
        top = tl.maximum(top, tl.max(scores, axis=1))
    total = tl.zeros((HEAD_TILE,), tl.float32)
    sums = tl.zeros((HEAD_TILE, DIM), tl.float32)
    for tile in range(0, WINDOW + BLOCK, TILE):
        record, there = _window_places(
            tile + tl.arange(0, TILE), row, slot, position, inside, first, records, ring,
            ring_slot_stride, ring_entry_stride, DIM, RING, WINDOW, BLOCK,
        )  # fmt: skip
        values = _window_values(record, there, DIM)
        total, sums = _add_tile(ours, values, there, scale, 1.0, top, total, sums)
    for tile in range(0, TOPK, TILE):
        record, there = _entry_places(
            tile + tl.arange(0, TILE), chosen + row * chosen_stride,
            block_table + seq * table_stride, compressed, block_stride, DIM, TOPK, ENTRIES,
        )  # fmt: skip
        values = _entry_values(record, there, DIM)
        total, sums = _add_tile(ours, values, there, scale, ENTRY_BOOST, top, total, sums)
    # The sink is one logit more, without a value; it may be the largest.
    logit = tl.load(sink + head, mask=mask, other=0.0) * LOG2_E
    higher = tl.maximum(top, logit)
    total = total * _exp2(top - higher) + _exp2(logit - higher)
    even, odd = _apart(_widened(_rounded(sums * (_exp2(top - higher) / total)[:, None])))
    pair = tl.arange(0, DIM // 2)
    if ROPE > 0:
        # Channels before the rotated ones are multiplied by one and added zero: not touched.
        channel = 2 * pair - (DIM - ROPE)
        turned = channel >= 0
        cos_even = tl.load(cos + row * ROPE + channel, mask=turned, other=1.0)
        cos_odd = tl.load(cos + row * ROPE + channel + 1, mask=turned, other=1.0)
        sin_even = tl.load(sin + row * ROPE + channel, mask=turned, other=0.0)
        sin_odd = tl.load(sin + row * ROPE + channel + 1, mask=turned, other=0.0)
        turned_even = even * cos_even[None, :] - odd * sin_even[None, :]
        turned_odd = odd * cos_odd[None, :] - even * sin_odd[None, :]
        even = tl.where(turned[None, :], turned_even, even)
        odd = tl.where(turned[None, :], turned_odd, odd)
    place = out + (row * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    both = _rounded(tl.interleave(even, odd))
    if out.dtype.element_ty == tl.float32:
        tl.store(place, _widened(both), mask=mask[:, None])
    else:
        tl.store(place, both, mask=mask[:, None])
