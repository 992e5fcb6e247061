"""Formats and cache records: the reference's bits, for every bf16 value and for hard float32 ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference import quant as reference
from phalanx.kernels.triton import quant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

Encode = Callable[[Tensor], Tensor]
NAMES = ("window", "compressed", "index_key")
FORMATS: list[tuple[Encode, Encode, Encode, Encode]] = [
    tuple(getattr(m, f"{way}_{n}") for way in ("encode", "decode") for m in (quant, reference))  # type: ignore[misc]
    for n in NAMES
]
formats = pytest.mark.parametrize("encode,encode_ref,decode,decode_ref", FORMATS, ids=NAMES)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: the sign of zero counts."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def patterns(device: torch.device, width: int) -> Tensor:
    """Finite bf16 values, in order and shuffled: all of them on a GPU, a sample in the interpreter."""
    x = torch.arange(0, 1 << 16, 1 if device.type == "cuda" else 61, dtype=torch.int32)
    x = x.to(torch.uint16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    x = torch.cat((x.sort().values, shuffled))
    return x[: len(x) // width * width].view(-1, width)


def hard_rows(width: int) -> Tensor:
    """Zeros of both signs, ties of every scale, denormals, huge values, float32 beyond bf16."""
    g = torch.Generator().manual_seed(2)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    e4m3_ties = (torch.arange(width) % 16 + 16.5) * 16
    return torch.stack(
        [
            torch.zeros(width),
            -torch.zeros(width),
            ties,
            -ties * 3 * 2.0**-9,
            ties * 2.0**-60,
            e4m3_ties,
            -e4m3_ties * 2.0**-30,
            torch.full((width,), 1e-45),
            torch.full((width,), 3e38),
            torch.full((width,), 448.0 * (1 + 2.0**-23)),
            torch.randn(width, generator=g) * 1e-4,
            torch.randn(width, generator=g) * 1e30,
            torch.randn(width, generator=g) * torch.logspace(-20, 10, width),
            torch.full((width,), float("inf")),
        ]
    )


@formats
def test_records_are_the_references_bytes(
    device: torch.device, encode: Encode, encode_ref: Encode, decode: Encode, decode_ref: Encode
) -> None:
    for x in (patterns(device, 128), hard_rows(128)):
        record = encode_ref(x)
        assert same(encode(x.to(device)), record)
        assert same(decode(record.to(device)), decode_ref(record))


@formats
def test_any_bytes_decode_as_in_the_reference(
    device: torch.device, encode: Encode, encode_ref: Encode, decode: Encode, decode_ref: Encode
) -> None:
    width = encode_ref(torch.zeros(1, 64)).shape[1]
    record = torch.randint(0, 256, (40, width), generator=torch.Generator().manual_seed(3))
    record = record.to(torch.uint8)
    got, expected = decode(record.to(device)).cpu(), decode_ref(record)
    assert torch.equal(got.isnan(), expected.isnan())
    assert same(got.nan_to_num(), expected.nan_to_num())


@formats
def test_a_record_is_its_rows_alone(
    device: torch.device, encode: Encode, encode_ref: Encode, decode: Encode, decode_ref: Encode
) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(4)).to(device)
    x[3], x[4] = float("nan"), float("inf")
    whole = encode(x)
    order = torch.tensor([7, 0, 8, 2, 2], device=device)
    assert torch.equal(encode(x[order]), whole[order])
    assert torch.equal(encode(x[5:6]), whole[5:6])
    assert encode(x[:0]).shape == (0, whole.shape[1])
    wide = torch.cat((x, x), dim=1)[:, :64]  # strided rows
    assert torch.equal(encode(wide), whole)
    assert torch.equal(decode(whole.view(3, 3, -1)).flatten(0, 1)[:3], decode(whole)[:3])


@pytest.mark.parametrize("name", ["q8_roundtrip", "qf4_idx_roundtrip"])
def test_roundtrips_are_the_references(device: torch.device, name: str) -> None:
    run, expect = getattr(quant, name), getattr(reference, name)
    for x in (patterns(device, 96), hard_rows(96)):
        expected = expect(x)
        for out_dtype in (torch.float32, torch.bfloat16):
            assert same(run(x.to(device), out_dtype=out_dtype), expected.to(out_dtype))
        assert same(run(x.to(device).bfloat16()), expect(x.bfloat16()))


def test_widths_that_hold_no_whole_groups_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quant.q8_roundtrip(torch.zeros(2, 33, device=device))
