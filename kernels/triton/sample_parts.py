# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The pieces of the sampling kernel: keys, candidates, noise, and scores in two precisions.

A *key* is a logit as an int32 in the same order; `EMPTY` is below every key and stands for what can
never be chosen: outside the vocabulary, blocked, -inf, NaN. A *candidate* is an int64: the bits of
its logit above its token id.

Weights, masses and noise as the reference has them are float64, which a GPU computes some twenty
times slower than float32. So candidates are first scored in float32, within a known error, and only
what that error leaves open is computed again: `NEAR` and `SLACK` say how far apart two numbers must
be for float32 to tell which is larger.
"""

import triton
import triton.language as tl

from phalanx.kernels.triton.formats import EMULATED

EMPTY = tl.constexpr(-(1 << 31))
LOWEST = tl.constexpr(-0x7F800000)  # the key of the lowest finite logit
LOWEST_LOGIT = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(0x7F800000)  # the key of +inf
NO_LOGIT = tl.constexpr(-0x800000 << 32)  # a candidate of token 0 with a logit of -inf

# A score is (logit - origin) / temperature - log(noise). That of the largest logit is at most 3.7 less
# than without noise, so the first term of the best is at most 41 less: four roundings of it come to
# 1e-5, and the logarithm of noise is 1.4e-5 off at most. Twice that, for two scores, is half of:
NEAR = tl.constexpr(1e-4)
NEAR_OFF = tl.constexpr(
    1e-6
)  # and this for each unit that the origin's exponent is off the largest
# Of a sum of weights, relative: 1e-5, by roundings of the exponents (to 2e-7 of each) and of the sum.
SLACK = tl.constexpr(4e-5)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # as in `kernels.reference.noise`
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIFORM_STEP = tl.constexpr(2.0**-52)
_ALL_52 = tl.constexpr((1 << 52) - 1)
_MASS_SCALE = tl.constexpr(2.0**44)
_LN_2 = tl.constexpr(0.6931471805599453)
ID_BITS = tl.constexpr(18)
_ID_MASK = tl.constexpr((1 << 18) - 1)
_ONE_NEAR = tl.constexpr(1 << 50)  # above a logit and an id


@triton.jit
def order_key(bits):
    bits = tl.where(bits == EMPTY, 0, bits)  # -0.0 and 0.0 are a tie
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_key(logit):
    return order_key(logit.to(tl.int32, bitcast=True))


@triton.jit
def key_logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(logits, ids):
    return (logits.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64)


@triton.jit
def unpack(candidates):
    """(logits, ids)"""
    return (candidates >> 32).to(tl.int32).to(tl.float32, bitcast=True), candidates.to(tl.int32)


@triton.jit
def better(logits, ids, logit, token):
    """Which come before `token` in the order of all: by logit, ties by lower id."""
    return (logits > logit) | ((logits == logit) & (ids < token))


@triton.jit
def splitmix(start, number):
    """Output `number` of SplitMix64 started at `start`; both uint64."""
    z = start + (number + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def reach(logits, cut, PLACE: tl.constexpr):
    """1 for each that reaches the cut, in field PLACE of an int64; see `lane_cut`."""
    return tl.where(logits >= cut, 1 << (11 * PLACE), 0).to(tl.int64)


@triton.jit
def lane_cut(logits, low, top, least, most):
    """The largest cut in low..top that at least `least` of the lanes reach, or any that at most `most`
    reach as well; `low` if none does.

    A step counts at five cuts; counts, of at most 1024, share an integer. First even steps of the
    logit, which suit most rows; then of its key, which end whatever the logits are.
    """
    key = logit_key(low).to(tl.int64)
    end_key = logit_key(top).to(tl.int64) + 1
    end = key_logit(end_key.to(tl.int32))
    turn = 0
    while key + 1 < end_key:
        turn += 1
        sixth = end * 0.16666667 - low * 0.16666667
        a, b, c, d, e = low + sixth, low + 2 * sixth, low + 3 * sixth, low + 4 * sixth, end - sixth
        if turn > 4:
            width = end_key - key
            step = (width >> 3) + (width >> 5) + 1
            a = key_logit((key + step).to(tl.int32))
            b = key_logit(tl.minimum(key + 2 * step, end_key).to(tl.int32))
            c = key_logit(tl.minimum(key + 3 * step, end_key).to(tl.int32))
            d = key_logit(tl.minimum(key + 4 * step, end_key).to(tl.int32))
            e = key_logit(tl.minimum(key + 5 * step, end_key).to(tl.int32))
        counts = reach(logits, a, 0) + reach(logits, b, 1) + reach(logits, c, 2)
        total = tl.sum(counts + reach(logits, d, 3) + reach(logits, e, 4), 0)
        at_a, at_b, at_c = total & 0x7FF, (total >> 11) & 0x7FF, (total >> 22) & 0x7FF
        at_d, at_e = (total >> 33) & 0x7FF, (total >> 44) & 0x7FF
        count = tl.full((), 1 << 20, tl.int64)
        if at_a < least:
            end = tl.minimum(a, end)
        elif at_b < least:
            low, end, count = a, b, at_a
        elif at_c < least:
            low, end, count = b, c, at_b
        elif at_d < least:
            low, end, count = c, d, at_c
        elif at_e < least:
            low, end, count = d, e, at_d
        else:
            low, count = e, at_e
        key = logit_key(low).to(tl.int64)
        end_key = tl.where(count <= most, key, logit_key(end).to(tl.int64))
    return low


@triton.jit
def quick_log2(x):
    """log2 in float32: 2**-22 off between 0.5 and 2, elsewhere by this share."""
    if EMULATED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def quick_log_noise(ids, row_key):
    """log of the exponential noise of `ids`, float32: 1.4e-5 off at most.

    A uniform above a half is taken from 1 before it is rounded, so that its logarithm stays exact.
    """
    word = splitmix(row_key, ids.to(tl.uint64)) >> 12
    above = (word >> 51) != 0
    word = tl.where(above, word ^ _ALL_52, word)
    half = (word >> 32).to(tl.uint32).to(tl.float32) * 4294967296.0
    u = (half + word.to(tl.uint32).to(tl.float32) + 0.5) * _UNIFORM_STEP
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    noise = quick_log2(tl.where(above, 1.0 - u, u)) * -_LN_2
    return quick_log2(tl.where(above & (u < 0.03125), series, noise)) * _LN_2


@triton.jit
def quick_exponent(logits, half, rate):
    """`(logit - origin) / temperature` in float32; `half`: of the origin, `rate`: 2 / temperature. The
    difference of halves cannot overflow."""
    return (logits * 0.5 - half) * rate


@triton.jit
def exact_weight(logits, maximum, temperature):
    return tl.exp((logits.to(tl.float64) - maximum) / temperature)


@triton.jit
def mass_of(weights):
    return (weights * _MASS_SCALE).to(tl.int64)


@triton.jit
def exact_noise(ids, row_key):
    word = splitmix(row_key, ids.to(tl.uint64)) >> 12
    return -tl.log((word.to(tl.int64).to(tl.float64) + 0.5) * _UNIFORM_STEP)


@triton.jit
def keep_best(scores, logits, ids, best, second, best_logit, best_id):
    """Each lane's best two scores, and whose the best is."""
    wins = scores > best
    second = tl.maximum(second, tl.minimum(scores, best))
    best_logit = tl.where(wins, logits, best_logit)
    return tl.maximum(scores, best), second, best_logit, tl.where(wins, ids, best_id)


@triton.jit
def nearest(best, second, best_logit, best_id, margin):
    """(how many scores are near the best one, its logit and id if that is all)"""
    near = tl.max(best, 0) - margin
    bits = best_logit.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = _ONE_NEAR + (bits << ID_BITS) + best_id
    word = tl.where(best >= near, word, 0) + tl.where(second >= near, _ONE_NEAR, 0)
    total = tl.sum(word, 0)
    logit = (total >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    return (total >> 50).to(tl.int32), logit, (total & _ID_MASK).to(tl.int32)
