"""What a scheduler says it runs comes in pieces, and counts once all are there: in any order, twice, torn off."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.protocol.messages import SequenceInfo, SequenceList
from phalanx.scheduler_svc import listing as scheduler_listing
from phalanx.scheduler_svc.listing import Listing as ScheduledListing
from phalanx.services.gateway.listing import AGAIN_NS, RETRY_NS, Listing

MS = 1_000_000
Take = Callable[[Listing, SequenceList, int], list[SequenceInfo] | None]


def pieces(call: int, *sizes: int) -> list[SequenceList]:
    """The answer to `call`, of so many pieces of so many sequences."""
    found, name = [], 0
    for number, size in enumerate(sizes):
        infos = [SequenceInfo(f"{call}.{name + at}", 0, 1, b"", None) for at in range(size)]
        name += size
        found.append(SequenceList(call, 0, 1, tuple(infos), number, number == len(sizes) - 1))
    return found


def whole(answer: list[SequenceList]) -> list[SequenceInfo]:
    return [info for piece in answer for info in piece.items]


@st.composite
def words(draw: st.DrawFn) -> list[SequenceList | int]:
    """Questions (numbers), each with some of the pieces of its answer after it or much later, some twice."""
    said: list[tuple[int, SequenceList | int]] = []
    for call in range(1, draw(st.integers(2, 4))):
        said.append((100 * call, call))
        answer = pieces(call, *draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        for piece in answer:
            times = draw(st.integers(0, 2)) if draw(st.booleans()) else 1
            said += [(100 * call + draw(st.integers(1, 150)), piece) for _ in range(times)]
    return [word for _, word in sorted(said, key=lambda one: one[0])]


def check(said: list[SequenceList | int], take: Take = Listing.take) -> None:
    """It is complete with the last piece of the newest answer that was missing, once, and whole."""
    listing, call, here = Listing(), 0, dict[int, SequenceList]()
    for at, word in enumerate(said):
        if isinstance(word, int):
            listing.ask(word, at)
            call, here = word, {}
            continue
        got = take(listing, word, at)
        if word.call == call:
            here[word.number] = word
        count = next((piece.number + 1 for piece in here.values() if piece.last), 0)
        if call and count == len(here) > 0:
            assert got == whole([here[number] for number in range(count)])
            assert listing.told
            call = 0
        else:
            assert got is None


@given(words())
@settings(max_examples=400)
def test_a_list_counts_once_and_only_when_all_of_it_is_here(said: list[SequenceList | int]) -> None:
    check(said)


def _what_comes_first_is_all(self: Listing, piece: SequenceList, now_ns: int) -> list[SequenceInfo]:
    self.told, self._call = True, 0
    return list(piece.items)


def _the_last_piece_ends_it(
    self: Listing, piece: SequenceList, now_ns: int
) -> list[SequenceInfo] | None:
    got = Listing.take(self, piece, now_ns)
    if got is None and piece.call == self._call and piece.last:
        self.told, self._call = True, 0
        return [info for part in self._pieces.values() for info in part]
    return got


def _any_answer_is_mine(
    self: Listing, piece: SequenceList, now_ns: int
) -> list[SequenceInfo] | None:
    mine = SequenceList(self._call, 0, 1, piece.items, piece.number, piece.last)
    return Listing.take(self, mine, now_ns)


def _as_they_come(self: Listing, piece: SequenceList, now_ns: int) -> list[SequenceInfo] | None:
    if piece.call == self._call and piece.number not in self._pieces:
        order = self.__dict__.setdefault("order", {}).setdefault(piece.call, [])
        order += piece.items
    got = Listing.take(self, piece, now_ns)
    return None if got is None else self.__dict__["order"][piece.call]


@pytest.mark.parametrize(
    "take",
    [_what_comes_first_is_all, _the_last_piece_ends_it, _any_answer_is_mine, _as_they_come],
)
def test_a_planted_bug_is_found(take: Take) -> None:
    @given(words())
    @settings(max_examples=400, database=None, report_multiple_bugs=False)
    def search(said: list[SequenceList | int]) -> None:
        check(said, take)

    with pytest.raises(AssertionError):
        search()


@dataclass(eq=False)
class Row:
    """As much of a scheduler's sequence as is told."""

    request_id: str
    index: int = 0
    attempt: int = 1
    num_outputs: int = 0
    finish: None = None
    first_score: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.index

    def outputs(self) -> Any:
        return array("i")


def both_ends(steps: list[tuple[str, int]]) -> None:
    """Whatever happens on the way: a list that counts has all that was there from the question on, once."""
    rows = {row.key: row for row in [Row(str(at)) for at in range(8)]}
    there, here, now_ns = ScheduledListing(0, 1), Listing(), 0
    questions: list[int] = []
    way: list[SequenceList] = []
    call, asked, lived = 0, dict[int, set[str]](), set[str]()
    for what, number in steps:
        now_ns += MS
        if what == "ask":
            call += 1
            here.ask(call, now_ns)
            questions.append(call)
        elif what == "hear" and questions:  # perhaps for the second time
            heard = questions[number % len(questions)]
            asked.setdefault(heard, {name for name, _ in rows})
            there.begin(heard, rows.values())  # type: ignore[arg-type]
        elif what == "step":
            way += [piece] if (piece := there.piece(rows)) is not None else []  # type: ignore[arg-type]
        elif what == "end" and rows:
            row = rows.pop(list(rows)[number % len(rows)])
            lived.add(row.request_id)
        elif what == "lose" and way:
            del way[number % len(way)]
        elif what == "arrive" and way:
            at = number % len(way)
            piece = way[at] if number % 3 == 0 else way.pop(at)
            if (infos := here.take(piece, now_ns)) is not None:
                names = [info.request_id for info in infos]
                assert len(set(names)) == len(names)
                assert asked[piece.call] - lived <= set(names)


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "hear", "step", "step", "end", "lose", "arrive", "arrive"]),
              st.integers(0, 11)), max_size=60,
)  # fmt: skip


@given(STEPS)
@settings(max_examples=300)
def test_what_counts_is_whole_whatever_happens_on_the_way(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_listing, "LIST_SEQUENCES_MAX", 2)
        both_ends(steps)


def test_a_question_that_comes_twice_has_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else pieces of two answers would be taken for one, and a sequence between them be missing."""

    def begin(self: ScheduledListing, call: int, sequences: Iterable[Any]) -> None:
        self._call, self._answered, self._number = call, False, 0
        self._left = deque(sequences)

    steps = [("ask", 0), ("hear", 0), ("step", 0), ("arrive", 1), ("end", 0), ("end", 0)]
    steps += [("hear", 0), ("step", 0), ("lose", 0), ("step", 0), ("step", 0)]
    steps += [("arrive", 1), ("arrive", 1)]
    monkeypatch.setattr(scheduler_listing, "LIST_SEQUENCES_MAX", 2)
    both_ends(steps)
    monkeypatch.setattr(ScheduledListing, "begin", begin)
    with pytest.raises(AssertionError):
        both_ends(steps)


def test_what_stays_away_is_asked_for_again() -> None:
    listing = Listing()
    listing.ask(5, 0)
    assert not listing.due(RETRY_NS - 1) and listing.due(RETRY_NS)
    first, second, last = pieces(5, 2, 2, 1)
    listing.take(first, RETRY_NS - 1)
    assert not listing.due(2 * RETRY_NS - 2) and listing.due(2 * RETRY_NS - 1)
    listing.take(first, RETRY_NS)  # once more the same: that is no progress
    assert listing.due(2 * RETRY_NS - 1)
    listing.take(last, RETRY_NS)
    assert listing.take(second, RETRY_NS) == whole([first, second, last])
    assert not listing.due(AGAIN_NS) and listing.due(AGAIN_NS + RETRY_NS)
