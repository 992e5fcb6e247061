"""When a silent process counts as hung: not for the time that it waits for a CPU."""

import math

import pytest

from phalanx.protocol.limits import (
    BEAT_PERIOD_MS,
    HANG_MS,
    STALL_TOLD_MS,
    START_DEADLINE_MS,
    SUSPECT_MS,
    TOLD_MS,
)
from phalanx.protocol.patience import Patience

MS = 1_000_000


@pytest.mark.parametrize("waits_ms", [0, 100, 300, 460, 700, 1300])
@pytest.mark.parametrize("looks_at_ms", [0, 50, 99])
def test_one_that_got_no_cpu_and_then_sleeps_until_its_next_beat_is_no_suspect(
    waits_ms: int, looks_at_ms: int
) -> None:
    """An idle rank of a loaded node: health told that it gave no sign of life."""
    life = Patience(0)
    for now_ms in range(looks_at_ms, waits_ms + BEAT_PERIOD_MS, 100):
        if life.silent_ms(now_ms * MS) <= HANG_MS / 3:
            continue  # it is not looked at yet
        state = "R" if now_ms < waits_ms else "S"
        life.inspected(state, min(now_ms, waits_ms) * MS, 0, now_ms * MS)
        assert not life.exhausted(now_ms * MS, SUSPECT_MS, TOLD_MS, STALL_TOLD_MS), now_ms


@pytest.mark.parametrize("looks_at_ms", [0, 50, 99])
def test_one_that_sleeps_for_good_is_one_within_a_second(looks_at_ms: int) -> None:
    life, found = Patience(0), False
    for now_ms in range(looks_at_ms, 1000, 100):
        if life.silent_ms(now_ms * MS) > HANG_MS / 3:
            life.inspected("S", 0, 0, now_ms * MS)
        found |= life.exhausted(now_ms * MS, SUSPECT_MS, TOLD_MS, STALL_TOLD_MS)
    assert found


@pytest.mark.parametrize("stops_ms", [50, 440, 700, 5_010, 60_090])
def test_one_that_loads_and_is_stopped_is_dead_as_soon_as_any_other(stops_ms: int) -> None:
    """However long it had been silent before, as one that imports may be."""
    life = Patience(0)
    for now_ms in range(0, 120_000, 100):
        if life.exhausted(now_ms * MS, START_DEADLINE_MS, START_DEADLINE_MS):
            break
        if life.silent_ms(now_ms * MS) > HANG_MS / 3:
            life.inspected("T" if now_ms >= stops_ms else "S", 0, 0, now_ms * MS)
    unseen_ms = min(stops_ms, HANG_MS / 3)  # the time before the stop in which nobody looked
    assert HANG_MS - max(unseen_ms, 100) <= now_ms - stops_ms <= HANG_MS + 100


def test_its_own_time_is_never_more_than_its_silence() -> None:
    """Whatever whoever looks at it makes of its waits."""
    life = Patience(0)
    life.inspected("R", 5_000 * MS, 0, 510 * MS)
    life.inspected("R", 1_000 * MS, 0, 610 * MS)
    assert not life.exhausted(620 * MS, HANG_MS, math.inf)


def skip_a_minute(life: Patience) -> int:
    """At 700 ms of its silence whoever looks at it does not run for a minute. Returns when that is over."""
    life.skip(60_000 * MS, 60_700 * MS)
    return 60_700


def hung_ms(life: Patience, from_ms: int, waited_ms: int) -> int:
    """How long after that one that sleeps for good counts as hung."""
    for now_ms in range(from_ms, from_ms + 120_000, 100):
        life.inspected("S", waited_ms * MS, 0, now_ms * MS)
        if life.exhausted(now_ms * MS, HANG_MS, math.inf):
            return now_ms - from_ms
    return 120_000


@pytest.mark.parametrize("threads", [1, 8])
def test_waits_in_a_time_that_does_not_count_are_no_credit_for_a_hang_after_it(
    threads: int,
) -> None:
    """It had to wait for a CPU while the supervisor was stopped, too, and hangs since."""
    life = Patience(0)
    for now_ms in (510, 610):
        life.inspected("R", threads * (now_ms - 510) * MS, 0, now_ms * MS)
    begun_ms = skip_a_minute(life)
    assert hung_ms(life, begun_ms, threads * 60_000) <= HANG_MS + 100


def test_nor_when_they_are_counted_later() -> None:
    """The kernel counts a wait when it is over."""
    life = Patience(0)
    begun_ms = skip_a_minute(life)
    life.inspected("R", 0, 0, begun_ms * MS)
    assert hung_ms(life, begun_ms + 100, 60_200) <= HANG_MS + 300  # three looks


def test_a_sleep_in_such_a_time_is_no_reproach() -> None:
    """A disk that hung together with the supervisor answers soon after."""
    life = Patience(0)
    life.inspected("D", 0, 0, 600 * MS)
    begun_ms = skip_a_minute(life)
    life.inspected("D", 0, 60_200 * MS, begun_ms * MS)
    assert not life.exhausted(begun_ms * MS, HANG_MS, math.inf, 10_000)
    life.inspected("D", 0, 70_200 * MS, (begun_ms + 10_000) * MS)
    assert life.exhausted((begun_ms + 10_000) * MS, HANG_MS, math.inf, 10_000)
