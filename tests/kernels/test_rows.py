"""Each row's result is the same bits in any batch, and plain library calls would not give that."""

import pytest
import torch

from phalanx.kernels.reference.rows import (
    LANES,
    TILE,
    lanewise,
    matmul_rows,
    pad_rows,
    padded,
    rms_norm,
    sum_columns,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("depth", "width"), [(64, 128), (128, 4), (128, 1), (512, 24), (1280, 512)]
)
def test_a_product_of_rows_does_not_depend_on_the_batch(depth: int, width: int) -> None:
    x, weight = random(67, depth), random(width, depth, seed=1)
    whole = matmul_rows(x, weight)
    assert torch.allclose(whole.double(), x.double() @ weight.double().t(), atol=1e-3)
    for count in (1, 2, 7, 8, 9, 24, 66):
        rows = torch.randperm(67, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(matmul_rows(x[rows], weight), whole[rows])


def test_the_plain_product_does_depend_on_it() -> None:
    x, weight = random(67, 1280), random(512, 1280, seed=1)
    assert not torch.equal(x[:1] @ weight.t(), (x @ weight.t())[:1])


def test_no_rows_give_no_rows() -> None:
    assert matmul_rows(torch.empty(0, 64), random(8, 64)).shape == (0, 8)


@pytest.mark.parametrize("count", [1, 31, 32, 33, LANES, LANES + 1, 1000])
def test_element_functions_do_not_depend_on_the_place(count: int) -> None:
    x = random(1100) * 5
    for function in (torch.exp, torch.sigmoid, torch.nn.functional.silu):
        whole = lanewise(function, x)
        for start in (0, 1, 17, 100):
            assert torch.equal(lanewise(function, x[start : start + count]), whole[start:][:count])


def test_the_plain_sigmoid_does_depend_on_it() -> None:
    x = random(1100) * 5
    whole = torch.sigmoid(x)
    assert any(not torch.equal(torch.sigmoid(x[i : i + 1]), whole[i : i + 1]) for i in range(1000))


def test_padding_fills_the_last_tile() -> None:
    assert [padded(count) for count in (0, 1, TILE, TILE + 1)] == [0, TILE, TILE, 2 * TILE]
    x = pad_rows(torch.ones(9, 3))
    assert x.shape == (16, 3) and x[:9].eq(1).all() and x[9:].eq(0).all()


def test_columns_are_added_from_the_left() -> None:
    x = torch.tensor([[1e8, 1.0, -1e8, 1.0]])
    assert sum_columns(x).item() == 1.0  # 1e8 + 1 loses the one; any other order keeps it


def test_norm_is_its_definition_and_a_row_of_zeros_stays_zero() -> None:
    x, weight = random(9, 96), random(96, seed=2)
    x[3] = 0
    wide = x.double()
    expected = wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-20) * weight.double()
    got = rms_norm(x, weight, 1e-20)
    assert torch.equal(got[3], torch.zeros(96))
    assert torch.allclose(got.double(), expected, rtol=2**-8, atol=1e-9)
    assert torch.equal(got, got.bfloat16().float())
