"""Tokens follow the distribution they claim: chi-square at 100,000 draws, over seeds and positions."""

import math
from dataclasses import replace

import pytest
import torch

from phalanx.kernels.reference.noise import Purpose
from phalanx.kernels.reference.sample import sample
from phalanx.kernels.reference.sampling_rows import Ragged, RowParams, SamplingRows

DRAWS = 100_000
BATCH = 5_000

HARD: dict[str, tuple[list[float], RowParams]] = {
    "near ties": ([1.0, 1.0 + 1e-6, 1.0, 0.999, 1.001], RowParams()),
    "heavy tail": ([-math.log(rank + 1.0) for rank in range(48)], RowParams()),
    "one sure token, one tiny": ([9.0, 0.0, -0.5], RowParams()),
    "top-p just past a boundary": ([math.log(p) for p in (0.5, 0.3, 0.15, 0.05)], RowParams(top_p=0.81)),
    "top-k and min-p": ([0.5 * i for i in range(12)], RowParams(top_k=7, min_p=0.1)),
    "penalised and biased": (
        [0.0, 0.3, -0.2, 1.0, 0.1],
        RowParams(repetition_penalty=1.5, output_ids=(3, 1, 1), bias={2: 0.7}),
    ),
}  # fmt: skip


def chi_square_limit(freedom: int) -> float:
    """Exceeded by chance once in a million (Wilson and Hilferty's cube root approximation)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.753 * math.sqrt(part)) ** 3


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom); tokens expected fewer than 5 times are counted as one."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    if bool(rare.any()):
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    keep = expected > 0.01  # a bin that is all but empty has no chi-square distribution
    assert int(counts[~keep].sum()) == 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum().item()
    return statistic, int(keep.sum()) - 1


def spread(row: RowParams, seeds: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
    """One row's settings at many seeds and positions, without building a list for each."""
    count = seeds.numel()
    one = SamplingRows.of([row])

    def same(ragged: Ragged) -> Ragged:
        lengths = torch.arange(count + 1) * ragged.values.numel()
        return Ragged(ragged.values.repeat(count), lengths)

    per_row = {
        name: getattr(one, name).expand(count)
        for name in one.__dataclass_fields__
        if isinstance(getattr(one, name), torch.Tensor)
    }
    lists = {
        name: same(getattr(one, name))
        for name in one.__dataclass_fields__
        if isinstance(getattr(one, name), Ragged)
    }
    return replace(one, **{**per_row, **lists, "seed": seeds, "position": positions})


def draw(logits: list[float], row: RowParams, *, over: str) -> torch.Tensor:
    """100,000 tokens along one axis of the noise's key."""
    table = torch.tensor(logits, dtype=torch.float32).expand(BATCH, -1).contiguous()
    tokens = []
    for start in range(0, DRAWS, BATCH):
        index = torch.arange(start, start + BATCH)
        fixed = torch.full_like(index, 12_345)
        axes = (index, fixed) if over == "seeds" else (fixed, index)
        tokens.append(sample(table, spread(row, *axes)).tokens)
    return torch.cat(tokens)


def claimed(logits: list[float], row: RowParams) -> torch.Tensor:
    """The probabilities the sampler itself reports; `test_sample.py` checks those independently."""
    arrays = SamplingRows.of([row], num_top_logprobs=len(logits))
    found = sample(torch.tensor([logits], dtype=torch.float32), arrays).logprobs
    assert found is not None
    probabilities = torch.zeros(len(logits), dtype=torch.float64)
    real = found.top_ids[0] >= 0
    probabilities[found.top_ids[0][real]] = found.top_logprobs[0][real].double().exp()
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("name", HARD)
def test_marginal(name: str, temperature: float, over: str) -> None:
    logits, row = HARD[name]
    row = replace(row, temperature=temperature)
    tokens = draw(logits, row, over=over)
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    probabilities = claimed(logits, row)
    assert int(counts[probabilities == 0].sum()) == 0
    statistic, freedom = chi_square(counts, probabilities)
    if freedom:
        assert statistic < chi_square_limit(freedom)


def test_the_chi_square_test_can_fail() -> None:
    """A drift of one percent in one token, far less than a shared-noise bias, is seen."""
    logits, row = HARD["near ties"]
    counts = torch.bincount(draw(logits, row, over="seeds"), minlength=5).double()
    shifted = claimed(logits, row) + torch.tensor([0.01, -0.01, 0.0, 0.0, 0.0])
    statistic, freedom = chi_square(counts, shifted)
    assert statistic > chi_square_limit(freedom)


def test_a_token_of_one_in_ten_thousand_comes_up_as_often() -> None:
    logits = [0.0, math.log(1e-4)]
    for over in ("seeds", "positions"):
        hits = int((draw(logits, RowParams(), over=over) == 1).sum())
        assert abs(hits - 10) < 5 * math.sqrt(10)


def test_tokens_at_neighbouring_positions_and_seeds_are_independent() -> None:
    """Joint counts of (token at t, token at t + 1) against the product of the marginals."""
    logits = [1.0, 0.5, 0.0, 0.8]
    probabilities = claimed(logits, RowParams())
    joint = torch.outer(probabilities, probabilities).flatten()
    for over in ("seeds", "positions"):
        tokens = draw(logits, RowParams(), over=over)
        for lag in (1, 2, 7):
            pairs = torch.bincount(tokens[:-lag] * 4 + tokens[lag:], minlength=16).double()
            statistic, freedom = chi_square(pairs, joint)
            assert statistic < chi_square_limit(freedom)


def test_purposes_draw_independently_at_one_position() -> None:
    logits = [1.0, 0.5, 0.0, 0.8]
    table = torch.tensor(logits).expand(DRAWS, -1).contiguous()
    rows = spread(RowParams(seed=1), torch.full((DRAWS,), 1), torch.arange(DRAWS))
    drawn = {p: sample(table, replace(rows, purpose=p)).tokens for p in Purpose}
    probabilities = claimed(logits, RowParams())
    joint = torch.outer(probabilities, probabilities).flatten()
    for other in (Purpose.RESAMPLE, Purpose.ACCEPT, Purpose.DRAFT):
        pairs = torch.bincount(drawn[Purpose.SAMPLE] * 4 + drawn[other], minlength=16).double()
        statistic, freedom = chi_square(pairs, joint)
        assert statistic < chi_square_limit(freedom)
