"""The experts of many pairs on Hopper: the two products of `experts`, with warps that do one thing each.

A program stays on its multiprocessor and goes from tile to tile. Four of its warps load rows and
packed weights into a ring in shared memory; two groups of four, each with outputs of its own,
unpack weights into registers and multiply. The groups wait for the ring alone, never for one another,
and a group has products under way while it unpacks: registers that tensor cores still read are held
until their products are waited for. The height of a tile's products follows its number of pairs.

A finished tile goes through shared memory and from there, 16 pairs at a time, to its activation or its
place: done register by register, that is more instructions than the cache for them holds.

Products are added up as in `experts`, 32 columns at a time from the first to the last, so the bits are
the same.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from phalanx.kernels.triton.expert_dot import q8_roundtrip, swiglu, unpack

_REGISTERS: Final = 216  # of a multiplying thread; a loading one has 504 less two of these
OPTIONS: Final = {"STAGES": 4, "REGISTERS": _REGISTERS, "num_warps": 4}  # of a launch
HEIGHT: Final = 96  # pairs of a tile: 64, and 32 more where needed

_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16))  # of 64 bf16
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a thread of a group for each pair
_CHUNK = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 pairs, 64 outputs


@gluon.jit
def _ring(STAGES: gl.constexpr):
    """Shared memory for rows, words and scales of some K steps, and barriers: "full" and "empty"."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], _LINES)
    more = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 32, 128], _LINES)
    words_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    words = gl.allocate_shared_memory(gl.int16, [STAGES, 256, 32], words_layout)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, 256], _FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # by each loading thread
        mbarrier.init(empty.index(i), count=2)  # by each group
    return rows, more, words, scales, full, empty


@gluon.jit
def _staging(dtype: gl.constexpr):
    """Where the groups put a tile's products, [64, 64] and [32, 64] of two matrices, and a note for each pair."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], _LINES)
    more = gl.allocate_shared_memory(gl.bfloat16, [4, 32, 64], _LINES)
    return rows, more, gl.allocate_shared_memory(dtype, [2, 128], _FLAT)


@gluon.jit
def _tile(tiles_ptr, index):
    """The slot, the first pair's place in the order, and the number of pairs."""
    tile = tiles_ptr + 3 * index
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)


@gluon.jit
def _rows_at(
    x_ptr,
    order_ptr,
    row_index_ptr,
    first,
    count,
    m,
    stride,
    GATHERED: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Where the rows of a tile's pairs `m` start; those that are not there have the first's."""
    row = first + gl.where(m < count, m, 0)
    if GATHERED:
        row = gl.load(order_ptr + row)
        if INDEXED:
            row = gl.load(row_index_ptr + row)
    return x_ptr + row.to(gl.int64) * stride


@gluon.jit
def _load(
    ring,
    x_ptr,
    order_ptr,
    row_index_ptr,
    tiles_ptr,
    words_ptr,
    scales_ptr,
    stride,
    items,
    DEPTH: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    SECOND: gl.constexpr,
    GATHERED: gl.constexpr,
    INDEXED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the ring, stage after stage as they become empty.

    A program's 256 rows of weights are four tiles of 64: two for each group, which begin GROUP tiles
    apart, and of these two the second is SECOND tiles behind the first.
    """
    rows_s, more_s, words_s, scales_s, full, empty = ring
    STEPS: gl.constexpr = DEPTH // 128
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    words_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, x_layout))
    m1 = 64 + gl.arange(0, 32, layout=gl.SliceLayout(1, x_layout))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, x_layout)).expand_dims(0)
    n = gl.arange(0, 256, layout=gl.SliceLayout(1, words_layout))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, words_layout)).expand_dims(0)
    tile_row = (n // 128 * GROUP + n // 64 % 2 * SECOND) * STEPS
    word = (tile_row * 2048 + n % 64 * 32).expand_dims(1) + word
    n = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [4], [0]))
    scale = (n // 128 * GROUP + n // 64 % 2 * SECOND) * (STEPS * 64) + n % 64
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot, first, count = _tile(tiles_ptr, item // BLOCKS)
        if (count > 0) & (slot >= 0):
            x = _rows_at(
                x_ptr, order_ptr, row_index_ptr, first, count, m, stride, GATHERED, INDEXED
            )
            x1 = _rows_at(
                x_ptr, order_ptr, row_index_ptr, first, count, m1, stride, GATHERED, INDEXED
            )
            x, x1 = x.expand_dims(1) + column, x1.expand_dims(1) + column
            read = (m < (count + 15) // 16 * 16).expand_dims(1)
            read1 = (m1 < (count + 15) // 16 * 16).expand_dims(1)
            at = (slot.to(gl.int64) * (4 * BLOCKS) + item % BLOCKS * (2 * GROUP)) * STEPS
            w = words_ptr + at * 2048 + word
            s = scales_ptr + at * 64 + scale
            for _ in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                async_copy.async_copy_global_to_shared(words_s.index(stage), w)
                async_copy.async_copy_global_to_shared(scales_s.index(stage), s)
                async_copy.async_copy_global_to_shared(rows_s.index(stage), x, mask=read)
                if count > 64:
                    async_copy.async_copy_global_to_shared(more_s.index(stage), x1, mask=read1)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                w += 2048
                s += 64
                x += 128
                x1 += 128
                step += 1


@gluon.jit
def _weights(ring, stage, PLACE: gl.constexpr, LEFT: gl.constexpr):
    """A group's words of one step [64, 32] and their scales [64], of both matrices."""
    words = ring[2].index(stage).slice(PLACE * 128, 128)
    scales = ring[3].index(stage).slice(PLACE * 128, 128)
    a_words, b_words = words.slice(0, 64).load(LEFT), words.slice(64, 64).load(LEFT)
    a_scales = scales.slice(0, 64).load(gl.SliceLayout(1, LEFT))
    b_scales = scales.slice(64, 64).load(gl.SliceLayout(1, LEFT))
    return a_words, a_scales, b_words, b_scales


@gluon.jit
def _products(
    ring,
    step,
    staging,
    a_raised,
    b_raised,
    PLACE: gl.constexpr,
    STEPS: gl.constexpr,
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A tile's products for one group: 64 outputs of two matrices by 64 pairs, or 96, to `staging`.

    Returns the steps that the ring has seen.
    """
    rows, more, _, _, full, empty = ring
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    a0 = warpgroup_mma_init(gl.full([64, 64], 0.0, gl.float32, mma))
    b0 = warpgroup_mma_init(gl.full([64, 64], 0.0, gl.float32, mma))
    if MORE:
        mma1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
        left1: gl.constexpr = gl.DotOperandLayout(0, mma1, 2)
        a1 = warpgroup_mma_init(gl.full([64, 32], 0.0, gl.float32, mma1))
        b1 = warpgroup_mma_init(gl.full([64, 32], 0.0, gl.float32, mma1))
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    a_words, a_scales, b_words, b_scales = _weights(ring, step % STAGES, PLACE, left)
    a, b = unpack(a_words, a_scales, 0), unpack(b_words, b_scales, 0)
    for k in range(STEPS):
        stage = step % STAGES
        step += 1
        for piece in gl.static_range(4):
            right = rows.index(stage).slice(32 * piece, 32, dim=1).permute([1, 0])
            a0 = warpgroup_mma(a, right, a0, is_async=True)
            b0 = warpgroup_mma(b, right, b0, is_async=True)
            if MORE:
                right1 = more.index(stage).slice(32 * piece, 32, dim=1).permute([1, 0])
                a1 = warpgroup_mma(
                    gl.convert_layout(a, left1, assert_trivial=True), right1, a1, is_async=True
                )
                b1 = warpgroup_mma(
                    gl.convert_layout(b, left1, assert_trivial=True), right1, b1, is_async=True
                )
            if piece == 3:  # the last step finds whatever lies there, and uses nothing of it
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1, pred=k < STEPS - 1)
                a_words, a_scales, b_words, b_scales = _weights(ring, step % STAGES, PLACE, left)
            next_a = unpack(a_words, a_scales, (piece + 1) % 4)
            next_b = unpack(b_words, b_scales, (piece + 1) % 4)
            if piece == 3:  # before registers that products still read are written again
                if MORE:
                    a0, b0, a1, b1, a, b = warpgroup_mma_wait(0, [a0, b0, a1, b1, a, b])
                    a1, b1 = warpgroup_mma_init(a1), warpgroup_mma_init(b1)
                else:
                    a0, b0, a, b = warpgroup_mma_wait(0, [a0, b0, a, b])
                a0, b0 = warpgroup_mma_init(a0), warpgroup_mma_init(b0)
            a, b = next_a, next_b
        mbarrier.arrive(empty.index(stage), count=1)
    if MORE:
        a0, b0, a1, b1 = warpgroup_mma_wait(0, [a0, b0, a1, b1])
        _stage(staging[1], a1 * a_raised, b1 * b_raised, PLACE)
    else:
        a0, b0 = warpgroup_mma_wait(0, [a0, b0])
    _stage(staging[0], a0 * a_raised, b0 * b_raised, PLACE)
    return step


@gluon.jit
def _stage(target, a, b, PLACE: gl.constexpr):
    target.index(2 * PLACE).permute([1, 0]).store(a.to(gl.bfloat16))
    target.index(2 * PLACE + 1).permute([1, 0]).store(b.to(gl.bfloat16))


@gluon.jit
def _tile_products(
    ring,
    step,
    staging,
    count,
    a_raised,
    b_raised,
    PLACE: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`_products` for `count` pairs, at most 96."""
    if count > 64:
        step = _products(ring, step, staging, a_raised, b_raised, PLACE, STEPS, True, STAGES)
    else:
        step = _products(ring, step, staging, a_raised, b_raised, PLACE, STEPS, False, STAGES)
    return step


@gluon.jit
def _store_activations(
    staged,
    notes,
    out_ptr,
    first,
    count,
    limit,
    PLACE: gl.constexpr,
    INTER: gl.constexpr,
    M: gl.constexpr,
    START: gl.constexpr,
):
    """The pairs from START on, at most M of them, 16 at a time."""
    gates = staged.index(2 * PLACE)._reinterpret(gl.bfloat16, [M // 16, 16, 64], _LINES)
    ups = staged.index(2 * PLACE + 1)._reinterpret(gl.bfloat16, [M // 16, 16, 64], _LINES)
    weights = notes.index(PLACE)._reinterpret(gl.float32, [8, 16], _FLAT)
    m = START + gl.arange(0, 16, layout=gl.SliceLayout(1, _CHUNK))
    n = gl.arange(0, 64, layout=gl.SliceLayout(0, _CHUNK)).expand_dims(0)
    out = out_ptr + (first + m).to(gl.int64).expand_dims(1) * INTER + n
    for chunk in range((gl.minimum(count - START, M) + 15) // 16):
        gate = gates.index(chunk).load(_CHUNK).to(gl.float32)
        up = ups.index(chunk).load(_CHUNK).to(gl.float32)
        weight = weights.index(START // 16 + chunk).load(gl.SliceLayout(1, _CHUNK))
        a = q8_roundtrip(swiglu(gate, up, limit, weight.expand_dims(1)), 16 * 64, 1)
        a = gl.convert_layout(gl.reshape(a, (16, 64)), _CHUNK).to(gl.bfloat16)
        gl.store(out, a, mask=(chunk * 16 + m < count).expand_dims(1))
        out += 16 * INTER


@gluon.jit
def _up_group(
    PLACE: gl.constexpr,
    ring,
    staging,
    raised_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    limit,
    items,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCKS: gl.constexpr = INTER // 128
    rows, more, notes = staging
    m = gl.arange(0, 128, layout=_ONE)
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot, first, count = _tile(tiles_ptr, item // BLOCKS)
        if (count > 0) & (slot >= 0):
            gate_raised = gl.load(raised_ptr + slot * 3)
            up_raised = gl.load(raised_ptr + slot * 3 + 1)
            pair = gl.load(order_ptr + first + m, mask=m < count, other=0)
            weight = gl.load(weights_ptr + pair, mask=m < count, other=0.0)
            step = _tile_products(
                ring, step, staging, count, gate_raised, up_raised, PLACE, HIDDEN // 128, STAGES
            )
            notes.index(PLACE).store(weight)
            gl.thread_barrier()
            out = out_ptr + (item % BLOCKS * 128 + PLACE * 64)
            _store_activations(rows, notes, out, first, count, limit, PLACE, INTER, 64, 0)
            _store_activations(more, notes, out, first, count, limit, PLACE, INTER, 32, 64)


@gluon.jit(do_not_specialize=["items"])
def up_kernel(
    x_ptr,
    row_index_ptr,
    words_ptr,
    scales_ptr,
    raised_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    limit,
    stride,
    items,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    INDEXED: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`experts._up_kernel`, for `items` blocks of 128 outputs of all tiles, by any number of programs."""
    BLOCKS: gl.constexpr = INTER // 128
    ring = _ring(STAGES)
    staging = _staging(gl.float32)
    gl.warp_specialize(
        [
            (
                _up_group,
                (
                    0, ring, staging, raised_ptr, weights_ptr, order_ptr, tiles_ptr, out_ptr,
                    limit, items, HIDDEN, INTER, STAGES,
                ),
            ),
            (
                _up_group,
                (
                    1, ring, staging, raised_ptr, weights_ptr, order_ptr, tiles_ptr, out_ptr,
                    limit, items, HIDDEN, INTER, STAGES,
                ),
            ),
            (
                _load,
                (
                    ring, x_ptr, order_ptr, row_index_ptr, tiles_ptr, words_ptr, scales_ptr, stride, items,
                    HIDDEN, BLOCKS, 1, 2 * BLOCKS, True, INDEXED, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


@gluon.jit
def _store_results(
    staged,
    notes,
    out_ptr,
    slot,
    count,
    PLACE: gl.constexpr,
    HIDDEN: gl.constexpr,
    M: gl.constexpr,
    START: gl.constexpr,
):
    """The pairs from START on, at most M of them, 16 at a time; zeros for pairs without a slot."""
    left = staged.index(2 * PLACE)._reinterpret(gl.bfloat16, [M // 16, 16, 64], _LINES)
    right = staged.index(2 * PLACE + 1)._reinterpret(gl.bfloat16, [M // 16, 16, 64], _LINES)
    pairs = notes.index(PLACE)._reinterpret(gl.int32, [8, 16], _FLAT)
    m = START + gl.arange(0, 16, layout=gl.SliceLayout(1, _CHUNK))
    n = gl.arange(0, 64, layout=gl.SliceLayout(0, _CHUNK)).expand_dims(0)
    for chunk in range((gl.minimum(count - START, M) + 15) // 16):
        pair = pairs.index(START // 16 + chunk).load(gl.SliceLayout(1, _CHUNK)).to(gl.int64)
        out = out_ptr + (pair * HIDDEN).expand_dims(1) + n
        y0, y1 = left.index(chunk).load(_CHUNK), right.index(chunk).load(_CHUNK)
        zero = gl.zeros_like(y0)
        mask = (chunk * 16 + m < count).expand_dims(1)
        gl.store(out, gl.where(slot < 0, zero, y0), mask=mask)
        gl.store(out + 64, gl.where(slot < 0, zero, y1), mask=mask)


@gluon.jit
def _down_group(
    PLACE: gl.constexpr,
    ring,
    staging,
    raised_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    items,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCKS: gl.constexpr = HIDDEN // 256
    rows, more, notes = staging
    m = gl.arange(0, 128, layout=_ONE)
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot, first, count = _tile(tiles_ptr, item // BLOCKS)
        if count > 0:
            pair = gl.load(order_ptr + first + m, mask=m < count, other=0)
            if slot >= 0:
                raised = gl.load(raised_ptr + slot * 3 + 2)
                step = _tile_products(
                    ring, step, staging, count, raised, raised, PLACE, INTER // 128, STAGES
                )
            gl.thread_barrier()  # the notes before have been read
            notes.index(PLACE).store(pair)
            gl.thread_barrier()
            out = out_ptr + (item % BLOCKS * 256 + PLACE * 128)
            _store_results(rows, notes, out, slot, count, PLACE, HIDDEN, 64, 0)
            _store_results(more, notes, out, slot, count, PLACE, HIDDEN, 32, 64)


@gluon.jit(do_not_specialize=["items"])
def down_kernel(
    a_ptr,
    words_ptr,
    scales_ptr,
    raised_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    items,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`experts._down_kernel`, for `items` blocks of 256 outputs of all tiles, by any number of programs."""
    BLOCKS: gl.constexpr = HIDDEN // 256
    ring = _ring(STAGES)
    staging = _staging(gl.int32)
    gl.warp_specialize(
        [
            (
                _down_group,
                (
                    0, ring, staging, raised_ptr, order_ptr, tiles_ptr, out_ptr, items,
                    HIDDEN, INTER, STAGES,
                ),
            ),
            (
                _down_group,
                (
                    1, ring, staging, raised_ptr, order_ptr, tiles_ptr, out_ptr, items,
                    HIDDEN, INTER, STAGES,
                ),
            ),
            (
                _load,
                (
                    ring, a_ptr, order_ptr, order_ptr, tiles_ptr, words_ptr, scales_ptr, INTER, items,
                    INTER, BLOCKS, 2, 1, False, False, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
