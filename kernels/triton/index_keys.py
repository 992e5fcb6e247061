# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment, var-annotated"
"""Products of index queries with keys from their records: the parts of the kernels in `indexer`.

Keys and queries are both e2m1 codes with a scale per 32 dimensions. A product over one such group
needs few bits, so tensor cores give it exactly from 8-bit floats, in any order; the groups' scales
and their sum are float32, one group after the other. Keys become 8-bit floats in the registers from
which they are multiplied.

How codes become e5m2: with a code `s ee m` in a byte, sign at bit 7 and `ee m` at bits 3 to 1, the
byte is 2^-14 times the e2m1 value, also where that is subnormal.
"""

from typing import Final

import triton
import triton.language as tl

# The interpreter knows no machine instructions, cuts off where a GPU rounds to bf16, and multiplies
# the bits of operands that are not float32.
INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Eight e2m1 codes of a word -> 2^-14 times the low ones of each byte, the high ones; e5m2.
UNPACK: Final = tl.constexpr(
    """{
    .reg .b32 sign, rest;
    shl.b32 sign, $2, 4;
    shl.b32 rest, $2, 1;
    and.b32 rest, rest, 0x0E0E0E0E;
    lop3.b32 $0, sign, 0x80808080, rest, 0xEA;  // (sign & 0x80808080) | rest
    shr.u32 rest, $2, 3;
    and.b32 rest, rest, 0x0E0E0E0E;
    lop3.b32 $1, $2, 0x80808080, rest, 0xEA;
    }"""
)


@triton.jit
def _value(code):
    """For the interpreter: 2^-14 times the value of the low four bits, float32."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)  # 2^-126 times the value
    return bits.to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0  # 2^112


@triton.jit
def _unpack(codes):
    """uint8, two codes each -> 2^-14 times the low ones, the high ones; e5m2."""
    if INTERPRETED:
        return _value(codes.to(tl.int32)), _value(codes.to(tl.int32) >> 4)
    else:
        types: tl.constexpr = (tl.float8e5, tl.float8e5)
        return tl.inline_asm_elementwise(UNPACK, "=&r,=r,r", [codes], types, True, 4)


@triton.jit
def _operand(codes):
    """uint8 [T, 16] -> e5m2 [T, 32], the even dimensions first."""
    low, high = _unpack(codes)
    return tl.join(low, high).permute(0, 2, 1).reshape(codes.shape[0], 32)


@triton.jit
def _split_last(x):
    """[A, B, 4] -> a tuple of four [A, B]."""
    even, odd = x.reshape(x.shape[0], x.shape[1], 2, 2).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@triton.jit
def load_keys(records, DIM: tl.constexpr, PIECE: tl.constexpr):
    """Records at pointers to uint8 [T] -> the operands [T, 32] of their groups, scales int32 [T].

    Codes come in pieces of PIECE groups.
    """
    TILE: tl.constexpr = records.shape[0]
    GROUPS: tl.constexpr = DIM // 32
    operands = ()
    for piece in tl.static_range(GROUPS // PIECE):
        at = piece * PIECE * 16 + tl.arange(0, PIECE * 16)
        codes = tl.load(records[:, None] + at[None, :])
        if PIECE == 4:
            groups = _split_last(codes.reshape(TILE, 4, 16).permute(0, 2, 1))
        elif PIECE == 2:
            groups = codes.reshape(TILE, 2, 16).permute(0, 2, 1).split()
        else:
            groups = (codes,)
        for group in tl.static_range(PIECE):
            operands += (_operand(groups[group]),)
    if DIM == 128:
        scales = tl.load((records + 64).to(tl.pointer_type(tl.int32)))
    else:
        scales = tl.load((records + 32).to(tl.pointer_type(tl.int16))).to(tl.int32)
    return operands, scales


@triton.jit
def _query_group(queries, head, known, GROUP: tl.constexpr, DIM: tl.constexpr):
    dim = 32 * GROUP + tl.arange(0, 32)
    source = head.to(tl.int64)[:, None] * DIM + dim[None, :]
    return tl.load(queries + source, mask=known[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_queries(queries, head_weights, head, known, DIM: tl.constexpr):
    """The groups' operands [32, COLUMNS], and weights float32 [COLUMNS].

    A query is divided by the power of two that brings its largest dimension to 1 .. 2, its weight is
    multiplied by it, and its operands by 2^14. `head` counts the heads of all rows; it is read where
    `known`.
    """
    COLUMNS: tl.constexpr = head.shape[0]
    bits = tl.zeros((COLUMNS,), tl.int32)
    groups = ()
    for group in tl.static_range(DIM // 32):
        values = _query_group(queries, head, known, group, DIM)
        groups += (values,)
        bits = tl.maximum(bits, tl.max(values.to(tl.int32, bitcast=True) & 0x7F800000, axis=1))
    bits = tl.minimum(tl.maximum(bits, 14 << 23), 254 << 23)
    factor = ((254 << 23) - bits + (14 << 23)).to(tl.float32, bitcast=True)
    weights = tl.load(head_weights + head, mask=known, other=0.0).to(tl.float32)
    weights *= bits.to(tl.float32, bitcast=True)
    operands = ()
    for group in tl.static_range(DIM // 32):
        values = groups[group] * factor[:, None]
        if not INTERPRETED:
            values = values.to(tl.float8e5)
        # Even dimensions first, as in keys.
        values = values.reshape(COLUMNS, 16, 2).permute(0, 2, 1).reshape(COLUMNS, 32)
        operands += (values.trans(),)
    return operands, weights


@triton.jit
def _round(x):
    """float32 -> the nearest bf16 values, as float32; for the interpreter."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, nearest)  # NaN stays


@triton.jit
def rounded(x):
    """float32 -> bf16, to the nearest."""
    if INTERPRETED:
        x = _round(x)
    return x.to(tl.bfloat16)


@triton.jit
def _dot(left, right, shape: tl.constexpr):
    """left @ right in float32."""
    zeros = tl.zeros(shape, tl.float32)
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), zeros, input_precision="ieee")
    else:
        return tl.dot(left, right, zeros)


@triton.jit
def _scale(scales, GROUP: tl.constexpr):
    """A group's scale of each key: int32 [T], a byte for each group -> float32 [T, 1]."""
    bits = scales << (23 - 8 * GROUP) if GROUP < 3 else scales >> 1
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _pairs(weights):
    """Weights as bf16, in pairs: the compiler would pair them anew for every tile."""
    if INTERPRETED:
        return rounded(weights)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], tl.bfloat16, True, 2
        )


@triton.jit
def _weighted(dots, weights):
    """bf16(weight * relu(bf16(dot))): float32 [T, H] and bf16 [T, H] -> bf16 [T, H]."""
    if INTERPRETED:
        dots = _round(tl.where(dots < 0, 0.0, dots))
        return rounded(dots * weights.to(tl.float32))
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
def _first(left, right):
    return left


@triton.jit
def tile_scores(keys, scales, queries, weights, HEADS: tl.constexpr):
    """Scores of a tile of keys for one or several rows, float32 [ROWS * T], row after row.

    Args: as from `load_keys` and `load_queries`.
    """
    TILE: tl.constexpr = scales.shape[0]
    COLUMNS: tl.constexpr = weights.shape[0]
    ROWS: tl.constexpr = COLUMNS // HEADS
    dots = _dot(keys[0], queries[0], (TILE, COLUMNS)) * _scale(scales, 0)
    for group in tl.static_range(1, len(keys)):
        scale = tl.broadcast_to(_scale(scales, group), (TILE, COLUMNS))
        dots = tl.fma(_dot(keys[group], queries[group], (TILE, COLUMNS)), scale, dots)
    parts = _weighted(dots, _pairs(tl.broadcast_to(weights[None, :], (TILE, COLUMNS))))
    if ROWS > 1:
        parts = parts.reshape(TILE, ROWS, HEADS).trans(1, 0, 2).reshape(ROWS * TILE, HEADS)
    ones = tl.full((HEADS, 8), 1.0, tl.float32).to(tl.bfloat16)
    total = _dot(parts, ones, (ROWS * TILE, 8))  # all columns alike
    if INTERPRETED:
        return tl.sum(tl.where(tl.arange(0, 8)[None, :] == 0, total, 0.0), axis=1)
    else:
        return tl.reduce(total, 1, _first)
