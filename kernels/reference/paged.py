"""Attention and index scores that read cache records where they lie, in torch, on any device.

The CPU's forward pass shares decoded vectors between rows and layers instead; this is the same
arithmetic in the shape of the GPU's kernels.
"""

import torch
from torch import Tensor

from phalanx.kernels.reference.attention import sink_attention
from phalanx.kernels.reference.indexer import block_entries, entry_scores, hide_future
from phalanx.kernels.reference.quant import decode_compressed, decode_index_key, decode_window
from phalanx.kernels.reference.rope import RopeTable, rotate

_ROWS = 128  # rows whose vectors are gathered at a time


def sparse_attention(
    queries: Tensor,
    records: Tensor,
    ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    within: Tensor,
    window_from: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed: Tensor | None = None,
    block_rows: tuple[Tensor, Tensor] | None = None,
    chosen: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Every row attends to its window and to the compressed entries that it chose (model.md C.4).

    Args:
        queries: bf16 values [R, heads, d], turned.
        records: uint8 [R, window record], of the step's rows.
        ring: uint8 [slots, ring size, window record], of this layer: positions before the step's.
        slots, positions, within: int64 [R]: state slot, position, and place within the rows that
            the sequence has in this step.
        window_from: int64 [R]: windows of rows from there on start no earlier.
        window: positions that a row sees, its own included.
        sink: float32 [heads].
        compressed: uint8 [blocks, entries, record], of the layer's owner.
        block_rows: block table int64 [S, max blocks] and the sequence of each row, int64 [R].
        chosen: int64 [R, k], entries of the sequence, -1 where there is none.
        cos, sin: float32 [R, rope_dim] each: the result is turned back.

    Returns:
        bf16 values as float32 [R, heads, d].
    """
    out = torch.empty_like(queries, dtype=torch.float32)
    back = torch.arange(window - 1, -1, -1, device=queries.device)
    for start in range(0, len(queries), _ROWS):
        part = slice(start, start + _ROWS)
        at = positions[part, None] - back
        since = window_from[part, None]
        empty = (at < 0) | ((at < since) & (positions[part, None] >= since))
        row = torch.arange(len(queries), device=queries.device)[part, None]
        ours = records[(row - back).clamp(min=0)]
        old = ring[slots[part, None], at.clamp(min=0) % ring.shape[1]]
        record = torch.where((back <= within[part, None])[..., None], ours, old)
        parts = [(decode_window(record.masked_fill(empty[..., None], 0)), empty)]
        if compressed is not None:
            assert block_rows is not None and chosen is not None
            parts.append(_entries(compressed, block_rows, chosen, part))
        out[part] = sink_attention(queries[part].float(), parts, sink, scale)
    if cos is None or sin is None:
        return out
    return rotate(out, RopeTable(cos, -sin))


def _entries(
    compressed: Tensor, block_rows: tuple[Tensor, Tensor], chosen: Tensor, part: slice
) -> tuple[Tensor, Tensor]:
    table, seqs = block_rows
    entries, picked = compressed.shape[1], chosen[part].long()
    empty, entry = picked < 0, picked.clamp(min=0)
    blocks = table[seqs[part]].gather(1, entry // entries)
    record = compressed[blocks, entry % entries].masked_fill(empty[..., None], 0)
    return decode_compressed(record), empty


def block_attention(
    queries: Tensor,
    records: Tensor,
    ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    within: Tensor,
    block: int,
    window: int,
    sink: Tensor,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """The draft stages' attention: the ring's context, then the row's whole block (model.md D).

    Args:
        queries: bf16 values [S * block, heads, d], turned.
        records: uint8 [S * block, window record], of the rows themselves.
        ring: uint8 [slots, ring size, window record], of this stage.
        slots, positions, within: int64 [S * block]: state slot, position, and place in the block.

    Returns:
        bf16 values as float32 [S * block, heads, d].
    """
    since = positions - within
    before = since[:, None] + torch.arange(-window, 0, device=queries.device)
    empty = before < 0
    record = ring[slots[:, None], before.clamp(min=0) % ring.shape[1]]
    context = decode_window(record.masked_fill(empty[..., None], 0))
    own = decode_window(records).view(-1, block, queries.shape[2]).repeat_interleave(block, 0)
    nothing = torch.zeros_like(empty[:, :1]).expand(-1, block)
    out = sink_attention(queries.float(), [(context, empty), (own, nothing)], sink, scale)
    if cos is None or sin is None:
        return out
    return rotate(out, RopeTable(cos, -sin))


def paged_scores(
    queries: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    seqs: Tensor,
    visible: Tensor,
    num_entries_max: int,
) -> Tensor:
    """Index scores of the entries of each row's sequence (model.md C.6).

    Args:
        queries: bf16 values [R, heads, dim], after QF4.
        head_weights: bf16 values [R, heads].
        index_keys: uint8 [blocks, entries, record], of the layer's owner.
        block_table: int64 [S, max blocks].
        seqs: int64 [R].
        visible: int64 [R], entries that a row may see.
        num_entries_max: E, columns wanted.

    Returns:
        bf16 values as float32 [R, E], -inf from `visible` on.
    """
    entries = index_keys.shape[1]
    columns = -(-num_entries_max // entries)
    scores = queries.new_full((len(queries), columns, entries), float("-inf"), dtype=torch.float32)
    for column in range(columns):
        keys = decode_index_key(index_keys[block_table[:, column]])[seqs]
        scores[:, column] = entry_scores(queries.float(), keys, head_weights.float())
    return hide_future(scores.flatten(1)[:, :num_entries_max], visible)


def candidate_scores(
    queries: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    seqs: Tensor,
    visible: Tensor,
    blocks: Tensor,
    block_size: int,
) -> Tensor:
    """`paged_scores` of the entries of each row's candidate blocks alone, side by side.

    Args:
        blocks: int64 [R, B], of `block_size` entries each, -1 for none; as from
            `indexer.candidate_blocks`.

    Returns:
        bf16 values as float32 [R, B * block_size], -inf where a row sees no such entry.
    """
    entries = block_entries(blocks, block_size)
    most = block_table.shape[1] * index_keys.shape[1]
    scores = paged_scores(queries, head_weights, index_keys, block_table, seqs, visible, most)
    unseen = (entries < 0) | (entries >= visible.unsqueeze(1))
    return scores.gather(1, entries.clamp(0, most - 1)).masked_fill(unseen, float("-inf"))
