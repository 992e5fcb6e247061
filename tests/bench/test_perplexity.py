"""The perplexity of the fixed text is the stored one, however the text is read; and it would move."""

import pytest
import torch

from phalanx.bench.perplexity import (
    MODELS,
    agrees,
    load_stored,
    model_dir,
    perplexity,
    text_ids,
)
from phalanx.worker_svc.model.reader import open_reader


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_stored_value_in_any_portions(name: str) -> None:
    ids = text_ids(model_dir(name))
    reader = open_reader(model_dir(name), len(ids))
    found = {perplexity(reader, ids, portion) for portion in (len(ids), 64, 7)}
    assert len(found) == 1
    stored = load_stored()
    assert agrees(stored.perplexity[name], found.pop(), stored.made_on)


@pytest.mark.parametrize("name", MODELS)
def test_another_rounding_of_one_weight_moves_it(name: str) -> None:
    ids = text_ids(model_dir(name))
    reader = open_reader(model_dir(name), len(ids))
    before = perplexity(reader, ids)
    norm = reader.model.layers[0].attention.norm
    norm[0] = torch.nextafter(norm[0].bfloat16(), torch.tensor(9.0).bfloat16()).float()
    assert perplexity(reader, ids) != before
