"""Rotary position embedding over the last channels of a vector (model.md C.0).

Neighbouring channels form a complex number; pair i at position p turns by p * f_i. The tables are
float32, the result is rounded to bf16.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from phalanx.kernels.reference.rows import lanewise

_FIRST_POSITIONS: Final = 4096
_PIECE, _THREADS = 1 << 15, 8  # positions made at a time, and how many such pieces


@dataclass(frozen=True)
class RopeTable:
    """Cosines, and sines with the sign of the partner channel, of every position: [positions, rope_dim]."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> "RopeTable":
        """The rows of these positions (int64 [R])."""
        return RopeTable(self.cos[positions], self.sin[positions])

    def to(self, device: torch.device) -> "RopeTable":
        return RopeTable(self.cos.to(device), self.sin.to(device))

    def inverse(self) -> "RopeTable":
        """Turns back."""
        return RopeTable(self.cos, -self.sin)


def frequencies(dim: int, base: float) -> Tensor:
    """f_i = base^(-2i/dim), float32 [dim/2]."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def stretch(freqs: Tensor, *, factor: float, low: int, high: int) -> Tensor:
    """YaRN: frequencies below `low` stay, from `high` on they are divided by `factor`, between they blend."""
    steps = torch.arange(freqs.shape[0], dtype=torch.float32)
    keep = 1 - ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs / factor * (1 - keep) + freqs * keep


def rope_table(freqs: Tensor, num_positions: int, first: int = 0) -> RopeTable:
    """Tables of the positions from `first` to num_positions-1."""
    angles = torch.outer(torch.arange(first, num_positions, dtype=torch.float32), freqs)
    cos, sin = lanewise(torch.cos, angles), lanewise(torch.sin, angles)
    return RopeTable(cos.repeat_interleave(2, -1), torch.stack((-sin, sin), dim=-1).flatten(-2))


class GrowingRope:
    """A table that reaches as far as it was asked for: all of a million positions take 0.5 GiB.

    Made on the CPU, so that it is the same bits everywhere; the rows asked for lie on `device`.
    """

    def __init__(
        self, freqs: Tensor, device: torch.device | None = None, num_positions: int = 0
    ) -> None:
        """`num_positions`: have all of these from the start. So it is on a GPU, where nothing may grow
        once memory is given out, and recorded steps read the table where it lay."""
        self._freqs, self._device = freqs, device or freqs.device
        self._table = (
            _whole_table(freqs, num_positions, self._device)
            if num_positions
            else rope_table(freqs, _FIRST_POSITIONS).to(self._device)
        )

    def at(self, positions: Tensor) -> RopeTable:
        """The rows of these positions, int64 [R] on the CPU."""
        self.reach(positions)
        return self._table.at(positions.to(self._device))

    def reach(self, positions: Tensor) -> None:
        """Have the rows of these positions, int64 [R] on the CPU. The table may move."""
        have = self._table.cos.shape[0]
        needed = int(positions.max()) + 1 if len(positions) else 0
        if needed > have:
            self._table = rope_table(self._freqs, max(needed, 2 * have)).to(self._device)

    def known(self, there: Tensor) -> RopeTable:
        """The rows of positions that were reached, int64 [R] on the table's device."""
        return self._table.at(there)


def _whole_table(freqs: Tensor, num_positions: int, device: torch.device) -> RopeTable:
    """The table in its place, made in pieces by several threads."""
    shape = (num_positions, 2 * len(freqs))
    whole = RopeTable(torch.empty(shape, device=device), torch.empty(shape, device=device))

    firsts = range(0, num_positions, _PIECE)
    with ThreadPoolExecutor(_THREADS, "rope") as pool:
        ends = [min(first + _PIECE, num_positions) for first in firsts]
        pieces = pool.map(lambda first, end: rope_table(freqs, end, first), firsts, ends)
        for first, end, piece in zip(firsts, ends, pieces, strict=True):
            whole.cos[first:end], whole.sin[first:end] = piece.cos, piece.sin
    return whole


def rotate(x: Tensor, table: RopeTable) -> Tensor:
    """Turn the last channels of each vector.

    Args:
        x: float32 [R, d] or [R, heads, d]; overwritten.
        table: rows of the R positions, [R, rope_dim].

    Returns:
        x itself; the turned channels are bf16 values, the others untouched.
    """
    cos, sin = table.cos, table.sin
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    tail = x[..., -cos.shape[-1] :]
    swapped = tail.reshape(*tail.shape[:-1], tail.shape[-1] // 2, 2).flip(-1).flatten(-2)
    tail.copy_((tail * cos).add_(swapped.mul_(sin)).bfloat16())
    return x
