"""Content keys of KV blocks and window states: a hash chain over token blocks.

A key says everything that decides the bytes of a record: the numerics fingerprint, the tenant's salt,
all tokens up to the end of the block and the content of every image among them. Two processes, hosts
or Python versions give the same key for the same input, so a prefix is found again after a restart.

Each hash covers tagged, length-prefixed fields, so that no two different inputs have one encoding: a
salt can never be read as part of a fingerprint, nor an image as tokens. The three kinds of hash (root,
block, state) are separated by BLAKE2b's personalisation.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.protocol.limits import BLOCK_SIZE

KEY_BYTES = 32  # 256 bits: a tenant who searches for collisions finds none
KEY_VERSION = 1  # part of the root: a change of the record format or of this file changes every key
TOKEN_ID_MAX = 2**32 - 1

_ROOT, _BLOCK, _STATE = b"phalanx-kv-root", b"phalanx-kv-block", b"phalanx-kv-state"
_FIELD = struct.Struct("<BQ")  # tag, length of the value in bytes
_IMAGE = struct.Struct("<QQ")  # first position inside the block, that position's index in the image
_TAG_VERSION, _TAG_FINGERPRINT, _TAG_SALT, _TAG_PARENT, _TAG_TOKENS, _TAG_IMAGE = range(1, 7)


class ImageSpan(NamedTuple):
    """An image's placeholder tokens in a prompt: all placeholders have one id, the digest differs."""

    start: int  # position of its first token in the sequence
    num_tokens: int
    digest: bytes  # of the pixels and of how they were prepared


def root_key(fingerprint: bytes, salt: bytes) -> bytes:
    """The parent of every first block: 32 bytes. Other numerics or another tenant, another key space."""
    return _digest(
        _ROOT,
        _field(_TAG_VERSION, struct.pack("<I", KEY_VERSION)),
        _field(_TAG_FINGERPRINT, fingerprint),
        _field(_TAG_SALT, salt),
    )


def block_key(
    parent: bytes, token_ids: Sequence[int], start: int = 0, images: Sequence[ImageSpan] = ()
) -> bytes:
    """The key of the block that holds `token_ids` at positions `start`.. and follows block `parent`.

    `images` are those of the whole sequence, in order and disjoint; those outside the block do not
    count. Raises ValueError when a token id does not fit 32 unsigned bits.
    """
    end = start + len(token_ids)
    fields = [_field(_TAG_PARENT, parent), _field(_TAG_TOKENS, _packed(token_ids))]
    for image in images:
        first = max(start, image.start)
        if first < min(end, image.start + image.num_tokens):
            place = _IMAGE.pack(first - start, first - image.start)
            fields.append(_field(_TAG_IMAGE, place + image.digest))
    return _digest(_BLOCK, *fields)


def state_key(block: bytes) -> bytes:
    """The key of the complete window state at the end of the block with key `block`."""
    return _digest(_STATE, _field(_TAG_PARENT, block))


def block_keys(
    fingerprint: bytes,
    salt: bytes,
    token_ids: Sequence[int],
    block_size: int = BLOCK_SIZE,
    images: Sequence[ImageSpan] = (),
) -> list[bytes]:
    """The keys of all full blocks of a sequence, in order: `len(token_ids) // block_size` of them."""
    return list(iter_block_keys(fingerprint, salt, token_ids, block_size, images))


def iter_block_keys(
    fingerprint: bytes,
    salt: bytes,
    token_ids: Sequence[int],
    block_size: int = BLOCK_SIZE,
    images: Sequence[ImageSpan] = (),
) -> Iterator[bytes]:
    """Like `block_keys`, one at a time: a search for the longest cached prefix stops at its first miss."""
    parent = root_key(fingerprint, salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size], start, images)
        yield parent


def _packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, whatever the machine."""
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(
            f"token ids must be integers from 0 to {TOKEN_ID_MAX}, these {len(token_ids)} are not"
        ) from error
    if words.itemsize != 4 or not _LITTLE:  # exotic machines only
        return struct.pack(f"<{len(words)}I", *words)
    return words.tobytes()


_LITTLE = struct.pack("=H", 1) == struct.pack("<H", 1)


def _field(tag: int, value: bytes) -> bytes:
    return _FIELD.pack(tag, len(value)) + value


def _digest(person: bytes, *fields: bytes) -> bytes:
    return hashlib.blake2b(b"".join(fields), digest_size=KEY_BYTES, person=person).digest()
