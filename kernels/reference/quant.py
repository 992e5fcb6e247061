"""Number formats of the model, exact to the bit: FP8 and FP4 activations, cache records, weights.

Every function works element by element or within one group of a row, so that a row's result never
depends on the rows beside it. Non-finite input never raises; what it becomes is unspecified.

Formats follow model.md sections B, C.0 and E:

* e4m3: ``float8_e4m3fn``, largest 448, smallest 2^-9.
* e2m1: a sign bit and one of {0, .5, 1, 1.5, 2, 3, 4, 6}; two codes a byte, even column in the low nibble.
* ue8m0: one byte b that stands for 2^(b - 127).
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
GROUP: Final = 32  # values per ue8m0 scale
KV_GROUP: Final = 16  # values per e4m3 scale of a compressed entry

_Q8_FLOOR: Final = 1e-4  # smallest group maximum of Q8
_IDX_FLOOR: Final = 6.0 * 2.0**-126  # smallest group maximum of QF4_idx
_KV_FLOOR: Final = (
    6.0 * 2.0**-9
)  # smallest group maximum of QF4_kv: its scale is then e4m3's smallest
_LARGEST: Final = 2.0**127  # keeps an infinite maximum from turning the scale into NaN
# Operands as tensors: with Python numbers torch takes twice as long for small tensors.
_MANTISSA: Final = torch.tensor(0x7FFFFF, dtype=torch.int32)
_NOT_MANTISSA: Final = torch.tensor(~0x7FFFFF, dtype=torch.int32)
_PER_E4M3_MAX: Final = torch.tensor(1.0 / E4M3_MAX)
_PER_E2M1_MAX: Final = torch.tensor(1.0 / E2M1_MAX)

_E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1: Final = torch.tensor(_E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES))
_E2M1_PAIRS: Final = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), dim=1)
_E4M3: Final = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float32)
_TABLE_FROM: Final = 2048  # codes from which a table is faster than torch's conversion
_DEQUANT_ROWS: Final = 2 * GROUP  # rows of a weight at a time: what is between stays in the cache

# Halfway points where the even neighbour is the lower code (strict: the tie stays below) or the upper.
_TIES_DOWN: Final = tuple(torch.tensor(tie) for tie in (0.25, 1.25, 2.5, 5.0))
_TIES_UP: Final = tuple(torch.tensor(tie) for tie in (0.75, 1.75, 3.5))


def pow2ceil(v: Tensor) -> Tensor:
    """The smallest power of two that is >= v. float32, v > 0 and at most 2^127 -> float32."""
    # A non-zero mantissa carries into the exponent field; the mask then drops the mantissa.
    bits = v.contiguous().view(torch.int32)
    return bits.add(_MANTISSA).bitwise_and_(_NOT_MANTISSA).view(torch.float32)


def ue8m0_encode(scale: Tensor) -> Tensor:
    """Powers of two (float32, normal) -> ue8m0 bytes (uint8), same shape."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_decode(code: Tensor) -> Tensor:
    """ue8m0 bytes (uint8 or float8_e8m0fnu) -> float32, same shape. Byte 255 is NaN."""
    return code.view(torch.float8_e8m0fnu).to(torch.float32)


def e4m3_decode(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, same shape."""
    if codes.numel() < _TABLE_FROM or codes.device.type != "cpu":
        return codes.to(torch.float32)
    index = codes.contiguous().view(torch.uint8).to(torch.int32).flatten()
    return _E4M3.index_select(0, index).view(codes.shape)


def _grouped(x: Tensor, group: int) -> Tensor:
    """[..., K] -> float32 [..., K/group, group]."""
    width = x.shape[-1]
    if width % group:
        raise ValueError(f"the last dimension is {width}; it must be a multiple of {group}")
    return x.to(torch.float32).reshape(*x.shape[:-1], width // group, group)


def _amax(groups: Tensor, floor: float) -> Tensor:
    """[..., G, n] -> the largest magnitude of each group, at least `floor`, [..., G, 1]."""
    return groups.abs().amax(dim=-1, keepdim=True).clamp_(floor, _LARGEST)


# --- Q8: activations and window entries -----------------------------------------------------------


def _q8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = _grouped(x, GROUP)
    scale = pow2ceil(_amax(groups, _Q8_FLOOR).mul_(_PER_E4M3_MAX))
    return (groups / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to FP8 with one power-of-two scale per 32 values (model.md C.0, "Q8").

    Args:
        x: bf16 or float32 [..., K], K a multiple of 32.

    Returns:
        Codes float8_e4m3fn [..., K] and scales ue8m0 uint8 [..., K/32].
    """
    codes, scale = _q8_groups(x)
    return codes.flatten(-2), ue8m0_encode(scale.squeeze(-1))


def q8_dequant(codes: Tensor, scales: Tensor) -> Tensor:
    """float8_e4m3fn [..., K] and ue8m0 uint8 [..., K/32] -> float32 [..., K]."""
    groups = _grouped(e4m3_decode(codes), GROUP)
    return groups.mul_(ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def q8_roundtrip(x: Tensor) -> Tensor:
    """What is left of x after Q8: bf16 or float32 [..., K] -> float32 [..., K]."""
    codes, scale = _q8_groups(x)
    return e4m3_decode(codes).mul_(scale).flatten(-2)


# --- e2m1 ---------------------------------------------------------------------------------------


def e2m1_encode(x: Tensor) -> Tensor:
    """Round to e2m1, ties to the even code, saturating at 6. float32 -> codes uint8 in 0..15.

    The sign of zero is kept (code 8 is -0).
    """
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for tie in _TIES_DOWN:
        code += magnitude > tie
    for tie in _TIES_UP:
        code += magnitude >= tie
    return code


def pack_nibbles(codes: Tensor) -> Tensor:
    """e2m1 codes uint8 [..., K] -> bytes uint8 [..., K/2]; even columns in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Both values of every byte, as one int64: [256]."""
    return _E2M1_PAIRS.to(device).view(torch.int64).flatten()


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes (uint8 or int8) [..., K/2] -> float32 values [..., K]."""
    # Two float32 at a time, as one int64: nine times faster than indexing rows of pairs.
    pairs = _e2m1_pairs(packed.device)
    codes = packed.view(torch.uint8).to(torch.int32).flatten()
    values = pairs.index_select(0, codes).view(torch.float32)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


# --- QF4: index keys and queries, compressed entries ----------------------------------------------


def qf4_idx(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to FP4 with one power-of-two scale per 32 values (model.md C.0, "QF4_idx").

    Args:
        x: bf16 or float32 [..., K], K a multiple of 32.

    Returns:
        Packed codes uint8 [..., K/2] and scales ue8m0 uint8 [..., K/32].
    """
    groups = _grouped(x, GROUP)
    scale = pow2ceil(_amax(groups, _IDX_FLOOR).mul_(_PER_E2M1_MAX))
    packed = pack_nibbles(e2m1_encode((groups / scale).flatten(-2)))
    return packed, ue8m0_encode(scale.squeeze(-1))


def qf4_idx_dequant(packed: Tensor, scales: Tensor) -> Tensor:
    """Packed uint8 [..., K/2] and ue8m0 uint8 [..., K/32] -> float32 [..., K]."""
    groups = _grouped(unpack_e2m1(packed), GROUP)
    return groups.mul_(ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def qf4_idx_roundtrip(x: Tensor) -> Tensor:
    """What is left of x after QF4_idx: bf16 or float32 [..., K] -> float32 [..., K]."""
    return qf4_idx_dequant(*qf4_idx(x))


def qf4_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to FP4 with one e4m3 scale per 16 values (model.md C.0, "QF4_kv").

    Args:
        x: bf16 or float32 [..., K], K a multiple of 16.

    Returns:
        Packed codes uint8 [..., K/2] and scales float8_e4m3fn as bytes, uint8 [..., K/16].
    """
    groups = _grouped(x, KV_GROUP)
    # Divided by a tensor: CUDA turns division by a Python number into a product with its inverse.
    amax = _amax(groups, _KV_FLOOR)
    scale = (amax / amax.new_full((1,), E2M1_MAX)).clamp(max=E4M3_MAX).to(E4M3)
    packed = pack_nibbles(e2m1_encode((groups / scale.to(torch.float32)).flatten(-2)))
    return packed, scale.squeeze(-1).view(torch.uint8)


def qf4_kv_dequant(packed: Tensor, scales: Tensor) -> Tensor:
    """Packed uint8 [..., K/2] and e4m3 bytes uint8 [..., K/16] -> float32 [..., K]."""
    groups = _grouped(unpack_e2m1(packed), KV_GROUP)
    return groups.mul_(e4m3_decode(scales.view(E4M3)).unsqueeze(-1)).flatten(-2)


def qf4_kv_roundtrip(x: Tensor) -> Tensor:
    """What is left of x after QF4_kv: bf16 or float32 [..., K] -> float32 [..., K]."""
    return qf4_kv_dequant(*qf4_kv(x))


# --- Cache records (model.md E): codes first, then their scales ------------------------------------


def window_bytes(dim: int) -> int:
    """Bytes of a window record: 528 at 512 dimensions."""
    return dim + dim // GROUP


def compressed_bytes(dim: int) -> int:
    """Bytes of a compressed record: 288 at 512 dimensions."""
    return dim // 2 + dim // KV_GROUP


def index_key_bytes(dim: int) -> int:
    """Bytes of an index key record: 68 at 128 dimensions."""
    return dim // 2 + dim // GROUP


def encode_window(x: Tensor) -> Tensor:
    """bf16 or float32 [..., K] -> window records uint8 [..., window_bytes(K)]."""
    codes, scales = q8(x)
    return torch.cat((codes.view(torch.uint8), scales), dim=-1)


def decode_window(record: Tensor) -> Tensor:
    """Window records uint8 [..., window_bytes(K)] -> float32 [..., K]."""
    dim = record.shape[-1] * GROUP // (GROUP + 1)
    return q8_dequant(record[..., :dim].view(E4M3), record[..., dim:])


def encode_compressed(x: Tensor) -> Tensor:
    """bf16 or float32 [..., K] -> compressed records uint8 [..., compressed_bytes(K)]."""
    return torch.cat(qf4_kv(x), dim=-1)


def decode_compressed(record: Tensor) -> Tensor:
    """Compressed records uint8 [..., compressed_bytes(K)] -> float32 [..., K]."""
    half = record.shape[-1] * 8 // 9
    return qf4_kv_dequant(record[..., :half], record[..., half:])


def encode_index_key(x: Tensor) -> Tensor:
    """bf16 or float32 [..., K] -> index key records uint8 [..., index_key_bytes(K)]."""
    return torch.cat(qf4_idx(x), dim=-1)


def decode_index_key(record: Tensor) -> Tensor:
    """Index key records uint8 [..., index_key_bytes(K)] -> float32 [..., K]."""
    half = record.shape[-1] * 16 // 17
    return qf4_idx_dequant(record[..., :half], record[..., half:])


# --- Weights (model.md B) ------------------------------------------------------------------------


def _block_scale(scale: Tensor, rows: int, columns: int) -> Tensor:
    """ue8m0, at least [ceil(rows/32), ceil(columns/32)] -> float32 [rows, columns]."""
    needed = ue8m0_decode(scale[: -(-rows // GROUP)])
    wide = needed.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return wide[:rows, :columns]


def dequant_fp8_block(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 weight e4m3 [o, i] with ue8m0 [ceil(o/32), ceil(i/32)] -> float32 [o, i], exact."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), device=weight.device)
    for start in range(0, rows, _DEQUANT_ROWS):
        part = slice(start, start + _DEQUANT_ROWS)
        codes = weight[part].view(E4M3)
        scales = _block_scale(scale[start // GROUP :], *codes.shape)
        torch.mul(e4m3_decode(codes), scales, out=out[part])
    return out


def dequant_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """FP4 weight int8 [o, i/2] with ue8m0 [o, i/32] -> float32 [o, i], exact."""
    rows, half = weight.shape
    out = torch.empty((rows, 2 * half), device=weight.device)
    for start in range(0, rows, _DEQUANT_ROWS):
        part = slice(start, start + _DEQUANT_ROWS)
        groups = unpack_e2m1(weight[part]).view(-1, 2 * half // GROUP, GROUP)
        scales = ue8m0_decode(scale[part]).unsqueeze(-1)
        torch.mul(groups, scales, out=out[part].view(groups.shape))
    return out


def dequant_engram_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """Engram rows e4m3 [..., dim] with ue8m0 [..., dim/32] -> bf16 [..., dim], exact."""
    return q8_dequant(rows.view(E4M3), scale.view(torch.uint8)).to(torch.bfloat16)


def _weight_scale(amax: Tensor, largest: float) -> Tensor:
    """A power of two s with amax / s <= largest; 1 for a group of zeros."""
    scale = pow2ceil((amax / largest).clamp(min=2.0**-126))
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quant_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [o, i] -> FP8 weight float8_e4m3fn [o, i] and ue8m0 uint8 [ceil(o/32), ceil(i/32)].

    Inverse of `dequant_fp8_block`: values that came from there are found again exactly.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(
        weight.to(torch.float32), (0, -columns % GROUP, 0, -rows % GROUP)
    )
    blocks = padded.reshape(padded.shape[0] // GROUP, GROUP, padded.shape[1] // GROUP, GROUP)
    scale = ue8m0_encode(_weight_scale(blocks.abs().amax(dim=(1, 3)), E4M3_MAX))
    return (weight / _block_scale(scale, rows, columns)).to(E4M3), scale


def quant_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [o, i] -> FP4 weight int8 [o, i/2] and ue8m0 uint8 [o, i/32], inverse of `dequant_fp4`."""
    groups = _grouped(weight, GROUP)
    scale = _weight_scale(groups.abs().amax(dim=-1, keepdim=True), E2M1_MAX)
    packed = pack_nibbles(e2m1_encode((groups / scale).flatten(-2)))
    return packed.view(torch.int8), ue8m0_encode(scale.squeeze(-1))


def quant_engram(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [rows, dim] -> Engram table float8_e4m3fn [rows, dim] and ue8m0 uint8 [rows, dim/32]."""
    groups = _grouped(rows, GROUP)
    scale = _weight_scale(groups.abs().amax(dim=-1, keepdim=True), E4M3_MAX)
    return (groups / scale).to(E4M3).flatten(-2), ue8m0_encode(scale.squeeze(-1))
