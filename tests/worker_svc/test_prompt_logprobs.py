"""Logprobs of a prompt are those that decoding the same tokens reported, bit for bit."""

from functools import cache

import pytest
import torch
from forward_world import SHAPES, World, weights_of

from phalanx.kernels.reference.logprobs import TokenLogprobs, prompt_logprobs
from phalanx.kernels.reference.sample import sample
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows
from phalanx.worker_svc.model.reader import Reader

ALL = pytest.mark.parametrize("shape", SHAPES)
PROMPT, OUTPUTS, BEST = 23, 13, 3


@cache
def decoded(shape: str, *, beside: int) -> tuple[list[int], TokenLogprobs]:
    """A text of which the last tokens were drawn at temperature 1, and what the draws reported."""
    world = World(shape, seed=4)
    text = world.tokens(PROMPT)
    logits = world.run(0, 0, text)[-1:]
    others = [world.tokens(PROMPT + OUTPUTS) for _ in range(beside)]
    drawn = []
    for at in range(PROMPT, PROMPT + OUTPUTS):
        rows = SamplingRows.of([RowParams(seed=11, position=at)], num_top_logprobs=BEST)
        result = sample(logits, rows)
        assert result.logprobs is not None
        drawn.append(result.logprobs)
        text.append(int(result.tokens[0]))
        parts = [world.rows(0, at, text[at:])]
        for slot, other in enumerate(others, start=1):
            start = at - PROMPT
            parts.insert(0, world.rows(slot, start, other[start : start + 1]))
        pending = world.forward(*parts)
        pending.commit([1] * len(parts))
        logits = pending.logits[-1:]
    return text, TokenLogprobs(
        torch.cat([one.logprobs for one in drawn]),
        torch.cat([one.top_ids for one in drawn]),
        torch.cat([one.top_logprobs for one in drawn]),
    )


def assert_equal(prompt: TokenLogprobs, decode: TokenLogprobs) -> None:
    for name in ("logprobs", "top_ids", "top_logprobs"):
        got, expected = getattr(prompt, name)[-OUTPUTS:], getattr(decode, name)
        assert torch.equal(got, expected), name


@ALL
@pytest.mark.parametrize("beside", [0, 4])
def test_one_shot_and_chunked_prompts_report_what_decoding_did(shape: str, beside: int) -> None:
    text, decode = decoded(shape, beside=beside)
    reader = Reader(weights_of(shape), len(text))
    for portion in (len(text), 17, 1):
        assert_equal(reader.score(text, portion, BEST), decode)


@ALL
def test_six_rows_at_a_time_report_the_same(shape: str) -> None:
    """As a verification step sees them."""
    text, decode = decoded(shape, beside=0)
    reader = Reader(weights_of(shape), len(text))
    logits = [reader.read(text[:PROMPT])]
    logits += [reader.read(text[at : at + 6]) for at in range(PROMPT, len(text), 6)]
    rows = torch.cat(logits)[:-1]
    assert_equal(prompt_logprobs(rows, torch.tensor(text[1:]), BEST), decode)


def test_another_text_has_other_logprobs() -> None:
    """Else the tests above could not fail."""
    text, decode = decoded("tiny-a", beside=0)
    text = [(text[0] + 1) % 512, *text[1:]]
    reader = Reader(weights_of("tiny-a"), len(text))
    got = reader.score(text, len(text), BEST).logprobs[-OUTPUTS:]
    assert not torch.equal(got, decode.logprobs)
