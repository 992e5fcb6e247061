"""Probabilities whose sums do not depend on the order of adding.

A token's weight is `exp((logit - max) / temperature)`, at most 1. Where weights are summed, they are
first turned into integers, `floor(weight * 2**44)`: integer sums are the same in any order, for any
batch and any vector width (DeepInfer does the same with 2**31 of the normalised probability; scaling
the weight saves a division and needs no total first). 2**18 tokens of weight 1 fit in int64.

Every order is a total order: by logit, ties by lower token id.
"""

import torch

MASS_BITS = 44
MAX_COLUMNS = 1 << (62 - MASS_BITS)
PREFIXES = (64, 512)  # how far rows are ordered before a full sort; changes the cost, no result
_OFF = torch.iinfo(torch.int64).max


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [n, K], distinct within a row: larger key = larger logit, then lower column.

    Args:
        logits: float32 [n, K] without NaN, columns in ascending token id, K < 2**32.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are a tie
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)  # negative floats reversed
    columns = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    return ordered.long().mul_(1 << 32).add_((1 << 32) - 1 - columns)


def scaled_logits(
    logits: torch.Tensor, maximum: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """`(logit - max) / temperature`, float64 [n, K], at most 0.

    Args:
        logits: float32 [n, K].
        maximum: float32 [n], finite.
        temperature: float64 [n], positive.
    """
    return (logits.double() - maximum.double()[:, None]).div_(temperature[:, None])


def masses(weights: torch.Tensor) -> torch.Tensor:
    """Weights in [0, 1] as integers that can be summed in any order; int64, same shape."""
    assert weights.shape[-1] <= MAX_COLUMNS
    return (weights * float(1 << MASS_BITS)).long()


def log_total(total: torch.Tensor) -> torch.Tensor:
    """log of a sum of masses, in units of weight: float64, exactly 0 for a single weight of 1."""
    return (total.double() * 2.0**-MASS_BITS).log()


def kept_columns(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    prefixes: tuple[int, ...] = PREFIXES,
) -> torch.Tensor:
    """Which columns survive top-k, then top-p of what top-k left, then min-p.

    Top-p keeps the shortest prefix, most likely first, that adds up to at least `top_p`; at least
    one token. Min-p keeps weights of at least `min_p` times the largest. A blocked logit (-inf)
    never survives.

    Args:
        logits: float32 [n, K], without NaN or +inf, at least one finite a row.
        weights: float64 [n, K], 1 at the largest logit.
        top_k: int64 [n]; <= 0 is off.
        top_p: float64 [n]; 1 or more (or NaN) is off.
        min_p: float64 [n]; 0 or less (or NaN) is off.

    Returns:
        bool [n, K].
    """
    kept = logits > float("-inf")
    num_columns = logits.shape[1]
    ordered = torch.nonzero((top_p < 1) | ((top_k > 0) & (top_k < num_columns)))[:, 0]
    if ordered.numel():
        keys = order_keys(_pick(logits, ordered))
        limit = torch.where(top_k > 0, top_k.clamp(max=num_columns), num_columns)[ordered]
        mass = masses(_pick(weights, ordered))
        cutoff = _cutoff(keys, mass, limit, top_p[ordered], prefixes)
        kept[ordered] = _pick(kept, ordered) & (keys >= cutoff[:, None])
    if bool((min_p > 0).any()):
        floor = torch.where(min_p > 0, min_p.clamp(max=1.0), 0.0)
        kept &= weights >= floor[:, None]
    return kept


def _cutoff(
    keys: torch.Tensor,
    mass: torch.Tensor,
    limit: torch.Tensor,
    top_p: torch.Tensor,
    prefixes: tuple[int, ...],
) -> torch.Tensor:
    """The smallest key kept by top-k (`limit`, 1..K) and top-p: int64 [n].

    Ordering a whole row is the dearest thing a sampler does, and a nucleus is mostly short. So order
    a short prefix, and a longer one only for the rows whose answer lies beyond it.
    """
    num_columns = keys.shape[1]
    total = mass.sum(1)
    cutoff = torch.empty_like(limit)
    open_rows = torch.arange(keys.shape[0], device=keys.device)
    for size in (*(size for size in prefixes if size < num_columns), num_columns):
        top = torch.topk(_pick(keys, open_rows), size, dim=1)
        lim, share = limit[open_rows], top_p[open_rows]
        inside = torch.arange(size, device=keys.device) < lim[:, None]
        head = mass[open_rows[:, None], top.indices].mul_(inside)
        before = head.cumsum(1).sub_(head)
        whole = torch.where(lim <= size, head.sum(1), total[open_rows])
        needed = (share * whole.double()).ceil().clamp(min=1.0).long()
        needed = torch.where(share < 1, needed, _OFF)
        count = ((before < needed[:, None]) & inside).sum(1)
        # Known when the prefix contains the cut, and the mass top-p is a share of.
        known = (count < size) | (count == lim)
        known &= (lim <= size) | (lim == num_columns)
        cutoff[open_rows[known]] = top.values[known, count[known] - 1]
        open_rows = open_rows[~known]
        if not open_rows.numel():
            break
    return cutoff


def _pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`table[index]` for ascending row numbers, without the copy when they are all of the rows."""
    return table if index.numel() == table.shape[0] else table[index]


def best_columns(keys: torch.Tensor, kept: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best kept columns of each row, best first; int64 [n, count], -1 past the end."""
    size = min(count, keys.shape[1])
    lowest = torch.iinfo(torch.int64).min
    top = torch.topk(keys.masked_fill(~kept, lowest), size, dim=1)
    columns = torch.where(top.values == lowest, -1, top.indices)
    return torch.nn.functional.pad(columns, (0, count - size), value=-1)
