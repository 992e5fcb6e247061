"""Cutting a text into pieces changes no id."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from phalanx.services.tokenizer.core import DEFAULT_TOKENIZER
from phalanx.services.tokenizer.encode import DIGITS, TextEncoder, can_cut, without_added_tokens


def default() -> Tokenizer:
    return Tokenizer.from_file(str(DEFAULT_TOKENIZER))


def official_rules() -> Tokenizer:
    """The packaged tokenizer with V4.1's own rule for digits."""
    parts = json.loads(default().to_str())
    parts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = DIGITS
    return Tokenizer.from_str(json.dumps(parts))


ENCODERS = {
    "default": default(),
    "official": official_rules(),
    "plain": without_added_tokens(default()),
}
FRAGMENTS = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "a",
        "the",
        "Word",
        " of",
        "é",
        "1",
        "2345",
        ",",
        ". ",
        "(x)",
        "==",
    ]
    + [
        "中文",
        "ひら",
        "カナ",
        "，",
        "한",
        "😀",
        "́",
        "<think>",
        "<｜User｜>",
        "｜",
        "<",
        "\u3000",
        "\u2028",
    ]
)


@pytest.mark.parametrize("name", ENCODERS)
@given(
    text=st.lists(FRAGMENTS | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join),
    piece_chars=st.integers(1, 12),
)
def test_pieces_join_to_the_ids_of_the_whole(name: str, text: str, piece_chars: int) -> None:
    tokenizer = ENCODERS[name]
    encoder = TextEncoder(tokenizer, piece_chars)
    pieces = list(encoder.pieces(text))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in encoder.encode(piece)] == tokenizer.encode(
        text
    ).ids


def test_prose_and_chinese_are_cut_near_the_wanted_size() -> None:
    encoder = TextEncoder(default(), 100)
    for sentence in ("All the king's horses and 7 men.\n", "天气很好，我们去学校。\n"):
        sizes = [len(piece) for piece in encoder.pieces(sentence * 100)]
        assert len(sizes) >= len(sentence) * 9 // 10
        assert max(sizes) < 140


def test_text_without_a_place_to_cut_stays_whole() -> None:
    assert list(TextEncoder(default(), 10).pieces("ab1" * 50)) == ["ab1" * 50]
    assert list(TextEncoder(default(), 10).pieces("")) == [""]


def test_tokenizers_with_other_rules_are_not_cut() -> None:
    lowercase, template, rstrip = default(), default(), default()
    lowercase.normalizer = normalizers.Lowercase()
    template.post_processor = processors.TemplateProcessing("X $A", special_tokens=[("X", 5)])
    rstrip.add_tokens([AddedToken("<x>", rstrip=True)])
    spanning = default()
    spanning.add_tokens(["New York"])
    for tokenizer in (lowercase, template, rstrip, spanning):
        assert not can_cut(tokenizer)
        assert list(TextEncoder(tokenizer, 1).pieces("one two three")) == ["one two three"]


def test_without_added_tokens_a_spelling_is_text() -> None:
    assert without_added_tokens(default()).encode("<think>").ids != default().encode("<think>").ids
    assert len(default().encode("<think>").ids) == 1
