"""Engram: hashed n-gram embeddings that are gated into the stream (model.md C.3)."""

import torch
from torch import Tensor

from phalanx.kernels.reference.quant import dequant_engram_rows
from phalanx.kernels.reference.rows import lanewise, rms_scale, round_bf16


def hash_rows(units: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each position.

    Args:
        units: int64 [R, n], compressed ids of the token itself and of those before it, nearest
            first; the pad id where there is none.
        multipliers: int64 [n], odd.
        primes: int64 [n - 1, heads], table rows of each hash column.
        offsets: int64 [(n - 1) * heads], first table row of each column.

    Returns:
        int64 [R, (n - 1) * heads].
    """
    products = units * multipliers
    hashes = products[:, 0]
    columns = []
    for back in range(1, units.shape[1]):
        hashes = hashes ^ products[:, back]
        columns.append(hashes.unsqueeze(1) % primes[back - 1])
    return torch.cat(columns, dim=1) + offsets


def gather(codes: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table in the host's memory: ids int64 [...] -> bf16 [..., dim] where the ids lie.

    Args:
        codes: e4m3 [rows, dim].
        scales: ue8m0 uint8 [rows, dim/32].
    """
    return gather_on_host(codes, scales, ids.cpu(), ids.device)


def gather_on_host(codes: Tensor, scales: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    """The same with the ids on the host: the rows travel as they are stored, and are decoded on `device`."""

    def rows(table: Tensor) -> Tensor:
        # Five times faster than indexing, which reads byte by byte.
        return table.index_select(0, ids.flatten()).view(*ids.shape, -1).to(device)

    return dequant_engram_rows(rows(codes.view(torch.uint8)), rows(scales))


def gate(h: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    """How much of the n-gram's value each copy takes: float32 [R, n], in (0, 1).

    Args:
        h, key: float32 [R, n, D].
        weight: float32 [n, D], the product of the stored query and key weights.
    """
    dot = (h * weight * key).sum(dim=-1)
    scale = rms_scale(h, eps) * rms_scale(key, eps)
    dot = dot * scale.squeeze(-1) * h.shape[-1] ** -0.5
    return lanewise(torch.sigmoid, dot.sign() * dot.abs().clamp(min=1e-6).sqrt())


def gate_add_value(
    h: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The stream with the value in it, and the gates: `gate`, then `add_value`."""
    gates = gate(h, key, weight, eps)
    return add_value(h, gates, value), gates


def add_value(h: Tensor, gates: Tensor, value: Tensor) -> Tensor:
    """h_c + g_c * value, bf16 values: h [R, n, D], gates [R, n], value [R, D]."""
    return round_bf16(h + gates.unsqueeze(-1) * value.unsqueeze(1))
