# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The pieces of the sampling kernel: order keys, cuts found by bisection, noise, compaction.

Everything that is summed is an integer, so no sum depends on its order, and every search is for a
cut that exists once: the settings of a launch can change no token.

A *key* is a logit as an int32 in the same order; `EMPTY` is below every key and stands for what can
never be chosen: outside the vocabulary, blocked, -inf, NaN.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 31))
LOWEST = tl.constexpr(-0x7F800000)  # the key of the lowest finite logit
HIGHEST = tl.constexpr(0x7F800000)  # the key of +inf
BROKEN = tl.constexpr(2)  # bits of what the pass over a row saw: NaN or +inf,
FINITE = tl.constexpr(1)  # and anything above -inf

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # as in `kernels.reference.noise`
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIFORM_STEP = tl.constexpr(2.0**-52)
_MASS_SCALE = tl.constexpr(2.0**44)
_GROUP = tl.constexpr(8)  # neighbours in the sample of a row: one 32-byte sector


@triton.jit
def key_value(key):
    """The float64 of a key's logit."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def splitmix(start, number):
    """Output `number` of SplitMix64 started at `start`; both uint64."""
    z = start + (number + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def exponential(row_key, ids):
    word = splitmix(row_key, ids.to(tl.uint64)) >> 12
    return -tl.log((word.to(tl.int64).to(tl.float64) + 0.5) * _UNIFORM_STEP)


@triton.jit
def tile(logits, mask, offs, ban, V: tl.constexpr, HAS_MASK: tl.constexpr):
    """(logits, keys) at `offs`."""
    inside = offs < V
    x = tl.load(logits + offs, mask=inside, other=float("-inf"))
    usable = (x > float("-inf")) & (offs != ban)
    if HAS_MASK:
        usable &= tl.load(mask + offs, mask=inside, other=0) != 0
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))  # -0.0 and 0.0 are a tie
    return x, tl.where(usable, bits ^ ((bits >> 31) & 0x7FFFFFFF), EMPTY)


@triton.jit
def screen(x):
    return tl.where(x < float("inf"), 0, BROKEN) | tl.where(x > float("-inf"), FINITE, 0)


@triton.jit
def any_bits(seen):
    return tl.max(seen & BROKEN, 0) | tl.max(seen & FINITE, 0)


@triton.jit
def count_cut(keys, low, high, least, most):
    """The largest cut in low..high that at least `least` keys reach, or any that at most `most`
    reach as well. `low` is the answer when none does. int64, as are the bounds."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = count >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough, tl.where(count <= most, middle, high), middle - 1)
    return low


@triton.jit
def mass_cut(keys, masses, low, high, needed):
    """The largest cut in low..high such that the keys that reach it weigh at least `needed`;
    `low` when none does. int64."""
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), masses, 0), 0) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def above_or_tied(keys, cut, ties):
    """Which keys are above the cut, or among the first `ties` that equal it."""
    tied = keys == cut
    rank = tl.cumsum(tied.to(tl.int32), 0)
    return (keys > cut) | (tied & (rank <= ties))


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
    _, keys = tile(logits, mask, at // _GROUP * spread + at % _GROUP, ban, V, HAS_MASK)
    low = tl.full((), LOWEST, tl.int64)
    return count_cut(keys, low, tl.max(keys, 0).to(tl.int64), LEAST, MOST)


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
    BLOCK: tl.constexpr,
):
    """The largest cut in low..high that `wanted` keys of the whole row reach, and how many are
    above it. A pass over the row for each bit: only for rows where the sample misled."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count = row_count(logits, mask, ban, middle, V, HAS_MASK, BLOCK)
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, tl.where(count == wanted, middle, high), middle - 1)
    return low, row_count(logits, mask, ban, low + 1, V, HAS_MASK, BLOCK)


@triton.jit
def row_count(logits, mask, ban, cut, V: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys of the row reach the cut."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        _, keys = tile(logits, mask, start + tl.arange(0, BLOCK), ban, V, HAS_MASK)
        count += (keys >= cut.to(tl.int32)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def greedy_pass(
    logits,
    mask,
    ban,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(bits seen, the lowest id that has the largest key; V when nothing is usable)."""
    seen = tl.zeros([BLOCK], tl.int32)
    best = tl.full([BLOCK], EMPTY, tl.int32)
    ids = tl.full([BLOCK], V, tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        x, keys = tile(logits, mask, offs, ban, V, HAS_MASK)
        seen |= screen(x)
        ids = tl.where(keys > best, offs, ids)
        best = tl.maximum(best, keys)
    top = tl.max(best, 0)
    return any_bits(seen), tl.min(tl.where(best == top, ids, V), 0)


@triton.jit
def collect(
    logits,
    mask,
    ban,
    cut,
    ties,
    keys_out,
    ids_out,
    V: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ROOM: tl.constexpr,
    SOME_TIES: tl.constexpr,
):
    """Copy (key, id) of what reaches the cut, in ascending id; with SOME_TIES only the first `ties`
    of those that equal it.

    Returns:
        (bits seen, how many reach it: those past ROOM are counted, not copied).
    """
    seen = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros((), tl.int32)
    tied = tl.zeros((), tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        x, keys = tile(logits, mask, offs, ban, V, HAS_MASK)
        seen |= screen(x)
        if SOME_TIES:
            take = above_or_tied(keys, cut, ties - tied)
            tied += tl.sum((keys == cut).to(tl.int32), 0)
        else:
            take = keys >= cut
        slot = count + tl.cumsum(take.to(tl.int32), 0) - 1
        stored = take & (slot < ROOM)
        tl.store(keys_out + slot, keys, mask=stored)
        tl.store(ids_out + slot, offs, mask=stored)
        count += tl.sum(take.to(tl.int32), 0)
    return any_bits(seen), count


@triton.jit
def trim(
    keys_in,
    ids_in,
    count,
    cut,
    ties,
    keys_out,
    ids_out,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the (key, id) above the cut and the first `ties` that equal it, in their order."""
    taken = tl.zeros((), tl.int32)
    tied = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        keys = tl.load(keys_in + at, mask=inside, other=EMPTY)
        ids = tl.load(ids_in + at, mask=inside, other=0)
        take = above_or_tied(keys, cut, ties - tied)
        slot = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(keys_out + slot, keys, mask=take)
        tl.store(ids_out + slot, ids, mask=take)
        tied += tl.sum((keys == cut).to(tl.int32), 0)
        taken += tl.sum(take.to(tl.int32), 0)


@triton.jit
def weigh(keys_in, count, top_key, temperature, weights_out, BLOCK: tl.constexpr):
    """Write the weights of `count` keys: `exp((logit - max) / temperature)`, float64."""
    maximum = key_value(top_key)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        keys = tl.load(keys_in + at, mask=inside, other=top_key)
        tl.store(weights_out + at, tl.exp((key_value(keys) - maximum) / temperature), mask=inside)


@triton.jit
def nucleus(keys, masses, inside, top_key, top_p):
    """Which keys top-p keeps: those whose better ones weigh less than it asks for."""
    whole = tl.sum(masses, 0)
    needed = tl.maximum(tl.ceil(top_p * whole.to(tl.float64)), 1.0).to(tl.int64)
    lowest = tl.min(tl.where(inside, keys, top_key), 0)
    cut = mass_cut(keys, masses, lowest.to(tl.int64), top_key.to(tl.int64), needed).to(tl.int32)
    above = tl.sum(tl.where(keys > cut, masses, 0), 0)
    own = tl.max(tl.where(keys == cut, masses, 0), 0)
    # Equal logits weigh the same: so many of them are needed. Weightless ones never end a prefix.
    ties = (needed - above + own - 1) // tl.maximum(own, 1)
    everything = keys.shape[0]
    return above_or_tied(keys, cut, tl.where(own > 0, tl.minimum(ties, everything), everything))


@triton.jit
def filtered(
    keys_in,
    weights_in,
    count,
    top_key,
    top_p,
    min_p,
    places_out,
    TOP: tl.constexpr,
):
    """Write the places, among `count`, that top-p and then min-p keep; returns how many."""
    at = tl.arange(0, TOP)
    inside = at < count
    weights = tl.load(weights_in + at, mask=inside, other=0.0)
    keep = inside
    if min_p > 0:
        keep &= weights >= tl.minimum(min_p, 1.0)
    if top_p < 1:
        keys = tl.load(keys_in + at, mask=inside, other=EMPTY)
        keep &= nucleus(keys, (weights * _MASS_SCALE).to(tl.int64), inside, top_key, top_p)
    slot = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(places_out + slot, at, mask=keep)
    return tl.sum(keep.to(tl.int32), 0)


@triton.jit
def draw(
    ids_in,
    weights_in,
    places_in,
    chosen,
    count,
    row_key,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id whose exponential clock rings first, the lower of equals, among the `count` places
    listed (`chosen`), or the first `count`."""
    best = tl.full([BLOCK], float("inf"), tl.float64)
    winner = tl.full([BLOCK], V, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        at = tl.where(chosen > 0, tl.load(places_in + at, mask=inside & (chosen > 0), other=0), at)
        ids = tl.load(ids_in + at, mask=inside, other=0)
        weights = tl.load(weights_in + at, mask=inside, other=0.0)
        rings = weights > 0  # weight 0 waits for ever
        time = exponential(row_key, ids) / tl.where(rings, weights, 1.0)
        time = tl.where(rings, time, float("inf"))
        winner = tl.where(time < best, ids, winner)
        best = tl.minimum(best, time)
    first = tl.min(best, 0)
    return tl.min(tl.where(best == first, winner, V), 0)
