"""The output matrix, shared by the model and its draft."""

from typing import Final

import torch
from torch import Tensor

from phalanx.kernels.ops import matmul_rows
from phalanx.kernels.registry import on_gpu

WHOLE_BYTES: Final = 32 << 20  # up to this size as float32 the matrix is kept as float32
PIECE_ROWS: Final = 1024  # of a larger one: tokens whose rows are float32 at a time


class OutputHead:
    """Logits of every token. A large matrix stays bf16 where it lies, and is widened in pieces.

    The pieces are the same for every step, so a row's logits are the same bits in all of them.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: bf16 [vocab, D]."""
        self._pieces: tuple[Tensor, ...]
        self._widen = not on_gpu(weight)  # a GPU multiplies bf16 as it lies
        if not self._widen:
            self._pieces = (weight,)
        elif 4 * weight.numel() <= WHOLE_BYTES:
            self._pieces = (weight.to(torch.float32, copy=True),)
        else:
            self._pieces = torch.split(weight, PIECE_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [R, D], normed -> float32 [R, vocab]."""
        if not self._widen:
            return matmul_rows(x, self._pieces[0])
        return torch.cat([matmul_rows(x, piece.float()) for piece in self._pieces], dim=-1)
