"""The number formats agree, bit for bit, with the reference's arrays and with slow exact arithmetic."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from phalanx.kernels.reference import quant

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny-a"
E2M1 = [Fraction(m) / 2 for m in (0, 1, 2, 3, 4, 6, 8, 12)]


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) / 64
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(127)]


def nearest(table: list[Fraction], value: Fraction) -> int:
    """The code of the nearest table entry; a tie goes to the even code; past the end saturates."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - value), code & 1))


def bits(x: Tensor) -> Tensor:
    """bf16 as integers, so that equality sees the sign of zero."""
    return x.to(torch.bfloat16).view(torch.int16)


def pow2_at_least(value: float) -> Fraction:
    mantissa, exponent = math.frexp(value)
    return Fraction(2) ** (exponent - 1 if mantissa == 0.5 else exponent)


bf16_values = st.integers(0, 0xFFFF).map(
    lambda code: torch.tensor([code], dtype=torch.uint16).view(torch.bfloat16).item()
)
finite_bf16 = bf16_values.filter(lambda value: math.isfinite(value) and abs(value) < 1e30)
moderate = st.floats(-100, 100, width=32)
# Rows that mix scales, exact zeros and arbitrary bf16 patterns.
groups_of_32 = st.lists(st.one_of(moderate, finite_bf16, st.just(-0.0)), min_size=32, max_size=32)


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_pow2ceil_is_the_smallest_power_that_is_enough(value: float) -> None:
    assert quant.pow2ceil(torch.tensor([value])).item() == pow2_at_least(value)


@settings(max_examples=60)
@given(groups_of_32)
def test_q8_rounds_every_value_to_the_nearest_code_of_its_scale(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    codes, scales = quant.q8(x)
    amax = np.float32(max(float(x.abs().max()), np.float32(1e-4)))
    scale = pow2_at_least(float(amax * np.float32(1 / 448)))
    assert Fraction(2) ** (int(scales[0]) - 127) == scale
    for value, code in zip(x.tolist(), codes.view(torch.uint8).tolist(), strict=True):
        sign = 0x80 if math.copysign(1, value) < 0 else 0
        assert code == sign | nearest(E4M3, abs(Fraction(value)) / scale)


@settings(max_examples=60)
@given(groups_of_32)
def test_qf4_idx_rounds_every_value_to_the_nearest_code_of_its_scale(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    packed, scales = quant.qf4_idx(x)
    amax = np.float32(max(float(x.abs().max()), 6 * 2.0**-126))
    scale = pow2_at_least(float(amax * np.float32(1 / 6)))
    assert Fraction(2) ** (int(scales[0]) - 127) == scale
    assert packed.tolist() == packed_codes(x.tolist(), [scale])


@settings(max_examples=60)
@given(groups_of_32)
def test_qf4_kv_rounds_scales_to_e4m3_and_values_to_e2m1(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    packed, scales = quant.qf4_kv(x)
    expected = []
    for group in (x[:16], x[16:]):
        amax = np.float32(max(float(group.abs().max()), 6 * 2.0**-9))
        expected.append(nearest(E4M3, Fraction(float(amax / np.float32(6)))))
    assert scales.tolist() == expected
    # x / s is rounded to float32 before it is rounded to e2m1.
    quotients = [
        float(np.float32(value) / np.float32(float(E4M3[expected[i // 16]])))
        for i, value in enumerate(x.tolist())
    ]
    assert packed.tolist() == packed_codes(quotients, [Fraction(1), Fraction(1)])


def packed_codes(row: list[float], scales: list[Fraction]) -> list[int]:
    """Bytes of a row whose equal parts have these scales; even columns in the low nibble."""
    codes = []
    for i, value in enumerate(row):
        magnitude = abs(Fraction(value)) / scales[i * len(scales) // len(row)]
        codes.append(nearest(E2M1, magnitude) | (8 if math.copysign(1, value) < 0 else 0))
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]


def test_e2m1_is_exact_on_every_finite_bf16() -> None:
    x = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    codes = quant.e2m1_encode(x)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    # Counting ties from the left puts a tie on the lower code, from the right on the upper one.
    lower = np.searchsorted(ties, x.abs().numpy(), side="left")
    upper = np.searchsorted(ties, x.abs().numpy(), side="right")
    expected = np.where(lower % 2 == 0, lower, upper) | np.where(np.signbit(x.numpy()), 8, 0)
    assert np.array_equal(codes.numpy(), expected)


MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # then the same below zero


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((MAGNITUDES, -MAGNITUDES))[codes.int()]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
        (5.01, 6.0), (6.0, 6.0), (1e9, 6.0), (-0.25, -0.0), (-5.0, -4.0), (-1e9, -6.0),
    ],
)  # fmt: skip
def test_e2m1_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    back = e2m1_decode(quant.e2m1_encode(torch.tensor([value]))).item()
    assert back == rounded and math.copysign(1, back) == math.copysign(1, rounded)


def test_e2m1_decodes_what_it_encodes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(quant.e2m1_encode(e2m1_decode(codes)), codes)


def test_low_nibble_is_the_even_column() -> None:
    packed = quant.pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    assert packed.tolist() == [0x21, 0x43]
    assert quant.unpack_e2m1(packed).tolist() == [0.5, 1.0, 1.5, 2.0]


def test_ue8m0_is_a_power_of_two_by_its_byte() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    values = quant.ue8m0_decode(codes)
    assert values.double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert torch.equal(quant.ue8m0_encode(values[1:]), codes[1:])  # byte 0 is subnormal: no code
    assert quant.ue8m0_decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_rows_of_zeros_take_the_floor_and_stay_zero() -> None:
    zeros = torch.zeros(2, 64)
    zeros[1] = -0.0
    for roundtrip in (quant.q8_roundtrip, quant.qf4_idx_roundtrip, quant.qf4_kv_roundtrip):
        back = roundtrip(zeros)
        assert torch.equal(bits(back), bits(zeros))  # the sign of zero too
    assert quant.q8(zeros)[1].unique().tolist() == [127 - 22]  # 1e-4 / 448, rounded up
    assert quant.qf4_idx(zeros)[1].unique().tolist() == [1]  # 2^-126
    assert quant.qf4_kv(zeros)[1].unique().tolist() == [1]  # 2^-9 in e4m3


def test_values_below_the_floor_round_as_if_the_group_were_larger() -> None:
    x = torch.full((32,), 1e-5)
    assert quant.q8(x)[1].item() == 127 - 22
    assert quant.q8_roundtrip(x)[0].item() == pytest.approx(1e-5, rel=0.07)
    assert quant.qf4_kv_roundtrip(torch.full((16,), 2.0**-11)).unique().item() == 0.0


def test_a_kv_group_past_the_largest_scale_saturates() -> None:
    x = torch.full((16,), 1e6)
    assert quant.qf4_kv(x)[1].view(quant.E4M3).float().item() == 448.0
    assert quant.qf4_kv_roundtrip(x).unique().item() == 448.0 * 6


def test_non_finite_rows_do_not_raise() -> None:
    for value in (math.inf, -math.inf, math.nan):
        row = torch.full((1, 32), value)
        for encode in (quant.encode_window, quant.encode_compressed, quant.encode_index_key):
            encode(row)


def test_a_width_that_is_no_whole_group_is_refused() -> None:
    with pytest.raises(ValueError, match="33; it must be a multiple of 32"):
        quant.q8(torch.zeros(33))


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_row_never_depends_on_the_rows_beside_it(rows: int, seed: int) -> None:
    x = torch.randn(rows, 3, 64, generator=torch.Generator().manual_seed(seed)) * 10
    for encode in (quant.encode_window, quant.encode_compressed, quant.encode_index_key):
        together = encode(x)
        for row in range(rows):
            assert torch.equal(together[row], encode(x[row].clone()))


def test_no_rows_give_no_records() -> None:
    assert quant.encode_window(torch.zeros(0, 64)).shape == (0, 66)
    assert quant.decode_compressed(torch.zeros(0, 36, dtype=torch.uint8)).shape == (0, 64)


def test_record_sizes_of_the_full_model() -> None:
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    assert quant.encode_window(x).shape == (3, 528) and quant.window_bytes(512) == 528
    assert quant.encode_compressed(x).shape == (3, 288) and quant.compressed_bytes(512) == 288
    assert quant.encode_index_key(x[:, :128]).shape == (3, 68) and quant.index_key_bytes(128) == 68


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_hold_codes_then_scales_and_decode_to_the_round_trip(dtype: torch.dtype) -> None:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scales = quant.q8(x)
    record = quant.encode_window(x)
    assert torch.equal(record[:, :128], codes.view(torch.uint8))
    assert torch.equal(record[:, 128:], scales)
    assert torch.equal(quant.decode_window(record), quant.q8_roundtrip(x))
    assert torch.equal(
        quant.decode_compressed(quant.encode_compressed(x)), quant.qf4_kv_roundtrip(x)
    )
    assert torch.equal(
        quant.decode_index_key(quant.encode_index_key(x)), quant.qf4_idx_roundtrip(x)
    )


def test_what_was_rounded_once_is_not_rounded_again() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(2)) * 3
    for roundtrip in (quant.q8_roundtrip, quant.qf4_idx_roundtrip):
        once = roundtrip(x)
        assert torch.equal(roundtrip(once), once)
        assert torch.equal(once.to(torch.bfloat16).float(), once)  # bf16 holds it exactly


def test_fp8_blocks_share_one_scale_and_come_back_exactly() -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(3))
    weight[32:64, :32] = 0
    weight[:32, 32:64] *= 1e-6
    codes, scale = quant.quant_fp8_block(weight)
    assert scale.shape == (3, 3) and scale[1, 0] == 127
    back = quant.dequant_fp8_block(codes, scale)
    assert ((back - weight).abs() <= weight.abs() / 16 + 2.0**-9 * 1e-2).all()
    again = quant.dequant_fp8_block(*quant.quant_fp8_block(back))
    assert torch.equal(again, back)


def test_fp4_and_engram_weights_come_back_exactly() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    back = quant.dequant_fp4(*quant.quant_fp4(weight))
    assert torch.equal(quant.dequant_fp4(*quant.quant_fp4(back)), back)
    rows = quant.dequant_engram_rows(*quant.quant_engram(weight))
    assert rows.dtype == torch.bfloat16
    assert torch.equal(quant.dequant_engram_rows(*quant.quant_engram(rows)), rows)


def test_window_entries_match_the_reference() -> None:
    arrays = load_file(GOLDEN / "expected.safetensors")
    names = [name for name in arrays if name.endswith(".window_kv")]
    assert len(names) == 20  # 10 layers, 2 prompts
    for name in names:
        before, after = arrays[f"{name}_pre"], arrays[name]
        assert torch.equal(bits(quant.q8_roundtrip(before)), bits(after)), name
        assert torch.equal(bits(quant.decode_window(quant.encode_window(before))), bits(after)), (
            name
        )


def test_compressed_entries_match_the_reference() -> None:
    arrays = load_file(GOLDEN / "expected.safetensors")
    names = [name for name in arrays if name.endswith(".compressed")]
    assert len(names) == 6  # 3 owners, 2 prompts
    for name in names:
        before, after = arrays[f"{name}_pre"], arrays[name]
        assert torch.equal(bits(quant.qf4_kv_roundtrip(before)), bits(after)), name
        decoded = quant.decode_compressed(quant.encode_compressed(before))
        assert torch.equal(bits(decoded), bits(after)), name


def test_index_keys_and_queries_of_the_reference_are_fixed_points() -> None:
    arrays = load_file(GOLDEN / "expected.safetensors")
    for name, value in arrays.items():
        if name.endswith((".index_k", ".index_q")):
            assert torch.equal(bits(quant.qf4_idx_roundtrip(value)), bits(value)), name
