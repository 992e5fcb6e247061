"""When a silent process counts as hung: not for the time that it waits for a CPU."""

import math

import pytest

from phalanx.protocol.limits import BEAT_PERIOD_MS, HANG_MS, STALL_TOLD_MS, SUSPECT_MS, TOLD_MS
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


def test_its_own_time_is_never_more_than_its_silence() -> None:
    """Whatever whoever looks at it makes of its waits."""
    life = Patience(0)
    life.inspected("R", 5_000 * MS, 0, 510 * MS)
    life.inspected("R", 1_000 * MS, 0, 610 * MS)
    assert not life.exhausted(620 * MS, HANG_MS, math.inf)
