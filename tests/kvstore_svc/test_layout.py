"""Records are believed only whole, where they were written and under their own key; a scan finds every
intact record behind any damage; an index counts only when it is the index of this very file."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.kvstore_svc.layout import (
    HEADER_BYTES,
    PAGE,
    IndexEntry,
    Kind,
    Place,
    RecordHeader,
    SegmentHead,
    check_record,
    decode_index,
    decode_record_header,
    decode_segment_head,
    decode_tail,
    encode_index,
    encode_record_header,
    encode_segment_head,
    end_of,
    index_bytes,
    payload_checksum,
    record_bytes,
    scan,
)

STORE = bytes(range(16))
HEAD = SegmentHead(STORE, 7, Kind.BLOCK, 1)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def record(number: int, payload: bytes, offset: int, head: SegmentHead = HEAD) -> bytes:
    place = Place(head.segment, offset, len(payload))
    header = RecordHeader(
        head.store_id,
        head.kind,
        head.ttl_class,
        place,
        number,
        5,
        6,
        key_of(number),
        payload_checksum(payload),
    )
    whole = encode_record_header(header) + payload
    return whole + bytes(record_bytes(len(payload)) - len(whole))


def segment(sizes: list[int], head: SegmentHead = HEAD) -> tuple[bytearray, list[IndexEntry]]:
    data, entries = bytearray(encode_segment_head(head)), []
    for number, size in enumerate(sizes):
        payload = random.Random(number).randbytes(size)
        entries.append(IndexEntry(key_of(number), len(data), size, number, 6))
        data += record(number, payload, len(data), head)
    return data, entries


def test_a_block_of_the_full_model_takes_28_pages() -> None:
    assert record_bytes(114_048) == 28 * PAGE


@given(st.binary(max_size=9000), st.integers(1, 2**40))
def test_a_record_round_trips_and_only_its_own_key_opens_it(payload: bytes, page: int) -> None:
    place = Place(7, page * PAGE, len(payload))
    data = record(3, payload, place.offset)
    assert len(data) % PAGE == 0
    assert check_record(data, store_id=STORE, key=key_of(3), place=place) == ""
    header = decode_record_header(data)
    assert header is not None and header.place == place and header.key == key_of(3)
    for expected in (
        {"key": key_of(4)},
        {"store_id": bytes(16)},
        {"place": place._replace(segment=8)},
        {"place": place._replace(offset=place.offset + PAGE)},
        {"place": place._replace(length=len(payload) + 1)},
    ):
        wrong = {"store_id": STORE, "key": key_of(3), "place": place} | expected
        assert check_record(data, **wrong)  # type: ignore[arg-type]


@given(st.data())
def test_any_flipped_bit_is_seen(data: st.DataObject) -> None:
    payload = random.Random(1).randbytes(5000)
    whole = bytearray(record(3, payload, PAGE))
    bit = data.draw(st.integers(0, (HEADER_BYTES + len(payload)) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    place = Place(7, PAGE, len(payload))
    assert check_record(whole, store_id=STORE, key=key_of(3), place=place) != ""


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, PAGE, 5000])
def test_a_cut_record_is_seen(cut: int) -> None:
    whole = record(3, bytes(6000), PAGE)
    place = Place(7, PAGE, 6000)
    assert check_record(whole[:cut], store_id=STORE, key=key_of(3), place=place) != ""


def test_a_scan_finds_everything_behind_the_damage() -> None:
    data, entries = segment([100, 5000, 9000, 4000, 1])
    assert list(scan(data, HEAD)) == entries
    assert end_of(entries) == len(data)
    damaged = bytearray(data)
    damaged[entries[1].offset + 3] ^= 1  # a header
    damaged[entries[2].offset + 7000] ^= 1  # a payload
    assert list(scan(damaged, HEAD)) == [entries[0], entries[3], entries[4]]
    assert list(scan(data + bytes(64 * PAGE), HEAD)) == entries
    assert list(scan(data[: entries[4].offset + 50], HEAD)) == entries[:4]


def test_a_scan_believes_no_record_of_elsewhere() -> None:
    """Not one of another segment, of another store, of another place, nor one inside a payload."""
    for other in (HEAD._replace(segment=8), HEAD._replace(store_id=bytes(16))):
        data, _ = segment([100, 200], other)
        assert list(scan(data, HEAD)) == []
    data, _ = segment([100, 200])
    assert list(scan(data[:PAGE] + data[2 * PAGE :], HEAD)) == []
    forged = record(9, b"forged", 3 * PAGE, HEAD._replace(store_id=bytes(16)))
    payload = bytes(2 * PAGE - HEADER_BYTES) + forged
    data = bytearray(encode_segment_head(HEAD)) + record(1, payload, PAGE)
    data[PAGE + 5] ^= 1  # the scan steps into the payload
    assert list(scan(data, HEAD)) == []


def test_an_index_ends_its_own_file_or_does_not_count() -> None:
    data, entries = segment([100, 5000])
    index = encode_index(HEAD, entries, len(data))
    assert len(index) == index_bytes(len(entries))
    whole = bytes(data + index)
    tail = decode_tail(whole[-PAGE:], HEAD, len(whole))
    assert tail is not None
    body = whole[tail.offset : tail.offset + tail.index_bytes]
    assert decode_index(body, tail) == entries
    assert decode_tail(whole[-PAGE:], HEAD, len(whole) + PAGE) is None
    assert decode_tail(whole[-PAGE:], HEAD._replace(segment=8), len(whole)) is None
    assert decode_tail(bytes(PAGE), HEAD, len(whole)) is None
    assert decode_index(body[:-1], tail) is None
    flipped = bytes([body[0] ^ 1]) + body[1:]
    assert decode_index(flipped, tail) is None


def test_a_head_of_another_kind_or_version_is_none() -> None:
    page = encode_segment_head(HEAD)
    assert decode_segment_head(page) == HEAD
    assert decode_segment_head(page[:100]) is None
    for position in (0, 8, 10, 16):
        flipped = bytearray(page)
        flipped[position] ^= 1
        assert decode_segment_head(flipped) is None


def test_headers_differ_in_every_field() -> None:
    header = RecordHeader(STORE, Kind.BLOCK, 1, Place(1, PAGE, 5), 2, 3, 4, key_of(1), bytes(16))
    others = [
        replace(header, kind=Kind.STATE),
        replace(header, ttl_class=2),
        replace(header, sequence=9),
        replace(header, written_ns=9),
        replace(header, expires_ns=9),
        replace(header, checksum=bytes(15) + b"\1"),
    ]
    assert len({encode_record_header(one) for one in [header, *others]}) == 7
