"""When a successor that waits for its turn is started, and what its death means: nothing but a wait."""

import pytest

from phalanx.supervisor.standbys import DELAY_MS, DELAY_MS_MAX, Standbys

MS = 1_000_000


def due_after(standbys: Standbys, now_ms: int, delay_ms: int) -> list[str]:
    assert standbys.take_due((now_ms + delay_ms) * MS - 1) == []
    return standbys.take_due((now_ms + delay_ms) * MS)


def test_one_is_started_a_while_after_it_was_wanted_and_only_once() -> None:
    standbys = Standbys()
    assert standbys.take_due(10**15) == []
    standbys.want(["gateway", "tokenizer-0"], 0)
    assert due_after(standbys, 0, DELAY_MS) == ["gateway", "tokenizer-0"]
    assert standbys.take_due(10**15) == []
    standbys.want(["gateway"], 7 * MS)
    standbys.want(["gateway"], 9 * MS)
    assert due_after(standbys, 9, DELAY_MS) == ["gateway"]


def test_those_that_die_follow_each_other_ever_more_slowly() -> None:
    standbys, now_ms, waits = Standbys(), 0, list[int]()
    standbys.want(["gateway"], 0)
    now_ms += DELAY_MS
    assert standbys.take_due(now_ms * MS) == ["gateway"]
    for _ in range(8):
        waits.append(standbys.ended("gateway", now_ms * MS))
        assert due_after(standbys, now_ms, waits[-1]) == ["gateway"]
        now_ms += waits[-1]
    assert waits[:3] == [DELAY_MS, 2 * DELAY_MS, 4 * DELAY_MS]
    assert waits == sorted(waits) and waits[-1] == DELAY_MS_MAX


@pytest.mark.parametrize("what", ["it waited for long", "one took over"])
def test_a_sound_one_begins_the_count_anew(what: str) -> None:
    standbys = Standbys()
    standbys.want(["gateway"], 0)
    standbys.take_due(DELAY_MS * MS)
    for now_ms in (DELAY_MS, 3 * DELAY_MS):
        wait_ms = standbys.ended("gateway", now_ms * MS)
        standbys.take_due((now_ms + wait_ms) * MS)
    now_ms += wait_ms
    if what == "one took over":
        standbys.want(["gateway"], now_ms * MS)
        now_ms += DELAY_MS
        assert standbys.take_due(now_ms * MS) == ["gateway"]
    else:
        now_ms += 60_000
    assert standbys.ended("gateway", now_ms * MS) == DELAY_MS
