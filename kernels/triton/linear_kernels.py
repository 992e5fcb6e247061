# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The device side of `linear`: matrix products with one order along K, whatever the tiles.

Every product is a chain of `tl.dot` over bf16 values with float32 sums. A row's bits depend on which
columns come together in one instruction, 16 at a time, and on the order of these sixteens: not on
the order within one, nor on the height of a tile, nor on the side its rows stand on (measured; the
tests check it on the GPU at hand). That holds while the compiler keeps the sixteens, as it does for
wgmma: so every tile has at least 64 rows of the left operand.
"""

from typing import Final

import triton
import triton.language as tl

from phalanx.kernels.triton import formats

# Triton's interpreter lacks inline PTX and the dot of bf16, and truncates where a GPU rounds to bf16.
# Its float64 hides the order within a tile, as numpy has another for every tile height.
INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))

# A word of four e4m3 codes to two pairs of bf16. A code's bits (s eeee mmm) moved into bf16's places
# (s 0000eeee mmm0000) are its value times 2^-120, subnormals too; the factor brings 2^120 and the
# block's scale. The first masks leave sign and high exponent bits of the four, the next the rest.
_E4M3_TO_BF16: Final = tl.constexpr("""{
    .reg .b32 high, low;
    shr.b32 high, $2, 4;
    and.b32 high, high, 0x07070707;
    lop3.b32 high, high, $2, 0x80808080, 0xf8;
    shl.b32 low, $2, 4;
    and.b32 low, low, 0xf0f0f0f0;
    prmt.b32 $0, low, high, 0x5140;
    prmt.b32 $1, low, high, 0x7362;
    mul.bf16x2 $0, $0, $3;
    mul.bf16x2 $1, $1, $3;
}""")


@triton.jit
def _factors(scales):
    """Scale bytes, at most 2^7 -> int32, twice the bf16 that is 2^120 times the scale."""
    # Byte b is 2^(b - 127); bf16 holds 2^(e - 127) as e << 7.
    factor = (scales.to(tl.int32) + 120) << 7
    return factor | (factor << 16)


@triton.jit
def _four_factors(words, BLOCKS: tl.constexpr):
    """Words of four scale bytes, int32 [BLOCKS] -> as `_factors`, [BLOCKS, 4]."""
    even = tl.join(_factors(words & 0xFF), _factors((words >> 16) & 0xFF))
    odd = tl.join(_factors((words >> 8) & 0xFF), _factors((words >> 24) & 0xFF))
    return tl.reshape(tl.join(even, odd), (BLOCKS, 4))


@triton.jit
def _two_factors(words, BLOCKS: tl.constexpr):
    """As `_four_factors`, of the two lower bytes."""
    both = tl.join(_factors(words & 0xFF), _factors((words >> 8) & 0xFF))
    return tl.reshape(both, (BLOCKS, 2))


@triton.jit
def _times(codes, factors):
    """The interpreter's way for the lowest byte: bf16 bits, int32."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    factor = (factors << 16).to(tl.float32, bitcast=True)
    return ((bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def _dequantize(words, factors):
    """Words of four e4m3 codes, int32, with factors from `_factors` -> pairs of bf16 in int32, exact.

    The first pair is of the two lower bytes.
    """
    if INTERPRETED:
        low = _times(words, factors) | (_times(words >> 8, factors) << 16)
        return low, _times(words >> 16, factors) | (_times(words >> 24, factors) << 16)
    return tl.inline_asm_elementwise(
        _E4M3_TO_BF16,
        "=&r,=&r,r,r",
        [words, factors],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _weights(words, factors, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words of four codes [BLOCK_N, BLOCK_K / 4] -> bf16 [BLOCK_N, BLOCK_K], `formats.shuffled`.

    No value leaves its register: the four codes of a word are those of one thread.
    """
    both = tl.join(*_dequantize(words, factors))
    both = tl.permute(tl.reshape(both, (BLOCK_N, BLOCK_K // 16, 4, 2)), (0, 1, 3, 2))
    pairs = tl.reshape(both, (BLOCK_N, BLOCK_K // 2))
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, (BLOCK_N, BLOCK_K)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _settle(acc):
    """Wait until the tensor cores have added to `acc`.

    Left alone, the compiler (Triton 3.6) lets an iteration's last products run on into the next
    one, which overwrites the registers that they still read: wrong bits now and then.
    """
    if INTERPRETED:
        return acc
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:
        a, b = a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64)
        return (acc.to(tl.float64) + tl.dot(a, b, out_dtype=tl.float64)).to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _round(x):
    """float32 -> bf16, to the nearest, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def _store(out, product, mask, ROUND):
    product = tl.where(ROUND != 0, _round(product).to(tl.float32), product)
    tl.store(out, product.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "GROUPS", "SPLITS", "ROUND"])
def few_rows(
    x,  # bf16 or float32 [R, G, K]
    w,  # int32 (words of four codes) [G, N, K / 4] or bf16 [G, N, K]
    scales,  # uint8 [G, ceil(N/32), K/32], with WORDS int32 [.., K/128], or anything
    out,  # [S, R, G, N]
    R,
    N,
    K,
    depth,  # K / S, a multiple of BLOCK_K
    stride_x,  # elements from row to row of x
    GROUPS,
    SPLITS,
    ROUND,  # whether to round to bf16 values
    GROUPED: tl.constexpr,  # whether there is more than one group
    FP8: tl.constexpr,
    WORDS: tl.constexpr,  # whether scales come four at a time; then BLOCK_K is 64 or 128
    SHUFFLED: tl.constexpr,  # whether the columns of x have been brought into that order before
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weights on the left, FP8 weights dequantized on their way: bound by the bytes of the weights.

    Grid: (tiles of N, tiles of R, G * S). Split s sums its own K / S.
    """
    BLOCKS: tl.constexpr = BLOCK_N // 32
    group, split = 0, tl.program_id(2)
    if GROUPED:
        group, split = split // SPLITS, split % SPLITS
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = split * depth + tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last one: no mask, and nothing of them is stored.
    n_in = tl.minimum(n, N - 1)
    w_row = tl.cast(group, tl.int64) * N + n_in
    if FP8:
        # The compiler brings the codes straight from memory into the operand's registers, as long as
        # nothing but loads and element-wise work stands in between: hence a load of all scales too.
        # Words of four are copied ahead like the codes; single bytes are waited for.
        w_at = w + w_row[:, None] * (K // 4)
        w_at += (split * depth // 4 + tl.arange(0, BLOCK_K // 4))[None, :]
        num_blocks = tl.cdiv(N, 32)
        block = tl.minimum(first // 32 + tl.arange(0, BLOCKS), num_blocks - 1)
        s_row = group * num_blocks + block
        if WORDS:
            s_at = scales + s_row * (K // 128)
        else:
            s_at = scales + (s_row * (K // 32) + split * depth // 32)[:, None]
            s_at += tl.arange(0, BLOCK_K // 32)[None, :]
    else:
        w_at = w + w_row[:, None] * K + k[None, :]
        s_at = scales
    x_at = x + group * K + r.to(tl.int64)[:, None] * stride_x + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    tl.assume(depth > 0)  # for a loop not taken the tensor cores would wait for one another
    for done in range(0, depth, BLOCK_K):
        weight = tl.load(w_at)
        rows = tl.load(x_at, mask=r[:, None] < R, other=0.0).to(tl.bfloat16)
        if FP8:
            if WORDS:
                column = split * depth + done
                factors = tl.load(s_at + column // 128)
                if BLOCK_K == 128:
                    factors = _four_factors(factors, BLOCKS)
                else:
                    factors = _two_factors(factors >> (column // 64 % 2 * 16), BLOCKS)
            else:
                factors = _factors(tl.load(s_at))
                s_at += BLOCK_K // 32
            wide = tl.broadcast_to(factors[:, None, :, None], (BLOCKS, 32, BLOCK_K // 32, 8))
            factors = tl.reshape(wide, (BLOCK_N, BLOCK_K // 4))
            weight = _weights(weight, factors, BLOCK_N, BLOCK_K)
            if not SHUFFLED:
                rows = formats.shuffled(rows, BLOCK_R, BLOCK_K)
            acc = _settle(_dot(weight, tl.trans(rows), acc))
            w_at += BLOCK_K // 4
        else:
            acc = _dot(weight, tl.trans(rows), acc)
            w_at += BLOCK_K
        x_at += BLOCK_K
    first_at = (r.to(tl.int64) * GROUPS + group)[None, :] * N + n[:, None]
    size = R.to(tl.int64) * GROUPS * N
    _store(out + split * size + first_at, acc, (r[None, :] < R) & (n[:, None] < N), ROUND)


@triton.jit
def _sum_of_columns(
    x_row, w_row, first, depth, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Rows at `x_row` by weights at `w_row`, over `depth` columns from `first` on."""
    k = first + tl.arange(0, BLOCK_K)[None, :]
    x_at, w_at = x_row[:, None] + k, w_row[:, None] + k
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for _ in range(0, depth, BLOCK_K):
        total = _dot(tl.load(x_at), tl.trans(tl.load(w_at)), total)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return total


@triton.jit(do_not_specialize=["R", "GROUPS", "ROUND"])
def many_rows(
    x,  # bf16 [R, G, K]
    w,  # bf16 [G, N, K]
    out,  # [R, G, N]
    R,
    N,
    K,
    depth,  # K / S, a multiple of BLOCK_K
    stride_x,
    GROUPS,
    ROUND,
    WHOLE: tl.constexpr,  # whether there is one split alone
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """Rows on the left, the splits of K one after the other: bound by the tensor cores.

    Grid: (tiles of R * tiles of N, G). BAND tiles of rows share their weights in the L2.
    """
    group = tl.program_id(1)
    num_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (BAND * num_n)
    in_band = tl.program_id(0) % (BAND * num_n)
    height = tl.minimum(tl.cdiv(R, BLOCK_R) - band * BAND, BAND)
    r = (band * BAND + in_band % height) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = in_band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x + group * K + tl.minimum(r, R - 1).to(tl.int64) * stride_x
    w_row = w + (group.to(tl.int64) * N + tl.minimum(n, N - 1)) * K
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    if WHOLE:
        acc = _sum_of_columns(x_row, w_row, 0, K, BLOCK_R, BLOCK_N, BLOCK_K)
    else:
        for first in range(0, K, depth):
            acc += _sum_of_columns(x_row, w_row, first, depth, BLOCK_R, BLOCK_N, BLOCK_K)
    at = out + (r.to(tl.int64) * GROUPS + group)[:, None] * N + n[None, :]
    _store(at, acc, (r[:, None] < R) & (n[None, :] < N), ROUND)


@triton.jit(do_not_specialize=["R", "SPLITS", "ROUND"])
def float_rows(
    x,  # bf16 or float32 [R, K]
    w,  # float32 [N, K]
    out,  # [S, R, N]
    R,
    N,
    K,
    stride_x,
    SPLITS,
    ROUND,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Float32 weights as the sum of three bf16: 24 bits, so that every product is exact.

    Grid: (tiles of R, tiles of N, S).
    """
    split = tl.program_id(2)
    depth = K // SPLITS // 32 * 32
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = split * depth + tl.arange(0, BLOCK_K)
    x_at = x + r.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = w + tl.minimum(n, N - 1)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for _ in range(0, depth, BLOCK_K):
        rows = tl.load(x_at, mask=r[:, None] < R, other=0.0).to(tl.bfloat16)
        weight = tl.load(w_at)
        high = _round(weight)
        weight -= high.to(tl.float32)
        middle = _round(weight)
        weight -= middle.to(tl.float32)
        acc = _dot(rows, tl.trans(_round(weight)), acc)
        acc = _dot(rows, tl.trans(middle), acc)
        acc = _dot(rows, tl.trans(high), acc)
        x_at += BLOCK_K
        w_at += BLOCK_K
    at = out + (split * R + r).to(tl.int64)[:, None] * N + n[None, :]
    _store(at, acc, (r[:, None] < R) & (n[None, :] < N), ROUND)


@triton.jit(do_not_specialize=["count"])
def sum_splits(
    parts,
    out,
    count,
    SPLITS: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[S, count] -> [count], the splits added in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.load(parts + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * count.to(tl.int64) + at, mask=mask, other=0.0)
    _store(out + at, total, mask, ROUND)


@triton.jit(do_not_specialize=["num_groups"])
def shuffle(x, out, num_groups, BLOCK: tl.constexpr):
    """Groups of 32 bf16 values, however long a row is, each in the order of `formats.shuffled`."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (group < num_groups)[:, None]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.bfloat16)
    tl.store(out + at, formats.shuffled(values, BLOCK, 32), mask=mask)


@triton.jit
def dequantize(w, scales, out, N, K, BLOCK_K: tl.constexpr):
    """Words of four codes, int32 [N, K / 4], with their scales -> pairs of bf16 in int32 [N, K / 2].

    Grid: (K / BLOCK_K, tiles of 32 rows).
    """
    n = tl.program_id(1) * 32 + tl.arange(0, 32)
    k = tl.program_id(0) * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4)
    row, inside = n.to(tl.int64)[:, None], n[:, None] < N
    words = tl.load(w + row * (K // 4) + k[None, :], mask=inside, other=0)
    s_at = scales + tl.program_id(1) * (K // 32) + k // 8
    factors = tl.broadcast_to(_factors(tl.load(s_at))[None, :], (32, BLOCK_K // 4))
    pairs = tl.reshape(tl.join(*_dequantize(words, factors)), (32, BLOCK_K // 2))
    pair = tl.program_id(0) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    tl.store(out + row * (K // 2) + pair[None, :], pairs, mask=inside)
