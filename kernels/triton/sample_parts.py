# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The pieces of the sampling kernel that work on a row's candidates: cuts, weights, noise, the draw.

Everything that is summed is an integer, so no sum depends on its order, and every search is for a
cut that exists once: neither the launch settings nor the order of the candidates can change a token.

A *key* is a logit as an int32 in the same order; `EMPTY` is below every key and stands for what can
never be chosen: outside the vocabulary, blocked, -inf, NaN. A *candidate* is an int64: the bits of
its logit above its token id.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 31))
LOWEST = tl.constexpr(-0x7F800000)  # the key of the lowest finite logit
HIGHEST = tl.constexpr(0x7F800000)  # the key of +inf

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # as in `kernels.reference.noise`
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIFORM_STEP = tl.constexpr(2.0**-52)
_MASS_SCALE = tl.constexpr(2.0**44)
_SHORT = tl.constexpr(13)  # 8192 masses of at most 2**31 stay below the bit
_COUNT_BIT = tl.constexpr(45)  # from which on their number is counted
_ONE = tl.constexpr(1 << 45)
_SUM_BITS = tl.constexpr((1 << 45) - 1)


@triton.jit
def lane_ids(zero, LANES: tl.constexpr):
    """0..LANES-1, in a way that hides from the compiler that they are consecutive.

    A thread would load four neighbours at once, and every scattered store of what it loaded would
    first go through shared memory to one a thread. The compiler gives all accesses of one shape
    one layout: other accesses should have another shape than [LANES].

    Args:
        zero: 0, unknown when the kernel is compiled.
    """
    return tl.arange(0, LANES) ^ zero


@triton.jit
def order_key(bits):
    bits = tl.where(bits == EMPTY, 0, bits)  # -0.0 and 0.0 are a tie
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(logits, ids):
    return (logits.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64)


@triton.jit
def candidate_keys(candidates):
    return order_key((candidates >> 32).to(tl.int32))


@triton.jit
def splitmix(start, number):
    """Output `number` of SplitMix64 started at `start`; both uint64."""
    z = start + (number + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def count_cut(keys, low, high, least, most):
    """The largest cut in low..high that at least `least` keys reach, or any that at most `most`
    reach as well. `low` is the answer when none does. int64, as are the bounds.

    A step counts at two points; the counts, below 2**15, share an integer.
    """
    while low < high:
        third = (high - low + 2) // 3
        near = low + third
        far = tl.minimum(near + third, high)
        meet = tl.where(keys >= near.to(tl.int32), 1, 0) + tl.where(
            keys >= far.to(tl.int32), 1 << 16, 0
        )
        both = tl.sum(meet, 0)
        at_near, at_far = both & 0xFFFF, both >> 16
        beyond = at_far >= least
        low = tl.where(beyond, far, tl.where(at_near >= least, near, low))
        count = tl.where(beyond, at_far, at_near)
        above = tl.where(beyond, high, tl.where(at_near >= least, far - 1, near - 1))
        high = tl.where((count >= least) & (count <= most), low, above)
    return low


@triton.jit
def mass_cut(keys, masses, count, low, high, needed):
    """A cut in low..high that is met by the fewest keys that weigh at least `needed`; `low` when
    all `count` do not. int64.

    A step sums how many meet the middle together with their masses, 13 bits shorter; where those
    do not decide, it sums the masses. One key between the bounds is the last one needed.
    """
    many = count
    few = tl.zeros((), tl.int32)
    while (low < high) & (many - few != 1):
        middle = low + (high - low + 1) // 2
        meet = keys >= middle.to(tl.int32)
        both = tl.sum(tl.where(meet, (masses >> _SHORT) + _ONE, 0), 0)
        met = (both >> _COUNT_BIT).to(tl.int32)
        least = (both & _SUM_BITS) << _SHORT
        if (least < needed) & (least + (met.to(tl.int64) << _SHORT) > needed):
            least = tl.sum(tl.where(meet, masses, 0), 0)
        enough = least >= needed
        low = tl.where(enough, middle, low)
        many = tl.where(enough, met, many)
        high = tl.where(enough, high, middle - 1)
        few = tl.where(enough, few, met)
    return low


@triton.jit
def last_tie(keys, candidates, cut, wanted, V: tl.constexpr):
    """The id up to which equals of the cut are kept, so that `wanted` of them are; V for all."""
    last = tl.full((), V, tl.int32)
    tied = keys == cut
    if tl.sum(tied.to(tl.int32), 0) > wanted:
        low = tl.zeros((), tl.int32)
        while low < last:
            middle = (low + last) // 2
            found = tl.sum((tied & (candidates.to(tl.int32) <= middle)).to(tl.int32), 0)
            last = tl.where(found >= wanted, middle, last)
            low = tl.where(found >= wanted, low, middle + 1)
    return last


@triton.jit
def best_cut(candidates_in, count, wanted, low, V: tl.constexpr, ROOM: tl.constexpr):
    """(cut, last id among its equals) that the `wanted` best of `count` candidates meet, and the
    largest key. `low`: a cut that all of them reach."""
    at = tl.arange(0, ROOM)
    inside = at < count
    candidates = tl.load(candidates_in + at, mask=inside, other=0)
    keys = tl.where(inside, candidate_keys(candidates), EMPTY)
    top_key = tl.max(keys, 0)
    cut = low.to(tl.int32)
    last = tl.full((), V, tl.int32)
    if count > wanted:
        cut = count_cut(keys, low, top_key.to(tl.int64), wanted, wanted).to(tl.int32)
        ties = wanted - tl.sum((keys > cut).to(tl.int32), 0)
        last = last_tie(keys, candidates, cut, ties, V)
    return cut, last, top_key


@triton.jit
def nucleus_cut(
    candidates_in, weights_in, count, top_key, top_p, V: tl.constexpr, TOP: tl.constexpr
):
    """(cut, last id among its equals) of top-p: the better ones of each that meets it weigh less
    than what is asked for."""
    at = tl.arange(0, TOP)
    inside = at < count
    candidates = tl.load(candidates_in + at, mask=inside, other=0)
    keys = tl.where(inside, candidate_keys(candidates), EMPTY)
    weights = tl.load(weights_in + at, mask=inside, other=0).to(tl.float64, bitcast=True)
    masses = (weights * _MASS_SCALE).to(tl.int64)
    needed = tl.ceil(top_p * tl.sum(masses, 0).to(tl.float64))
    needed = tl.maximum(needed, 1.0).to(tl.int64)
    lowest = tl.min(tl.where(inside, keys, top_key), 0).to(tl.int64)
    cut = mass_cut(keys, masses, count, lowest, top_key.to(tl.int64), needed).to(tl.int32)
    above = tl.sum(tl.where(keys > cut, masses, 0), 0)
    own = tl.max(tl.where(keys == cut, masses, 0), 0)
    # Equal logits weigh the same: so many of them are needed. Weightless ones never end a prefix,
    # and no key need equal the cut.
    ties = tl.minimum((needed - above + own - 1) // tl.maximum(own, 1), TOP)
    last = last_tie(keys, candidates, cut, tl.where(own > 0, ties, TOP).to(tl.int32), V)
    return cut, last


@triton.jit
def meets(candidates, keys, cut, last):
    return (keys > cut) | ((keys == cut) & (candidates.to(tl.int32) <= last))


@triton.jit
def weigh(
    candidates_in,
    count,
    cut,
    last,
    top_key,
    temperature,
    candidates_out,
    weights_out,
    zero,
    LANES: tl.constexpr,
):
    """Copy the candidates that meet the cut side by side, and write their weights:
    `exp((logit - max) / temperature)`, float64, as the int64 of their bits. Returns how many.

    A lane counts its own first: one scan over the lanes then gives every one its places.
    """
    lane = lane_ids(zero, LANES)
    hits = tl.zeros([LANES], tl.int32)
    for start in range(0, count, LANES):
        inside = start + lane < count
        candidates = tl.load(candidates_in + start + lane, mask=inside, other=0)
        take = meets(candidates, candidate_keys(candidates), cut, last) & inside
        hits += take.to(tl.int32)
    place = tl.cumsum(hits, 0) - hits
    maximum = key_logit(top_key).to(tl.float64)
    for start in range(0, count, LANES):
        inside = start + lane < count
        candidates = tl.load(candidates_in + start + lane, mask=inside, other=0)
        keys = candidate_keys(candidates)
        take = meets(candidates, keys, cut, last) & inside
        keys = tl.where(take, keys, top_key)
        weights = tl.exp((key_logit(keys).to(tl.float64) - maximum) / temperature)
        tl.store(candidates_out + place, candidates, mask=take)
        tl.store(weights_out + place, weights.to(tl.int64, bitcast=True), mask=take)
        place += take.to(tl.int32)
    return tl.sum(hits, 0)


@triton.jit
def draw(
    candidates_in,
    weights_in,
    count,
    cut,
    last,
    least_weight,
    row_key,
    zero,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id whose exponential clock rings first, among the candidates that meet the cut and weigh
    enough; the lower of equals."""
    best = tl.full([BLOCK], float("inf"), tl.float64)
    winner = tl.full([BLOCK], V, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + lane_ids(zero, BLOCK)
        inside = at < count
        candidates = tl.load(candidates_in + at, mask=inside, other=0)
        weights = tl.load(weights_in + at, mask=inside, other=0).to(tl.float64, bitcast=True)
        ids = candidates.to(tl.int32)
        rings = meets(candidates, candidate_keys(candidates), cut, last)
        rings &= (weights > 0) & (weights >= least_weight)  # weight 0 waits for ever
        word = splitmix(row_key, ids.to(tl.uint64)) >> 12
        noise = -tl.log((word.to(tl.int64).to(tl.float64) + 0.5) * _UNIFORM_STEP)
        time = tl.where(rings, noise / tl.where(rings, weights, 1.0), float("inf"))
        sooner = (time < best) | ((time == best) & (ids < winner))
        winner = tl.where(sooner & rings, ids, winner)
        best = tl.minimum(best, time)
    first = tl.min(best, 0)
    return tl.min(tl.where(best == first, winner, V), 0)
