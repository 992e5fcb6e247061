"""Attention over cache records on Hopper: every record is read and decoded once.

A row's slots are cut into two parts and these into tiles, whatever the number of rows, and so are the
results' bits: sums of a part follow its tiles, and a row's result is that of its two parts. With few
rows each part has a program of its own, and the two of a row hand each other half of the dimensions
and finish one half each. With many rows a program takes a row's parts one after the other.

A program has 16 warps. Four decode records, tile by tile, into shared memory, where both products find
them; four multiply queries with the tiles and make weights of the scores; eight add up weighted values.

Within every 16 dimensions the even ones come first here, then the odd ones: so two codes are decoded
at a time. Queries are put in the same order, results are put back.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

DIM: Final = gl.constexpr(512)  # of a vector
HEAD_TILE: Final = gl.constexpr(64)  # rows of a matrix instruction
TILE: Final = gl.constexpr(64)  # slots
_HALF_TILE: Final = gl.constexpr(32)  # slots that are decoded at a time
_BUFFERS: Final = gl.constexpr(2)  # decoded tiles
_REGISTERS: Final = gl.constexpr(96)  # of each thread that decodes or weighs
_NOWHERE: Final = gl.constexpr(-1e30)  # the largest score where there is none
_LOG2_E: Final = gl.constexpr(1.4426950408889634)
# What an e2m1 code put into bf16 bits lacks is 2^126; 2^119 times the largest scale is still
# finite. The missing 2^7 is made up for in the scores' factor and in the weights, without rounding.
_BOOST: Final = gl.constexpr(128.0)
_BOOST_POWER: Final = gl.constexpr(7.0)

# --- Layouts: bit by bit, what a register, a lane, and a warp stand for -----------------------------

_LINE: Final = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_VALUES: Final = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WORDS: Final = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # of two values
_WEIGHTS: Final = gl.constexpr(gl.NVMMASharedLayout(2 * TILE.value, 16, 2))
_SCORES: Final = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value, 16]))
_SUMS: Final = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM.value // 4, 16]))
_PLACES: Final = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Raw records [slots, groups of 16 dimensions]: a thread has two neighbouring groups, and eight
# neighbouring threads, who store at a time, have four slots: that meets every bank once.
_GROUPS: Final = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 16], [16, 0]],
        [[0, 2], [1, 0], [2, 0], [0, 4], [0, 8]],
        [[4, 0], [8, 0]],
        [],
        [_HALF_TILE.value, DIM.value // 16],
    )
)
_HALF_GROUPS: Final = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [16, 0]],
        [[0, 4], [1, 0], [2, 0], [0, 8], [0, 16]],
        [[4, 0], [8, 0]],
        [],
        [_HALF_TILE.value, DIM.value // 8],
    )
)
# Half the dimensions of a result: a thread has four neighbours.
_HALF: Final = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 128]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 64]],
        [],
        [HEAD_TILE.value, DIM.value // 2],
    )
)

# --- Decoding -------------------------------------------------------------------------------------

# 8 bytes of e2m1 and a byte of e4m3 -> 4 words of even, 4 of odd values.
_E2M1_PTX: Final = gl.constexpr("""{
.reg .b32 lo, hi, x, y, t, s, u;
mul.lo.u32 s, $9, 0x00100010;
shl.b32 u, s, 4;
and.b32 u, u, 0x80008000;
and.b32 s, s, 0x07f007f0;
or.b32 s, s, u;
mov.b32 t, 0x7b807b80;
mul.rn.bf16x2 s, s, t;
mov.b32 t, 0x7b007b00;
mul.rn.bf16x2 s, s, t;
mov.b64 {lo, hi}, $8;
prmt.b32 x, lo, 0, 0x4140;
prmt.b32 y, lo, 0, 0x4342;
and.b32 t, x, 0x000f000f;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $0, t, s;
and.b32 t, y, 0x000f000f;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $1, t, s;
and.b32 t, x, 0x00f000f0;
mul.lo.u32 t, t, 0x0104;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $4, t, s;
and.b32 t, y, 0x00f000f0;
mul.lo.u32 t, t, 0x0104;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $5, t, s;
prmt.b32 x, hi, 0, 0x4140;
prmt.b32 y, hi, 0, 0x4342;
and.b32 t, x, 0x000f000f;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $2, t, s;
and.b32 t, y, 0x000f000f;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $3, t, s;
and.b32 t, x, 0x00f000f0;
mul.lo.u32 t, t, 0x0104;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $6, t, s;
and.b32 t, y, 0x00f000f0;
mul.lo.u32 t, t, 0x0104;
and.b32 t, t, 0x81c081c0;
mul.rn.bf16x2 $7, t, s;
}""")


def _fp8_word(word: str, even: int, odd: int) -> str:
    return f"""
shr.b32 h, {word}, 4;
and.b32 h, h, 0x07070707;
lop3.b32 h, h, {word}, 0x80808080, 0xf8;
shl.b32 l, {word}, 4;
and.b32 l, l, 0xf0f0f0f0;
prmt.b32 t, l, h, 0x6240;
mul.rn.bf16x2 t, t, up;
mul.rn.bf16x2 ${even}, t, s;
prmt.b32 t, l, h, 0x7351;
mul.rn.bf16x2 t, t, up;
mul.rn.bf16x2 ${odd}, t, s;
"""


_E4M3_PTX: Final = gl.constexpr(
    """{
.reg .b32 a, b, c, d, h, l, t, s, up;
mul.lo.u32 s, $10, 0x00800080;
mov.b32 up, 0x7b807b80;
mov.b64 {a, b}, $8;
mov.b64 {c, d}, $9;
"""
    + _fp8_word("a", 0, 4)
    + _fp8_word("b", 1, 5)
    + _fp8_word("c", 2, 6)
    + _fp8_word("d", 3, 7)
    + "}"
)


@gluon.jit
def _exp2(x):
    """2^x; what is below 2^-126 becomes zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _round(x):
    """float32 -> bf16, two at a time, as the compiler does not where it needs them again."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _store_words(words, target):
    """Eight words of each group of 16 dimensions: in their order, into shared memory."""
    a, b, c, d, e, f, g, h = words
    even = gl.join(gl.join(a, b), gl.join(c, d))
    odd = gl.join(gl.join(e, f), gl.join(g, h))
    both = gl.permute(gl.join(even, odd), (0, 1, 4, 3, 2))
    target.store(gl.reshape(both, (_HALF_TILE, DIM // 2)))


@gluon.jit
def _load_window(places):
    """Window records as they are: of each 16 dimensions two words of codes and the scale."""
    record = places.load(gl.SliceLayout(1, _HALF_GROUPS))
    half = gl.arange(0, DIM // 8, gl.SliceLayout(0, _HALF_GROUPS))[None, :]
    words = gl.multiple_of(record.to(gl.pointer_type(gl.int64)), 16)[:, None] + half
    words = gl.load(words, mask=(record != 0)[:, None], other=0)
    first, second = gl.split(gl.reshape(words, (_HALF_TILE, DIM // 16, 2)))
    record = places.load(gl.SliceLayout(1, _GROUPS))
    group = gl.arange(0, DIM // 16, gl.SliceLayout(0, _GROUPS))[None, :]
    scales = record.to(gl.pointer_type(gl.uint8))[:, None] + (DIM + group // 2)
    scales = gl.load(scales, mask=(record != 0)[:, None], other=0)
    return gl.convert_layout(first, _GROUPS), gl.convert_layout(second, _GROUPS), scales


@gluon.jit
def _load_entries(places):
    """Compressed records as they are: of each 16 dimensions a word of codes and the scale."""
    record = places.load(gl.SliceLayout(1, _GROUPS))
    there = (record != 0)[:, None]
    group = gl.arange(0, DIM // 16, gl.SliceLayout(0, _GROUPS))[None, :]
    words = gl.multiple_of(record.to(gl.pointer_type(gl.int64)), 16)[:, None] + group
    scales = gl.multiple_of(record.to(gl.pointer_type(gl.uint8)), 16)[:, None] + (DIM // 2 + group)
    return gl.load(words, mask=there, other=0), gl.load(scales, mask=there, other=0)


@gluon.jit
def _decode_window(raw, target):
    first, second, scales = raw
    words = gl.inline_asm_elementwise(
        _E4M3_PTX,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,r",
        [first, second, scales.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    _store_words(words, target)


@gluon.jit
def _decode_entries(raw, target):
    codes, scales = raw
    words = gl.inline_asm_elementwise(
        _E2M1_PTX,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r",
        [codes, scales.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    _store_words(words, target)


# --- The four warps that decode ----------------------------------------------------------------------


@gluon.jit
def _prefetch(places, SIZE: gl.constexpr):
    """Bring records of SIZE bytes into the L2."""
    for byte in gl.static_range(0, SIZE, 128):
        gl.inline_asm_elementwise(
            """{
            .reg .pred there;
            setp.ne.s64 there, $1, 0;
            @there prefetch.global.L2 [$2];
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [places, places + byte],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _decode(
    records, ring, ring_slot_stride, ring_entry_stride, slots, positions, within, window_from,
    compressed, block_stride, block_table, table_stride, seqs, chosen, chosen_stride, row, part,
    values, near_places, far_places, near_bias, far_bias, ready, free, RING: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK: gl.constexpr, TOPK: gl.constexpr, ENTRIES: gl.constexpr,
    PARTS: gl.constexpr, WINDOW_TILES: gl.constexpr, TILES: gl.constexpr,
    WINDOW_SLOTS: gl.constexpr, ENTRY_SLOTS: gl.constexpr, SEQS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Records of the parts' slots, tile by tile."""
    if EARLY:
        gdc_wait()
    if ENTRY_SLOTS > 0:
        seq = gl.load(seqs + row).to(gl.int64) if SEQS else row
        j = gl.arange(0, ENTRY_SLOTS, _PLACES)
        i = part * ((TILES - WINDOW_TILES) * TILE) + j
        ours = (i < TOPK) & (j < PARTS * (TILES - WINDOW_TILES) * TILE)
        entry = gl.load(chosen + row * chosen_stride + i, mask=ours, other=-1).to(gl.int32)
    slot = gl.load(slots + row).to(gl.int64)
    position = gl.load(positions + row).to(gl.int32)
    inside = gl.load(within + row).to(gl.int32)
    first_seen = gl.load(window_from + row).to(gl.int32)
    j = gl.arange(0, WINDOW_SLOTS, _PLACES)
    i = part * (WINDOW_TILES * TILE) + j
    if BLOCK == 0:
        back = WINDOW - 1 - i
        at = position - back
        own = back <= inside
        there = (back >= 0) & (at >= 0) & ((at >= first_seen) | (position < first_seen))
    else:
        back = WINDOW + inside - i  # from the row to the ring's or the block's vector
        at = position - back
        own = i >= WINDOW
        there = (i < WINDOW + BLOCK) & (at >= 0)
    there &= j < PARTS * WINDOW_TILES * TILE
    here = records.to(gl.int64) + (row - back) * (DIM + DIM // 32)
    away = ring.to(gl.int64) + slot * ring_slot_stride
    away += (gl.maximum(at, 0) % RING) * ring_entry_stride
    place = gl.where(there, gl.where(own, here, away), 0)  # zero: no record
    _prefetch(place, DIM + DIM // 32)
    near_places.store(place)
    near_bias.store(gl.where(there, 0.0, float("-inf")))
    near = near_places._reinterpret(gl.int64, (WINDOW_SLOTS // _HALF_TILE, _HALF_TILE), _LINE)
    if ENTRY_SLOTS > 0:
        there = entry >= 0
        entry = gl.maximum(entry, 0)
        block = gl.load(block_table + seq * table_stride + entry // ENTRIES, mask=there, other=0)
        place = compressed.to(gl.int64) + block.to(gl.int64) * block_stride
        place = gl.where(there, place + entry % ENTRIES * (DIM // 2 + DIM // 16), 0)
        far_places.store(place)
        far_bias.store(gl.where(there, 0.0, float("-inf")))
        _prefetch(place, DIM // 2 + DIM // 16)
    ENTRY_HALVES: gl.constexpr = max(ENTRY_SLOTS // _HALF_TILE, 1)
    far = far_places._reinterpret(gl.int64, (ENTRY_HALVES, _HALF_TILE), _LINE)
    # The next half of a tile is on its way while one is decoded.
    for p in range(PARTS):
        for n in range(WINDOW_TILES):
            t = p * TILES + n
            tile = values.index(t % _BUFFERS)._reinterpret(gl.int32, (TILE, DIM // 2), _WORDS)
            k = 2 * (p * WINDOW_TILES + n)
            raw = _load_window(near.index(k))
            second_half = _load_window(near.index(k + 1))
            mbarrier.wait(free.index(t % _BUFFERS), (t // _BUFFERS - 1) % 2, pred=t >= _BUFFERS)
            _decode_window(raw, tile.slice(0, _HALF_TILE))
            _decode_window(second_half, tile.slice(_HALF_TILE, _HALF_TILE))
            fence_async_shared()
            mbarrier.arrive(ready.index(t % _BUFFERS), count=1)
        if WINDOW_TILES < TILES:
            k = 2 * p * (TILES - WINDOW_TILES)
            codes = _load_entries(far.index(k))
            for n in range(WINDOW_TILES, TILES):
                t = p * TILES + n
                tile = values.index(t % _BUFFERS)._reinterpret(gl.int32, (TILE, DIM // 2), _WORDS)
                second_codes = _load_entries(far.index(k + 1))
                mbarrier.wait(free.index(t % _BUFFERS), (t // _BUFFERS - 1) % 2, pred=t >= _BUFFERS)
                _decode_entries(codes, tile.slice(0, _HALF_TILE))
                k = gl.minimum(k + 2, 2 * PARTS * (TILES - WINDOW_TILES) - 1)
                codes = _load_entries(far.index(k))
                _decode_entries(second_codes, tile.slice(_HALF_TILE, _HALF_TILE))
                fence_async_shared()
                mbarrier.arrive(ready.index(t % _BUFFERS), count=1)


# --- The four warps that weigh -----------------------------------------------------------------------


@gluon.jit
def _weigh(
    scale, query, values, weights, factors, near_bias, far_bias, asked, ready, weighed, tops,
    totals, head0, HEADS: gl.constexpr, PARTS: gl.constexpr, WINDOW_TILES: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Weights of each part's slots; their sums and what they are relative to."""
    ROW: gl.constexpr = gl.SliceLayout(1, _SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, _SCORES)
    mbarrier.wait(asked, 0)
    for p in range(PARTS):
        top = gl.full([HEAD_TILE], _NOWHERE, gl.float32, ROW)
        total = gl.full([HEAD_TILE], 0.0, gl.float32, ROW)
        for n in range(TILES):
            t = p * TILES + n
            b = t % _BUFFERS
            mbarrier.wait(ready.index(b), t // _BUFFERS % 2)
            scores = gl.zeros([HEAD_TILE, TILE], gl.float32, _SCORES)
            keys = values.index(b).permute((1, 0))
            scores = warpgroup_mma(query, keys, scores, use_acc=False, is_async=True)
            entry = n >= WINDOW_TILES
            bias = near_bias.index(p * WINDOW_TILES + gl.minimum(n, WINDOW_TILES - 1)).load(COLUMN)
            if WINDOW_TILES < TILES:
                k = p * (TILES - WINDOW_TILES)
                other = far_bias.index(k + gl.maximum(n - WINDOW_TILES, 0)).load(COLUMN)
                bias = gl.where(entry, other, bias)
            boost = gl.where(entry, _BOOST, 1.0)
            power = gl.where(entry, _BOOST_POWER, 0.0)
            rest = gl.where(entry, 1.0 / _BOOST, 1.0)
            scores = warpgroup_mma_wait(0, [scores])
            # Scores of slots without a record become -inf.
            factor = gl.full([HEAD_TILE, TILE], scale * boost, gl.float32, _SCORES)
            scores = gl.fma(scores, factor, bias[None, :] + gl.zeros_like(scores))
            largest = gl.maximum(top, gl.max(scores, axis=1))
            change = _exp2(top - largest)
            top = largest
            weight = _round(_exp2(scores - (top - power)[:, None]))
            factors.index(b).store(change)
            weights.index(b).store(weight)
            fence_async_shared()
            mbarrier.arrive(weighed.index(b), count=1)
            total = total * change + gl.sum(weight.to(gl.float32), axis=1) * rest
        head = head0 + gl.arange(0, HEAD_TILE, ROW)
        gl.store(tops + p * HEADS + head, top, mask=head < HEADS)
        gl.store(totals + p * HEADS + head, total, mask=head < HEADS)


# --- The eight warps that add up -----------------------------------------------------------------------


@gluon.jit
def _store_queries(queries, row, head0, target, HEADS: gl.constexpr, WIDE: gl.constexpr):
    """Queries into shared memory, in the order of decoded records."""
    SIZE: gl.constexpr = DIM // 2 * (1 + WIDE)  # words
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4 * (1 + WIDE)], [1, 32], [8, 1], [1, 0])
    SOME: gl.constexpr = HEAD_TILE // (1 + WIDE)
    for i in gl.static_range(0, HEAD_TILE, SOME):
        head = head0 + i + gl.arange(0, SOME, gl.SliceLayout(1, LAYOUT))
        word = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
        at = (row * HEADS + head)[:, None] * SIZE + word[None, :]
        mask = (head < HEADS)[:, None]
        words = gl.load(queries.to(gl.pointer_type(gl.int32)) + at, mask=mask, other=0)
        if WIDE:
            low, high = gl.split(gl.reshape(words, (SOME, DIM // 2, 2)))
            words = ((low >> 16) & 0xFFFF) | (high & -65536)
        first, second = gl.split(gl.reshape(words, (SOME, DIM // 16, 2, 2, 2)))
        even = (first & 0xFFFF) | (second << 16)
        odd = ((first >> 16) & 0xFFFF) | (second & -65536)
        both = gl.permute(gl.join(even, odd), (0, 1, 4, 2, 3))
        target.slice(i, SOME).store(gl.reshape(both, (SOME, DIM // 2)))


@gluon.jit
def _halves(sums):
    """Back to the order of dimensions: of every 32, the first and the last 16, apart."""
    sums = gl.permute(gl.reshape(sums, (HEAD_TILE, DIM // 32, 2, 2, 8)), (0, 1, 4, 3, 2))
    first, second = gl.split(sums)
    first = gl.convert_layout(gl.reshape(first, (HEAD_TILE, DIM // 2)), _HALF)
    return first, gl.convert_layout(gl.reshape(second, (HEAD_TILE, DIM // 2)), _HALF)


@gluon.jit
def _half_places():
    """Where a half lies in memory: 16 dimensions of all heads after the other.

    So what the lanes of a warp have lies together.
    """
    head = gl.arange(0, HEAD_TILE, gl.SliceLayout(1, _HALF))
    dim = gl.arange(0, DIM // 2, gl.SliceLayout(0, _HALF))
    return (dim // 16 * (HEAD_TILE * 16) + dim % 16)[None, :] + (head * 16)[:, None]


@gluon.jit
def _add_up(
    queries, row, head0, query, values, weights, factors, asked, weighed, free, halves,
    HEADS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, WIDE: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Weighted values of the last part's slots, float32 [HEAD_TILE, DIM]; of others, in memory."""
    if EARLY:
        gdc_wait()
    words = query._reinterpret(gl.int32, (HEAD_TILE, DIM // 2), _WORDS)
    _store_queries(queries, row, head0, words, HEADS, WIDE)
    fence_async_shared()
    mbarrier.arrive(asked, count=1)
    sums = gl.zeros([HEAD_TILE, DIM], gl.float32, _SUMS)
    for t in range(PARTS * TILES):
        b = t % _BUFFERS
        if PARTS > 1:  # noqa: SIM102  (this is known when the kernel is compiled)
            if t == TILES:
                first, second = _halves(sums)
                gl.store(halves + _half_places(), first)
                gl.store(halves + HEAD_TILE * DIM // 2 + _half_places(), second)
                sums = gl.zeros([HEAD_TILE, DIM], gl.float32, _SUMS)
        mbarrier.wait(weighed.index(b), t // _BUFFERS % 2)
        sums *= factors.index(b).load(gl.SliceLayout(1, _SUMS))[:, None]
        sums = warpgroup_mma(weights.index(b), values.index(b), sums, is_async=True)
        sums = warpgroup_mma_wait(0, [sums])
        gl.thread_barrier()  # all warps are done with the tile
        mbarrier.arrive(free.index(b), count=1)
    return (sums,)


# --- The kernel ----------------------------------------------------------------------------------


@gluon.jit
def _turn(x, cos, sin, part, ROPE: gl.constexpr):
    """Turn back the last ROPE of the DIM dimensions; x [HEAD_TILE, DIM / 2] are those of a part.

    ROPE is at most DIM / 8: only a quarter of a thread's values are looked at.
    """
    # Bits of a dimension among those of a part: 128, 64, 32, then 32 places. A thread has both 128s
    # and both 32s of one 64.
    bits = gl.permute(gl.reshape(x, (HEAD_TILE, 2, 2, 2, 32)), (0, 2, 4, 1, 3))
    low, high = gl.split(bits)
    low_high, high_high = gl.split(high)
    first, second = gl.split(gl.reshape(high_high, (HEAD_TILE, 32, 2)))
    LAYOUT: gl.constexpr = gl.SliceLayout(0, first.type.layout)
    pair = gl.arange(0, 32, LAYOUT)
    half = 128 + pair // 16 * 64 + 32 + pair % 16 * 2
    channel = half // 16 * 32 + part * 16 + half % 16 - (DIM - ROPE)
    turned = channel >= 0
    cos_first = gl.load(cos + channel, mask=turned, other=1.0)[None, :]
    cos_second = gl.load(cos + channel + 1, mask=turned, other=1.0)[None, :]
    sin_first = gl.load(sin + channel, mask=turned, other=0.0)[None, :]
    sin_second = gl.load(sin + channel + 1, mask=turned, other=0.0)[None, :]
    turned = turned[None, :]
    even = gl.where(turned, first * cos_first - second * sin_first, first)
    odd = gl.where(turned, second * cos_second - first * sin_second, second)
    high_high = gl.reshape(gl.join(even, odd), (HEAD_TILE, 2, 32))
    high_high = gl.convert_layout(high_high, low_high.type.layout)
    high = gl.join(low_high, high_high)
    high = gl.convert_layout(high, low.type.layout)
    bits = gl.permute(gl.join(low, high), (0, 3, 1, 4, 2))
    return gl.convert_layout(gl.reshape(bits, (HEAD_TILE, DIM // 2)), _HALF)


@gluon.jit
def _finish(result, half, mask, cos, sin, out, ROPE: gl.constexpr):
    """Round, turn back and store half of the dimensions."""
    result = _round(result)
    if ROPE > 0:
        result = _round(_turn(result.to(gl.float32), cos, sin, half, ROPE))
    dim = gl.arange(0, DIM // 2, gl.SliceLayout(0, _HALF))
    dim = dim // 16 * 32 + half * 16 + dim % 16
    gl.store(out + dim[None, :], result.to(out.dtype.element_ty), mask=mask[:, None])


@gluon.jit(do_not_specialize=["first_row", "table_stride"])
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
    halves,  # float32 [rows, tiles of heads, 2, HEAD_TILE * DIM / 2]: what a program leaves to the other
    tops,  # float32 [rows, 2, heads]
    totals,  # float32 [rows, 2, heads]
    flags,  # int32 zeros [rows, tiles of heads, 2], and zeros again afterwards
    sink,
    cos,
    sin,
    out,
    scale,  # times log2(e)
    first_row,
    HEADS: gl.constexpr,
    RING: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    TOPK: gl.constexpr,
    ENTRIES: gl.constexpr,
    WINDOW_TILES: gl.constexpr,  # of a part
    TILES: gl.constexpr,  # of a part
    WINDOW_SLOTS: gl.constexpr,  # of a part, up to a power of two
    ENTRY_SLOTS: gl.constexpr,
    SEQS: gl.constexpr,
    WIDE: gl.constexpr,
    ROPE: gl.constexpr,
    EARLY: gl.constexpr,
    PARTS: gl.constexpr,  # 1, a part and half of the result for each program, or 2, a row for each
):
    """Attention of rows: grid (2 / PARTS, tiles of heads, rows)."""
    part = gl.program_id(0)
    local = gl.program_id(2).to(gl.int64)
    row = local + first_row
    head0 = gl.program_id(1) * HEAD_TILE
    near_places = gl.allocate_shared_memory(gl.int64, [WINDOW_SLOTS], _LINE)
    far_places = gl.allocate_shared_memory(gl.int64, [max(ENTRY_SLOTS, TILE)], _LINE)
    near_bias = gl.allocate_shared_memory(gl.float32, [WINDOW_SLOTS], _LINE)
    far_bias = gl.allocate_shared_memory(gl.float32, [max(ENTRY_SLOTS, TILE)], _LINE)
    query = gl.allocate_shared_memory(gl.bfloat16, [HEAD_TILE, DIM], _VALUES)
    values = gl.allocate_shared_memory(gl.bfloat16, [_BUFFERS, TILE, DIM], _VALUES)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_BUFFERS, HEAD_TILE, TILE], _WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [_BUFFERS, HEAD_TILE], _LINE)
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=1)
    for i in gl.static_range(_BUFFERS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(weighed.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    at = (local * 2 + part) * HEADS
    HALF: gl.constexpr = HEAD_TILE * DIM // 2
    tile = local * gl.num_programs(1) + gl.program_id(1)
    halves += tile * (2 * HALF)
    flags += tile * 2
    sums = gl.warp_specialize(
        [
            (
                _add_up,
                (queries, row, head0, query, values, weights, factors, asked, weighed, free, halves,
                 HEADS, PARTS, TILES, WIDE, EARLY),
            ),
            (
                _weigh,
                (scale, query, values, weights, factors,
                 near_bias._reinterpret(gl.float32, (WINDOW_SLOTS // TILE, TILE), _LINE),
                 far_bias._reinterpret(gl.float32, (max(ENTRY_SLOTS // TILE, 1), TILE), _LINE),
                 asked, ready, weighed, tops + at, totals + at, head0, HEADS, PARTS,
                 WINDOW_TILES, TILES),
            ),
            (
                _decode,
                (records, ring, ring_slot_stride, ring_entry_stride, slots, positions, within,
                 window_from, compressed, block_stride, block_table, table_stride, seqs, chosen,
                 chosen_stride, row, part, values, near_places, far_places, near_bias, far_bias,
                 ready, free, RING, WINDOW, BLOCK, TOPK, ENTRIES, PARTS, WINDOW_TILES, TILES,
                 WINDOW_SLOTS, ENTRY_SLOTS, SEQS, EARLY),
            ),
        ],
        [4, 4],
        [_REGISTERS, _REGISTERS],
    )[0]  # fmt: skip
    place = _half_places()
    first, second = _halves(sums)
    if PARTS == 1:
        # Of every 32 dimensions, this program finishes the first or the last 16.
        ours = gl.where(part == 0, first, second)
        gl.store(halves + part * HALF + place, gl.where(part == 0, second, first))
        # All programs run at the same time, so each may wait for its neighbour.
        gl.thread_barrier()
        gl.atomic_xchg(flags + part, 1, sem="release")
        while gl.atomic_cas(flags + (1 - part), 1, 0, sem="acquire") == 0:
            pass
    head = head0 + gl.arange(0, HEAD_TILE, gl.SliceLayout(1, _HALF))
    mask = head < HEADS
    at = local * 2 * HEADS + head
    top0 = gl.load(tops + at, mask=mask, other=0.0, cache_modifier=".cg")
    top1 = gl.load(tops + at + HEADS, mask=mask, other=0.0, cache_modifier=".cg")
    total0 = gl.load(totals + at, mask=mask, other=0.0, cache_modifier=".cg")
    total1 = gl.load(totals + at + HEADS, mask=mask, other=0.0, cache_modifier=".cg")
    # The sink is one logit more, without a value; it may be the largest.
    logit = gl.load(sink + head, mask=mask, other=0.0) * _LOG2_E
    top = gl.maximum(gl.maximum(top0, top1), logit)
    factor0 = _exp2(top0 - top)
    factor1 = _exp2(top1 - top)
    inverse = 1.0 / (total0 * factor0 + total1 * factor1 + _exp2(logit - top))
    factor0 *= inverse
    factor1 *= inverse
    out += (row * HEADS + head)[:, None] * DIM
    cos += row * ROPE
    sin += row * ROPE
    if PARTS == 1:
        theirs = gl.load(halves + (1 - part) * HALF + place, cache_modifier=".cg")
        our_factor = gl.where(part == 0, factor0, factor1)
        their_factor = gl.where(part == 0, factor1, factor0)
        result = ours * our_factor[:, None] + theirs * their_factor[:, None]
        _finish(result, part, mask, cos, sin, out, ROPE)
    else:
        # The first part's sums were left in memory by the same threads.
        earlier = gl.load(halves + place, cache_modifier=".cg")
        result = first * factor1[:, None] + earlier * factor0[:, None]
        _finish(result, 0, mask, cos, sin, out, ROPE)
        earlier = gl.load(halves + HALF + place, cache_modifier=".cg")
        result = second * factor1[:, None] + earlier * factor0[:, None]
        _finish(result, 1, mask, cos, sin, out, ROPE)
