"""Text to ids, in pieces: exact, and with bounded memory and bounded time between two looks around.

The library needs some 190 bytes of memory a byte of text (5 GB for a prompt of 27 MB) and gives
nothing back before it is done. V4.1's pre-tokenizer, however, has places where it always cuts,
whatever stands around them; texts are cut there first, so that the pieces' ids joined are the ids
of the whole.
"""

import json
import re
from array import array
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer

PIECE_CHARS = 16_384  # a few milliseconds of work

# V4.1's pre-tokenizer, verbatim: three splits, then bytes. `DIGIT` is the variant of the packaged default.
DIGITS = r"\p{N}{1,3}"
DIGIT = r"\p{N}"
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+"
    "|\\s+(?!\\S)"
    "|\\s+"
)

# Where those rules always cut. Between letter and space: a word takes one space in front of it and
# never ends in one. Beside a run of CJK characters: the second split isolates such runs.
_CUT = re.compile(
    r"(?<=[A-Za-z])(?= [A-Za-z])"
    "|(?<=[一-龥\u3040-ゟ゠-ヿ])(?=[^一-龥\u3040-ゟ゠-ヿ])"
)


class TextEncoder:
    """Encodes with one tokenizer. `Tokenizer.encode(text).ids` is what the pieces' ids add up to."""

    def __init__(self, tokenizer: Tokenizer, piece_chars: int = PIECE_CHARS) -> None:
        assert piece_chars >= 1
        self._tokenizer = tokenizer
        self._piece_chars = piece_chars if can_cut(tokenizer) else None

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces of about `piece_chars`; in one where its tokenizer or itself has no place to cut."""
        start = 0
        while self._piece_chars is not None and len(text) - start > self._piece_chars:
            cut = _CUT.search(text, start + self._piece_chars)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def encode(self, piece: str) -> "array[int]":
        """Ids of one piece, int32. Releases the interpreter lock while it works."""
        return array("i", self._tokenizer.encode_batch_fast([piece])[0].ids)


def can_cut(tokenizer: Tokenizer) -> bool:
    """Whether the places of `_CUT` are cuts for this tokenizer: V4.1's rules, and nothing that looks across."""
    splits = settings(tokenizer.pre_tokenizer).get("pretokenizers", [])
    rules = [split.get("pattern", {}).get("Regex") for split in splits]
    if rules not in ([DIGITS, CJK, WORDS, None], [DIGIT, CJK, WORDS, None]):
        return False
    isolated = all(split["behavior"] == "Isolated" and not split["invert"] for split in splits[:3])
    bytes_last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    normalizer, post_processor = settings(tokenizer.normalizer), settings(tokenizer.post_processor)
    return (
        isolated
        and bytes_last.items() <= splits[3].items()
        and normalizer in ({}, {"type": "Sequence", "normalizers": []})
        and post_processor.get("type", "ByteLevel") == "ByteLevel"
        and not any(map(looks_across, tokenizer.get_added_tokens_decoder().values()))
    )


def settings(part: Any) -> dict[str, Any]:
    """What `tokenizer.json` says of one part of the pipeline, {} for one that is absent."""
    return json.loads(part.__getstate__()) if part is not None else {}


def looks_across(token: AddedToken) -> bool:
    """Whether an added token can match across a place of `_CUT`, or looks at what stands beside it."""
    if token.lstrip or token.rstrip or token.single_word:
        return True
    return _CUT.search(token.content) is not None


def without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer that reads the spelling of a special token as plain text."""
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(parts))
