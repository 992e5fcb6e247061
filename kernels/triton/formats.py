# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Number formats inside a kernel: the device functions that the kernels of this package share.

Every function gives the bits of `kernels.reference.quant` for finite input. NaN stays NaN where the
format has one. All scales but those of compressed entries are powers of two, so that a division by
one is an exact multiplication.
"""

import triton
import triton.language as tl

# Triton's interpreter cuts floats down by truncation: there, rounding is written out in integers.
EMULATED = tl.constexpr(bool(triton.knobs.runtime.interpret))

Q8_FLOOR = tl.constexpr(1e-4)  # smallest group maximum of Q8
IDX_FLOOR = tl.constexpr(6.0 * 2.0**-126)  # of QF4_idx
KV_FLOOR = tl.constexpr(6.0 * 2.0**-9)  # of QF4_kv
LARGEST = tl.constexpr(2.0**127)  # keeps an infinite maximum from turning the scale into NaN
E4M3_MAX = tl.constexpr(448.0)
PER_E4M3_MAX = tl.constexpr(1.0 / 448.0)
PER_E2M1_MAX = tl.constexpr(1.0 / 6.0)


@triton.jit
def _is_nan(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def round_bf16(x):
    """float32 -> the nearest bf16 values, as float32."""
    if EMULATED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(_is_nan(x), x, bits.to(tl.float32, bitcast=True))
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def float_of(bits):
    """Bits of a float32 in an int32 -> the float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot_bf16(a, b, total):
    """total + a @ b of bf16 operands, added up in float32."""
    if EMULATED:
        # The interpreter takes bf16 operands for integers, and numpy adds in an order that depends
        # on the shape: with float64 that is not seen after rounding.
        product = tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64))
        return (total.to(tl.float64) + product).to(tl.float32)
    else:
        return tl.dot(a, b, total)


@triton.jit
def shuffled(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS], column 4t + 2h + e of every 16 at 8h + 2t + e (t below 4, h and e below 2).

    A thread of a tensor core's warp holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16: in this
    order they are neighbours in memory.
    """
    rows = tl.permute(tl.reshape(rows, (ROWS, COLUMNS // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(rows, (ROWS, COLUMNS))


# --- e4m3 and ue8m0 --------------------------------------------------------------------------------


@triton.jit
def to_e4m3(x):
    """float32 -> the nearest e4m3, ties to even, saturating at 448: bytes, uint8."""
    x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    if EMULATED:
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # Below 2^-6 the codes count steps of 2^-9; adding 2^23 rounds to whole steps.
        steps = float_of(magnitude) * 512.0 + 8388608.0
        small = steps.to(tl.int32, bitcast=True) & 15
        code = tl.where(magnitude < 0x3C800000, small, normal)
        return (sign | tl.where(_is_nan(x), 0x7F, code)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code):
    """e4m3 bytes, uint8 -> float32."""
    if EMULATED:
        wide = code.to(tl.int32)
        half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.int16)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def from_ue8m0(code):
    """Bytes b -> 2^(b - 127), float32; 255 is NaN."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return float_of(tl.where(wide == 255, 0x7FC00000, bits))


@triton.jit
def exponent_of(amax, FLOOR: tl.constexpr, PER_MAX: tl.constexpr):
    """The ue8m0 byte (as int32) of the smallest power of two that is >= max(amax, FLOOR) * PER_MAX."""
    bounded = tl.minimum(tl.maximum(amax, FLOOR), LARGEST)
    # A non-zero mantissa carries into the exponent field.
    return ((bounded * PER_MAX).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def inverse_of(exponent):
    """1 / 2^(exponent - 127), exact for the scales of Q8 and QF4_idx."""
    return float_of((254 - exponent) << 23)


# --- Q8 --------------------------------------------------------------------------------------------


@triton.jit
def q8_codes(x):
    """Groups of 32, float32 [G, 32] -> e4m3 bytes uint8 [G, 32] and ue8m0 int32 [G, 1]."""
    amax = tl.max(tl.abs(x), axis=1, keep_dims=True)
    exponent = exponent_of(amax, Q8_FLOOR, PER_E4M3_MAX)
    return to_e4m3(x * inverse_of(exponent)), exponent


@triton.jit
def q8_values(x):
    """What is left after Q8: groups of 32, float32 [G, 32] -> float32 [G, 32], bf16 values."""
    codes, exponent = q8_codes(x)
    return from_e4m3(codes) * float_of(exponent << 23)


@triton.jit
def q8_row(x, WIDTH: tl.constexpr):
    """`q8_values` of a row, float32 [WIDTH]; what lies past the row's end must be 0."""
    return tl.reshape(q8_values(tl.reshape(x, (WIDTH // 32, 32))), (WIDTH,))


# --- e2m1 ------------------------------------------------------------------------------------------


@triton.jit
def to_e2m1(x):
    """float32 -> e2m1 codes 0..15 (int32): ties to the even code, saturating at 6, -0 kept."""
    m = tl.abs(x)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32)
    code += (m >= 1.75).to(tl.int32) + (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32)
    code += (m > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def from_e2m1(code):
    """e2m1 codes (int32) -> float32."""
    # Read as the low bits of a float16's exponent, subnormals included, and scaled back.
    half = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def pack_e2m1(x, G: tl.constexpr, N: tl.constexpr):
    """float32 [G, N] -> bytes uint8 [G, N/2], even columns in the low nibble."""
    low, high = tl.split(tl.reshape(to_e2m1(x), (G, N // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack_e2m1(packed, G: tl.constexpr, N: tl.constexpr):
    """Bytes uint8 [G, N/2] -> float32 [G, N]."""
    wide = packed.to(tl.int32)
    return tl.reshape(tl.join(from_e2m1(wide & 15), from_e2m1(wide >> 4)), (G, N))


@triton.jit
def qf4_idx(x, G: tl.constexpr):
    """Groups of 32, float32 [G, 32] -> packed codes uint8 [G, 16] and ue8m0 int32 [G, 1]."""
    amax = tl.max(tl.abs(x), axis=1, keep_dims=True)
    exponent = exponent_of(amax, IDX_FLOOR, PER_E2M1_MAX)
    return pack_e2m1(x * inverse_of(exponent), G, 32), exponent


@triton.jit
def qf4_kv(x, G: tl.constexpr):
    """Groups of 16, float32 [G, 16] -> packed codes uint8 [G, 8] and e4m3 scale bytes uint8 [G, 1]."""
    amax = tl.max(tl.abs(x), axis=1, keep_dims=True)
    bounded = tl.minimum(tl.maximum(amax, KV_FLOOR), LARGEST)
    scale = to_e4m3(tl.math.div_rn(bounded, tl.full((G, 1), 6.0, tl.float32)))
    # Not a power of two: a real division, rounded as the reference rounds it.
    divisor = tl.broadcast_to(from_e4m3(scale), (G, 16))
    return pack_e2m1(tl.math.div_rn(x, divisor), G, 16), scale
