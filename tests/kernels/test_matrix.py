"""FP8 matrices are cut and joined along whole blocks, and mean what the reference says they mean."""

import pytest
import torch

from phalanx.kernels.matrix import Fp8Matrix
from phalanx.kernels.reference.quant import quant_fp8_block


def matrix(rows: int, columns: int) -> Fp8Matrix:
    return Fp8Matrix(*quant_fp8_block(torch.randn(rows, columns)))


def test_rows_and_cat_are_inverse() -> None:
    whole = matrix(80, 96)
    parts = [whole.rows(0, 32), whole.rows(32, 64), whole.rows(64, 80)]
    joined = Fp8Matrix.cat(parts)
    assert torch.equal(joined.dequantize(), whole.dequantize())
    assert torch.equal(parts[1].dequantize(), whole.dequantize()[32:64])
    assert joined.num_bytes == whole.num_bytes == 80 * 96 + 3 * 3


def test_a_block_is_never_cut() -> None:
    whole = matrix(80, 32)
    for start, stop in ((16, 64), (0, 40)):
        with pytest.raises(ValueError, match="cut a block"):
            whole.rows(start, stop)
    with pytest.raises(ValueError, match="cuts a block"):
        Fp8Matrix.cat([whole, whole])


def test_the_scales_fit_the_codes() -> None:
    whole = matrix(64, 64)
    with pytest.raises(ValueError, match="scales"):
        Fp8Matrix(whole.codes, whole.scales[:1])
    with pytest.raises(ValueError, match="above"):
        Fp8Matrix(whole.codes, whole.scales.new_full((2, 2), 135))
    with pytest.raises(TypeError, match="codes"):
        Fp8Matrix(whole.dequantize(), whole.scales)
