"""Log-probabilities, from one function for prompt tokens, decoded tokens and processed rows."""

from dataclasses import dataclass

import torch

from phalanx.kernels.reference.probability import (
    best_columns,
    log_total,
    masses,
    order_keys,
    scaled_logits,
)

_CHUNK_ELEMENTS = 1 << 22  # float64 work space per step of `prompt_logprobs`: a few times 32 MiB


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of n tokens and, best first, of the k best candidates of each row."""

    logprobs: torch.Tensor  # float32 [n]
    top_ids: torch.Tensor  # int64 [n, k], -1 past a row's last candidate
    top_logprobs: torch.Tensor  # float32 [n, k], -inf where top_ids is -1


def token_logprobs(
    logits: torch.Tensor,
    scaled: torch.Tensor,
    weights: torch.Tensor,
    kept: torch.Tensor,
    columns: torch.Tensor,
    num_top: int,
) -> TokenLogprobs:
    """Log-probabilities over the kept columns, renormalised. `top_ids` holds columns, not ids.

    Args:
        logits: float32 [n, K], in ascending token id: the order of the best.
        scaled, weights: float64 [n, K] from `scaled_logits` and its exp.
        kept: bool [n, K], at least one a row.
        columns: int64 [n], the token of each row.
    """
    total = log_total(masses(weights).mul_(kept).sum(1))
    own = scaled.gather(1, columns[:, None])[:, 0] - total
    if num_top:
        best = best_columns(order_keys(logits), kept, num_top)
    else:
        best = columns.new_empty(logits.shape[0], 0)
    values = scaled.gather(1, best.clamp(min=0)) - total[:, None]
    return TokenLogprobs(own.float(), best, values.masked_fill_(best < 0, float("-inf")).float())


def raw_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> TokenLogprobs:
    """Log-softmax of unprocessed logits at `ids`, and the best candidates of each row.

    Args:
        logits: float32 [n, V], no NaN or +inf, at least one finite a row.
        ids: int64 [n].
    """
    maximum = logits.amax(1)
    scaled = scaled_logits(logits, maximum, torch.ones_like(maximum, dtype=torch.float64))
    kept = logits > float("-inf")
    return token_logprobs(logits, scaled, scaled.exp(), kept, ids, num_top)


def prompt_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int = 0) -> TokenLogprobs:
    """Raw logprobs along a prompt: equal, bit for bit, to those a decode step would have returned.

    Args:
        logits: float32 [T, V]; row t scores `ids[t]`, so the caller has already shifted them.
        ids: int64 [T].

    Raises:
        ValueError: an id is outside the vocabulary, or a row of logits is not finite.
    """
    num_rows, vocab = logits.shape
    if num_rows and not (0 <= int(ids.min()) and int(ids.max()) < vocab):
        raise ValueError(f"prompt ids must be within 0..{vocab - 1} to have a logprob")
    maximum = logits.amax(1)
    if not bool(maximum.isfinite().all()):
        bad = int((~maximum.isfinite()).nonzero()[0, 0])
        raise ValueError(f"logits of prompt row {bad} hold NaN or +inf, or nothing but -inf")
    size = max(1, _CHUNK_ELEMENTS // vocab)
    parts = [
        raw_logprobs(logits[start : start + size], ids[start : start + size], num_top)
        for start in range(0, max(num_rows, 1), size)
    ]
    return TokenLogprobs(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )


def token_ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [n]: how likely `ids` are among all tokens, from 1; among equals the lower id is first.

    Args:
        logits: float32 [n, V], without NaN.
        ids: int64 [n].
    """
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    parts = []
    for start in range(0, len(ids), size):
        keys = order_keys(logits[start : start + size])
        own = keys.gather(1, ids[start : start + size, None])
        parts.append((keys > own).sum(1) + 1)
    return torch.cat(parts)
