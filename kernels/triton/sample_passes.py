# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The passes of the sampling kernel over a whole row of logits.

The usual row is read once, four tiles at a time, without a word between threads: each lane of a tile
keeps what reaches the pivot in slots of its own, and `gather_lanes` then moves them together.
"""

import triton
import triton.language as tl

from phalanx.kernels.triton.sample_parts import (
    EMPTY,
    LOWEST,
    count_cut,
    lane_ids,
    order_key,
    pack,
)

BROKEN = tl.constexpr(2)  # bits of what a pass saw: NaN or +inf,
FINITE = tl.constexpr(1)  # and anything above -inf
NO_LOGIT = tl.constexpr(-0x800000 << 32)  # a candidate of token 0 with a logit of -inf
_GROUP = tl.constexpr(8)  # neighbours in the sample of a row: one 32-byte sector


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
    return x, tl.where(usable, order_key(x.to(tl.int32, bitcast=True)), EMPTY)


@triton.jit
def pivot(
    logits,
    mask,
    ban,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SAMPLE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """A key that about the wanted number of the row's keys reach, guessed from a fixed sample."""
    spread: tl.constexpr = V // (SAMPLE // _GROUP) // _GROUP * _GROUP
    at = tl.arange(0, SAMPLE)
    _, keys = tile_keys(logits, mask, at // _GROUP * spread + at % _GROUP, ban, V, HAS_MASK)
    low = tl.full((), LOWEST, tl.int64)
    return count_cut(keys, low, tl.max(keys, 0).to(tl.int64), LEAST, MOST)


@triton.jit
def keep_in_lanes(
    x,
    ids,
    mask,
    least,
    places,
    highest,
    lanes_out,
    HAS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    take = x >= least
    if HAS_MASK:
        take &= tl.load(mask + ids, mask=take, other=0) != 0
    tl.store(lanes_out + places, pack(x, ids), mask=take & (places < SLOTS * LANES))
    places += tl.where(take, LANES, 0)
    return places, tl.maximum(highest, x, tl.PropagateNan.ALL)


@triton.jit
def load_tile(logits, start, lane, V: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(logits + start + lane, mask=start + lane < V, other=float("-inf"))
    else:
        x = tl.load(logits + start + lane, eviction_policy="evict_first")
    return x


@triton.jit
def turn(
    a,
    b,
    c,
    d,
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
    MASKED: tl.constexpr,
):
    """Look at the four tiles from `start` on, and load the next one in the place of each: three are
    always under way."""
    ids = start + lane
    places, highest = keep_in_lanes(
        a, ids, mask, least, places, highest, lanes_out, HAS_MASK, LANES, SLOTS
    )
    a = load_tile(logits, start + 4 * LANES, lane, V, MASKED)
    places, highest = keep_in_lanes(
        b, ids + LANES, mask, least, places, highest, lanes_out, HAS_MASK, LANES, SLOTS
    )
    b = load_tile(logits, start + 5 * LANES, lane, V, MASKED)
    places, highest = keep_in_lanes(
        c, ids + 2 * LANES, mask, least, places, highest, lanes_out, HAS_MASK, LANES, SLOTS
    )
    c = load_tile(logits, start + 6 * LANES, lane, V, MASKED)
    places, highest = keep_in_lanes(
        d, ids + 3 * LANES, mask, least, places, highest, lanes_out, HAS_MASK, LANES, SLOTS
    )
    d = load_tile(logits, start + 7 * LANES, lane, V, MASKED)
    return a, b, c, d, places, highest


@triton.jit
def fill_lanes(
    logits,
    mask,
    least,
    lanes_out,
    zero,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Copy the candidates whose logit is at least `least` to the slots of their lanes.

    Returns:
        (bits seen, int32 [LANES]: how many a lane met; only the first SLOTS are copied).
    """
    whole: tl.constexpr = V // (4 * LANES) * (4 * LANES)
    lane = lane_ids(zero, LANES)
    places = lane
    highest = tl.full([LANES], float("-inf"), tl.float32)
    a = load_tile(logits, 0, lane, V, whole == 0)
    b = load_tile(logits, LANES, lane, V, whole == 0)
    c = load_tile(logits, 2 * LANES, lane, V, whole == 0)
    d = load_tile(logits, 3 * LANES, lane, V, whole == 0)
    for start in range(0, whole - 4 * LANES, 4 * LANES):
        a, b, c, d, places, highest = turn(
            a, b, c, d, start, logits, lane, mask, least, places, highest, lanes_out,
            V, HAS_MASK, LANES, SLOTS, False,
        )  # fmt: skip
    last: tl.constexpr = max(whole - 4 * LANES, 0)
    for start in range(last, V, 4 * LANES):
        a, b, c, d, places, highest = turn(
            a, b, c, d, start, logits, lane, mask, least, places, highest, lanes_out,
            V, HAS_MASK, LANES, SLOTS, True,
        )  # fmt: skip
    return seen_bits(highest), (places - lane) // LANES


@triton.jit
def banned_hit(logits, mask, ban, least, V: tl.constexpr, HAS_MASK: tl.constexpr):
    """1 if the banned id is among the candidates in the lanes, else 0."""
    inside = (ban >= 0) & (ban < V)
    hit = tl.load(logits + ban, mask=inside, other=float("-inf")) >= least
    if HAS_MASK:
        hit &= tl.load(mask + ban, mask=inside, other=0) != 0
    return (hit & inside).to(tl.int32)


@triton.jit
def gather_lanes(lanes_in, hits, ban, candidates_out, zero, LANES: tl.constexpr):
    """Copy the candidates of all lanes side by side; the banned one with a logit of -inf."""
    place = tl.cumsum(hits, 0) - hits
    lane = lane_ids(zero, LANES)
    for slot in range(0, tl.max(hits, 0), 4):
        here, there = lanes_in + slot * LANES + lane, candidates_out + place + slot
        a = tl.load(here, mask=slot < hits, other=0)
        b = tl.load(here + LANES, mask=slot + 1 < hits, other=0)
        c = tl.load(here + 2 * LANES, mask=slot + 2 < hits, other=0)
        d = tl.load(here + 3 * LANES, mask=slot + 3 < hits, other=0)
        dead = NO_LOGIT | ban.to(tl.int64)
        tl.store(there, tl.where(a.to(tl.int32) == ban, dead, a), mask=slot < hits)
        tl.store(there + 1, tl.where(b.to(tl.int32) == ban, dead, b), mask=slot + 1 < hits)
        tl.store(there + 2, tl.where(c.to(tl.int32) == ban, dead, c), mask=slot + 2 < hits)
        tl.store(there + 3, tl.where(d.to(tl.int32) == ban, dead, d), mask=slot + 3 < hits)


@triton.jit
def better(x, offs, mask, ban, best, winner, highest, HAS_MASK: tl.constexpr):
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
        best, winner, highest = better(a, ids, mask, ban, best, winner, highest, HAS_MASK)
        best, winner, highest = better(b, ids + TILE, mask, ban, best, winner, highest, HAS_MASK)
    first = tl.max(best, 0)
    return seen_bits(highest), tl.min(tl.where(best == first, winner, V), 0)


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
    """Copy the candidates above the cut, and the first `ties` of those that equal it; returns how
    many. A scan a tile: slower than lanes, but without a limit to what one lane may meet."""
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
