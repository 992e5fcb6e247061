"""Hyper-connections: sums over copies to the bit, mixes within a bound, every row by itself."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference import hyper as reference
from phalanx.kernels.reference.hyper import Mix, MixWeights
from phalanx.kernels.reference.quant import q8_roundtrip
from phalanx.kernels.reference.rows import rms_norm
from phalanx.kernels.triton import hyper

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

EPS, HC_EPS, ITERS = 1e-20, 1e-6, 20
NAMES = ("pre", "post", "comb")


def random(*shape: int, seed: int = 0) -> Tensor:
    """bf16 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def weights_of(dim: int) -> MixWeights:
    g = torch.Generator().manual_seed(7)
    fn = torch.randn(24, 4 * dim, generator=g) * dim**-0.5
    base = torch.randn(24, generator=g)
    return MixWeights.from_stored(fn, torch.tensor([0.7, 1.1, 0.9]), base, 4)


def moved(x: Mix | MixWeights, device: torch.device) -> Mix | MixWeights:
    return type(x)(*(getattr(x, name).to(device) for name in x.__dataclass_fields__))  # type: ignore[call-arg]


def mixed(h: Tensor, weights: MixWeights, iters: int = ITERS) -> Mix:
    return hyper.mix(h, weights, iters=iters, hc_eps=HC_EPS, eps=EPS)


def exact(h: Tensor, weights: MixWeights, iters: int = ITERS) -> Mix:
    """The definition in float64."""
    z = h.flatten(1).double()
    m = z @ weights.fn.double().t() * (z.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
    m = m * weights.scale.double() + weights.base.double()
    c = torch.softmax(m[:, 8:].view(-1, 4, 4), dim=2) + HC_EPS
    c = c / (c.sum(dim=1, keepdim=True) + HC_EPS)
    for _ in range(iters - 1):
        c = c / (c.sum(dim=2, keepdim=True) + HC_EPS)
        c = c / (c.sum(dim=1, keepdim=True) + HC_EPS)
    return Mix(m[:, :4].sigmoid() + HC_EPS, 2 * m[:, 4:8].sigmoid(), c)


def assert_near(got: Mix, expected: Mix) -> None:
    for name, bound in zip(NAMES, (2e-6, 4e-6, 8e-6), strict=True):
        difference = (getattr(got, name).cpu().double() - getattr(expected, name)).abs().max()
        assert difference < bound, (name, difference)


def assert_same(got: Mix, expected: Mix) -> None:
    for name in NAMES:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def part(mix: Mix, some: list[int] | slice) -> Mix:
    return Mix(mix.pre[some], mix.post[some], mix.comb[some])


@pytest.mark.parametrize("dim,iters", [(32, 20), (320, 3)])
def test_mix_is_near_its_definition(device: torch.device, dim: int, iters: int) -> None:
    h, weights = random(2, 4, dim), weights_of(dim)
    h[1] *= 2.0**-26
    on_device = moved(weights, device)
    assert isinstance(on_device, MixWeights)
    got = mixed(h.to(device), on_device, iters)
    assert_near(got, exact(h, weights, iters))
    assert_near(got, reference.mix(h, weights, iters=iters, hc_eps=HC_EPS, eps=EPS))
    assert_same(mixed(h.to(device).bfloat16(), on_device, iters), got)


def test_a_rows_mix_is_its_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    h, weights = random(7, 4, 192).to(device), moved(weights_of(192), device)
    assert isinstance(weights, MixWeights)
    h[4], h[5] = float("nan"), float("inf")

    def run(some: list[int] | slice, rows: int = 64) -> Mix:
        settings = {"ROWS": rows, "num_warps": 4, "num_stages": 2}
        return hyper.mix(h[some], weights, iters=1, hc_eps=HC_EPS, eps=EPS, settings=settings)

    whole = run(slice(None))
    for some, rows in (([6], 64), ([3, 0, 2], 64), ([3, 0, 6], 128)):
        assert_same(run(some, rows), part(whole, some))
    monkeypatch.setattr(hyper, "_FEW_ROWS", 0)  # several rows to a finishing program
    assert_same(run([0, 6, 1]), part(whole, [0, 6, 1]))
    monkeypatch.setattr(hyper, "_PART", 3)  # a control: another order of summation is seen
    other = run([0, 6, 1])
    assert any(not torch.equal(getattr(other, n), getattr(whole, n)[[0, 6, 1]]) for n in NAMES)
    empty = run(slice(0))
    assert empty.pre.shape == (0, 4) and empty.comb.shape == (0, 4, 4)


@pytest.mark.parametrize("dim", [32, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_copies_are_the_references(
    device: torch.device, dim: int, dtype: torch.dtype
) -> None:
    h, y, norm = random(5, 4, dim), random(5, dim, seed=1), random(dim, seed=2)
    pre, mix = torch.rand(5, 4), Mix(torch.rand(5, 4), torch.rand(5, 4) * 2, torch.rand(5, 4, 4))
    there = moved(mix, device)
    assert isinstance(there, Mix)
    hd, yd, pred = h.to(device, dtype), y.to(device, dtype), pre.to(device)
    collapsed = hyper.collapse(hd, pred, out_dtype=dtype)
    assert torch.equal(collapsed.float().cpu(), reference.collapse(h, pre))
    mean = hyper.mean_copies(hd, out_dtype=dtype)
    assert torch.equal(mean.float().cpu(), reference.mean_copies(h))
    stream = hyper.expand(yd, hd, there)
    assert stream.dtype == dtype
    assert torch.equal(stream.float().cpu(), reference.expand(y, h, mix))

    x, quantized = hyper.collapse_norm(
        hd, pred, norm.to(device), EPS, q8=True, out_dtype=torch.float32
    )
    expected = rms_norm(reference.collapse(h, pre), norm, EPS)
    apart = x.cpu() != expected
    assert apart.float().mean() < 0.01
    assert ((x.cpu() - expected).abs() <= expected.abs() * 2.0**-7)[apart].all()
    assert quantized is not None
    assert torch.equal(quantized.cpu(), q8_roundtrip(x.cpu()))

    fused = hyper.expand_collapse_norm(yd, hd, there, pred, norm.to(device), EPS, q8=True)
    x, quantized = hyper.collapse_norm(stream, pred, norm.to(device), EPS, q8=True)
    for got, alone in zip(fused, (stream, x, quantized), strict=True):
        assert got is not None and alone is not None
        assert torch.equal(got, alone)


def test_streams_of_rows_are_their_own(device: torch.device) -> None:
    h, y, norm = random(6, 4, 96).to(device), random(6, 96, seed=1).to(device), random(96, seed=2)
    norm, pre = norm.to(device), torch.rand(6, 4).to(device)
    mix = Mix(pre, pre * 2, torch.rand(6, 4, 4).to(device))
    h[2], y[3] = float("nan"), float("inf")
    whole = hyper.expand_collapse_norm(y, h, mix, pre, norm, EPS, q8=True)
    for some in ([5], [4, 0, 5]):
        alone = hyper.expand_collapse_norm(
            y[some], h[some], part(mix, some), pre[some], norm, EPS, q8=True
        )
        for got, all_rows in zip(alone, whole, strict=True):
            assert got is not None and all_rows is not None
            assert torch.equal(got, all_rows[some])
    nothing = hyper.expand_collapse_norm(y[:0], h[:0], part(mix, slice(0)), pre[:0], norm, EPS)
    assert nothing[0].shape == (0, 4, 96) and nothing[1].shape == (0, 96) and nothing[2] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_model_stream(device: torch.device, dtype: torch.dtype) -> None:
    dim, num_rows = 5120, 300
    h, y, weights = random(num_rows, 4, dim), random(num_rows, dim, seed=1), weights_of(dim)
    there = moved(weights, device)
    assert isinstance(there, MixWeights)
    hd, yd = h.to(device, dtype), y.to(device, dtype)
    whole = mixed(hd, there)
    assert_near(whole, exact(h, weights))
    for some in ([299], [0, 5], list(range(17)), list(range(100, 164)), list(range(65, 150))):
        assert_same(mixed(hd[some], there), part(whole, some))
    for settings in (
        {"ROWS": 16, "num_warps": 4, "num_stages": 3},
        {"ROWS": 64, "num_warps": 4, "num_stages": 2},
        {"ROWS": 128, "num_warps": 8, "num_stages": 2},
    ):
        other = hyper.mix(hd, there, iters=ITERS, hc_eps=HC_EPS, eps=EPS, settings=settings)
        assert_same(other, whole)
    on_cpu = moved(whole, torch.device("cpu"))
    assert isinstance(on_cpu, Mix)
    norm = random(dim, seed=2)
    stream, x, quantized = hyper.expand_collapse_norm(
        yd, hd, whole, whole.pre, norm.to(device), EPS, q8=True
    )
    assert torch.equal(stream.float().cpu(), reference.expand(y, h, on_cpu))
    expected = rms_norm(reference.collapse(stream.float().cpu(), on_cpu.pre), norm, EPS)
    apart = x.cpu() != expected
    assert apart.float().mean() < 2e-3
    assert ((x.cpu() - expected).abs() <= expected.abs() * 2.0**-7)[apart].all()
    alone = hyper.collapse_norm(stream, whole.pre, norm.to(device), EPS, q8=True)
    assert quantized is not None and alone[1] is not None
    assert torch.equal(alone[0], x) and torch.equal(alone[1], quantized)
    for row in (0, 299):
        one = part(whole, [row])
        got = hyper.expand_collapse_norm(
            yd[[row]], hd[[row]], one, one.pre, norm.to(device), EPS, q8=True
        )
        assert torch.equal(got[0][0], stream[row]) and torch.equal(got[1][0], x[row])
