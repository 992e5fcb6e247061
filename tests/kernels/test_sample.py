"""The pipeline row by row: DeepInfer's examples, greedy, filters, bans, broken rows, logprobs."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.kernels.reference.logprobs import prompt_logprobs
from phalanx.kernels.reference.sample import SampleResult, SampleStatus, sample
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows

INF = float("inf")


def run(
    logits: list[list[float]],
    *rows: RowParams,
    top: int = -1,
    raw: bool = False,
    mask: list[list[bool]] | None = None,
    eos_id: int = -1,
    force_top_k: int = 4096,
) -> SampleResult:
    arrays = SamplingRows.of(rows, eos_id=eos_id, num_top_logprobs=top, want_raw_logprobs=raw)
    return sample(
        torch.tensor(logits, dtype=torch.float32),
        arrays,
        None if mask is None else torch.tensor(mask),
        force_top_k=force_top_k,
    )


def distribution(
    logits: list[float], row: RowParams, eos_id: int = -1, force_top_k: int = 4096
) -> dict[int, float]:
    """Every token the row may become, with its probability, most likely first."""
    found = run([logits], row, top=len(logits), eos_id=eos_id, force_top_k=force_top_k).logprobs
    assert found is not None
    pairs = zip(found.top_ids[0].tolist(), found.top_logprobs[0].tolist(), strict=True)
    return {token: math.exp(value) for token, value in pairs if token >= 0}


def rounded(probabilities: dict[int, float]) -> dict[int, float]:
    return {token: round(p, 3) for token, p in probabilities.items()}


def possible(logits: list[float], row: RowParams, draws: int = 400) -> set[int]:
    rows = [replace(row, seed=seed) for seed in range(draws)]
    return set(run([logits] * draws, *rows).tokens.tolist())


def test_worked_example_of_four_tokens() -> None:
    """Logits 2, 1, 0.5, -1 at temperature 0.5: 0.842, 0.114, 0.042, 0.002; top-p 0.9 keeps A and B,
    which become 0.881 and 0.119."""
    logits = [2.0, 1.0, 0.5, -1.0]
    assert rounded(distribution(logits, RowParams(temperature=0.5))) == {
        0: 0.842,
        1: 0.114,
        2: 0.042,
        3: 0.002,
    }
    row = RowParams(temperature=0.5, top_p=0.9)
    assert rounded(distribution(logits, row)) == {0: 0.881, 1: 0.119}
    assert possible(logits, row) == {0, 1}


def test_worked_example_of_five_tokens_with_a_tie() -> None:
    """Logits 3, 2, 2, 0, -1, top-p 0.8: one of the tied pair is not enough (0.758), both are."""
    logits = [3.0, 2.0, 2.0, 0.0, -1.0]
    row = RowParams(top_p=0.8)
    assert rounded(distribution(logits, row)) == {0: 0.576, 1: 0.212, 2: 0.212}
    assert possible(logits, row) == {0, 1, 2}


def test_a_tie_at_the_edge_goes_to_the_lower_id() -> None:
    logits = [1.0, 3.0, 1.0, 1.0, 0.0]
    assert list(distribution(logits, RowParams(top_k=3))) == [1, 0, 2]
    assert list(distribution(logits, RowParams(top_p=0.75))) == [1, 0]
    assert list(distribution([0.0] * 5, RowParams(top_p=0.8))) == [0, 1, 2, 3]  # exactly 4 / 5
    assert list(distribution([0.0, -0.0, 0.0, -0.0], RowParams(top_k=2))) == [0, 1]
    assert list(distribution(logits, RowParams(), force_top_k=2)) == [1, 0]


def test_first_token_cannot_be_the_end() -> None:
    """As in a traced request of DeepInfer's: the end token is banned for the first output only, and its
    logprob is then minus infinity, which is to say it is not in the list."""
    logits, eos = [0.0, 0.0, 9.0], 2
    first = RowParams(first_n_no_eos=1)
    later = RowParams(first_n_no_eos=1, output_ids=(0,))
    assert list(distribution(logits, first, eos_id=eos)) == [0, 1]
    assert list(distribution(logits, later, eos_id=eos)) == [2, 0, 1]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = [[0.0, 5.0, 5.0, 5.0 - 1e-5], [7.0, 7.0, 7.0, 7.0], [-INF, -3.0, -INF, -3.0]]
    for seed in range(50):
        rows = [RowParams(seed=seed, temperature=0.0, top_p=0.1, top_k=3, min_p=0.9)] * 3
        assert run(logits, *rows).tokens.tolist() == [1, 0, 1]


def test_greedy_rows_report_the_plain_distribution() -> None:
    logits = [2.0, 1.0, 0.5, -1.0]
    greedy = RowParams(temperature=0.0, top_k=1)
    assert distribution(logits, greedy) == distribution(logits, RowParams())


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-30, 5e-324])
def test_tiny_temperatures_stay_finite(temperature: float) -> None:
    logits = [1.0, 30.0, 30.0 + 2e-6, -500.0, 29.0]
    rows = [RowParams(seed=s, temperature=temperature) for s in range(200)]
    result = run([logits] * 200, *rows, top=5)
    assert result.status.tolist() == [0] * 200
    assert set(result.tokens.tolist()) <= {1, 2}
    assert result.logprobs is not None
    assert bool(result.logprobs.logprobs.isfinite().all())
    assert bool(result.logprobs.top_logprobs.isfinite().all())


def test_near_equal_logits_still_compete_at_the_smallest_temperature() -> None:
    """DeepInfer's 73% against 27%: two logits 1e-5 apart at temperature 1e-5. Here that is what 1e-5
    means, and 0 means the larger one always."""
    logits = [0.0, 1e-5]
    hot = distribution(logits, RowParams(temperature=1e-5))
    assert {token: round(p, 2) for token, p in hot.items()} == {1: 0.73, 0: 0.27}
    assert possible(logits, RowParams(temperature=1e-5)) == {0, 1}
    assert possible(logits, RowParams(temperature=0.0)) == {1}


def test_statuses_are_per_row() -> None:
    nan = float("nan")
    logits = [
        [1.0, 2.0, 3.0],
        [1.0, nan, 3.0],
        [1.0, INF, 3.0],
        [-INF, -INF, -INF],
        [1.0, 2.0, 3.0],
        [1.0, 2.0, 3.0],
        [1.0, nan, 3.0],
        [1.0, 3e38, 3.0],
        [-INF, 2.0, -INF],
    ]
    rows = [RowParams(temperature=0.0)] * 4 + [
        RowParams(temperature=0.0, blocked_ids=(0, 1, 2)),
        RowParams(temperature=0.0, blocked_ids=(2,)),
        RowParams(temperature=0.0, blocked_ids=(1,)),  # blocking the NaN does not heal the row
        RowParams(temperature=0.0, repetition_penalty=0.5, output_ids=(1,)),  # overflows
        RowParams(temperature=0.0),
    ]
    result = run(logits, *rows, top=3, raw=True)
    ok, blocked, broken = SampleStatus.OK, SampleStatus.ALL_BLOCKED, SampleStatus.NAN
    assert result.status.tolist() == [
        ok,
        broken,
        broken,
        broken,
        blocked,
        ok,
        broken,
        broken,
        ok,
    ]
    assert result.tokens.tolist() == [2, -1, -1, -1, -1, 1, -1, -1, 1]
    for found in (result.logprobs, result.raw_logprobs):
        assert found is not None
        assert not bool(found.logprobs.isnan().any() | found.top_logprobs.isnan().any())
        failed = result.status != ok
        assert set(found.logprobs[failed].tolist()) == {0.0}
        assert set(found.top_ids[failed].flatten().tolist()) == {-1}


def test_grammar_blacklist_and_first_token_ban_together_block_everything() -> None:
    """An open case in DeepInfer: there a device assert ends the process, here one row gets a status."""
    rows = [RowParams(blocked_ids=(0,), first_n_no_eos=1), RowParams()]
    mask = [[True, True, False], [True, True, True]]
    result = run([[1.0, 2.0, 3.0]] * 2, *rows, mask=mask, eos_id=1)
    assert result.status.tolist() == [SampleStatus.ALL_BLOCKED, SampleStatus.OK]
    assert result.tokens[0].item() == -1 and result.tokens[1].item() in (0, 1, 2)


def test_a_single_legal_token_is_certain() -> None:
    result = run([[1.0, 2.0, 3.0]], RowParams(), mask=[[False, True, False]], top=3)
    assert result.tokens.tolist() == [1]
    assert result.logprobs is not None
    assert result.logprobs.logprobs.tolist() == [0.0]
    assert result.logprobs.top_ids.tolist() == [[1, -1, -1]]


def test_no_rows_is_no_work() -> None:
    rows = SamplingRows.of([], num_top_logprobs=2, want_raw_logprobs=True)
    for vocab in (5, 5000):
        result = sample(torch.empty(0, vocab), rows)
        assert result.tokens.shape == (0,) and result.status.shape == (0,)


def test_more_top_logprobs_than_tokens() -> None:
    result = run([[1.0, 2.0]], RowParams(), top=5)
    assert result.logprobs is not None
    assert result.logprobs.top_ids.tolist() == [[1, 0, -1, -1, -1]]


def test_prompt_logprobs_refuses_what_has_no_answer() -> None:
    with pytest.raises(ValueError, match="within 0..4"):
        prompt_logprobs(torch.zeros(2, 5), torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="row 1 hold NaN"):
        prompt_logprobs(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), torch.tensor([0, 1]))


def plain_distribution(logits: list[float], row: RowParams, force_top_k: int) -> dict[int, float]:
    """The pipeline with floats and a sort, one token at a time. None where a cut is too close."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:force_top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / row.temperature) for i in order]
    if row.top_k > 0:
        order, weights = order[: row.top_k], weights[: row.top_k]
    total, before, kept = math.fsum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        assume(abs(before / total - row.top_p) > 1e-9 and abs(weight - row.min_p) > 1e-12)
        if (before / total < row.top_p or row.top_p >= 1) and weight >= row.min_p:
            kept.append((token, weight))
        before += weight
    total = math.fsum(weight for _, weight in kept)
    return {token: weight / total for token, weight in kept}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=1, max_size=90),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([1.0, 0.95, 0.81, 0.5, 0.013]),
    st.sampled_from([0, -1, 1, 3, 20, 200]),
    st.sampled_from([0.0, 0.1, 0.013]),
    st.sampled_from([4096, 40, 7]),
)
def test_kept_set_and_probabilities_equal_a_plain_oracle(
    logits: list[float],
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    force_top_k: int,
) -> None:
    row = RowParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    want = plain_distribution(logits, row, force_top_k)
    got = distribution(logits, row, force_top_k=force_top_k)
    assert list(got) == list(want)
    for token, p in want.items():
        # Not ==: the oracle sums floats, and the answer is rounded to a float32 logarithm.
        assert math.isclose(got[token], p, rel_tol=5e-6)
