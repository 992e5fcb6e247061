"""What a scheduler runs is told in bounded pieces, all of it, however much it is."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.protocol.codec import encode
from phalanx.protocol.limits import LIST_BYTES_MAX, LIST_SEQUENCES_MAX
from phalanx.protocol.messages import ListSequences, SequenceList
from phalanx.scheduler_svc import listing as module
from phalanx.scheduler_svc.listing import Listing
from sim.scheduler_story import Story


@dataclass(eq=False)
class Row:
    """As much of a sequence as is told."""

    request_id: str
    num_outputs: int
    index: int = 0
    attempt: int = 1
    finish: None = None
    first_score: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.index

    def outputs(self) -> Any:
        return np.arange(self.num_outputs, dtype=np.int32)


def told(listing: Listing, known: dict[Any, Any]) -> list[SequenceList]:
    found = []
    while (piece := listing.piece(known)) is not None:
        found.append(piece)
    assert not listing.busy
    return found


@given(
    st.lists(st.sampled_from([0, 1, 40, 50_000, 200_000, 400_000]), max_size=12),
    st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_pieces_are_bounded_and_all_of_it_is_told(sizes: list[int], most: int) -> None:
    rows = [Row(f"{at:032x}", size) for at, size in enumerate(sizes)]
    listing = Listing(3, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LIST_SEQUENCES_MAX", most)
        listing.begin(5, rows)  # type: ignore[arg-type]
        found = told(listing, {row.key: row for row in rows})
    assert [piece.number for piece in found] == list(range(len(found)))
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert {(piece.call, piece.seat, piece.incarnation) for piece in found} == {(5, 3, 7)}
    infos = [info for piece in found for info in piece.items]
    assert [info.request_id for info in infos] == [row.request_id for row in rows]
    assert [len(info.outputs) // 4 for info in infos] == sizes
    for piece in found:
        assert len(piece.items) <= most
        nbytes = sum(len(info.outputs) for info in piece.items)
        assert nbytes <= LIST_BYTES_MAX or len(piece.items) == 1
        assert len(encode(piece)) < nbytes + 100 * (1 + len(piece.items))


def test_a_hundred_thousand_sequences_are_told_in_bounded_messages() -> None:
    rows = [Row(f"{at:032x}", 100) for at in range(100_000)]
    listing = Listing(0, 1)
    listing.begin(1, rows)  # type: ignore[arg-type]
    found = told(listing, {row.key: row for row in rows})
    assert sum(len(piece.items) for piece in found) == 100_000
    assert len(found) == -(-100_000 // LIST_SEQUENCES_MAX)
    assert max(len(encode(piece)) for piece in found) < LIST_BYTES_MAX


def test_what_is_forgotten_meanwhile_is_not_told_and_who_asks_again_gets_all_again() -> None:
    rows = [Row(f"{at:032x}", 300_000) for at in range(4)]  # each a piece of its own
    known = {row.key: row for row in rows}
    listing = Listing(0, 1)
    listing.begin(1, rows)  # type: ignore[arg-type]
    first = listing.piece(known)  # type: ignore[arg-type]
    assert first is not None and len(first.items) == 1 and not first.last
    del known[rows[1].key]
    known[rows[3].key] = Row(rows[3].request_id, 1, attempt=9)  # this gateway placed it anew
    rest = told(listing, known)
    assert [i.request_id for piece in rest for i in piece.items] == [rows[2].request_id]
    listing.begin(1, known.values())  # type: ignore[arg-type]  # the same question came twice
    assert not listing.busy
    listing.begin(2, known.values())  # type: ignore[arg-type]
    assert [piece.number for piece in told(listing, known)] == [0, 1, 2]
    listing.begin(3, known.values(), outputs=False)  # type: ignore[arg-type]
    (names,) = told(listing, known)
    assert [(info.attempt, info.outputs) for info in names.items] == [(1, b""), (1, b""), (9, b"")]
    listing.begin(4, [])
    (empty,) = told(listing, {})
    assert empty == SequenceList(4, 0, 1, (), 0, last=True)


def test_one_piece_a_step_and_no_wait_until_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIST_SEQUENCES_MAX", 2)
    story = Story(max_num_seqs=2)
    for number in range(5):
        story.submit(number)
    story.event(ListSequences(99))
    assert len(story.of(SequenceList)) == 1
    assert story.core.wait_ms(story.now_ns) == 0.0
    story.step(3)
    found = story.of(SequenceList)
    assert [(piece.number, piece.last) for piece in found] == [(0, False), (1, False), (2, True)]
    names = [int(info.request_id, 16) for piece in found for info in piece.items]
    assert names == [0, 1, 2, 3, 4]
    # Each as it was by then: the first ones had no token yet.
    last = msgspec.structs.asdict(found[-1])
    assert (last["call"], last["seat"], last["incarnation"]) == (99, 3, 7)
