"""The output matrix, shared by the model and its draft."""

from typing import Final

import torch
from torch import Tensor

from phalanx.kernels.reference.rows import matmul_rows

WHOLE_BYTES: Final = 32 << 20  # up to this size as float32 the matrix is kept as float32
PIECE_ROWS: Final = 1024  # of a larger one: tokens whose rows are float32 at a time


class OutputHead:
    """Logits of every token. A large matrix stays bf16 where it lies, and is widened in pieces.

    The pieces are the same for every step, so a row's logits are the same bits in all of them.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: bf16 [vocab, D]."""
        if 4 * weight.numel() <= WHOLE_BYTES:
            self._pieces: tuple[Tensor, ...] = (weight.to(torch.float32, copy=True),)
        else:
            self._pieces = torch.split(weight, PIECE_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [R, D], normed -> float32 [R, vocab]."""
        return torch.cat([matmul_rows(x, piece.float()) for piece in self._pieces], dim=-1)
