"""The attention sublayer: window, compressed entries and their choice (model.md C.4 to C.6)."""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from phalanx.kernels.ops import (
    candidate_blocks,
    candidate_scores,
    decode_compressed,
    decode_index_key,
    decode_window,
    grouped_linear,
    latent_and_window,
    linear,
    matmul_rows,
    paged_scores,
    pool_pairs,
    qf4_idx_roundtrip,
    rms_norm,
    rotate,
    select_top,
    sparse_attention,
    store_compressed,
    store_index_keys,
)
from phalanx.kernels.reference.attention import sink_attention
from phalanx.kernels.reference.indexer import candidate_mask, entry_scores, hide_future
from phalanx.kernels.reference.rope import RopeTable
from phalanx.kernels.reference.rows import round_bf16
from phalanx.kernels.registry import on_gpu
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.layers import AttentionWeights
from phalanx.worker_svc.model.step import Chosen, Step

ROW_CHUNK = 128  # rows whose vectors are gathered at a time: bounds memory, changes no result
_SCORE_CHUNK = 1 << 22  # key values that are gathered at a time
# On a GPU, of the rows of a step: those of further rows are made afterwards, in the same memory.
SCORES_AT_ONCE: Final = 1 << 30
_PORTION: Final = 64  # rows; a multiple, so that parts of tensors are aligned as the whole


def project(
    weights: AttentionWeights, config: ModelConfig, rope: RopeTable, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, heads, d], the Q8 form of their latent [R, q_lora], and window records [R, record]."""
    latent, records = latent_and_window(
        linear(x, weights.q_kv), weights.q_norm, weights.kv_norm, config.rms_norm_eps, rope
    )
    queries = matmul_rows(latent, weights.wq_b, rounded=True)
    queries = queries.view(-1, config.num_attention_heads, config.head_dim)
    return rotate(queries, rope), latent, records


def output(weights: AttentionWeights, config: ModelConfig, o: Tensor) -> Tensor:
    """Project the heads' results, turned back already: [R, heads, d] -> [R, D]."""
    o = o.view(o.shape[0], config.o_groups, -1)
    return linear(grouped_linear(o, weights.wo_a), weights.wo_b)


def attention(step: Step, weights: AttentionWeights, layer: int, x: Tensor) -> Tensor:
    """The sublayer on normed input x, float32 [P, D] -> bf16 values [P, D].

    Publishes the layer's window records and, where the layer is an owner, entries and choice.
    """
    config, rope = step.config, step.rope(layer)
    queries, latent, record = project(weights, config, rope, x)
    step.window_records[layer] = record
    if step.observer is not None:
        kv = linear(x, weights.q_kv)[:, config.q_lora_rank :]
        kv = rotate(rms_norm(kv, weights.kv_norm, config.rms_norm_eps), rope)
        step.note("window_kv_pre", layer, kv)
        step.note("window_kv", layer, decode_window(record))
    if weights.compressor is not None and not step.entries_stored:
        store_entries(step, weights, layer, x)
    if weights.indexer is not None:
        chosen = _choose(step, weights, layer, x, latent)
        if on_gpu(x):
            step.picked[layer] = chosen
        else:
            step.chosen[layer] = _vectors(step, layer, chosen)
    if on_gpu(x):
        o = _attend_records(step, weights, layer, queries, record)
    else:
        o = rotate(_attend(step, weights, layer, queries, decode_window(record)), rope.inverse())
    return output(weights, config, o)


def ring_vectors(step: Step, ring: int) -> Tensor:
    """The window vectors before each sequence's first row, float32 [S * (W - 1), d]."""
    rows = step.rows
    return decode_window(
        step.pools.rings[rows.slot_ids.unsqueeze(1), ring, step.windows.ring_indices]
    ).flatten(0, 1)


def _attend(
    step: Step, weights: AttentionWeights, layer: int, queries: Tensor, kv: Tensor
) -> Tensor:
    config, rows, windows = step.config, step.rows, step.windows
    table = torch.cat((ring_vectors(step, layer), kv))
    owner = config.index_owner(layer)
    out = torch.empty_like(queries)
    for start in range(0, rows.num_padded, ROW_CHUNK):
        part = slice(start, start + ROW_CHUNK)
        parts = [(table[windows.places[part]], windows.empty[part])]
        if owner is not None:
            chosen = step.chosen[owner]
            parts.append((chosen.vectors[chosen.place[part]], chosen.empty[part]))
        out[part] = sink_attention(queries[part], parts, weights.sink, config.head_dim**-0.5)
    return out


def _attend_records(
    step: Step, weights: AttentionWeights, layer: int, queries: Tensor, records: Tensor
) -> Tensor:
    """On a GPU: read the records where they lie. The result is turned back."""
    config, rows, rope = step.config, step.rows, step.rope(layer)
    owner, choice = config.kv_owner(layer), config.index_owner(layer)
    entries = None if owner is None else step.pools.compressed[owner]
    return sparse_attention(
        queries,
        records,
        step.pools.rings[:, layer],
        rows.slots,
        rows.positions,
        rows.within,
        rows.window_from,
        config.sliding_window,
        weights.sink,
        config.head_dim**-0.5,
        entries,
        None if owner is None else (rows.block_table, rows.seqs),
        None if choice is None else step.picked[choice],
        rope.cos,
        rope.sin,
    )


def store_entries(step: Step, weights: AttentionWeights, layer: int, x: Tensor) -> None:
    """Make the entries and index keys that this step's rows complete, and store them.

    Args:
        x: float32 [P, D], the sublayer's normed input.
    """
    assert weights.compressor is not None and weights.index_keys is not None
    config, entries = step.config, step.rows.entries[step.config.ratio(layer)]
    kv = matmul_rows(x, weights.compressor.wkv)
    if entries.ratio == 2:
        pairs = kv.view(-1, 2, config.head_dim)
        step.pending[layer] = pairs
        owner = step.pools.layout.pair_owners.index(layer)
        before = torch.cat((step.pools.pairs[step.rows.slot_ids, owner], pairs))
        both = torch.stack((before[entries.partners], pairs[entries.rows]), dim=1)
        latent = pool_pairs(both[:, :, 0], both[:, :, 1])
    else:
        latent = round_bf16(kv)[entries.rows]
    eps = config.rms_norm_eps
    rope = step.ropes.yarn_all.known(entries.positions)
    where = entries.blocks, entries.offsets
    compressed, index_keys = step.pools.compressed[layer], step.pools.index_keys[layer]
    latent = store_compressed(latent, weights.compressor.norm, eps, rope, *where, compressed)
    keys = matmul_rows(latent, weights.index_keys.wk, rounded=True)
    store_index_keys(keys, weights.index_keys.norm, eps, rope, *where, index_keys)
    if step.observer is not None:
        step.note("latent", layer, latent)
        step.note("index_k", layer, decode_index_key(index_keys[where]))
        step.note("compressed_pre", layer, rotate(latent.clone(), rope))
        step.note("compressed", layer, decode_compressed(compressed[where]))


def _choose(step: Step, weights: AttentionWeights, layer: int, x: Tensor, latent: Tensor) -> Tensor:
    """Choose entries for every row: int64 [P, top-k], -1 where there is none."""
    queries, head_weights = _index_queries(step, weights, layer, x, latent)
    choose = _choose_records if on_gpu(x) else _choose_decoded
    chosen = choose(step, layer, queries, head_weights)
    step.note("topk", layer, chosen)
    return chosen


def _index_queries(
    step: Step, weights: AttentionWeights, layer: int, x: Tensor, latent: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries [P, heads, dim] after QF4, and weights of the heads [P, heads]."""
    assert weights.indexer is not None
    heads, dim = step.config.index_n_heads, step.config.index_head_dim
    queries = matmul_rows(latent, weights.indexer.wq, rounded=True).view(-1, heads, dim)
    queries = qf4_idx_roundtrip(rotate(queries, step.rope(layer)))
    step.note("index_q", layer, queries)
    head_weights = matmul_rows(x, weights.indexer.weights_proj, rounded=True)
    return queries, round_bf16(head_weights * (dim**-0.5 * heads**-0.5))


def _choose_records(step: Step, layer: int, queries: Tensor, head_weights: Tensor) -> Tensor:
    """On a GPU: score keys where they lie; after the candidate source, those of candidates alone."""
    config, rows = step.config, step.rows
    entries, owner = rows.entries[config.ratio(layer)], config.kv_owner(layer)
    assert owner is not None
    read = (step.pools.index_keys[owner], rows.block_table, rows.seqs, entries.visible)
    if config.uses_candidates(layer) and step.candidate_blocks is not None:
        blocks, size = step.candidate_blocks, config.candidate_block_size
        scores = candidate_scores(queries, head_weights, *read, blocks, size)
        return select_top(scores, config.index_topk, blocks)
    num_entries = entries.num_columns * entries.num_entries
    of_rows = queries, head_weights, rows.seqs, entries.visible
    portion = max(1, SCORES_AT_ONCE // max(1, num_entries * _PORTION)) * _PORTION
    parts = list(zip(*(torch.split(tensor, portion) for tensor in of_rows), strict=True))
    found = [_choose_among_all(step, layer, num_entries, *part) for part in parts]
    if found[0][1] is not None:
        step.candidate_blocks = _joined([blocks for _, blocks in found if blocks is not None])
    return _joined([chosen for chosen, _ in found])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _choose_among_all(
    step: Step,
    layer: int,
    num_entries: int,
    queries: Tensor,
    head_weights: Tensor,
    seqs: Tensor,
    visible: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The choice of some rows; and, in the candidate source, among which blocks they choose later. None:
    there all that a row sees are candidates."""
    config, rows, owner = step.config, step.rows, step.config.kv_owner(layer)
    assert owner is not None
    size, count = config.candidate_block_size, config.candidate_topk_blocks
    keys = step.pools.index_keys[owner]
    scores = paged_scores(queries, head_weights, keys, rows.block_table, seqs, visible, num_entries)
    step.note("index_score", layer, scores)
    blocks = None
    if layer == config.candidate_source_layer_id:
        if num_entries > size * count:
            blocks = candidate_blocks(scores, visible, block_size=size, num_blocks=count)
        if step.observer is not None:
            mask = candidate_mask(scores.float(), visible, block_size=size, num_blocks=count)
            step.note("candidates", layer, mask)
    return select_top(scores, config.index_topk), blocks


def _choose_decoded(step: Step, layer: int, queries: Tensor, head_weights: Tensor) -> Tensor:
    config = step.config
    scores = _scores(step, layer, queries, head_weights)
    step.note("index_score", layer, scores)
    if layer == config.candidate_source_layer_id:
        step.candidates = candidate_mask(
            scores,
            step.rows.entries[config.ratio(layer)].visible,
            block_size=config.candidate_block_size,
            num_blocks=config.candidate_topk_blocks,
        )
        step.note("candidates", layer, step.candidates)
    elif config.uses_candidates(layer):
        assert step.candidates is not None
        scores = scores.masked_fill(~step.candidates, float("-inf"))
    return select_top(scores, config.index_topk)


def _scores(step: Step, layer: int, queries: Tensor, head_weights: Tensor) -> Tensor:
    """Index scores of the entries a row may see, float32 [P, columns * entries], others -inf."""
    config, rows = step.config, step.rows
    entries = rows.entries[config.ratio(layer)]
    keys = _page_keys(step, layer)
    scores = torch.full((rows.num_padded, entries.num_columns, entries.num_entries), float("-inf"))
    chunk = max(1, _SCORE_CHUNK // (entries.num_entries * config.index_head_dim))
    pages = step.pages(config.ratio(layer))
    for start in range(0, len(pages.pair_rows), chunk):
        part = slice(start, start + chunk)
        row = pages.pair_rows[part]
        scores[row, pages.pair_columns[part]] = entry_scores(
            queries[row], keys[pages.pair_pages[part]], head_weights[row]
        )
    for page, column, first, end in pages.spans:
        shared = keys[page].expand(end - first, -1, -1)
        scores[first:end, column] = entry_scores(
            queries[first:end], shared, head_weights[first:end]
        )
    return hide_future(scores.flatten(1), entries.visible)


def _page_keys(step: Step, layer: int) -> Tensor:
    """The index keys of all pages, decoded once a step for the owner's readers."""
    owner = step.config.kv_owner(layer)
    assert owner is not None
    if owner not in step.index_keys:
        pages = step.pages(step.config.ratio(layer))
        step.index_keys[owner] = decode_index_key(step.pools.index_keys[owner][pages.blocks])
    return step.index_keys[owner]


def _vectors(step: Step, layer: int, chosen: Tensor) -> Chosen:
    """Decode the entries int64 [P, top-k] that rows chose, -1 where there is none."""
    owner = step.config.kv_owner(layer)
    assert owner is not None
    rows = step.rows
    num_entries = rows.entries[step.config.ratio(layer)].num_entries
    empty = chosen < 0
    entry = chosen.clamp(min=0)
    blocks = rows.block_table[rows.seqs].gather(1, entry // num_entries)
    # The null block's first entry stands for "none": zeros.
    record = (blocks * num_entries + entry % num_entries).masked_fill_(empty, 0)
    # Neighbouring rows choose much the same entries: decode and hold each once.
    unique, inverse = np.unique(record.flatten().numpy(), return_inverse=True)
    needed, place = torch.from_numpy(unique), torch.from_numpy(inverse).view(record.shape)
    vectors = decode_compressed(
        step.pools.compressed[owner][needed // num_entries, needed % num_entries]
    )
    return Chosen(vectors, place, empty)
