"""Turns token ids into text piece by piece. Pure and stateless: the caller keeps the carry between calls.

Whatever way the ids of a sequence are cut into calls, the texts joined, with the tail at the end, are
the text of the whole sequence. A character is never split: the text of a token that ends inside one
comes with the token that completes it, and not more than that one character is ever held back.
Nothing here raises on odd ids: bytes that are not UTF-8 become U+FFFD, unknown ids become nothing.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from tokenizers import Tokenizer

from phalanx.services.tokenizer.encode import settings


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of some consecutive tokens of one sequence."""

    texts: list[str]  # one a token, "" while it shows nothing yet
    tail: str  # what the last token still owes: an incomplete character; only with flush
    carry: bytes  # for the next call; b"" begins a sequence


class Detokenizer(Protocol):
    """Two kinds: `ByteDetokenizer` (V4.1 and every byte-level BPE) and `TextDetokenizer` (the rest)."""

    def step(self, ids: Sequence[int], carry: bytes, *, flush: bool) -> Piece:
        """Text of the next `ids`. Tokens that the tokenizer marks special show nothing."""


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte (GPT-2's table), inverted.

    Printable Latin-1 characters stand for themselves, the others for U+0100 onwards in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in plain]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


ALPHABET = byte_alphabet()


class ByteDetokenizer:
    """Every token is a string of bytes, so the carry is the bytes of an unfinished character: at most 3."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}  # filled as ids come: a full table would delay the start

    def step(self, ids: Sequence[int], carry: bytes, *, flush: bool) -> Piece:
        texts: list[str] = []
        for token in ids:
            data = carry + self._token_bytes(token)
            text, used = codecs.utf_8_decode(data, "replace", False)
            carry = data[used:]
            texts.append(text)
        if flush:
            return Piece(texts, carry.decode("utf-8", "replace"), b"")
        return Piece(texts, "", carry)

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            text = "" if token in self._special_ids else token_text(self._tokenizer, token)
            known = self._bytes[token] = token_bytes(text)
        return known


def token_bytes(text: str) -> bytes:
    """Bytes of a byte-level token; an added token with other characters stands for itself."""
    try:
        return bytes(ALPHABET[char] for char in text)
    except KeyError:
        return text.encode("utf-8", "replace")


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The vocabulary's spelling of an id, "" for one outside it (a padded embedding has such rows)."""
    if not 0 <= token < 2**32:
        return ""
    return tokenizer.id_to_token(token) or ""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]  # what the library takes as an id


class TextState(msgspec.Struct, array_like=True, frozen=True):
    """What decides how the next tokens of a non-byte-level tokenizer read."""

    context: list[TokenId]  # shown last: a decoder may treat the first token of a text differently
    pending: list[TokenId]  # not shown yet: they end inside a character


CHARACTER_BYTES_MAX = 4  # so a character takes at most so many byte-fallback tokens


class TextDetokenizer:
    """Asks the library for the text with and without the new token; what was added is the token's.

    Exact for decoders whose text only grows at the end. A byte-fallback decoder that would take back
    text already shown (it replaces a whole run of bytes when its last one is wrong) keeps what is shown.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids

    def step(self, ids: Sequence[int], carry: bytes, *, flush: bool) -> Piece:
        now = read_carry(carry)
        texts: list[str] = []
        for token in ids:
            if token in self._special_ids or not token_text(self._tokenizer, token):
                texts.append("")  # nor does it become context: the decoder leaves it out
                continue
            pending = [*now.pending, token]
            text = self._added(now.context, pending)
            if text.endswith("\ufffd") and len(pending) < CHARACTER_BYTES_MAX:
                now, text = TextState(now.context, pending), ""
            else:
                now = TextState(pending, [])
            texts.append(text)
        if not flush:
            return Piece(texts, "", msgspec.msgpack.encode(now))
        tail = self._added(now.context, now.pending) if now.pending else ""
        return Piece(texts, tail, b"")

    def _added(self, context: list[int], ids: list[int]) -> str:
        before = self._tokenizer.decode(context)
        return self._tokenizer.decode([*context, *ids])[len(before) :]


def read_carry(carry: bytes) -> TextState:
    """A carry that is not one of ours begins afresh: a stream loses a space, not its life."""
    try:
        return msgspec.msgpack.decode(carry, type=TextState) if carry else TextState([], [])
    except msgspec.DecodeError:  # malformed, or of other types
        return TextState([], [])


def make_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """The detokenizer that suits the tokenizer's decoder."""
    decoder = settings(tokenizer.decoder)
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(token for token, entry in added.items() if entry.special)
    if decoder.get("type") == "ByteLevel":
        return ByteDetokenizer(tokenizer, special)
    return TextDetokenizer(tokenizer, special)
