"""Text of a stream equals the text of the whole sequence, for every split of the ids and any bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from phalanx.services.tokenizer.core import DEFAULT_TOKENIZER
from phalanx.services.tokenizer.detokenize import (
    ALPHABET,
    ByteDetokenizer,
    Detokenizer,
    TextDetokenizer,
    make_detokenizer,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny-a" / "tokenizer.json"
DEFAULT = Tokenizer.from_file(str(DEFAULT_TOKENIZER))
VOCAB = DEFAULT.get_vocab_size()
THINK = DEFAULT.token_to_id("<think>")


def words() -> Tokenizer:
    return Tokenizer.from_file(str(GOLDEN))


def sentencepiece() -> Tokenizer:
    """The other kind of tokenizer in use: spaces in front of words, bytes as tokens of their own."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁Hello": 256, "▁world": 257, "ing": 258, "▁": 259, "é": 260}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    return tokenizer


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Texts, one a token, and the tail, of `ids` given in calls cut at `cuts`."""
    texts: list[str] = []
    carry = b""
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        piece = detokenizer.step(ids[start:end], carry, flush=False)
        assert len(piece.texts) == end - start
        assert piece.tail == ""
        texts, carry = texts + piece.texts, piece.carry
    return [*texts, detokenizer.step([], carry, flush=True).tail]


def byte_ids(data: bytes) -> list[int]:
    letters = {byte: letter for letter, byte in ALPHABET.items()}
    return [DEFAULT.token_to_id(letters[byte]) for byte in data]


def test_the_alphabet_has_every_byte() -> None:
    assert sorted(ALPHABET.values()) == list(range(256))
    assert "".join(stream(ByteDetokenizer(DEFAULT, frozenset()), byte_ids(bytes(range(128))), []))


def test_a_character_comes_whole_with_its_last_byte() -> None:
    texts = stream(make_detokenizer(DEFAULT), byte_ids("é€😀a".encode()), [])
    assert texts == ["", "é", "", "", "€", "", "", "", "😀", "a", ""]


def test_an_incomplete_character_is_flushed_at_the_end_once() -> None:
    assert stream(make_detokenizer(DEFAULT), byte_ids("a😀".encode()[:-1]), []) == [
        *("a", "", "", ""),
        "\ufffd",
    ]


def test_flush_with_the_last_tokens_equals_flush_after_them() -> None:
    ids = byte_ids(b"a\xf0\x9f")
    piece = make_detokenizer(DEFAULT).step(ids, b"", flush=True)
    assert [*piece.texts, piece.tail] == ["a", "", "", "\ufffd"]
    assert piece.carry == b""


def test_wrong_bytes_are_replaced_and_the_next_character_is_whole() -> None:
    assert "".join(stream(make_detokenizer(DEFAULT), byte_ids(b"\xff\xe4b\x80"), [2])) == "��b�"


def test_special_tokens_show_nothing_and_structure_tokens_show() -> None:
    assert stream(make_detokenizer(DEFAULT), [0, THINK, 1], []) == ["", "<think>", "", ""]


def test_unknown_ids_and_foreign_carries_do_not_raise() -> None:
    for tokenizer in (DEFAULT, words(), sentencepiece()):
        detokenizer = make_detokenizer(tokenizer)
        for carry in (
            b"",
            b"\xff",
            b"garbage",
            b"\x92\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x90",
            b"\x92\x91\xff\x90",
        ):
            piece = detokenizer.step([-1, VOCAB, 2**32, 2**70, 5], carry, flush=True)
            assert piece.texts[:4] == ["", "", "", ""] or carry


@given(st.data(), st.lists(st.integers(-1, VOCAB + 3) | st.integers(3, 258), max_size=24))
def test_any_split_of_any_ids_is_the_whole_text(data: st.DataObject, ids: list[int]) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    texts = stream(make_detokenizer(DEFAULT), ids, cuts)
    known = [token for token in ids if 0 <= token < VOCAB]
    assert "".join(texts) == DEFAULT.decode(known, skip_special_tokens=True)
    assert texts == stream(
        make_detokenizer(DEFAULT), ids, []
    )  # the same token releases the same text


@given(st.data(), st.text(max_size=24))
def test_any_split_of_any_text_gives_the_text_and_holds_one_character_back(
    data: st.DataObject, text: str
) -> None:
    ids = DEFAULT.encode(text).ids
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    texts = stream(make_detokenizer(DEFAULT), ids, cuts)
    assert "".join(texts) == DEFAULT.decode(ids)
    decoded = ""
    for position, shown in enumerate(texts[:-1]):
        decoded += shown
        so_far = DEFAULT.decode(ids[: position + 1])
        # Not yet shown is at most the one U+FFFD that the whole-sequence decode ends with.
        assert so_far in (decoded, decoded + "\ufffd")


@given(st.data(), st.lists(st.integers(0, 513), max_size=16))
def test_word_level_streams_equal_the_whole(data: st.DataObject, ids: list[int]) -> None:
    tokenizer = words()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    texts = stream(make_detokenizer(tokenizer), ids, cuts)
    assert "".join(texts) == tokenizer.decode(ids)


PIECES = ["▁Hello", "▁world", "ing", "▁", "é"]


@given(st.data(), st.lists(st.sampled_from([*PIECES, "é€", "😀", "\n"]), max_size=10))
def test_byte_fallback_streams_equal_the_whole(data: st.DataObject, parts: list[str]) -> None:
    tokenizer = sentencepiece()
    ids: list[int] = []
    for part in parts:
        token = tokenizer.token_to_id(part)
        ids += [token] if token is not None else list(part.encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    texts = stream(make_detokenizer(tokenizer), ids, cuts)
    assert "".join(texts) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(texts)


@given(st.lists(st.integers(0, 260), max_size=16))
def test_byte_fallback_of_wrong_bytes_does_not_raise(ids: list[int]) -> None:
    detokenizer = make_detokenizer(sentencepiece())
    assert isinstance(detokenizer, TextDetokenizer)
    carry = b""
    for token in ids:
        carry = detokenizer.step([token], carry, flush=False).carry
        assert len(carry) < 64  # bounded, however long the stream


@pytest.mark.parametrize("tokenizer", [DEFAULT, words()])
def test_the_kind_follows_the_decoder(tokenizer: Tokenizer) -> None:
    byte_level = tokenizer is DEFAULT
    assert isinstance(make_detokenizer(tokenizer), ByteDetokenizer) == byte_level
