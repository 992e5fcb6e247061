# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
"""The passes of the sampling kernel over a whole row of logits.

The usual row is read once. Lane i of a program, which is one thread, meets every LANES-th logit, and
copies what reaches the pivot to slots of its own: candidate s of lane i lies at s * LANES + i of the
work space. Lanes exchange nothing.
"""

import triton
import triton.language as tl

from phalanx.kernels.triton.sample_parts import (
    EMPTY,
    LOWEST_LOGIT,
    lane_cut,
    logit_key,
    pack,
)

BROKEN = tl.constexpr(2)  # bits of what a pass saw: NaN or +inf,
FINITE = tl.constexpr(1)  # and anything above -inf
_NEIGHBOURS = tl.constexpr(8)  # in the sample of a row: one 32-byte sector


@triton.jit
def seen_bits(highest):
    """What the running maxima of the lanes, in which NaN stays, say about the row."""
    broken = tl.max(tl.where(highest < float("inf"), 0, BROKEN), 0)
    return broken | tl.max(tl.where(highest > float("-inf"), FINITE, 0), 0)


@triton.jit
def tile_keys(logits, mask, offs, ban, V: tl.constexpr, HAS_MASK: tl.constexpr):
    """(logits, keys) at `offs`."""
    inside = offs < V
    x = tl.load(logits + offs, mask=inside, other=float("-inf"))
    usable = (x > float("-inf")) & (offs != ban)
    if HAS_MASK:
        usable &= tl.load(mask + offs, mask=inside, other=0) != 0
    return x, tl.where(usable, logit_key(x), EMPTY)


@triton.jit
def pivot(
    logits,
    mask,
    ban,
    wanted,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(logit that somewhat more than `wanted` of the row's usable ones reach, guessed from a fixed
    sample; the largest of the sample, or 0)

    So many of a sample of n reach a cut that `wanted` of the row do, or one more in n: with 4.3
    standard deviations to spare. A lane looks at GROUP logits and keeps the largest: how many lanes
    reach a cut tells almost as well how many logits do.
    """
    SAMPLE: tl.constexpr = LANES * GROUP
    spread: tl.constexpr = V // (SAMPLE // _NEIGHBOURS) // _NEIGHBOURS * _NEIGHBOURS
    best = tl.full([LANES], float("-inf"), tl.float32)
    for part in tl.static_range(GROUP):
        at = part * LANES + tl.arange(0, LANES)
        offs = at // _NEIGHBOURS * spread + at % _NEIGHBOURS
        x = tl.load(logits + offs)
        usable = (x < float("inf")) & (offs != ban)
        if HAS_MASK:
            usable &= tl.load(mask + offs) != 0
        best = tl.maximum(best, tl.where(usable, x, float("-inf")))
    root = 2.15 + tl.sqrt(4.63 + wanted.to(tl.float32) * (SAMPLE / V))
    share = tl.minimum(root * root / SAMPLE, 0.9)  # of the row's logits
    least = (LANES * (1.0 - tl.exp(GROUP * tl.log(1.0 - share)))).to(tl.int32) + 1
    low = tl.maximum(tl.min(best, 0), LOWEST_LOGIT)
    top = tl.max(best, 0)
    cut = lane_cut(best, low, tl.maximum(top, low), least, least + least // 32)
    return cut, tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def load_tile(logits, start, lane, V: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(logits + start + lane, mask=start + lane < V, other=float("-inf"))
    else:
        x = tl.load(logits + start + lane, eviction_policy="evict_first")
    return x


@triton.jit
def turn(
    tiles,
    start,
    logits,
    lane,
    mask,
    least,
    places,
    highest,
    lanes_out,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Look at the DEPTH tiles from `start` on, and load the next one in the place of each."""
    next_tiles = ()
    room = places < (SLOTS - DEPTH) * LANES
    for i in tl.static_range(DEPTH):
        x = tiles[i]
        ids = start + i * LANES + lane
        take = (x < least) == 0  # and NaN, for the row to be found broken
        if HAS_MASK:
            take &= tl.load(mask + ids, mask=take, other=0) != 0
            highest = tl.maximum(highest, x, tl.PropagateNan.ALL)
        tl.store(lanes_out + places, pack(x, ids), mask=take & room, eviction_policy="evict_last")
        places += tl.where(take, LANES, 0)
        next_tiles = next_tiles + (
            load_tile(logits, start + (DEPTH + i) * LANES, lane, V, MASKED),
        )  # fmt: skip
    return next_tiles, places, highest


@triton.jit
def fill_lanes(
    logits,
    mask,
    least,
    lanes_out,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Copy the candidates whose logit is at least `least`, or NaN, to the slots of their lanes.

    Two turns to a step of the loop: then tiles change registers without a copy, which would wait for
    the loads.

    Returns:
        (bits seen, where a mask hides logits; int32 [LANES]: how many a lane met, of which the first
        SLOTS - DEPTH are copied for sure).
    """
    STEP: tl.constexpr = DEPTH * LANES
    paired: tl.constexpr = max(V // STEP - 1, 0) // 2 * (2 * STEP)
    lane = tl.arange(0, LANES)
    places = lane
    highest = tl.full([LANES], float("-inf"), tl.float32)
    tiles = ()
    for i in tl.static_range(DEPTH):
        tiles = tiles + (load_tile(logits, i * LANES, lane, V, V < STEP),)
    for start in range(0, paired, 2 * STEP):
        tiles, places, highest = turn(
            tiles, start, logits, lane, mask, least, places, highest, lanes_out,
            V, HAS_MASK, LANES, SLOTS, DEPTH, False,
        )  # fmt: skip
        tiles, places, highest = turn(
            tiles, start + STEP, logits, lane, mask, least, places, highest, lanes_out,
            V, HAS_MASK, LANES, SLOTS, DEPTH, False,
        )  # fmt: skip
    for start in range(paired, V, STEP):
        tiles, places, highest = turn(
            tiles, start, logits, lane, mask, least, places, highest, lanes_out,
            V, HAS_MASK, LANES, SLOTS, DEPTH, True,
        )  # fmt: skip
    return seen_bits(highest), (places - lane) // LANES


@triton.jit
def larger(x, offs, mask, ban, best, winner, highest, HAS_MASK: tl.constexpr):
    take = (x > best) & (offs != ban)
    if HAS_MASK:
        take &= tl.load(mask + offs, mask=take, other=0) != 0
    best = tl.where(take, x, best)
    return best, tl.where(take, offs, winner), tl.maximum(highest, x, tl.PropagateNan.ALL)


@triton.jit
def largest(logits, mask, ban, V: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr):
    """(bits seen, the lowest id that has the largest logit; V when nothing is usable)."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    best = tl.full([TILE], float("-inf"), tl.float32)
    winner = tl.full([TILE], V, tl.int32)
    rest: tl.constexpr = float("-inf")
    for start in range(0, V, 2 * TILE):
        here = logits + start
        at = tl.arange(0, TILE)
        ids = start + at
        a = tl.load(here + at, mask=ids < V, other=rest, eviction_policy="evict_first")
        b = tl.load(
            here + at + TILE, mask=ids + TILE < V, other=rest, eviction_policy="evict_first"
        )
        best, winner, highest = larger(a, ids, mask, ban, best, winner, highest, HAS_MASK)
        best, winner, highest = larger(b, ids + TILE, mask, ban, best, winner, highest, HAS_MASK)
    first = tl.max(best, 0)
    return seen_bits(highest), tl.min(tl.where(best == first, winner, V), 0)


@triton.jit
def row_seen(logits, V: tl.constexpr, TILE: tl.constexpr):
    """Bits seen in the whole row."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, V, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + at, mask=at < V, other=float("-inf"))
        highest = tl.maximum(highest, x, tl.PropagateNan.ALL)
    return seen_bits(highest)


@triton.jit
def row_count(logits, mask, ban, cut, V: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr):
    """How many keys of the row reach the cut."""
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, V, TILE):
        _, keys = tile_keys(logits, mask, start + tl.arange(0, TILE), ban, V, HAS_MASK)
        count += (keys >= cut.to(tl.int32)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def row_cut(
    logits,
    mask,
    ban,
    low,
    high,
    wanted,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest cut in low..high that `wanted` keys of the whole row reach, and how many are
    above it. A pass over the row for each bit: only for rows where the sample misled."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count = row_count(logits, mask, ban, middle, V, HAS_MASK, TILE)
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, tl.where(count == wanted, middle, high), middle - 1)
    return low, row_count(logits, mask, ban, low + 1, V, HAS_MASK, TILE)


@triton.jit
def collect(
    logits,
    mask,
    ban,
    cut,
    ties,
    candidates_out,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy the candidates above the cut, and the first `ties` of those that equal it, side by side;
    returns how many. A scan a tile: slower than lanes, but without a limit to what one may meet."""
    count = tl.zeros((), tl.int32)
    tied = tl.zeros((), tl.int32)
    for start in range(0, V, TILE):
        offs = start + tl.arange(0, TILE)
        x, keys = tile_keys(logits, mask, offs, ban, V, HAS_MASK)
        equal = (keys == cut).to(tl.int32)
        take = (keys > cut) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= ties))
        place = count + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(candidates_out + place, pack(x, offs), mask=take)
        tied += tl.sum(equal, 0)
        count += tl.sum(take.to(tl.int32), 0)
    return count
