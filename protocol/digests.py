"""The running digest of a stream: what proves, in 16 bytes, that two sides mean the same tokens.

BLAKE2b with a digest of 16 bytes over int32, little endian: the sequence's index, then its token ids
from the first output on. Who has k tokens has hashed k + 1 numbers.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class RunningDigest:
    """Fed with tokens as they come."""

    def __init__(self, index: int, token_ids: Sequence[int] = ()) -> None:
        self._hash = blake2b(_encoded((index,)), digest_size=DIGEST_BYTES)
        self.update(token_ids)

    def update(self, token_ids: Sequence[int]) -> None:
        self._hash.update(_encoded(token_ids))

    def digest(self) -> bytes:
        """Of everything so far."""
        return self._hash.digest()


def tokens_digest(index: int, token_ids: Sequence[int]) -> bytes:
    """Of a whole beginning of sequence `index`."""
    return RunningDigest(index, token_ids).digest()


def _encoded(numbers: Sequence[int]) -> bytes:
    words = array("i", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
