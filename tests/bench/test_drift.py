"""Drift is nothing where a mode is exact, and something where it is not."""

from collections.abc import Iterator

import pytest
import torch

from phalanx.bench import drift


@pytest.fixture(scope="module")
def subject() -> Iterator[drift.Subject]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "PROMPTS", 2)
        patch.setattr(drift, "FOLLOWING", 8)
        yield drift.Subject("tiny-a")


def test_exact_sizes(subject: drift.Subject) -> None:
    decoder = 4 * (subject.window - 1) + 1  # layers of the decoder half
    for found in (
        subject.replayed(subject.reach),
        subject.truncated(drift.PROMPT_TOKENS),
        subject.truncated(decoder),
    ):
        assert (found.rel_l2, found.argmax, found.first, found.same) == (0, 1, 8, 2), found.mode


def test_smaller_ones_stray(subject: drift.Subject) -> None:
    for found in (subject.replayed(subject.window), subject.truncated(subject.window + 6)):
        assert 0 < found.rel_l2 < 0.5, found.mode
