"""Pairs brought together by slot: which pairs each tile of an expert kernel multiplies."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW: Final = 128  # pairs compared each with each
_ONE: Final = 8192  # pairs that one program brings together
_CHUNK: Final = 1024  # pairs of one of several programs


@triton.jit
def _ids(slot_ids_ptr, pair, num_pairs, num_slots):
    """Slots of pairs; num_slots stands for none."""
    ids = tl.load(slot_ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    return tl.where((ids >= 0) & (ids < num_slots), ids, num_slots)


@triton.jit
def _cut(
    counts_ptr, first_ptr, tiles_ptr, num_slots, num_tiles, HEIGHT: tl.constexpr, BINS: tl.constexpr
):
    """From the pairs of each slot to where its first pair comes, and to tiles."""
    slot = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + slot, mask=slot <= num_slots, other=0)
    first = tl.cumsum(counts, 0) - counts
    tl.store(first_ptr + slot, first)
    tiles = (counts + HEIGHT - 1) // HEIGHT
    tile = tl.cumsum(tiles, 0) - tiles
    for i in range(tl.max(tiles, 0)):
        mask = i < tiles
        entry = tiles_ptr + 3 * (tile + i)
        tl.store(entry, tl.where(slot < num_slots, slot, -1), mask=mask)
        tl.store(entry + 1, first + i * HEIGHT, mask=mask)
        tl.store(entry + 2, tl.minimum(counts - i * HEIGHT, HEIGHT), mask=mask)
    for start in range(tl.sum(tiles, 0), num_tiles, BINS):
        mask = start + slot < num_tiles
        tl.store(tiles_ptr + 3 * (start + slot) + 2, tl.zeros((BINS,), tl.int32), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_tiles"])
def _group_kernel(
    slot_ids_ptr,
    order_ptr,
    counts_ptr,
    first_ptr,
    tiles_ptr,
    num_pairs,
    num_slots,
    num_tiles,
    HEIGHT: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    ids = _ids(slot_ids_ptr, pair, num_pairs, num_slots)
    tl.store(counts_ptr + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    tl.debug_barrier()
    rank = tl.atomic_add(counts_ptr + ids, 1, mask=pair < num_pairs)
    tl.debug_barrier()
    _cut(counts_ptr, first_ptr, tiles_ptr, num_slots, num_tiles, HEIGHT, BINS)
    tl.debug_barrier()
    place = tl.load(first_ptr + ids) + rank
    tl.store(order_ptr + place, pair, mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _rank_kernel(slot_ids_ptr, ranks_ptr, counts_ptr, num_pairs, num_slots, CHUNK: tl.constexpr):
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = _ids(slot_ids_ptr, pair, num_pairs, num_slots)
    rank = tl.atomic_add(counts_ptr + ids, 1, mask=pair < num_pairs)
    tl.store(ranks_ptr + pair, rank, mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _cut_kernel(
    counts_ptr, first_ptr, tiles_ptr, num_slots, num_tiles, HEIGHT: tl.constexpr, BINS: tl.constexpr
):
    _cut(counts_ptr, first_ptr, tiles_ptr, num_slots, num_tiles, HEIGHT, BINS)


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _place_kernel(
    slot_ids_ptr, ranks_ptr, first_ptr, order_ptr, num_pairs, num_slots, CHUNK: tl.constexpr
):
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = _ids(slot_ids_ptr, pair, num_pairs, num_slots)
    place = tl.load(first_ptr + ids) + tl.load(ranks_ptr + pair, mask=pair < num_pairs, other=0)
    tl.store(order_ptr + place, pair, mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_tiles"])
def _group_few_kernel(
    slot_ids_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_slots,
    num_tiles,
    HEIGHT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    valid = pair < num_pairs
    ids = tl.load(slot_ids_ptr + pair, mask=valid, other=-1).to(tl.int32)
    ids = tl.where((ids >= 0) & (ids < num_slots), ids, num_slots)
    ids = tl.where(valid, ids, num_slots + 1)  # behind all others
    same = ids[:, None] == ids[None, :]  # [other, pair]
    lower = ids[:, None] < ids[None, :]
    rank = tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), 0)
    count = tl.sum(same.to(tl.int32), 0)
    first = tl.sum(lower.to(tl.int32), 0)
    tl.store(order_ptr + first + rank, pair, mask=valid)

    opens = (rank % HEIGHT == 0) & valid  # the first pair of a tile
    before = tl.sum((lower & opens[:, None]).to(tl.int32), 0)
    entry = tiles_ptr + 3 * (before + rank // HEIGHT)
    tl.store(entry, tl.where(ids < num_slots, ids, -1), mask=opens)
    tl.store(entry + 1, first + rank, mask=opens)
    tl.store(entry + 2, tl.minimum(count - rank, HEIGHT), mask=opens)
    unused = (pair >= tl.sum(opens.to(tl.int32), 0)) & (pair < num_tiles)
    tl.store(tiles_ptr + 3 * pair + 2, tl.zeros((PAIRS,), tl.int32), mask=unused)


def num_tiles(num_pairs: int, num_slots: int, height: int) -> int:
    """No grouping of so many pairs has more tiles; pairs without a slot have tiles of their own."""
    groups = min(num_pairs, num_slots + 1)
    return (num_pairs + groups * (height - 1)) // height


def group_pairs(slot_ids: Tensor, num_slots: int, height: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by slot and cut each slot's pairs into tiles.

    One launch of one program; for more than 8,192 pairs three launches.

    Args:
        slot_ids: int32 or int64 [P], contiguous. Others than 0..num_slots - 1 mean "no slot".
        height: pairs of a tile.

    Returns:
        The pairs in order of their slots, int32 [P] (of many pairs those within a slot come in any
        order, another one each time), and the tiles,
        int32 [num_tiles(...), 3]: the slot, or -1 for pairs without one; the first place in the
        order; and the number of pairs, 0 for tiles that are not needed.
    """
    num_pairs = slot_ids.shape[0]
    bins = triton.next_power_of_2(num_slots + 1)
    count = num_tiles(num_pairs, num_slots, height)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=slot_ids.device)

    order, tiles = empty(num_pairs), empty(count, 3)
    padded = max(32, triton.next_power_of_2(num_pairs))
    numbers = num_pairs, num_slots, count
    if num_pairs <= _FEW:
        _group_few_kernel[(1,)](
            slot_ids, order, tiles, *numbers, HEIGHT=height, PAIRS=padded, num_warps=padded // 16
        )
    elif num_pairs <= _ONE:
        counts, first = empty(2, bins)
        _group_kernel[(1,)](
            slot_ids, order, counts, first, tiles, *numbers,
            HEIGHT=height, BINS=bins, PAIRS=padded, num_warps=16 if padded > 2048 else 8,
        )  # fmt: skip
    else:
        ranks, first = empty(num_pairs), empty(bins)
        counts = torch.zeros(bins, dtype=torch.int32, device=slot_ids.device)
        grid = (triton.cdiv(num_pairs, _CHUNK),)
        which = num_pairs, num_slots
        _rank_kernel[grid](slot_ids, ranks, counts, *which, CHUNK=_CHUNK)
        _cut_kernel[(1,)](
            counts, first, tiles, num_slots, count, HEIGHT=height, BINS=bins, num_warps=8
        )
        _place_kernel[grid](slot_ids, ranks, first, order, *which, CHUNK=_CHUNK)
    return order, tiles
