"""Edits of the logits equal a plain loop over each row, to the bit, and never reach another row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.kernels.reference.penalties import edit_logits
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows

VOCAB = 11
EOS = 2
INF = float("inf")


def plain_edit(logits: np.ndarray, row: RowParams, mask: np.ndarray | None) -> np.ndarray:
    """The rules one token at a time, in float32 like the real thing."""
    out = logits.copy()
    f32 = np.float32
    for token in row.blocked_ids:
        if 0 <= token < VOCAB:
            out[token] = -INF
    for token, value in row.bias.items():
        if 0 <= token < VOCAB:
            out[token] += f32(value)
    repetition, frequency, presence = map(
        f32, (row.repetition_penalty, row.frequency_penalty, row.presence_penalty)
    )
    for token in sorted({t for t in row.output_ids if 0 <= t < VOCAB}):
        value = out[token]
        value = value / repetition if value > 0 else value * repetition
        out[token] = value - frequency * f32(list(row.output_ids).count(token)) - presence
    if len(row.output_ids) < max(row.min_tokens, row.first_n_no_eos):
        out[EOS] = -INF
    if len(row.output_ids) < row.min_tokens:
        for token in row.stop_ids:
            if 0 <= token < VOCAB:
                out[token] = -INF
    if mask is not None:
        out[~mask] = -INF
    return out


token_ids = st.integers(-2, VOCAB + 2)  # some outside the vocabulary, on both sides
rows_strategy = st.builds(
    RowParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.1, 1.7]),
    presence_penalty=st.sampled_from([0.0, -0.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.2, 0.1]),
    min_tokens=st.integers(0, 4),
    first_n_no_eos=st.integers(0, 4),
    output_ids=st.lists(token_ids, max_size=9),
    stop_ids=st.lists(token_ids, max_size=3),
    bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=3),
    blocked_ids=st.lists(token_ids, max_size=3),
)


@given(st.lists(rows_strategy, min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.booleans())
def test_equals_a_plain_loop(rows: list[RowParams], data_seed: int, with_mask: bool) -> None:
    rng = np.random.default_rng(data_seed)
    logits = (rng.standard_normal((len(rows), VOCAB)) * 3).astype(np.float32)
    mask = rng.random(logits.shape) < 0.7 if with_mask else None
    got = edit_logits(
        torch.from_numpy(logits),
        SamplingRows.of(rows, eos_id=EOS),
        None if mask is None else torch.from_numpy(mask),
    ).numpy()
    for i, row in enumerate(rows):
        want = plain_edit(logits[i], row, None if mask is None else mask[i])
        assert got[i].tolist() == want.tolist()


def test_nothing_asked_copies_nothing() -> None:
    logits = torch.randn(3, VOCAB)
    rows = SamplingRows.of([RowParams(output_ids=(1, 2))] * 3, eos_id=EOS)
    assert edit_logits(logits, rows, None) is logits


def test_the_callers_logits_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    rows = SamplingRows.of([RowParams(blocked_ids=(1,)), RowParams(bias={3: 1.0})])
    edit_logits(logits, rows, torch.zeros(2, VOCAB, dtype=torch.bool))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 3, 10**12, -1, -VOCAB])
def test_an_id_outside_the_vocabulary_never_reaches_a_neighbour(bad: int) -> None:
    logits = torch.zeros(3, VOCAB)
    middle = RowParams(
        blocked_ids=(bad,),
        stop_ids=(bad,),
        bias={bad: 5.0},
        output_ids=(bad,),
        min_tokens=9,
        presence_penalty=1.0,
    )
    edited = edit_logits(logits, SamplingRows.of([RowParams(), middle, RowParams()]), None)
    assert torch.equal(edited, logits)


def test_min_tokens_bans_end_and_stop_until_reached() -> None:
    def banned(settings: RowParams, num_outputs: int) -> list[int]:
        row = replace(settings, output_ids=[5] * num_outputs, stop_ids=(4, 7))
        edited = edit_logits(torch.zeros(1, VOCAB), SamplingRows.of([row], eos_id=EOS), None)
        return (edited[0] == -INF).nonzero()[:, 0].tolist()

    at_least_two, no_end_first = RowParams(min_tokens=2), RowParams(first_n_no_eos=1)
    assert [banned(at_least_two, n) for n in range(4)] == [[2, 4, 7], [2, 4, 7], [], []]
    assert [banned(no_end_first, n) for n in range(3)] == [[2], [], []]  # stop ids stay legal


def test_outputs_may_be_counted_without_being_listed() -> None:
    rows = [RowParams(num_outputs=n, min_tokens=2) for n in range(4)]
    edited = edit_logits(torch.zeros(4, VOCAB), SamplingRows.of(rows, eos_id=EOS), None)
    assert (edited[:, EOS] == -INF).tolist() == [True, True, False, False]
