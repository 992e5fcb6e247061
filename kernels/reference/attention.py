"""Attention over one shared key/value vector per position, with a sink (model.md C.4)."""

import torch
from torch import Tensor

from phalanx.kernels.reference.rows import lanewise, round_bf16


def sink_attention(
    queries: Tensor, parts: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float
) -> Tensor:
    """One softmax over all parts; each position's vector is key and value at once.

    Each row has its own positions, in slots whose number and order are the same for all rows, so
    that the order of every sum is fixed. Probabilities are rounded to bf16 before they weigh the
    values, as in the reference.

    Args:
        queries: float32 [R, heads, d].
        parts: pairs of vectors, float32 [R, slots, d], finite, and bool [R, slots], True where the
            slot is empty. At least one slot of a row is not.
        sink: float32 [heads], an extra logit without a value.
        scale: factor of the scores.

    Returns:
        bf16 values [R, heads, d].
    """
    scores = torch.cat(
        [
            torch.bmm(queries, vectors.transpose(1, 2))
            .mul_(scale)
            .masked_fill_(empty.unsqueeze(1), float("-inf"))
            for vectors, empty in parts
        ],
        dim=-1,
    )
    top = scores.amax(dim=-1, keepdim=True)
    weights = lanewise(torch.exp, scores.sub_(top))
    rest = lanewise(torch.exp, sink.unsqueeze(-1) - top)
    total = weights.sum(dim=-1, keepdim=True) + rest
    weights = round_bf16(weights)
    out = torch.zeros_like(queries)
    start = 0
    for vectors, _ in parts:
        out += torch.bmm(weights[..., start : start + vectors.shape[1]], vectors)
        start += vectors.shape[1]
    return round_bf16(out / total)
