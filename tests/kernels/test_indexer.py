"""Entries are chosen by score, then lower position, whatever lies beyond what a row may see."""

import random

import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference.indexer import (
    candidate_mask,
    entry_scores,
    hide_future,
    select_top,
)

HIDDEN = float("-inf")


def coarse_scores(rows: int, entries: int, seed: int) -> Tensor:
    """Scores with many ties, among them both zeros."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (rows, entries), generator=generator).float() / 2
    minus = torch.rand((rows, entries), generator=generator) < 0.5
    return torch.where((scores == 0) & minus, -0.0, scores)


def best(scores: list[float], count: int) -> list[int]:
    """The definition: by score, then by position; the chosen in position order."""
    seen = [j for j, score in enumerate(scores) if score != HIDDEN]
    chosen = sorted(sorted(seen, key=lambda j: (-scores[j], j))[:count])
    return chosen + [-1] * (count - len(chosen))


@pytest.mark.parametrize("seed", range(20))
def test_choice_with_ties(seed: int) -> None:
    choose = random.Random(seed)
    entries, count = choose.randint(1, 60), choose.randint(1, 20)
    scores = coarse_scores(13, entries, seed)
    visible = torch.tensor([choose.randint(0, entries) for _ in range(13)])
    scores = hide_future(scores, visible)
    got = select_top(scores, count)
    assert got.tolist() == [best(row, count) for row in scores.tolist()]


@pytest.mark.parametrize("seed", range(5))
def test_choice_does_not_depend_on_the_width_of_the_batch(seed: int) -> None:
    scores = coarse_scores(40, 50, seed)
    wide = torch.nn.functional.pad(scores, (0, 200), value=HIDDEN)
    assert torch.equal(select_top(wide, 8), select_top(scores, 8))


def test_the_library_choice_does_depend_on_it() -> None:
    scores = coarse_scores(40, 50, 0)
    wide = torch.nn.functional.pad(scores, (0, 200), value=HIDDEN)
    narrow, widened = (s.topk(8, dim=1).indices.sort(dim=1).values for s in (scores, wide))
    assert not torch.equal(narrow, widened)


def test_without_entries_nothing_is_chosen() -> None:
    assert select_top(torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("seed", range(20))
def test_candidates(seed: int) -> None:
    choose = random.Random(seed)
    size, blocks, entries = choose.randint(1, 5), choose.randint(1, 6), choose.randint(1, 50)
    visible = torch.tensor([choose.randint(0, entries) for _ in range(9)])
    scores = hide_future(coarse_scores(9, entries, seed), visible)
    got = candidate_mask(scores, visible, block_size=size, num_blocks=blocks)
    for row, seen in enumerate(visible.tolist()):
        maxima = [max(scores[row, at : at + size].tolist()) for at in range(0, entries, size)]
        if seen:
            maxima[(seen - 1) // size] = float("inf")
        kept = {block for block in best(maxima, blocks) if block >= 0}
        assert got[row].tolist() == [j // size in kept for j in range(entries)]


def test_scores_round_after_every_operation() -> None:
    generator = torch.Generator().manual_seed(4)
    queries, keys = (
        torch.randn(shape, generator=generator).bfloat16().float()
        for shape in ((3, 5, 32), (3, 16, 32))
    )
    weights = torch.randn((3, 5), generator=generator).bfloat16()
    dots = torch.bmm(queries, keys.transpose(1, 2)).bfloat16()
    expected = (dots.relu() * weights.unsqueeze(-1)).float().sum(dim=1).bfloat16().float()
    got = entry_scores(queries, keys, weights.float())
    assert torch.allclose(got, expected, rtol=2**-7)
    assert torch.equal(got, got.bfloat16().float())
