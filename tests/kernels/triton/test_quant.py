"""Formats and cache records: the reference's bits, for every bf16 value and for hard float32 ones."""

from collections.abc import Callable

import pytest
import torch
from hard_values import hard_rows, patterns
from torch import Tensor

from phalanx.kernels.reference import quant as reference
from phalanx.kernels.triton import quant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

Turn = Callable[[Tensor], Tensor]
NAMES = ("window", "compressed", "index_key")
FORMATS: list[tuple[Turn, Turn, Turn]] = [
    (
        getattr(reference, f"encode_{n}"),
        getattr(quant, f"decode_{n}"),
        getattr(reference, f"decode_{n}"),
    )
    for n in NAMES
]
formats = pytest.mark.parametrize("encode,decode,decode_ref", FORMATS, ids=NAMES)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: the sign of zero counts."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@formats
def test_records_decode_as_in_the_reference(
    device: torch.device, encode: Turn, decode: Turn, decode_ref: Turn
) -> None:
    for x in (patterns(device, 128), hard_rows(128)):
        record = encode(x)
        assert same(decode(record.to(device)), decode_ref(record))


@formats
def test_any_bytes_decode_as_in_the_reference(
    device: torch.device, encode: Turn, decode: Turn, decode_ref: Turn
) -> None:
    width = encode(torch.zeros(1, 64)).shape[1]
    record = torch.randint(0, 256, (40, width), generator=torch.Generator().manual_seed(3))
    record = record.to(torch.uint8)
    got, expected = decode(record.to(device)).cpu(), decode_ref(record)
    assert torch.equal(got.isnan(), expected.isnan())
    assert same(got.nan_to_num(), expected.nan_to_num())


@formats
def test_a_vector_is_its_record_alone(
    device: torch.device, encode: Turn, decode: Turn, decode_ref: Turn
) -> None:
    record = encode(torch.randn(9, 64, generator=torch.Generator().manual_seed(4))).to(device)
    record[3] = 0xFF
    whole = decode(record)
    order = torch.tensor([7, 0, 8, 2, 2], device=device)
    assert torch.equal(decode(record[order]), whole[order])
    assert torch.equal(decode(record[5:6]), whole[5:6])
    assert decode(record[:0]).shape == (0, 64)
    wide = torch.cat((record, record), dim=1)[:, : record.shape[1]]  # strided rows
    assert same(decode(wide), whole.cpu())
    assert same(decode(record.view(3, 3, -1)).flatten(0, 1), whole.cpu())


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
