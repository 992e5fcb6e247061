"""Index scores on Hopper, for rows with sequences of their own.

A program stays on its multiprocessor. One of its warps copies tiles of 128 records, as they lie in
memory, into a ring in shared memory; three groups of four warps take turns at the tiles. A group unpacks
keys in registers and has the products of 64 keys under way while it scales and adds up those before.

Programs share the tiles of all rows evenly, those in which a row sees something, in one order: so each
has few rows' queries to set up, however long the contexts are and however much they differ.

The products and sums are those of `index_keys`, in the same order, so the bits are the same.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc, assignment"

from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phalanx.kernels.triton.index_keys import UNPACK

HEADS: Final = gl.constexpr(32)
DIM: Final = gl.constexpr(128)
VECTOR: Final = gl.constexpr(4)  # neighbouring keys of a thread
_TILE: Final = gl.constexpr(128)  # keys
_WORDS: Final = gl.constexpr(17)  # of a record
_ROOM: Final = gl.constexpr(4096)  # words of a tile in the ring, a power of two
_LINE: Final = gl.constexpr(128)  # words that are copied as one line, 17 of them a tile
_GROUPS: Final = gl.constexpr(3)
# A group finds what it reads in places of the ring that no other group reads: whoever came late could
# take a place's next filling for the last.
_STAGES: Final = 12  # a multiple of the groups
_REGISTERS: Final = 160  # of a thread that computes; the one warp that copies has 24 each

_FLAT: Final = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINES: Final = gl.constexpr(gl.NVMMASharedLayout(0, 32, 3))
# A tile in the ring without its scales, which are the padding; and its scales.
_CODES: Final = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[64, 4]], [128, 64], [1, 0]))
_SCALES: Final = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[1, 16]], [128], [0]))
_QUERIES: Final = gl.constexpr(gl.NVMMASharedLayout(128, 8))

_SUMS: Final = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]))
_LEFT: Final = gl.constexpr(gl.DotOperandLayout(0, _SUMS, 4))
_SUMS_OF_KEYS: Final = gl.constexpr(gl.SliceLayout(1, _SUMS))
_TOTALS: Final = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_PARTS: Final = gl.constexpr(gl.DotOperandLayout(0, _TOTALS, 2))
_ONES: Final = gl.constexpr(gl.DotOperandLayout(1, _TOTALS, 2))
# A thread has four neighbouring keys and of these every fourth word; four threads share these keys.
_BYTES: Final = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [4, 0], [8, 0], [16, 0]],
        [[32, 0], [64, 0]],
        [],
        [128, 64],
    )
)
_KEYS: Final = gl.constexpr(
    gl.DistributedLinearLayout([[1], [2]], [[0], [0], [4], [8], [16]], [[32], [64]], [], [128])
)
_LOADED: Final = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_HEADS: Final = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))

_PAIRS: Final = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_WEIGHTED: Final = gl.constexpr(
    """{
    .reg .b32 t;
    cvt.rn.relu.bf16x2.f32 t, $2, $1;
    mul.rn.bf16x2 $0, t, $3;
    }"""
)


@gluon.jit
def _first(left, right):
    return left


@gluon.jit
def _add(left, right):
    return left + right


# --- A tile for a row -----------------------------------------------------------------------------
#
# A key's number is that of its warp (4), its neighbourhood in the warp (8), and its place in that: the
# first and the second two (2) are multiplied one after the other, and these two (2) are 8 rows apart
# in a product.


@gluon.jit
def _halves(x):
    """[128], a number for each key -> [64] and [64], for the rows of both products."""
    left, right = x.reshape((4, 8, 2, 2)).permute((0, 3, 1, 2)).split()
    left = gl.convert_layout(left.reshape((64,)), _SUMS_OF_KEYS)
    return left, gl.convert_layout(right.reshape((64,)), _SUMS_OF_KEYS)


@gluon.jit
def _operand(codes):
    """uint8 [4, 8, 2, 16] -> e5m2 [64, 32], the even dimensions first."""
    types: gl.constexpr = (gl.float8e5, gl.float8e5)
    low, high = gl.inline_asm_elementwise(UNPACK, "=&r,=r,r", [codes], types, True, 4)
    x = gl.join(low, high).permute((0, 2, 1, 4, 3)).reshape((64, 32))
    return gl.convert_layout(x, _LEFT)


@gluon.jit
def _operands(codes):
    """uint8 [128, 64] -> for both products the operands of their four groups."""
    x = codes.reshape((4, 8, 2, 2, 2, 2, 16)).permute((0, 1, 3, 6, 5, 4, 2))
    first, second = x.split()
    operands = ()
    for i in gl.static_range(2):
        half = first if i == 0 else second
        low, high = half.split()
        g0, g1 = low.split()
        g2, g3 = high.split()
        operands += ((_operand(g0), _operand(g1), _operand(g2), _operand(g3)),)
    return operands


@gluon.jit
def _scale(scales, GROUP: gl.constexpr):
    """As in `index_keys`: int32 [64] -> float32 [64, 1]."""
    bits = scales << (23 - 8 * GROUP) if GROUP < 3 else scales >> 1
    return (bits & 0x7F800000).to(gl.float32, bitcast=True).expand_dims(1)


@gluon.jit
def _products(keys, queries):
    """Of four groups, each for itself, to be waited for."""
    zero = gl.zeros([64, HEADS], gl.float32, _SUMS)
    sums = ()
    for group in gl.static_range(4):
        right = queries.slice(32 * group, 32, dim=1).permute([1, 0])
        sums += (warpgroup_mma(keys[group], right, zero, use_acc=False, is_async=True),)
    return sums


@gluon.jit
def _totals(sums, scales, weights):
    """Scores of 64 keys, float32 [4, 2, 8]."""
    dots = sums[0] * _scale(scales, 0)
    for group in gl.static_range(1, 4):
        dots += sums[group] * _scale(scales, group)  # a product by a power of two is exact
    parts = gl.inline_asm_elementwise(_WEIGHTED, "=r,r,r,r", [dots, weights], gl.bfloat16, True, 2)
    ones = gl.full([HEADS, 8], 1.0, gl.bfloat16, _ONES)
    zero = gl.zeros([64, 8], gl.float32, _TOTALS)
    total = mma_v2(gl.convert_layout(parts, _PARTS), ones, zero)
    return gl.reduce(total, 1, _first).reshape((4, 2, 8))  # all columns alike


@gluon.jit
def _scores(keys, scales, queries, weights):
    """Scores of a tile for one row, float32 [128]."""
    first_scales, second_scales = _halves(scales)
    # The compiler begins the second products before it needs the first ones' totals.
    sums = warpgroup_mma_wait(0, _products(keys[0], queries))
    first = _totals(sums, first_scales, weights)
    sums = warpgroup_mma_wait(0, _products(keys[1], queries))
    second = _totals(sums, second_scales, weights)
    scores = gl.join(first, second).permute((0, 2, 3, 1)).reshape((128,))
    return gl.convert_layout(scores, _KEYS)


@gluon.jit
def _load_queries(operands, weights, queries, head_weights, row):
    """As `index_keys.load_queries`, to shared memory: e5m2 [HEADS, DIM] and float32 [HEADS]."""
    head = row * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _HEADS))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, _HEADS))
    source = head.to(gl.int64).expand_dims(1) * DIM + dim.expand_dims(0)
    values = gl.load(queries + source).to(gl.float32)
    weight = gl.load(head_weights + head).to(gl.float32)
    bits = gl.max(values.to(gl.int32, bitcast=True) & 0x7F800000, axis=1)
    bits = gl.minimum(gl.maximum(bits, 14 << 23), 254 << 23)
    factor = ((254 << 23) - bits + (14 << 23)).to(gl.float32, bitcast=True)
    weights.store(weight * bits.to(gl.float32, bitcast=True))
    values = (values * factor.expand_dims(1)).to(gl.float8e5)
    values = values.reshape((HEADS, DIM // 32, 16, 2)).permute((0, 1, 3, 2)).reshape((HEADS, DIM))
    operands.store(gl.convert_layout(values, _HEADS))


@gluon.jit
def _weights(weights):
    """float32 [HEADS] in shared memory -> bf16 [64, HEADS], in pairs."""
    x = weights.load(gl.SliceLayout(0, _SUMS)).expand_dims(0)
    x += gl.zeros([64, HEADS], gl.float32, _SUMS)
    return gl.inline_asm_elementwise(_PAIRS, "=r,r,r", [x], gl.bfloat16, True, 2)


# --- Who does what --------------------------------------------------------------------------------


@gluon.jit
def _seen(visible, row, num_entries):
    return gl.minimum(gl.load(visible + row), num_entries).to(gl.int32)


@gluon.jit
def _share(visible, num_rows, num_entries):
    """The row and the tile of it with which a program begins, and the number of its tiles."""
    member = gl.arange(0, 128, layout=_LOADED)
    total = 0
    for start in range(0, num_rows, 128):
        total += gl.sum(_tiles(visible, start + member, num_rows, num_entries), axis=0)
    program, programs = gl.program_id(0), gl.num_programs(0)
    each, more = total // programs, total % programs
    begin = program * each + gl.minimum(program, more)
    count = each + (program < more).to(gl.int32)
    row, before, passed = 0, 0, 0
    for start in range(0, num_rows, 128):
        tiles = _tiles(visible, start + member, num_rows, num_entries)
        over = before + gl.associative_scan(tiles, 0, _add) <= begin
        row += gl.sum(over.to(gl.int32), axis=0)
        passed += gl.sum(gl.where(over, tiles, 0), axis=0)
        before += gl.sum(tiles, axis=0)
    return row, begin - passed, count


@gluon.jit
def _tiles(visible, row, num_rows, num_entries):
    seen = gl.load(visible + row, mask=row < num_rows, other=0)
    return gl.cdiv(gl.minimum(seen, num_entries).to(gl.int32), _TILE)


@gluon.jit
def _load(args, ENTRIES: gl.constexpr, STAGES: gl.constexpr):
    """Fill the ring, stage after stage as they become empty."""
    (
        ring, full, empty, most, rest, block_table, seqs, visible, row, first, count, num_entries,
        table_stride,
    ) = args  # fmt: skip
    PER_BLOCK: gl.constexpr = ENTRIES // _TILE
    step = 0
    while count > 0:
        end = gl.minimum(gl.cdiv(_seen(visible, row, num_entries), _TILE), first + count)
        table = block_table + gl.load(seqs + row).to(gl.int64) * table_stride
        block = gl.load(table + first // PER_BLOCK, mask=first < end, other=0).to(gl.int32)
        for tile in range(first, end):
            stage = step % STAGES
            here = ring.index(stage)
            line = tile % PER_BLOCK * 17
            # The next tile's block is looked up while this one's place is waited for.
            later = gl.load(table + (tile + 1) // PER_BLOCK, mask=tile + 1 < end, other=0)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), _TILE * _WORDS * 4)
            target = here.slice(0, 2048)._reinterpret(gl.int32, [1, 16, _LINE], _LINES)
            tma.async_copy_global_to_shared(most, [block, line, 0], full.index(stage), target)
            target = here.slice(2048, 128)._reinterpret(gl.int32, [1, 1, _LINE], _LINES)
            tma.async_copy_global_to_shared(rest, [block, line + 16, 0], full.index(stage), target)
            block = later.to(gl.int32)
            step += 1
        count -= end - first
        row += 1
        first = 0


@gluon.jit
def _score(PLACE: gl.constexpr, args, STAGES: gl.constexpr):
    """A group's tiles of the ring."""
    (
        ring, full, empty, operands, weights, queries, head_weights, visible, out, row, first, count,
        num_entries,
    ) = args  # fmt: skip
    operands = operands.index(PLACE)
    weights = weights.index(PLACE)
    done = 0  # tiles of the ring
    while count > 0:
        seen = _seen(visible, row, num_entries)
        end = gl.minimum(gl.cdiv(seen, _TILE), first + count)
        gl.thread_barrier()  # the queries before are no longer read
        _load_queries(operands, weights, queries, head_weights, row)
        fence_async_shared()
        gl.thread_barrier()
        pairs = _weights(weights)
        target = out + row.to(gl.int64) * num_entries
        for tile in range(first + (PLACE + _GROUPS - done % _GROUPS) % _GROUPS, end, _GROUPS):
            step = done + tile - first
            stage = step % STAGES
            here = ring.index(stage)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            codes = here._reinterpret(gl.uint8, [_TILE, 64], _CODES).load(_BYTES)
            # Scales are the last word of 17: they begin with the 17th.
            scales = here._reinterpret(gl.int32, [_ROOM // 16, 16], _FLAT).index(1)
            scales = scales._reinterpret(gl.int32, [_TILE], _SCALES).load(_KEYS)
            _store(target, _scores(_operands(codes), scales, operands, pairs), tile, seen)
            # Every thread for itself, when all that it has read is in its registers: neither a
            # barrier nor the order of instructions keeps what is copied next from overtaking a load.
            async_copy.mbarrier_arrive(empty.index(stage), increment_count=False)
        done += end - first
        count -= end - first
        row += 1
        first = 0


@gluon.jit
def _store(target, scores, tile, seen):
    """The nearest bf16 values of a tile's scores, where the row sees the entries."""
    scores = scores.to(gl.bfloat16).to(target.dtype.element_ty)
    entry = tile * _TILE + gl.arange(0, _TILE, layout=_KEYS)
    if tile * _TILE + _TILE <= seen:
        gl.store(target + entry, scores)
    else:
        gl.store(target + entry, scores, mask=entry < seen)


@gluon.jit
def _hide(out, visible, num_rows, num_entries):
    """-inf for the entries that no row sees, of a program's part of all."""
    num_tiles = gl.cdiv(num_entries, _TILE)
    each = gl.cdiv(num_rows * num_tiles, gl.num_programs(0))
    item = gl.program_id(0) * each
    last = gl.minimum(item + each, num_rows * num_tiles)
    place = gl.arange(0, _TILE, layout=_LOADED)
    hidden = gl.full([_TILE], float("-inf"), gl.float32, _LOADED)
    hidden = hidden.to(out.dtype.element_ty)
    while item < last:
        row, first = item // num_tiles, item % num_tiles
        end = gl.minimum(num_tiles, first + last - item)
        seen = _seen(visible, row, num_entries)
        target = out + row.to(gl.int64) * num_entries
        for tile in range(gl.maximum(first, seen // _TILE), end):
            entry = tile * _TILE + place
            gl.store(target + entry, hidden, mask=(entry >= seen) & (entry < num_entries))
        item += end - first


@gluon.jit(
    do_not_specialize=["num_rows", "num_vectors", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "seqs", "visible"],
)
def _kernel(
    queries,
    head_weights,
    most,
    rest,
    block_table,
    seqs,
    visible,
    out,
    num_rows,
    num_vectors,
    table_stride,
    ENTRIES: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`indexer._score_kernel` by any number of programs."""
    num_entries = num_vectors * VECTOR
    row, first, count = _share(visible, num_rows, num_entries)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, _ROOM], _FLAT)
    operands = gl.allocate_shared_memory(gl.float8e5, [_GROUPS, HEADS, DIM], _QUERIES)
    weights = gl.allocate_shared_memory(gl.float32, [_GROUPS, HEADS], _FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=128)  # by each thread of a group
    score_args = (
        ring, full, empty, operands, weights, queries, head_weights, visible, out, row, first, count,
        num_entries,
    )  # fmt: skip
    load_args = (
        ring, full, empty, most, rest, block_table, seqs, visible, row, first, count, num_entries,
        table_stride,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_score, (0, score_args, STAGES)),
            (_score, (1, score_args, STAGES)),
            (_score, (2, score_args, STAGES)),
            (_load, (load_args, ENTRIES, STAGES)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
    _hide(out, visible, num_rows, num_entries)


def suits(queries: Tensor, index_keys: Tensor, num_entries: int) -> bool:
    """Whether `scores` is made for these shapes and places."""
    return (
        queries.shape[1:] == (HEADS.value, DIM.value)
        and index_keys.shape[1] % _TILE.value == 0
        and num_entries % VECTOR.value == 0
        and index_keys.stride(0) % 16 == 0
        and index_keys.data_ptr() % 16 == 0
    )


def scores(
    queries: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    seqs: Tensor,
    visible: Tensor,
    out: Tensor,
) -> None:
    """`indexer.paged_scores` to `out`, where all `suits`."""
    num_blocks, entries, _ = index_keys.shape
    words = index_keys.view(torch.int32)
    shape = [num_blocks, entries * _WORDS.value // _LINE.value, _LINE.value]
    strides = [words.stride(0), _LINE.value, 1]
    most, rest = (
        TensorDescriptor(words, shape, strides, [1, lines, _LINE.value], _LINES.value)
        for lines in (16, 1)
    )
    properties = torch.cuda.get_device_properties(out.device)
    num_rows, num_entries = out.shape
    tiles = num_rows * triton.cdiv(num_entries, _TILE.value)
    _kernel[(min(properties.multi_processor_count, tiles),)](
        queries,
        head_weights,
        most,
        rest,
        block_table,
        seqs,
        visible,
        out,
        num_rows,
        num_entries // VECTOR.value,
        block_table.stride(0),
        ENTRIES=entries,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )
