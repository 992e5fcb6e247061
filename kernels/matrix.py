"""A weight matrix as the GPU keeps it: in the checkpoint's format, one byte a weight where it is FP8."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from phalanx.kernels.reference.quant import E4M3, GROUP, dequant_fp8_block

LARGEST_SCALE: Final = 127 + 7  # ue8m0


@dataclass(frozen=True)
class Fp8Matrix:
    """Rows of e4m3 codes with one power-of-two scale, at most 2^7, per block of 32 x 32 (model.md B)."""

    codes: Tensor  # float8_e4m3fn [N, K], contiguous
    scales: Tensor  # ue8m0, uint8 [ceil(N/32), ceil(K/32)], contiguous

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        blocks = (-(-rows // GROUP), -(-columns // GROUP))
        if self.codes.dtype != E4M3 or self.scales.dtype != torch.uint8:
            raise TypeError(f"{self.codes.dtype} codes with {self.scales.dtype} scales")
        if tuple(self.scales.shape) != blocks:
            raise ValueError(f"[{rows}, {columns}] codes with {list(self.scales.shape)} scales")
        # A checkpoint is read on the CPU; elsewhere the check would wait for the device.
        if self.scales.device.type == "cpu" and bool((self.scales > LARGEST_SCALE).any()):
            raise ValueError("a scale above 2^7: the products' kernels cannot hold such weights")

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel()

    def rows(self, start: int, stop: int) -> "Fp8Matrix":
        """A view of rows start to stop; both are multiples of 32, or stop is the last row."""
        if start % GROUP or (stop % GROUP and stop != self.shape[0]):
            raise ValueError(f"rows {start} to {stop} cut a block of {GROUP}")
        blocks = slice(start // GROUP, -(-stop // GROUP))
        return Fp8Matrix(self.codes[start:stop], self.scales[blocks])

    def dequantize(self) -> Tensor:
        """float32 [N, K], exact."""
        return dequant_fp8_block(self.codes, self.scales)

    def to(self, device: torch.device | str) -> "Fp8Matrix":
        return Fp8Matrix(self.codes.to(device), self.scales.to(device))

    @staticmethod
    def cat(matrices: Sequence["Fp8Matrix"]) -> "Fp8Matrix":
        """The rows of all, one below the other; all but the last have a multiple of 32 rows."""
        if any(matrix.shape[0] % GROUP for matrix in matrices[:-1]):
            raise ValueError(f"a matrix before the last cuts a block of {GROUP} rows")
        # As bytes: not every device joins FP8 tensors.
        codes = torch.cat([matrix.codes.view(torch.uint8) for matrix in matrices])
        return Fp8Matrix(codes.view(E4M3), torch.cat([matrix.scales for matrix in matrices]))


Matrix = Tensor | Fp8Matrix  # a Tensor: bf16 or float32 [N, K]


def matrix_rows(matrix: Matrix, start: int) -> Matrix:
    """The rows from `start` on, a multiple of 32 where the matrix is quantized."""
    if isinstance(matrix, Fp8Matrix):
        return matrix.rows(start, matrix.shape[0])
    return matrix[start:]


def join_rows(*matrices: Matrix) -> Matrix:
    """The rows of all, one matrix below the other; all are of one kind."""
    first = matrices[0]
    if isinstance(first, Fp8Matrix):
        return Fp8Matrix.cat([m for m in matrices if isinstance(m, Fp8Matrix)])
    return torch.cat([m for m in matrices if isinstance(m, Tensor)])
