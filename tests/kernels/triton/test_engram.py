"""Engram and the compressor: hashes and rows to the bit, gates and pairs within their bounds."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference import compressor as compressor_reference
from phalanx.kernels.reference import engram as reference
from phalanx.kernels.reference.quant import dequant_engram_rows, q8_roundtrip, quant_engram
from phalanx.kernels.triton import compressor, engram

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

EPS = 1e-20


def random(*shape: int, seed: int = 0) -> Tensor:
    """bf16 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def test_hashes_are_the_references_even_where_products_wrap(device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    for largest in (99092, 1 << 62):
        units = torch.randint(-largest if largest > 1 << 60 else 0, largest, (37, 4), generator=g)
        multipliers = torch.randint(0, 1 << 62, (4,), generator=g) * 2 + 1
        primes = torch.randint(3, 16_000_889, (3, 8), generator=g)
        offsets = torch.randint(0, 1 << 40, (24,), generator=g)
        args = (multipliers, primes, offsets)
        expected = reference.hash_rows(units, *args)
        there = [t.to(device) for t in args]
        assert torch.equal(engram.hash_rows(units.to(device), *there).cpu(), expected)
        strided = torch.cat((units, units), dim=1).to(device)[5:9, :4]
        assert torch.equal(engram.hash_rows(strided, *there).cpu(), expected[5:9])
    assert engram.hash_rows(units[:0].to(device), *there).shape == (0, 24)


def host(x: Tensor) -> Tensor:
    """Host memory that the GPU reads, if there is one."""
    return x.pin_memory() if torch.cuda.is_available() else x


@pytest.mark.parametrize("dim", [32, 256])
def test_rows_come_from_host_memory_as_the_reference_reads_them(
    device: torch.device, dim: int
) -> None:
    g = torch.Generator().manual_seed(1)
    codes, scales = quant_engram(torch.randn(50, dim, generator=g) * 0.02)
    # The ends of the range; the interpreter has no denormal bf16.
    scales[3], scales[4] = (0, 254) if device.type == "cuda" else (20, 240)
    ids = torch.randint(0, 50, (4, 3), generator=g)
    ids[0, 0], ids[0, 1] = 3, 4
    expected = dequant_engram_rows(codes[ids], scales[ids])
    there = (host(codes.view(torch.uint8)), host(scales), ids.to(device))
    assert torch.equal(engram.gather(*there).cpu(), expected)
    ids = ids[1:]
    quantized = q8_roundtrip(dequant_engram_rows(codes[ids], scales[ids])).bfloat16()
    got = engram.gather(there[0], there[1], ids.to(device), q8=True)
    assert torch.equal(got.cpu(), quantized)
    out = torch.empty((3, 3, dim), dtype=torch.bfloat16, device=device)
    engram.gather_on_host(codes, scales, ids, out)
    assert torch.equal(out.cpu(), dequant_engram_rows(codes[ids], scales[ids]))


def test_an_id_outside_the_table_reads_nothing(device: torch.device) -> None:
    codes, scales = quant_engram(random(8, 64))
    ids = torch.tensor([-1, 3, 8, 1 << 50]).to(device)
    got = engram.gather(host(codes.view(torch.uint8)), host(scales), ids).cpu()
    assert torch.equal(got[1], dequant_engram_rows(codes[3], scales[3]))
    assert (got[[0, 2, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_the_stream(device: torch.device, dtype: torch.dtype) -> None:
    h, kv, weight = random(5, 4, 96), random(5, 5, 96, seed=1), random(4, 96, seed=2)
    h[1], kv[2, 0] = 0, 0
    key, value = kv[:, :-1], kv[:, -1]
    expected = reference.gate(h, key, weight, EPS)
    there = kv.to(device, dtype)
    hd, keyd, valued, weightd = h.to(device, dtype), there[:, :-1], there[:, -1], weight.to(device)
    stream, gates = engram.gate_add_value(hd, keyd, valued, weightd, EPS)
    assert torch.allclose(gates.cpu(), expected, atol=2.0**-12, rtol=0)
    assert torch.equal(stream.float().cpu(), reference.add_value(h, gates.cpu(), value))
    for some in ([4], [3, 0]):
        alone = engram.gate_add_value(hd[some], keyd[some], valued[some], weightd, EPS)
        assert torch.equal(alone[0], stream[some]) and torch.equal(alone[1], gates[some])
    nothing = engram.gate_add_value(hd[:0], keyd[:0], valued[:0], weightd, EPS)
    assert nothing[1].shape == (0, 4)


@pytest.mark.parametrize("dim", [32, 96])
def test_pairs_are_pooled_channel_by_channel(device: torch.device, dim: int) -> None:
    both = torch.randn(6, 2, 2, dim, generator=torch.Generator().manual_seed(3)) * 3
    both[1, :, 1] = 0.0
    both[2, 0, 1] = -1e30
    kv, scores = both[:, :, 0], both[:, :, 1]
    expected = compressor_reference.pool_pairs(kv, scores)
    there = both.to(device)
    got = compressor.pool_pairs(there[:, :, 0], there[:, :, 1])
    close = (got.cpu() - expected).abs() <= kv.abs().amax(dim=1) * 2.0**-8
    assert close.all() and (got.cpu() != expected).float().mean() < 0.01
    alone = compressor.pool_pairs(there[4:5, :, 0], there[4:5, :, 1], out_dtype=torch.bfloat16)
    assert torch.equal(alone.float(), got[4:5])
    assert compressor.pool_pairs(there[:0, :, 0], there[:0, :, 1]).shape == (0, dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_gates(device: torch.device) -> None:
    h, kv, weight = random(200, 4, 5120), random(200, 5, 5120, seed=1), random(4, 5120, seed=2)
    key, value = kv[:, :-1], kv[:, -1]
    there = kv.to(device)
    stream, gates = engram.gate_add_value(
        h.to(device), there[:, :-1], there[:, -1], weight.to(device), EPS
    )
    assert torch.allclose(gates.cpu(), reference.gate(h, key, weight, EPS), atol=2.0**-12, rtol=0)
    assert torch.equal(stream.cpu(), reference.add_value(h, gates.cpu(), value))
    one = engram.gate_add_value(
        h[199:].to(device), there[199:, :-1], there[199:, -1], weight.to(device), EPS
    )
    assert torch.equal(one[0][0], stream[199]) and torch.equal(one[1][0], gates[199])
