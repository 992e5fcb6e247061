"""The inner loop of the experts: rows times packed FP4, and what happens to a product on its way out.

The weights are the left operand of the tensor cores: they are unpacked in registers and never stored
again. A tile of products is therefore [outputs, rows], the transpose of how it is written.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import os

import triton
import triton.language as tl

# The interpreter knows no machine instructions: there the same unpacking runs on whole tensors.
PLAIN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _unpack_plain(word: tl.tensor, scale: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    bits = word.to(tl.int32)
    if PLACE == 1:
        code = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0)
    else:
        code = (bits << (0 if PLACE == 0 else 6 if PLACE == 2 else 3)) & 0x81C0
    exponent = (scale >> 8 * PLACE) & 0xFF
    value = (code << 16).to(tl.float32, bitcast=True)
    value *= (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    upper = value.to(tl.int32, bitcast=True) >> 16  # its conversion knows no subnormal bf16
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scale(scale: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """int32 [N], four exponent fields -> one as two equal bf16 in 32 bits, [N]."""
    # Each half is the byte times 128. A shift to the left is a product: another pipe than `prmt`'s.
    if PLACE == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4040; shl.b32 $0, t, 7; }",
            "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    if PLACE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4141; shl.b32 $0, t, 7; }",
            "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    if PLACE == 2:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4242; shl.b32 $0, t, 7; }",
            "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4343; shl.b32 $0, t, 7; }",
        "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def unpack(word: tl.tensor, scale: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """One of the four codes of each word: int16 [N, 32] and int32 [N] -> bf16 [N, 32], exact.

    Two words at a time: at most six instructions and one product for two values.
    """
    if PLAIN:
        return _unpack_plain(word, scale, PLACE)
    factor = tl.broadcast_to(_scale(scale, PLACE)[:, None], word.shape)
    if PLACE == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $1, 0x81C081C0; mul.rn.bf16x2 $0, t, $2; }",
            "=r,r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    if PLACE == 1:  # what the other three left; 0xEA is (a & b) | c
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b; shl.b32 t, $1, 1; and.b32 t, t, 0x80008000;
            shr.u32 a, $1, 5; lop3.b32 t, a, 0x01000100, t, 0xEA;
            shr.u32 b, $1, 4; lop3.b32 t, b, 0x00C000C0, t, 0xEA;
            mul.rn.bf16x2 $0, t, $2; }""",
            "=r,r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    if PLACE == 2:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; shl.b32 t, $1, 6; and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 $0, t, $2; }""",
            "=r,r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t; shl.b32 t, $1, 3; and.b32 t, t, 0x81C081C0;
        mul.rn.bf16x2 $0, t, $2; }""",
        "=r,r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def product(left: tl.tensor, right: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + left @ right: bf16 [N, K] and bf16 [K, M] in float32 [N, M]."""
    if PLAIN:  # the interpreter multiplies the bits of bf16 operands
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total)


@triton.jit
def to_bf16(x: tl.tensor) -> tl.tensor:
    """The nearest bf16 value, ties to even, as float32."""
    if PLAIN:  # the interpreter cuts the mantissa off
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -65536).to(tl.float32, bitcast=True)
    # With a zero beside it in the lower half, a bf16 is a float32.
    bits = tl.inline_asm_elementwise(
        "{ .reg .f32 zero; mov.f32 zero, 0f00000000; cvt.rn.bf16x2.f32 $0, $1, zero; }",
        "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bf16(x: tl.tensor) -> tl.tensor:
    """The nearest bf16."""
    if PLAIN:
        return to_bf16(x).to(tl.bfloat16)
    return x.to(tl.bfloat16)


@triton.jit
def _silu(x: tl.tensor) -> tl.tensor:
    """x / (1 + exp(-x)), to a few units in the last place of float32."""
    if PLAIN:
        return x / (1.0 + tl.exp(-x))
    # Plain division and exponential would care for subnormals; the product is -x * log2(e).
    return tl.inline_asm_elementwise(
        """{ .reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
        add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.rn.f32 $0, $1, t; }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def swiglu(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """`kernels.reference.swiglu` on bf16 values: float32, a weight that broadcasts -> bf16 values."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return to_bf16(_silu(gate) * up * weight)


@triton.jit
def q8_roundtrip(x: tl.tensor, N: tl.constexpr, M: tl.constexpr) -> tl.tensor:
    """`kernels.reference.quant.q8_roundtrip` in groups of 32 along the first axis, float32 [N, M].

    For values up to 2^127, far above what the activation's limit lets through.
    """
    x = tl.reshape(x, (N // 32, 32, M))
    largest = tl.max(tl.abs(x), axis=1)
    largest = tl.minimum(tl.maximum(largest, 1e-4), 1.7014118346046923e38)  # 2^127
    # The smallest power of two that is no smaller: a mantissa carries into the exponent.
    bits = (largest * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (bits + 0x7FFFFF) & 0x7F800000
    scale = exponent.to(tl.float32, bitcast=True)[:, None, :]
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None, :]
    code = x * inverse  # at most 448, or so little more that it is rounded to 448
    # Round to three bits of mantissa, or to multiples of 2^-9: added to 1.5 * 2^20 times its power
    # of two (at least 2^-6), a number has its last place there, and is rounded to even.
    power = tl.maximum(code.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = (power + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    code = (code + magic) - magic
    return tl.reshape(code * scale, (N, M))
