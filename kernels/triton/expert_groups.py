"""Pairs brought together by slot: which pairs each tile of an expert kernel multiplies."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # pairs looked at together
_FEW = 128  # pairs compared each with each


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_tiles"])
def _group_kernel(
    slot_ids_ptr,
    order_ptr,
    next_ptr,
    tiles_ptr,
    num_pairs,
    num_slots,
    num_tiles,
    HEIGHT: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    lane = tl.arange(0, CHUNK)
    slot = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        mask = start + lane < num_pairs
        ids = tl.load(slot_ids_ptr + start + lane, mask=mask, other=-1).to(tl.int32)
        ids = tl.where((ids >= 0) & (ids < num_slots), ids, num_slots)
        # Lanes without a pair go to the last bin, which no slot has, and are not looked at again.
        counts += tl.histogram(tl.where(mask, ids, BINS - 1), BINS)
    counts = tl.where(slot <= num_slots, counts, 0)
    first = tl.cumsum(counts, 0) - counts
    tl.store(next_ptr + slot, first)

    tiles = (counts + HEIGHT - 1) // HEIGHT
    tile = tl.cumsum(tiles, 0) - tiles
    for i in range(tl.max(tiles, 0)):
        mask = i < tiles
        entry = tiles_ptr + 3 * (tile + i)
        tl.store(entry, tl.where(slot < num_slots, slot, -1), mask=mask)
        tl.store(entry + 1, first + i * HEIGHT, mask=mask)
        tl.store(entry + 2, tl.minimum(counts - i * HEIGHT, HEIGHT), mask=mask)
    used = tl.sum(tiles, 0)
    for start in range(0, num_tiles, CHUNK):
        rest = start + lane
        mask = (rest >= used) & (rest < num_tiles)
        tl.store(tiles_ptr + 3 * rest + 2, tl.zeros((CHUNK,), tl.int32), mask=mask)

    tl.debug_barrier()  # `next` is written
    for start in range(0, num_pairs, CHUNK):
        mask = start + lane < num_pairs
        ids = tl.load(slot_ids_ptr + start + lane, mask=mask, other=-1).to(tl.int32)
        ids = tl.where((ids >= 0) & (ids < num_slots), ids, num_slots)
        place = tl.atomic_add(next_ptr + ids, 1, mask=mask)
        tl.store(order_ptr + place, start + lane, mask=mask)


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
    """Sort pairs by slot and cut each slot's pairs into tiles, in one launch of one program.

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
    bins = triton.next_power_of_2(num_slots + 2)
    count = num_tiles(num_pairs, num_slots, height)
    order, following, tiles = (
        torch.empty(shape, dtype=torch.int32, device=slot_ids.device)
        for shape in ((num_pairs,), (bins,), (count, 3))
    )
    padded = max(32, triton.next_power_of_2(num_pairs))
    numbers = num_pairs, num_slots, count
    if num_pairs <= _FEW:
        _group_few_kernel[(1,)](
            slot_ids, order, tiles, *numbers, HEIGHT=height, PAIRS=padded, num_warps=padded // 16
        )
    else:
        _group_kernel[(1,)](
            slot_ids,
            order,
            following,
            tiles,
            *numbers,
            HEIGHT=height,
            BINS=bins,
            CHUNK=min(_CHUNK, padded),
            num_warps=8,
        )
    return order, tiles
