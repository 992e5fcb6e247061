"""KV keys depend on everything that decides a record's bytes, on nothing else, and are the same in
every process: known answers, a chain rebuilt by hand, other interpreters, and no field confusion."""

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.kvkeys import (
    KEY_BYTES,
    ImageSpan,
    block_key,
    block_keys,
    iter_block_keys,
    root_key,
    state_key,
)

IDS = list(range(1000, 1300))


def field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BQ", tag, len(value)) + value


def test_the_chain_is_what_the_docstring_says() -> None:
    def digest(person: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32, person=person).digest()

    fields = field(1, b"\x01\0\0\0") + field(2, b"numerics") + field(3, b"tenant")
    parent = digest(b"phalanx-kv-root", fields)
    assert root_key(b"numerics", b"tenant") == parent
    expected = []
    for start in (0, 128):
        tokens = struct.pack("<128I", *IDS[start : start + 128])
        parent = digest(b"phalanx-kv-block", field(4, parent) + field(5, tokens))
        expected.append(parent)
    assert block_keys(b"numerics", b"tenant", IDS) == expected
    assert state_key(parent) == digest(b"phalanx-kv-state", field(4, parent))


def test_known_answers_do_not_move_between_versions() -> None:
    keys = block_keys(b"numerics", b"tenant", IDS)
    assert [key.hex()[:16] for key in keys] == ["3a0defbb37a6ddd2", "d4970414ce82db35"]
    assert state_key(keys[1]).hex()[:16] == "b1a3b627288a01b9"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_other_processes_find_the_same_keys(seed: str) -> None:
    program = (
        "from phalanx.protocol.kvkeys import block_keys\n"
        "print(*(k.hex() for k in block_keys(b'numerics', b'tenant', range(1000, 1300))))"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        text=True,
    )
    assert answer.stdout.split() == [key.hex() for key in block_keys(b"numerics", b"tenant", IDS)]


def test_only_full_blocks_have_keys() -> None:
    for length, number in ((0, 0), (127, 0), (128, 1), (255, 1), (256, 2)):
        assert len(block_keys(b"", b"", range(length))) == number
    assert block_keys(b"", b"", range(12), block_size=4) == list(
        iter_block_keys(b"", b"", range(15), block_size=4)
    )


def test_any_integer_sequence_gives_the_same_key() -> None:
    assert block_keys(b"f", b"s", IDS) == block_keys(b"f", b"s", tuple(IDS))
    assert block_keys(b"f", b"s", IDS) == block_keys(b"f", b"s", range(1000, 1300))
    array = np.asarray(IDS, dtype=np.int32)
    assert block_keys(b"f", b"s", IDS) == block_keys(b"f", b"s", array.tolist())


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "1"])
def test_a_token_id_that_is_none_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        block_keys(b"", b"", [0] * 127 + [bad])


def test_a_key_depends_on_every_earlier_token() -> None:
    keys = block_keys(b"f", b"s", IDS)
    for position in (0, 127, 128, 255):
        changed = list(IDS)
        changed[position] += 1
        other = block_keys(b"f", b"s", changed)
        same = [a == b for a, b in zip(keys, other, strict=True)]
        assert same == [position >= 128 and block == 0 for block in range(2)]


def test_images_count_by_content_and_place() -> None:
    image = ImageSpan(start=100, num_tokens=60, digest=b"a cat")
    keys = block_keys(b"f", b"s", IDS, images=[image])
    assert all(a != b for a, b in zip(keys, block_keys(b"f", b"s", IDS), strict=True))
    for other in (
        image._replace(digest=b"a dog"),
        image._replace(start=101),
        image._replace(start=99),
    ):
        assert block_keys(b"f", b"s", IDS, images=[other])[0] != keys[0]
    far = ImageSpan(start=256, num_tokens=9, digest=b"beyond the last full block")
    assert block_keys(b"f", b"s", IDS, images=[image, far]) == keys
    # The second block alone tells how far into the image it begins.
    first = block_key(b"p", IDS[:128], 128, [image])
    assert first != block_key(b"p", IDS[:128], 128, [image._replace(start=90, num_tokens=70)])


TEXT = st.binary(max_size=6)


@given(TEXT, TEXT, TEXT, TEXT)
def test_fingerprint_and_salt_have_separate_key_spaces(
    a: bytes, b: bytes, c: bytes, d: bytes
) -> None:
    assert (root_key(a, b) == root_key(c, d)) == ((a, b) == (c, d))


@given(
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.integers(0, 3), max_size=8),
    st.binary(min_size=1, max_size=20),
    st.binary(min_size=1, max_size=20),
)
def test_no_field_is_mistaken_for_another(a: list[int], b: list[int], x: bytes, y: bytes) -> None:
    def key(ids: list[int], digest: bytes) -> bytes:
        return block_key(b"parent", ids, 0, [ImageSpan(0, len(ids), digest)])

    # With no token, the image has no place in the block and does not count.
    equal = a == b and (x == y or not a)
    assert (key(a, x) == key(b, y)) == equal


def test_blocks_states_and_roots_never_meet() -> None:
    """A state's key is no block's key even if the block's fields are chosen to imitate it."""
    parent = bytes(KEY_BYTES)
    assert len({parent, state_key(parent), block_key(parent, []), root_key(parent, b"")}) == 4
