"""From logits to tokens: a row's token is a pure function of its logits, settings, seed and position.

The order is that of DeepSeek's own engine, DeepInfer: edits of the logits (`penalties.py`), forced
top-k, temperature, top-k, top-p, min-p (`probability.py`), logprobs, draw. No step adds floats across
a row, so neither the other rows, their number and order, nor the row's place can change a bit; tests
hold it to `==`.

The draw is the Gumbel-max trick: the token with the largest `logit + Gumbel noise` follows the softmax
distribution. Written with exponentials, `argmin(-log(u) / weight)`, it is the same token with half the
logarithms. A token's noise does not depend on which others are kept, which is what lets a drafter
with the same noise guess the same token (Daliri et al., arXiv 2408.07978).

Where this differs from DeepInfer: temperature 0 takes the largest logit (lower id on ties); there it
becomes 1e-5 and the engine still draws, so near-equal tokens can both win. Positive temperatures are
raised to at least 1e-5, so 1e-4 is sharp but finite. DeepInfer inverts the cumulative distribution with
one uniform a position; here each token has its own noise.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from phalanx.kernels.reference.logprobs import TokenLogprobs, raw_logprobs, token_logprobs
from phalanx.kernels.reference.noise import exponential, row_keys
from phalanx.kernels.reference.penalties import edit_logits
from phalanx.kernels.reference.probability import kept_columns, order_keys, scaled_logits
from phalanx.kernels.reference.sampling_rows import SamplingRows

TEMPERATURE_MIN = 1e-5
FORCE_TOP_K = 4096


class SampleStatus(IntEnum):
    """How a row ended. Only OK rows have a token."""

    OK = 0
    ALL_BLOCKED = 1  # blocked ids, bans and mask together left no token
    NAN = 2  # the logits hold NaN or +inf, or nothing but -inf: the model's numbers are broken


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry a row. Rows whose status is not OK hold token -1 and logprob 0, and no top ids."""

    tokens: torch.Tensor  # int64 [n]
    status: torch.Tensor  # uint8 [n], SampleStatus
    logprobs: TokenLogprobs | None  # of the distribution drawn from; None unless asked for
    raw_logprobs: TokenLogprobs | None  # of the model's own logits; None unless asked for


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    mask: torch.Tensor | None = None,
    *,
    force_top_k: int = FORCE_TOP_K,
) -> SampleResult:
    """Make one token a row.

    Logprobs are those of the distribution that was drawn from: after every edit and filter, and
    renormalised. A greedy row has no such distribution; it reports temperature 1, unfiltered, which
    is what a client that asks for logprobs at temperature 0 wants to see.

    Args:
        logits: float32 [n, V], never written to.
        rows: settings of the n rows.
        mask: bool [n, V], True where a grammar allows the token.
        force_top_k: candidates kept before temperature, whatever the request says; >= 1.

    Returns:
        Tokens, statuses and, when asked for, logprobs. The tokens are the same either way.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == rows.num_rows and force_top_k >= 1
    raw, raw_max, broken = _screen(logits)
    edited = edit_logits(raw, rows, mask)
    if edited is raw:
        usable, maximum, blocked = raw, raw_max, torch.zeros_like(broken)
    else:
        blocked = edited.amax(1) == float("-inf")
        usable, maximum, overflowed = _screen(edited)
        broken = broken | (overflowed & ~blocked)
    status = torch.where(broken, int(SampleStatus.NAN), blocked * int(SampleStatus.ALL_BLOCKED))

    ids, candidates = _force_top_k(usable, force_top_k)
    greedy, temperature = _temperatures(rows)
    columns, chosen = _choose(candidates, ids, maximum, temperature, greedy, rows)
    tokens = columns if ids is None else ids.gather(1, columns[:, None])[:, 0]
    failed = status != int(SampleStatus.OK)
    return SampleResult(
        tokens.masked_fill(failed, -1),
        status.to(torch.uint8),
        None if chosen is None else _named(chosen, ids, failed),
        _raw(raw, tokens, failed, rows),
    )


def logprobs_of(
    tokens: torch.Tensor,
    status: torch.Tensor,
    logits: torch.Tensor,
    rows: SamplingRows,
    mask: torch.Tensor | None = None,
    *,
    force_top_k: int = FORCE_TOP_K,
) -> SampleResult:
    """The result of `sample` around tokens that were drawn elsewhere from the same arguments.

    Args:
        tokens: int64 [n]; read only where `status` is OK.
        status: uint8 [n].
    """
    raw, _, _ = _screen(logits)
    usable, maximum, _ = _screen(edit_logits(raw, rows, mask))
    failed = status != int(SampleStatus.OK)
    ids, candidates = _force_top_k(usable, force_top_k)
    own = tokens.masked_fill(failed, 0)
    columns = own
    if ids is not None:
        columns = torch.searchsorted(ids, own[:, None])[:, 0].clamp(max=ids.shape[1] - 1)
    greedy, temperature = _temperatures(rows)
    scaled, weights, kept = _distribution(candidates, maximum, temperature, greedy, rows)
    found = token_logprobs(candidates, scaled, weights, kept, columns, rows.num_top_logprobs)
    return SampleResult(tokens, status, _named(found, ids, failed), _raw(raw, own, failed, rows))


def _temperatures(rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool [n], which rows are greedy; float64 [n], 1 for those)."""
    greedy = ~(rows.temperature > 0)
    return greedy, rows.temperature.double().clamp(min=TEMPERATURE_MIN).masked_fill(greedy, 1.0)


def _screen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits with unusable rows zeroed, row maxima, bool [n] which were unusable).

    A maximum is exact in any order; amax carries NaN through, so one pass finds all three faults.
    """
    maximum = logits.amax(1)
    bad = ~maximum.isfinite()
    if bool(bad.any()):
        return logits.masked_fill(bad[:, None], 0.0), maximum.masked_fill(bad, 0.0), bad
    return logits, maximum, bad


def _force_top_k(logits: torch.Tensor, count: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(ids int64 [n, K] ascending, their logits), or (None, logits) when the vocabulary fits."""
    num_rows, vocab = logits.shape
    if vocab <= count:
        return None, logits
    keys = order_keys(logits)
    cutoff = torch.kthvalue(keys, vocab - count + 1, dim=1, keepdim=True).values
    ids = (keys >= cutoff).nonzero()[:, 1].view(num_rows, count)
    return ids, logits.gather(1, ids)


def _choose(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    maximum: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    rows: SamplingRows,
) -> tuple[torch.Tensor, TokenLogprobs | None]:
    """The column of each row's token, and its logprobs if any are wanted."""
    want_logprobs = rows.num_top_logprobs >= 0
    all_greedy = bool(greedy.all())
    if all_greedy and not want_logprobs:
        return logits.argmax(1), None  # the first of equals, which is the lower id
    scaled, weights, kept = _distribution(logits, maximum, temperature, greedy, rows)
    columns = logits.argmax(1)
    if not all_greedy:
        columns = torch.where(greedy, columns, _draw(weights, kept, ids, rows))
    if not want_logprobs:
        return columns, None
    return columns, token_logprobs(logits, scaled, weights, kept, columns, rows.num_top_logprobs)


def _distribution(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    rows: SamplingRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scaled logits, weights, which columns are kept), [n, K] each; greedy rows are unfiltered."""
    scaled = scaled_logits(logits, maximum, temperature)
    weights = scaled.exp()
    kept = kept_columns(
        logits,
        weights,
        rows.top_k.masked_fill(greedy, 0),
        rows.top_p.double().masked_fill(greedy, 1.0),
        rows.min_p.double().masked_fill(greedy, 0.0),
    )
    return scaled, weights, kept


def _draw(
    weights: torch.Tensor, kept: torch.Tensor, ids: torch.Tensor | None, rows: SamplingRows
) -> torch.Tensor:
    keys = row_keys(rows.seed, rows.position, rows.purpose)
    if ids is None:
        ids = torch.arange(weights.shape[1], dtype=torch.int64, device=weights.device)
    times = exponential(keys, ids).div_(weights)  # weight 0 waits for ever
    return times.masked_fill_(~kept, float("inf")).argmin(1)


def _raw(
    raw: torch.Tensor, tokens: torch.Tensor, failed: torch.Tensor, rows: SamplingRows
) -> TokenLogprobs | None:
    if rows.num_top_logprobs < 0 or not rows.want_raw_logprobs:
        return None
    return _named(raw_logprobs(raw, tokens, rows.num_top_logprobs), None, failed)


def _named(found: TokenLogprobs, ids: torch.Tensor | None, failed: torch.Tensor) -> TokenLogprobs:
    """Columns turned into token ids, failed rows emptied."""
    top = found.top_ids
    if ids is not None:
        top = torch.where(top < 0, -1, ids.gather(1, top.clamp(min=0)))
    return TokenLogprobs(
        found.logprobs.masked_fill(failed, 0.0),
        top.masked_fill(failed[:, None], -1),
        found.top_logprobs.masked_fill(failed[:, None], float("-inf")),
    )
