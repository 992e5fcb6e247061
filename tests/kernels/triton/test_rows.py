"""Norm, rotation and activation: the reference's values, and each row by itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference import rope
from phalanx.kernels.reference import rows as reference
from phalanx.kernels.reference import swiglu as swiglu_reference
from phalanx.kernels.triton import rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

EPS = 1e-20


def random(*shape: int, seed: int = 0) -> Tensor:
    """bf16 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def assert_rounded_alike(got: Tensor, expected: Tensor) -> None:
    """At most one bf16 step apart, and nearly always equal."""
    got, expected = got.float().cpu(), expected.float()
    apart = got != expected
    assert apart.float().mean() < 1e-2
    assert ((got - expected).abs() <= expected.abs() * 2.0**-7)[apart].all()


def assert_rows_stand_alone(run: Callable[[Tensor], Tensor], num_rows: int) -> None:
    """`run` takes row numbers; each row's bits are the same in any company."""
    whole = run(torch.arange(num_rows))
    for some in ([num_rows - 1], [0], [2, 1, 2, 0], list(range(1, num_rows))):
        assert torch.equal(run(torch.tensor(some)), whole[some])


@pytest.mark.parametrize("dim", [32, 96, 1280])
def test_norm(device: torch.device, dim: int) -> None:
    x, weight = random(6, dim) * 3, random(dim, seed=1)
    x[1] = 0
    x[2] *= 2.0**-40
    w = weight.to(device)
    for dtype in (torch.float32, torch.bfloat16):
        y = rows.rms_norm(x.to(device, dtype), w, EPS, out_dtype=dtype)
        assert y.dtype == dtype
        assert_rounded_alike(y, reference.rms_norm(x.to(dtype).float(), weight, EPS))
        quantized = rows.rms_norm_q8(x.to(device, dtype), w, EPS, out_dtype=dtype)
        assert torch.equal(quantized, rows.q8_roundtrip(y, out_dtype=dtype))
    assert_rows_stand_alone(lambda some: rows.rms_norm(x[some].to(device), w, EPS), 6)
    both = torch.cat((x, x), dim=1).to(device)  # strided rows, and rows that are not aligned
    for part in (both[:, dim:], both[:, 1:]):
        assert torch.equal(
            rows.rms_norm(part, w if part.shape[1] == dim else w.new_ones(part.shape[1]), EPS),
            rows.rms_norm(
                part.contiguous(), w if part.shape[1] == dim else w.new_ones(part.shape[1]), EPS
            ),
        )


def test_norm_of_garbage_stays_in_its_row(device: torch.device) -> None:
    x, weight = random(4, 64).to(device), torch.ones(64, device=device)
    clean = rows.rms_norm(x, weight, EPS)
    x[1], x[2, 5] = float("nan"), float("inf")
    y = rows.rms_norm(x, weight, EPS)
    assert torch.equal(y[[0, 3]], clean[[0, 3]]) and y[1].isnan().all()
    assert rows.rms_norm(x[:0], weight, EPS).shape == (0, 64)


@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64), (5, 20, 96)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_is_the_references(
    device: torch.device, shape: tuple[int, ...], inverse: bool
) -> None:
    table = rope.rope_table(rope.frequencies(32, 10000.0), 60)
    positions = torch.tensor([0, 59, 7, 7, 31])
    x = random(*shape)
    x[2] *= 2.0**99
    at = table.at(positions)
    expected = rope.rotate(x.clone(), at.inverse() if inverse else at)
    on_device = rope.RopeTable(at.cos.to(device), at.sin.to(device))
    assert torch.equal(
        rows.rotate(x.clone().to(device), on_device, inverse=inverse).cpu(), expected
    )
    whole = rope.RopeTable(table.cos.to(device), table.sin.to(device))
    for dtype in (torch.float32, torch.bfloat16):
        got = x.clone().to(device, dtype)
        given = rows.rotate(got, whole, positions=positions.to(device), inverse=inverse)
        assert given is got
        assert torch.equal(got.float().cpu(), expected)


def test_rotation_writes_only_the_last_channels_of_its_rows(device: torch.device) -> None:
    table = rope.rope_table(rope.frequencies(32, 10000.0), 4)
    table = rope.RopeTable(table.cos.to(device), table.sin.to(device))
    buffer = random(6, 3, 96).to(device)
    before = buffer.clone()
    rows.rotate(buffer[1:5, :2, :80], table)
    assert torch.equal(buffer[[0, 5]], before[[0, 5]]) and torch.equal(buffer[:, 2], before[:, 2])
    assert torch.equal(buffer[..., :48], before[..., :48])
    assert torch.equal(buffer[..., 80:], before[..., 80:])
    assert not torch.equal(buffer[1:5, :2, 48:80], before[1:5, :2, 48:80])
    rows.rotate(buffer[:0], rope.RopeTable(table.cos[:0], table.sin[:0]))


@pytest.mark.parametrize("limit", [10.0, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_activation(device: torch.device, limit: float, weighted: bool) -> None:
    both = random(7, 2 * 96) * 4
    both[0, 0], both[0, 1], both[0, 96 + 5] = -100.0, 40.0, -1e30
    weights = torch.rand(7, generator=torch.Generator().manual_seed(1)) if weighted else None
    gate, up = both.chunk(2, dim=-1)
    expected = swiglu_reference.swiglu(gate, up, limit, weights)

    def run(some: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        gate, up = both[some].to(device, dtype).chunk(2, dim=-1)
        w = None if weights is None else weights[some].to(device)
        y = rows.swiglu(gate, up, limit, w, out_dtype=dtype)
        quantized = rows.swiglu_q8(gate, up, limit, w, out_dtype=dtype)
        assert torch.equal(quantized, rows.q8_roundtrip(y, out_dtype=dtype))
        return y

    everyone = torch.arange(7)
    assert_rounded_alike(run(everyone), expected)
    assert torch.equal(run(everyone, torch.bfloat16).float(), run(everyone))
    assert_rows_stand_alone(run, 7)
    assert run(everyone[:0]).shape == (0, 96)


def test_activation_of_garbage_stays_in_its_row(device: torch.device) -> None:
    gate, up = random(3, 32).to(device), random(3, 32, seed=1).to(device)
    clean = rows.swiglu_q8(gate, up, 10.0)
    gate[1], up[1] = float("nan"), float("inf")
    assert torch.equal(rows.swiglu_q8(gate, up, 10.0)[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_results_add_up_in_order(device: torch.device, dtype: torch.dtype) -> None:
    shared, routed = random(5, 96), random(5, 3, 96, seed=1)
    total = shared.clone()
    for pick in range(3):
        total += routed[:, pick]
    got = rows.add_picks(shared.to(device, dtype), routed.to(device, dtype), out_dtype=dtype)
    assert torch.equal(got.cpu(), total.bfloat16().to(dtype))
    assert rows.add_picks(shared[:0].to(device), routed[:0].to(device)).shape == (0, 96)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for dim in (128, 512, 1280, 5120):
        x, weight = random(300, dim), random(dim, seed=1).to(device)
        y = rows.rms_norm(x.to(device), weight, EPS)
        assert_rounded_alike(y, reference.rms_norm(x, weight.cpu(), EPS))
        assert torch.equal(rows.rms_norm_q8(x.to(device), weight, EPS), rows.q8_roundtrip(y))

        def run(some: Tensor, x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return rows.rms_norm(x[some].to(device), weight, EPS)

        assert_rows_stand_alone(run, 300)
    # A control: bits do show the order of summation (before the rounding hides most of it).
    x = torch.randn(4000, 5120, device=device)
    weight = torch.ones(5120, device=device)
    y = rows.rms_norm(x, weight, EPS)
    monkeypatch.setattr(rows, "row_warps", lambda dim: 2)
    assert not torch.equal(rows.rms_norm(x, weight, EPS), y)
    gate, up = (random(4096, 2304, seed=s) * 4 for s in (1, 2))
    got = rows.swiglu(gate.to(device), up.to(device), 10.0)
    assert_rounded_alike(got, swiglu_reference.swiglu(gate, up, 10.0))
    q = random(64, 64, 512)
    table = rope.rope_table(rope.frequencies(64, 160000.0), 5000)
    positions = torch.randint(0, 5000, (64,), generator=torch.Generator().manual_seed(1))
    expected = rope.rotate(q.clone(), table.at(positions))
    whole = rope.RopeTable(table.cos.to(device), table.sin.to(device))
    got = rows.rotate(q.to(device).bfloat16(), whole, positions=positions.to(device))
    assert torch.equal(got.float().cpu(), expected)
