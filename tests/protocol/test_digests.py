"""The digest is what the documents say, so that a client in any language can make it."""

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.digests import DIGEST_BYTES, RunningDigest, tokens_digest

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(st.integers(0, 63), IDS, IDS)
def test_however_the_tokens_come_it_is_the_same(
    index: int, head: list[int], tail: list[int]
) -> None:
    running = RunningDigest(index, head)
    assert running.digest() == tokens_digest(index, head)
    running.update(tail)
    words = struct.pack(f"<{1 + len(head) + len(tail)}i", index, *head, *tail)
    assert running.digest() == blake2b(words, digest_size=16).digest()
    assert len(running.digest()) == DIGEST_BYTES


def test_sequences_of_one_request_differ() -> None:
    assert tokens_digest(0, (1, 2)) != tokens_digest(1, (1, 2)) != tokens_digest(1, (2, 1))
