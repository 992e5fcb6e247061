"""The packaged tokenizer: every text has an encoding, V4.1's special tokens are single ids, and it can be built again."""

import json
import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from phalanx.services.tokenizer import build_default
from phalanx.services.tokenizer.core import DEFAULT_TOKENIZER
from phalanx.services.tokenizer.encode import can_cut

TOKENIZER = Tokenizer.from_file(str(DEFAULT_TOKENIZER))
SPECIAL = json.loads(DEFAULT_TOKENIZER.with_name("special_ids.json").read_text("utf-8"))


def test_it_is_small() -> None:
    assert DEFAULT_TOKENIZER.stat().st_size < 400_000
    assert TOKENIZER.get_vocab_size() == SPECIAL["vocab_size"] == 4096
    assert can_cut(TOKENIZER)


def test_special_tokens_have_the_ids_that_the_file_says() -> None:
    assert [SPECIAL[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == [0, 1, 2]
    assert SPECIAL["image_token_id"] == SPECIAL["tokens"]["<｜image｜>"]
    assert SPECIAL["dspark_noise_token_id"] == SPECIAL["tokens"]["<｜place▁holder▁no▁799｜>"]
    for text, token in SPECIAL["tokens"].items():
        assert TOKENIZER.encode(f"a{text}b").ids[1:-1] == [token]


def test_low_ids_behind_the_special_ones_are_ordinary_tokens() -> None:
    assert not set(range(3, 4000)) & set(SPECIAL["tokens"].values())
    assert all(TOKENIZER.id_to_token(token) for token in range(4096))


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the corpus is 3.11.7's")
def test_building_it_again_gives_the_committed_files() -> None:
    tokenizer = build_default.build()
    assert json.loads(tokenizer.to_str()) == json.loads(DEFAULT_TOKENIZER.read_text("utf-8"))
    assert build_default.special_ids(tokenizer) == SPECIAL
