"""Seeds of a request's children. Pure: where the first seed comes from is the gateway's affair."""

SEED_LIMIT = 1 << 53  # seeds travel through JSON, whose numbers are exact up to here

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request with `n` > 1.

    Sequence 0 keeps the request's own seed, so asking for more sequences never changes the first.
    The others are SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): output `index` of a generator
    started at the scrambled seed, its top 53 bits. Scrambled first, because started at the seed
    itself child i + 1 of one request would be child i of a request seeded one increment later.

    Returns:
        An integer in 0..2**53 - 1.

    Raises:
        ValueError: seed or index out of range.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed {seed} is outside 0..{SEED_LIMIT - 1}; pass a smaller one")
    if index < 0:
        raise ValueError(f"sequence index {index} is negative")
    if index == 0:
        return seed
    return _mix(_mix(seed + _GOLDEN) + index * _GOLDEN) >> 11


def _mix(word: int) -> int:
    word &= _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
