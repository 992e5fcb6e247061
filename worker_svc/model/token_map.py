"""The map from token ids to Engram's compressed ids: spellings of one text share an id.

Source: model.md C.3.
"""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from phalanx.worker_svc.model.cache import cache_dir

# Part of the name of a stored map: raise it when the rule changes.
_RULE = 1
_LONE_SPACE = "\ue000"  # protects a token that is one space from being stripped to nothing


def engram_token_map(tokenizer: Path, vocab_size: int) -> npt.NDArray[np.int64]:
    """Compressed id of every token id, int64 [vocab_size].

    The map of the full vocabulary takes seconds to make, so it is kept in the cache directory
    under the tokenizer's digest.

    Raises:
        OSError: the tokenizer file cannot be read.
        ValueError: it is not a tokenizer.
    """
    content = tokenizer.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:24]
    stored = cache_dir() / f"engram-map-{_RULE}-{vocab_size}-{digest}.npy"
    known = _read(stored, vocab_size)
    if known is not None:
        return known
    try:
        parsed = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{tokenizer} is not a tokenizer.json: {error}") from error
    made = _make(parsed, vocab_size)
    _store(stored, made)
    return made


def _make(tokenizer: Tokenizer, vocab_size: int) -> npt.NDArray[np.int64]:
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    ids: dict[str | None, int] = {}
    result = np.empty(vocab_size, np.int64)
    for token in range(vocab_size):
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:  # part of a character: only the token's own spelling tells it apart
            key: str | None = tokenizer.id_to_token(token)
        else:
            key = normalizer.normalize_str(text) or text
        result[token] = ids.setdefault(key, len(ids))
    return result


def _read(stored: Path, vocab_size: int) -> npt.NDArray[np.int64] | None:
    try:
        known: npt.NDArray[np.int64] = np.load(stored, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    usable = known.dtype == np.int64 and known.shape == (vocab_size,)
    return known if usable else None


def _store(stored: Path, made: npt.NDArray[np.int64]) -> None:
    """Best effort: a cache that cannot be written only costs time."""
    part = stored.with_name(f"{stored.name}.{os.getpid()}.part")
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.save(file, made, allow_pickle=False)
        part.replace(stored)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
