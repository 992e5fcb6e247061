"""From a projection's result to what the caches keep (model.md C.4, C.5)."""

from collections.abc import Sequence

from torch import Tensor

from phalanx.kernels.reference.quant import encode_compressed, encode_index_key, encode_window
from phalanx.kernels.reference.rope import RopeTable, rotate
from phalanx.kernels.reference.rows import rms_norm, rms_norm_q8


def latent_and_window(
    both: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, table: RopeTable
) -> tuple[Tensor, Tensor]:
    """What follows the attention's first projection.

    Args:
        both: bf16 values [R, rank + d]: the queries' latent, then the window vector.
        q_norm, kv_norm: [rank] and [d].
        table: rows of the R positions.

    Returns:
        The Q8 form of the normed latent [R, rank], and window records uint8 [R, record].
    """
    rank = q_norm.shape[0]
    records = window_records(both[:, rank:], kv_norm, eps, table)
    return rms_norm_q8(both[:, :rank], q_norm, eps), records


def window_records(kv: Tensor, norm_weight: Tensor, eps: float, table: RopeTable) -> Tensor:
    """Records uint8 [R, record] of window vectors, bf16 values [R, d], as they are projected."""
    return encode_window(rotate(rms_norm(kv, norm_weight, eps), table))


def store_compressed(
    latent: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: RopeTable,
    blocks: Tensor,
    offsets: Tensor,
    pool: Tensor,
) -> Tensor:
    """Norm latents, and store them turned and encoded: pool[blocks, offsets] = records.

    Args:
        latent: bf16 values [M, d], as pooled or projected.
        norm_weight: [d].
        table: rows of the M entries' positions.
        blocks, offsets: int64 [M]; a negative block stores nothing.
        pool: uint8 [num_blocks, entries, record].

    Returns:
        The normed latents [M, d] before the turn, bf16 values: what index keys are made of.
    """
    normed = rms_norm(latent, norm_weight, eps)
    _put(pool, blocks, offsets, encode_compressed(rotate(normed.clone(), table)))
    return normed


def store_index_keys(
    keys: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: RopeTable,
    blocks: Tensor,
    offsets: Tensor,
    pool: Tensor,
) -> None:
    """Norm, turn and encode index keys, bf16 values [M, d], and store them; see `store_compressed`."""
    keys = rotate(rms_norm(keys, norm_weight, eps), table)
    _put(pool, blocks, offsets, encode_index_key(keys))


def _put(pool: Tensor, blocks: Tensor, offsets: Tensor, records: Tensor) -> None:
    stored = blocks >= 0
    if not bool(stored.all()):
        blocks, offsets, records = blocks[stored], offsets[stored], records[stored]
    pool[blocks, offsets] = records


def store_window(
    records: Sequence[Tensor], rings: Tensor, slots: Tensor, places: Tensor, keep: Tensor
) -> None:
    """rings[slots[r], l, places[r]] = records[l][r] for every layer l and every row r that is kept.

    Args:
        records: uint8 [R, record] by layer.
        rings: uint8 [num_slots, L, ring_size, record].
        slots, places: int64 [R]; no two kept rows may share a place.
        keep: bool [R].
    """
    (kept,) = keep.nonzero(as_tuple=True)
    slots, places = slots[kept], places[kept]
    for layer, rows in enumerate(records):
        rings[slots, layer, places] = rows[kept]


def store_pairs(pairs: Sequence[Tensor], pool: Tensor, slots: Tensor, keep: Tensor) -> None:
    """pool[slots[r], l] = pairs[l][r] for every owner l and every row r that is kept.

    Args:
        pairs: float32 [R, 2, d] by owner: kv and score of tokens that wait for their partners.
        pool: float32 [num_slots, L, 2, d].
        slots, keep: as for `store_window`.
    """
    (kept,) = keep.nonzero(as_tuple=True)
    slots = slots[kept]
    for owner, rows in enumerate(pairs):
        pool[slots, owner] = rows[kept]
