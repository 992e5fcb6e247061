"""Matrix products on the GPU: right within float32's sums, and a row's bits are the row's alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sass import disassembled, overwritten
from torch import Tensor

from phalanx.kernels.matrix import Fp8Matrix, Matrix
from phalanx.kernels.reference import quant
from phalanx.kernels.reference.rows import round_bf16
from phalanx.kernels.triton import linear as ops
from phalanx.kernels.triton import linear_kernels

BOUND = 4e-6  # of the sum of the products' magnitudes
TOLERANCE = 2**-8  # and what rounding to bf16 adds, of the value


def values(*shape: int, device: torch.device) -> Tensor:
    """bf16 values of many magnitudes, signs mixed, as float32."""
    x = torch.randn(shape, device=device) * torch.randn(shape, device=device).exp2()
    return round_bf16(x)


def fp8(rows: int, columns: int, device: torch.device) -> Fp8Matrix:
    spread = torch.randint(-4, 3, (rows, columns), device=device).float().exp2()
    return Fp8Matrix(*quant.quant_fp8_block(torch.randn(rows, columns, device=device) * spread))


def dense(weight: Matrix) -> Tensor:
    return weight.dequantize() if isinstance(weight, Fp8Matrix) else weight


def check(result: Tensor, x: Tensor, weight: Tensor, *, rounded: bool = False) -> None:
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.t(), x.abs() @ weight.abs().t()
    error = (result.double() - exact).abs()
    allowed = BOUND * size + (TOLERANCE * exact.abs() if rounded else 0)
    assert bool((error <= allowed).all()), float((error / size).max())


def weights(kind: str, rows: int, columns: int, device: torch.device) -> Matrix:
    if kind == "fp8":
        return fp8(rows, columns, device)
    if kind == "float":
        return torch.randn(rows, columns, device=device)
    return values(rows, columns, device=device).bfloat16()


KINDS = ("fp8", "bf16", "float")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 64), (24, 32), (40, 160), (72, 384)])
def test_matmul_rows(device: torch.device, kind: str, shape: tuple[int, int]) -> None:
    weight = weights(kind, *shape, device)
    x = values(5, shape[1], device=device)
    result = ops.matmul_rows(x, weight)
    check(result, x, dense(weight))
    assert result.dtype == torch.float32
    assert torch.equal(ops.matmul_rows(x.bfloat16(), weight), result)
    assert torch.equal(ops.matmul_rows(x, weight, rounded=True), round_bf16(result))
    half = ops.matmul_rows(x, weight, out_dtype=torch.bfloat16)
    assert torch.equal(half, result.bfloat16())


def test_every_code_dequantizes_exactly(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 1, 32).repeat(1, 32, 6).view(256, -1)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    scales = torch.tensor([0, 1, 20, 120, 127, 134], dtype=torch.uint8).repeat(8, 1)
    weight = Fp8Matrix(codes.view(quant.E4M3), scales)
    expected = weight.dequantize().bfloat16()
    kept = expected.abs() >= 2.0**-126  # a GPU keeps the subnormals too
    result = ops.dequantize(weight.to(device)).cpu()
    assert torch.equal(result[kept], expected[kept])
    assert bool((result[~kept].abs() < 2.0**-125).all())


def test_linear(device: torch.device) -> None:
    weight = fp8(70, 96, device)
    x = values(5, 96, device=device)
    result = ops.linear(x, weight)
    check(result, quant.q8_roundtrip(x), weight.dequantize(), rounded=True)
    assert torch.equal(ops.linear(x, weight, out_dtype=torch.bfloat16).float(), result)
    assert torch.equal(ops.linear(x, weight, settings={"many": 1}), result)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_tiles_change_no_bit(device: torch.device, kind: str) -> None:
    weight, x = weights(kind, 72, 256, device), values(70, 256, device=device)
    expected = ops.matmul_rows(x, weight, settings={"many": 1})
    check(expected, x, dense(weight))
    for tiles in ({}, {"BLOCK_R": 16}, {"BLOCK_N": 64}, {"BLOCK_K": 128}, {"BLOCK_K": 32}):
        settings = {"many": 0, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2, **tiles}
        result = ops.matmul_rows(x, weight, settings=settings)
        assert torch.equal(ops.matmul_rows(x.bfloat16(), weight, settings=settings), result)
        if device.type == "cuda" or settings["BLOCK_K"] == 64:
            assert torch.equal(result, expected), tiles
        else:  # the interpreter rounds once a tile
            check(result, x, dense(weight))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("few", [0, 256])
def test_grouped_linear(
    device: torch.device, kind: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_FEW", few)
    num_rows, groups, rows, depth = 3, 2, 32, 64
    weight = weights(kind, groups * rows, depth, device)
    x = values(num_rows, groups, depth, device=device)
    shaped = weight if isinstance(weight, Fp8Matrix) else weight.view(groups, rows, depth)
    result = ops.grouped_linear(x, shaped)
    assert result.shape == (num_rows, groups * rows)
    for group in range(groups):
        part = slice(group * rows, (group + 1) * rows)
        alone = ops.matmul_rows(x[:, group], cut(weight, part), rounded=True)
        assert torch.equal(result[:, part], alone)
        check(alone, x[:, group], dense(weight)[part], rounded=True)


def cut(weight: Matrix, part: slice) -> Matrix:
    return weight.rows(part.start, part.stop) if isinstance(weight, Fp8Matrix) else weight[part]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_is_alone(
    device: torch.device, kind: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_splits", lambda *_: splits)
    monkeypatch.setattr(ops, "_MIN_SIZE", 0)
    monkeypatch.setattr(ops, "_FEW", 48)  # the smallest sizes on one path, the others on the other
    same_bits(device, kind, (24 if kind == "float" else 40, 96), (1, 7, 33, 70))


def same_bits(
    device: torch.device, kind: str, shape: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    """Every prefix and reversed suffix gives each row the bits that it has in the whole batch."""
    weight = weights(kind, *shape, device)
    x = values(max(sizes), shape[1], device=device).bfloat16()
    whole = ops.matmul_rows(x, weight)
    check(whole, x, dense(weight))
    for size in sizes:
        assert torch.equal(ops.matmul_rows(x[:size], weight), whole[:size]), size
        assert torch.equal(ops.matmul_rows(x[-size:].flip(0), weight).flip(0), whole[-size:]), size


def test_another_order_of_k_gives_other_bits(device: torch.device) -> None:
    """The control: the comparison above would see a sum in another order."""
    weight, x = weights("bf16", 64, 512, device), values(16, 512, device=device)
    assert isinstance(weight, Tensor)
    order = torch.arange(512, device=device).view(4, 128).flip(0).flatten()
    other = ops.matmul_rows(x[:, order], weight[:, order].contiguous())
    assert not torch.equal(other, ops.matmul_rows(x, weight))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, for the NaN
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_between_rows(device: torch.device, kind: str) -> None:
    weight = weights(kind, 33, 64, device)
    x = values(4, 64, device=device)
    clean = ops.matmul_rows(x, weight)
    x[1], x[2] = float("nan"), float("inf")
    spoilt = ops.matmul_rows(x, weight)
    assert torch.equal(spoilt[[0, 3]], clean[[0, 3]])
    assert not bool(spoilt[1:3].isfinite().any())


def test_no_rows(device: torch.device) -> None:
    weight, x = fp8(33, 64, device), torch.ones(0, 64, device=device)
    assert ops.linear(x, weight).shape == (0, 33)
    assert ops.matmul_rows(x[:0], weight).shape == (0, 33)


def test_splits_follow_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "config", lambda _, __, default: default)  # nothing was tuned
    full = {(1792, 5120): 10, (32768, 1280): 1, (5120, 8192): 4, (5120, 2304): 3}
    assert {shape: ops.num_splits(*shape) for shape in full} == full
    assert ops.num_splits(1024, 4096, groups=8) == 2
    assert ops.num_splits(384, 5120, fp8=False) == 20
    assert ops.num_splits(128, 512, fp8=False) == 1


FULL = (
    ("fp8", 1792, 5120),
    ("fp8", 4608, 5120),
    ("fp8", 4096, 1280),
    ("fp8", 32768, 1280),
    ("fp8", 5120, 8192),
    ("fp8", 5120, 2304),
    ("fp8", 5120, 15360),
    ("bf16", 384, 5120),
    ("bf16", 32, 5120),
    ("bf16", 128, 512),
    ("bf16", 129280, 5120),
    ("float", 24, 20480),
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "rows", "depth"), FULL)
def test_a_row_is_alone_at_full_size(
    device: torch.device, kind: str, rows: int, depth: int
) -> None:
    same_bits(device, kind, (rows, depth), (1, 7, 16, 33, 64, 100, 200, 256, 300, 385, 512, 600))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [16, 64, 256, 512])
def test_a_product_is_the_same_each_time(device: torch.device, num_rows: int) -> None:
    """Registers overwritten while the tensor cores read them were seen in one run of five."""
    weight = fp8(4096, 1280, device)
    x = values(num_rows, 1280, device=device).bfloat16()
    expected = ops.matmul_rows(x, weight, settings={"many": 1})
    for _ in range(50):
        assert torch.equal(ops.matmul_rows(x, weight, settings={"many": 0}), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_row_of_groups_is_alone_at_full_size(device: torch.device, kind: str) -> None:
    groups, rows, depth = 8, 1024, 4096
    weight = weights(kind, groups * rows, depth, device)
    shaped = weight if isinstance(weight, Fp8Matrix) else weight.view(groups, rows, depth)
    x = values(600, groups, depth, device=device)
    whole = ops.grouped_linear(x, shaped)
    check(whole[:, :rows], x[:, 0], dense(weight)[:rows], rounded=True)
    for size in (1, 16, 64, 200, 300, 512):
        assert torch.equal(ops.grouped_linear(x[:size], shaped), whole[:size]), size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_register_is_written_that_a_product_still_reads(device: torch.device) -> None:
    """The comparisons above see that in some runs alone."""
    for rows, depth in ((5120, 2304), (4608, 5120), (5120, 8192)):
        weight = fp8(rows, depth, device)
        for num_rows in (1, 20, 40, 100):
            x = values(num_rows, depth, device=device)
            ops.linear(x, weight)
            ops.matmul_rows(x.bfloat16(), weight)
    kernels = linear_kernels.few_rows.device_caches[torch.cuda.current_device()][0].values()
    with ThreadPoolExecutor(8) as threads:
        code = list(threads.map(disassembled, [kernel.asm["cubin"] for kernel in kernels]))
    assert any("HGMMA" in sass for sass in code) or torch.cuda.get_device_capability() != (9, 0)
    assert not any(overwritten(sass) for sass in code)


LOOP = """
/*0000*/ MOV R8, R1 ;
/*0010*/ WARPGROUP.ARRIVE ;
/*0020*/ HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;
/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
/*0040*/ @P0 BRA 0x0 ;
/*0050*/ EXIT ;
"""


def test_a_register_that_is_written_too_early_is_found() -> None:
    assert overwritten(LOOP) == [(LOOP.splitlines()[3].split("*/ ")[1], "MOV R8, R1 ;")]
    assert not overwritten(LOOP.replace("gsb0, 0x1", "gsb0, 0x0"))
    assert not overwritten(LOOP.replace("MOV R8", "MOV R7"))
