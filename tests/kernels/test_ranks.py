"""The rank of a token is its place in the order that the list of the best has, ties and all."""

import pytest
import torch

from phalanx.kernels.reference import logprobs
from phalanx.kernels.reference.logprobs import raw_logprobs, token_ranks


@pytest.mark.parametrize("chunk", [1, 40, 1 << 22])
def test_ranks_are_places_in_the_order(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk)
    draw = torch.Generator().manual_seed(3)
    logits = torch.randint(-4, 5, (30, 20), generator=draw).float()  # many ties
    logits[4, 7] = float("-inf")
    ids = torch.randint(0, 20, (30,), generator=draw)
    order = raw_logprobs(logits, ids, 20).top_ids.tolist()
    order[4][-1] = 7  # the list of the best leaves it out
    expected = [1 + row.index(token) for row, token in zip(order, ids.tolist(), strict=True)]
    assert token_ranks(logits, ids).tolist() == expected
