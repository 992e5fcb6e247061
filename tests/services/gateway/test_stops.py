"""Stop strings: the end found in a stream equals the end found in its whole text, however it is cut."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.services.gateway.stops import StopScanner


def whole(
    texts: Sequence[str], tail: str, stops: Sequence[str], include_stop: bool, min_tokens: int
) -> tuple[str, int, str | None]:
    """(shown text, tokens, stop) by trying every end of the whole text in order."""
    owner = [i for i, text in enumerate(texts) for _ in text] + [len(texts) - 1] * len(tail)
    full = "".join(texts) + tail
    for end in range(1, len(full) + 1):
        num_tokens = owner[end - 1] + 1
        hits = [s for s in stops if full[:end].endswith(s) and num_tokens >= min_tokens]
        if hits:
            stop = max(hits, key=len)
            return full[: end if include_stop else end - len(stop)], num_tokens, stop
    return full, len(texts), None


def stream(
    scanner: StopScanner, calls: Sequence[Sequence[str]], tail: str
) -> tuple[str, int, str | None]:
    text, num_tokens = "", 0
    for call in calls:
        shown = scanner.feed(call)
        text, num_tokens = text + shown.text, num_tokens + shown.num_tokens
    shown = scanner.finish(tail)
    assert scanner.num_tokens == num_tokens
    return text + shown.text, num_tokens, shown.stop


def test_stop_over_two_tokens_leaks_nothing() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert scanner.feed(["Hi", "\n"]).text == "Hi"
    assert scanner.feed(["\nUs"]).text == ""
    shown = scanner.feed(["er: more", "never seen"])
    assert (shown.text, shown.num_tokens, shown.stop) == ("", 1, "\n\nUser:")


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    scanner = StopScanner(["</think>"])
    assert scanner.feed(["a</th", "i"]).text == "a"
    assert scanner.feed(["s"]).text == "</this"
    assert scanner.feed(["x<"]).text == "x"
    assert scanner.finish().text == "<"


def test_overlapping_beginnings_keep_the_longest() -> None:
    scanner = StopScanner(["aab", "ac"])
    assert scanner.feed(["aa"]).text == ""
    assert scanner.feed(["a"]).text == "a"  # "aa" may still become "aab"
    assert scanner.feed(["c"]).text == "a"
    assert scanner.stop == "ac"


def test_stop_before_min_tokens_is_ordinary_text() -> None:
    scanner = StopScanner(["x"], min_tokens=3)
    shown = scanner.feed(["x", "x", "ax", "y"])
    assert (shown.text, shown.num_tokens, shown.stop) == ("xxa", 3, "x")


def test_a_stop_begun_before_min_tokens_counts_where_it_completes() -> None:
    scanner = StopScanner(["abc"], min_tokens=3)
    assert scanner.feed(["a", "b", "c"]).stop == "abc"


def test_include_stop_shows_text_through_the_stop_without_delay() -> None:
    scanner = StopScanner(["end."], include_stop=True)
    assert scanner.feed(["the e", "n"]).text == "the en"
    assert scanner.feed(["d. Then"]).text == "d."


def test_a_stop_in_the_last_owed_text() -> None:
    scanner = StopScanner(["a\ufffd"])
    assert scanner.feed(["xa", ""]).text == "x"
    shown = scanner.finish("\ufffd")
    assert (shown.text, shown.stop, scanner.num_tokens) == ("", "a\ufffd", 2)


def test_without_stops_everything_passes_at_once() -> None:
    assert StopScanner([]).feed(["a", "", "b"]).text == "ab"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])


letters = st.text(alphabet="ab\n", max_size=4)


@given(
    texts=st.lists(letters, min_size=1, max_size=12),
    tail=st.text(alphabet="ab", max_size=2),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 8),
    data=st.data(),
)
def test_every_cut_gives_the_whole_sequence_answer(
    texts: list[str],
    tail: str,
    stops: list[str],
    include_stop: bool,
    min_tokens: int,
    data: st.DataObject,
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(texts)), max_size=6)) | {0, len(texts)})
    calls = [texts[a:b] for a, b in pairwise(cuts)]
    scanner = StopScanner(stops, include_stop=include_stop, min_tokens=min_tokens)
    expected = whole(texts, tail, stops, include_stop, min_tokens)
    assert stream(scanner, calls, tail) == expected


@given(
    texts=st.lists(letters, min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_only_a_possible_stop_is_held_back(texts: list[str], stops: list[str]) -> None:
    scanner, shown, full = StopScanner(stops), "", ""
    for text in texts:
        full += text
        shown += scanner.feed([text]).text
        if scanner.stop is not None:
            return
        held = full[len(shown) :]
        assert full.startswith(shown)
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
        longer = [full[i:] for i in range(len(shown))]
        assert not any(s.startswith(end) for s in stops for end in longer)
