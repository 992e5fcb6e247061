"""A row's token, status and logprobs are the same alone, in any batch, in any order, anywhere."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.kernels.reference import probability
from phalanx.kernels.reference.logprobs import TokenLogprobs, prompt_logprobs
from phalanx.kernels.reference.probability import kept_columns
from phalanx.kernels.reference.sample import SampleResult, SampleStatus, sample
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows

EOS = 1
VOCABS = (7, 8, 9, 31, 100, 257, 1000, 4096, 4097, 5000)


def odd_rows(count: int, vocab: int, rng: random.Random) -> list[RowParams]:
    """Rows that use every feature, in all mixtures."""

    def ids(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randrange(most + 1))]

    return [
        RowParams(
            seed=rng.randrange(1 << 53),
            position=rng.randrange(1 << 20),
            temperature=rng.choice([0.0, 1e-4, 0.3, 1.0, 1.0, 2.0]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 1e-9]),
            top_k=rng.choice([0, -1, 1, 5, 600, 10**9]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.1]),
            min_tokens=rng.choice([0, 3]),
            first_n_no_eos=rng.choice([0, 1]),
            output_ids=ids(20),
            stop_ids=ids(2),
            bias={i: rng.uniform(-2, 2) for i in set(ids(3))},
            blocked_ids=ids(3),
        )
        for _ in range(count)
    ]


def odd_logits(count: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows of different scales; rounded ones are full of ties; some are broken or half blocked."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=gen)
    logits *= torch.rand(count, 1, generator=gen) * 8
    logits[::3] = logits[::3].round()
    logits[1::5, ::2] = float("-inf")
    logits[4::7, vocab // 2] = float("nan")
    logits[5::11, 0] = float("inf")
    logits[6::13] = float("-inf")
    return logits


def as_lists(found: TokenLogprobs | None) -> list[list[object]]:
    if found is None:
        return []
    return [found.logprobs.tolist(), found.top_ids.tolist(), found.top_logprobs.tolist()]


def row_of(result: SampleResult, i: int) -> list[object]:
    parts: list[object] = [result.tokens[i].item(), result.status[i].item()]
    for found in (result.logprobs, result.raw_logprobs):
        parts += [values[i] for values in as_lists(found)]
    return parts


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 33), st.sampled_from(VOCABS), st.integers(0, 2**32 - 1), st.booleans())
def test_alone_in_any_batch_and_in_any_order(
    count: int, vocab: int, seed: int, with_mask: bool
) -> None:
    rng = random.Random(seed)
    params, logits = odd_rows(count, vocab, rng), odd_logits(count, vocab, seed)
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, vocab, generator=gen) < 0.8 if with_mask else None

    def run(index: list[int], top: int = 5) -> SampleResult:
        rows = SamplingRows.of(
            [params[i] for i in index],
            eos_id=EOS,
            num_top_logprobs=top,
            want_raw_logprobs=top >= 0,
        )
        return sample(logits[index], rows, None if mask is None else mask[index])

    everyone = list(range(count))
    whole = run(everyone)
    shuffled = rng.sample(everyone, count)
    mixed = run(shuffled)
    some = rng.sample(everyone, rng.randint(1, count))
    part = run(some)
    for place, i in enumerate(shuffled):
        assert row_of(mixed, place) == row_of(whole, i)
    for place, i in enumerate(some):
        assert row_of(part, place) == row_of(whole, i)
    for i in rng.sample(everyone, min(count, 4)):
        assert row_of(run([i]), 0) == row_of(whole, i)
    without = run(everyone, top=-1)
    assert without.logprobs is None and without.raw_logprobs is None
    assert without.tokens.tolist() == whole.tokens.tolist()
    assert without.status.tolist() == whole.status.tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [4096, 5000])
def test_the_number_of_threads_changes_nothing(vocab: int, threads: int) -> None:
    rows = SamplingRows.of(odd_rows(33, vocab, random.Random(3)), eos_id=EOS, num_top_logprobs=3)
    logits = odd_logits(33, vocab, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    want = sample(logits, rows)
    torch.set_num_threads(threads)
    try:
        got = sample(logits, rows)
    finally:
        torch.set_num_threads(before)
    assert [row_of(got, i) for i in range(33)] == [row_of(want, i) for i in range(33)]


def test_broken_neighbours_change_nothing() -> None:
    vocab = 300
    logits = torch.randn(5, vocab)
    rows = SamplingRows.of([RowParams(seed=i) for i in range(5)], num_top_logprobs=2)
    want = sample(logits, rows)
    logits = logits.clone()
    logits[1, 7] = float("nan")
    logits[3] = float("-inf")
    got = sample(logits, rows)
    assert got.status.tolist() == [0, SampleStatus.NAN, 0, SampleStatus.NAN, 0]
    for i in (0, 2, 4):
        assert row_of(got, i) == row_of(want, i)


def test_the_batch_row_is_not_in_the_noise() -> None:
    """The same row 64 times over is the same token 64 times over."""
    logits = torch.zeros(1, 512).expand(64, 512).contiguous()
    result = sample(logits, SamplingRows.of([RowParams(seed=9, position=4)] * 64))
    assert len(set(result.tokens.tolist())) == 1
    moved = sample(logits, SamplingRows.of([RowParams(seed=9, position=p) for p in range(64)]))
    assert len(set(moved.tokens.tolist())) > 32


def test_dropping_other_candidates_keeps_the_winner() -> None:
    """Noise belongs to the token: as long as the winner stays legal, it stays the winner."""
    vocab, count = 50, 200
    logits = torch.randn(count, vocab)
    params = [RowParams(seed=i, position=i) for i in range(count)]
    want = sample(logits, SamplingRows.of(params)).tokens
    mask = torch.rand(count, vocab) < 0.5
    mask[torch.arange(count), want] = True
    assert torch.equal(sample(logits, SamplingRows.of(params), mask).tokens, want)
    blocked = [
        replace(p, blocked_ids=(~m).nonzero()[:, 0].tolist())
        for p, m in zip(params, mask, strict=True)
    ]
    assert torch.equal(sample(logits, SamplingRows.of(blocked)).tokens, want)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.sampled_from([7, 33, 600, 1500]), st.integers(0, 2**32 - 1))
def test_how_far_rows_are_ordered_changes_nothing(count: int, columns: int, seed: int) -> None:
    rng = random.Random(seed)
    params = odd_rows(count, columns, rng)
    rows = SamplingRows.of(params)
    logits = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).mul_(2)
    logits[::2] = logits[::2].round()
    weights = (logits.double() - logits.amax(1, keepdim=True)).exp()

    def keep(prefixes: tuple[int, ...]) -> torch.Tensor:
        return kept_columns(logits, weights, rows.top_k, rows.top_p, rows.min_p, prefixes)

    full = keep(())
    for prefixes in ((1,), (1, 2, 3), (64, 512), probability.PREFIXES, (columns,)):
        assert torch.equal(keep(prefixes), full)
    assert bool(full.any(1).all())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 33), st.sampled_from(VOCABS), st.integers(0, 2**32 - 1))
def test_log_sum_exp_is_the_same_for_a_row_alone_and_in_a_prompt(
    count: int, vocab: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=gen) * 6
    ids = torch.randint(vocab, (count,), generator=gen)
    whole = prompt_logprobs(logits, ids, num_top=3)
    for i in range(count):
        alone = prompt_logprobs(logits[i : i + 1], ids[i : i + 1], num_top=3)
        assert [v[0] for v in as_lists(alone)] == [v[i] for v in as_lists(whole)]


@pytest.mark.parametrize("vocab", VOCABS)
def test_sums_do_not_depend_on_the_order_of_the_tokens(vocab: int) -> None:
    """Renaming the tokens renames the logprobs and changes no bit: no float is added to another."""
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=gen) * 3
    names = torch.randperm(vocab, generator=gen)
    ids = torch.randint(vocab, (9,), generator=gen)
    renamed = torch.empty_like(logits)
    renamed[:, names] = logits
    want, got = prompt_logprobs(logits, ids, 5), prompt_logprobs(renamed, names[ids], 5)
    assert got.logprobs.tolist() == want.logprobs.tolist()
    assert got.top_logprobs.tolist() == want.top_logprobs.tolist()
    assert torch.equal(got.top_ids, names[want.top_ids])


def test_prompt_logprobs_equal_decode_logprobs() -> None:
    vocab, count = 700, 40
    logits = torch.randn(count, vocab) * 4
    rows = SamplingRows.of(
        [RowParams(seed=3, position=t, temperature=0.7, top_p=0.8) for t in range(count)],
        num_top_logprobs=4,
        want_raw_logprobs=True,
    )
    decoded = sample(logits, rows)
    assert as_lists(prompt_logprobs(logits, decoded.tokens, 4)) == as_lists(decoded.raw_logprobs)


def test_a_long_prompt_is_scored_in_pieces_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = torch.randn(50, 90), torch.randint(90, (50,))
    want = as_lists(prompt_logprobs(logits, ids, 2))
    monkeypatch.setattr("phalanx.kernels.reference.logprobs._CHUNK_ELEMENTS", 90 * 7)
    assert as_lists(prompt_logprobs(logits, ids, 2)) == want
