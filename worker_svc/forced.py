"""Forced continuations: the first outputs of a request are given, and what the model thinks of them is told."""

import torch

from phalanx.kernels.reference.logprobs import TokenLogprobs, raw_logprobs
from phalanx.kernels.reference.sample import SampleResult, SampleStatus


def force_tokens(
    sampled: SampleResult, logits: torch.Tensor, forced: torch.Tensor, num_top: int
) -> SampleResult:
    """Put the forced tokens in the place of the sampled ones.

    Their logprobs are those of the model's own logits, at temperature 1 and unfiltered: a forced token
    need not be one that the request's settings would let through. Rows whose numbers are broken stay so.

    Args:
        sampled: of the n rows of `logits`, float32 [n, V].
        forced: int64 [n], -1 where the sampled token stays.
    """
    at = ((forced >= 0) & (sampled.status != int(SampleStatus.NAN))).nonzero()[:, 0]
    tokens, status = sampled.tokens.clone(), sampled.status.clone()
    tokens[at], status[at] = forced[at], int(SampleStatus.OK)
    if sampled.logprobs is None:
        return SampleResult(tokens, status, None, None)
    own = raw_logprobs(logits[at], forced[at], num_top)
    raw = sampled.raw_logprobs
    return SampleResult(
        tokens,
        status,
        _told(sampled.logprobs, at, own),
        None if raw is None else _told(raw, at, own),
    )


def _told(found: TokenLogprobs, at: torch.Tensor, own: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        _replaced(found.logprobs, at, own.logprobs),
        _replaced(found.top_ids, at, own.top_ids),
        _replaced(found.top_logprobs, at, own.top_logprobs),
    )


def _replaced(column: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    column = column.clone()
    column[at] = values
    return column
