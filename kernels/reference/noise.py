"""Counter-based noise: every random number is a pure function of what it is for.

The key is (request seed, position of the token being made, token id, purpose). The batch row, the
other rows, the other candidates and the number of draws made so far are not in it, so a request
replayed anywhere, after any preemption or move, meets the same noise.

Construction: a tree of SplitMix64 generators (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014; finaliser: Stafford's variant 13, as in Java's SplittableRandom).
The request seed starts one generator whose first output is the request key; output number
`4 * position + purpose` of a generator started there is the row key; output number `token id` of a
generator started there is the noise of that token.

Quality: SplitMix64 passes BigCrush. Row keys are points on one orbit of length 2**64, and a row uses
`vocab` successive points, so two rows share a stretch with probability 2 * vocab / 2**64 (about
1e-14 at 129,280 ids); a shared stretch would repeat noise at *shifted* ids, which shows in no token
statistics. It is not cryptographic: whoever knows the seed knows the noise.
"""

from enum import IntEnum

import torch

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MANTISSA_BITS = 52  # with half a step added, both ends stay exact and strictly inside (0, 1)


class Purpose(IntEnum):
    """What a draw is for. Draws for different purposes at one position are independent."""

    SAMPLE = 0  # the token itself; the coupled drafter shares it on purpose
    RESAMPLE = 1  # the replacement after a rejected draft
    ACCEPT = 2  # the coin that accepts or rejects a draft
    DRAFT = 3  # the draft itself, under the rejection verifier


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _xor_shift_(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch has no logical right shift of int64: shift arithmetically, then clear the sign's copies.
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix64_(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words, applied in place to int64 `x`."""
    _xor_shift_(x, 30).mul_(_signed(MIX_1))
    _xor_shift_(x, 27).mul_(_signed(MIX_2))
    return _xor_shift_(x, 31)


def _output(start: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Output `number` (from 0) of SplitMix64 started at `start`; int64, broadcast."""
    return mix64_(((number + 1) * _signed(GOLDEN)) + start)


def row_keys(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """The key of each row's noise.

    Args:
        seed: int64 [n], the request's seed; any value.
        position: int64 [n], index in the sequence of the token being made, below 2**61.

    Returns:
        int64 [n].
    """
    request_key = _output(seed, torch.zeros_like(seed))
    return _output(request_key, position * 4 + int(purpose))


def uniform(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Uniform noise strictly inside (0, 1): odd multiples of 2**-53.

    Args:
        keys: int64 [n] from `row_keys`.
        ids: int64 [K], or [n, K] when rows differ: token ids (0 for draws that have none).

    Returns:
        float64 [n, K].
    """
    words = _output(keys[:, None], ids)
    words = (words >> (64 - MANTISSA_BITS)).bitwise_and_((1 << MANTISSA_BITS) - 1)
    return words.double().add_(0.5).mul_(2.0**-MANTISSA_BITS)


def exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential noise of mean 1, `-log(uniform)`, in [2**-53, 36.8); float64 [n, K]."""
    return uniform(keys, ids).log_().neg_()
