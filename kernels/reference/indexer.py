"""Choice of the compressed entries that a row attends to (model.md C.6).

Scores are bf16, so ties are common. Everywhere the lower position wins: a row's choice then never
depends on how many entries other rows of the batch have.
"""

from typing import Final

import torch
from torch import Tensor

from phalanx.kernels.reference.rows import round_bf16

_HIDDEN: Final = float("-inf")


def entry_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """sum_h w_h * relu(q_h . k), with the reference's bf16 rounding after each operation.

    Args:
        queries: float32 [P, heads, dim].
        keys: float32 [P, entries, dim]; the number of entries must not depend on the batch.
        weights: float32 [P, heads].

    Returns:
        bf16 values as float32 [P, entries].
    """
    dots = round_bf16(torch.bmm(queries, keys.transpose(1, 2)))
    parts = round_bf16(dots.relu_().mul_(weights.unsqueeze(-1)))
    total = parts[:, 0]
    for head in range(1, parts.shape[1]):
        total = total + parts[:, head]
    return round_bf16(total)


def hide_future(scores: Tensor, num_visible: Tensor) -> Tensor:
    """Entries from num_visible (int64 [R]) on become -inf; scores float32 [R, E]."""
    entry = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(entry >= num_visible.unsqueeze(1), _HIDDEN)


def select_top(scores: Tensor, count: int, blocks: Tensor | None = None) -> Tensor:
    """The best `count` entries of each row that are not -inf, in position order.

    Args:
        scores: bf16 values as float32 [R, E].
        blocks: int64 [R, B], as from `candidate_blocks`, if the scores are those of these blocks'
            entries side by side, E / B each; None: if they are those of entries 0, 1, ...

    Returns:
        int64 [R, count], filled up with -1 at the end.
    """
    chosen = _select_columns(scores, count)
    if blocks is None or blocks.numel() == 0:
        return chosen
    size = scores.shape[1] // blocks.shape[1]
    column = chosen.clamp(min=0)
    entry = blocks.gather(1, column // size) * size + column % size
    return entry.where(chosen >= 0, -1)


def _select_columns(scores: Tensor, count: int) -> Tensor:
    num_rows, num_entries = scores.shape
    chosen = scores.new_full((num_rows, count), -1, dtype=torch.int64)
    kept = min(count, num_entries)
    if kept == 0:
        return chosen
    best = _ordered_keys(scores).topk(kept, dim=1, sorted=False).indices
    hidden = scores.gather(1, best) == _HIDDEN
    positions = best.masked_fill(hidden, num_entries).sort(dim=1).values
    chosen[:, :kept] = positions.masked_fill(positions == num_entries, -1)
    return chosen


def _ordered_keys(scores: Tensor) -> Tensor:
    """bf16 values [R, E] -> int64 keys, all different in a row, that sort by score, then lower position."""
    bits = (scores + 0.0).view(torch.int32) >> 16  # + 0.0 makes the two zeros one
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits).to(torch.int64)
    return (ordered << 32) - torch.arange(scores.shape[1], device=scores.device)


def candidate_blocks(
    scores: Tensor, num_visible: Tensor, *, block_size: int, num_blocks: int
) -> Tensor:
    """The best blocks of entries, among which later layers choose.

    A block counts as much as its best entry; the block of the newest visible entry always stays.

    Args:
        scores: bf16 values as float32 [R, E], future entries -inf.
        num_visible: int64 [R].
        block_size: entries per candidate block.
        num_blocks: blocks that are kept.

    Returns:
        int64 [R, num_blocks], rising, filled up with -1 at the end.
    """
    num_rows, num_entries = scores.shape
    short = -num_entries % block_size
    padded = torch.nn.functional.pad(scores, (0, short), value=_HIDDEN)
    best = padded.view(num_rows, -1, block_size).amax(dim=-1)
    newest = (num_visible - 1).clamp(min=0) // block_size
    block = torch.arange(best.shape[1], device=best.device)
    pinned = (block == newest.unsqueeze(1)) & (num_visible > 0).unsqueeze(1)
    best = best.masked_fill(pinned, float("inf"))
    return select_top(best, num_blocks)


def candidate_mask(
    scores: Tensor, num_visible: Tensor, *, block_size: int, num_blocks: int
) -> Tensor:
    """bool [R, E]: the entries of `candidate_blocks`."""
    kept = candidate_blocks(scores, num_visible, block_size=block_size, num_blocks=num_blocks)
    num_rows, num_entries = scores.shape
    in_all = -(-num_entries // block_size)
    # One column more than blocks: the fill value -1 lands there.
    mask = scores.new_zeros((num_rows, in_all + 1), dtype=torch.bool)
    mask.scatter_(1, kept.where(kept >= 0, in_all), True)
    return mask[:, :-1].repeat_interleave(block_size, dim=1)[:, :num_entries]


def block_entries(blocks: Tensor, block_size: int) -> Tensor:
    """Blocks int64 [R, B], -1 for none -> their entries int64 [R, B * block_size], -1 for none."""
    inner = torch.arange(block_size, device=blocks.device)
    entries = blocks.unsqueeze(2) * block_size + inner
    return entries.masked_fill_(blocks.unsqueeze(2) < 0, -1).flatten(1)
