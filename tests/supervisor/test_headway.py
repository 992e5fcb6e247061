"""A start is waited for as long as something gets on, however long; and no longer than that."""

import pytest

from phalanx.protocol.limits import START_DEADLINE_MS
from phalanx.protocol.messages import ProcessStatus
from phalanx.supervisor.headway import Headway, Waits, waiting_for

PATIENCE_S = START_DEADLINE_MS / 1000


def process(
    name: str, detail: str, fraction: float = -1.0, still_s: float = -1.0, incarnation: int = 1
) -> ProcessStatus:
    still_ms = int(still_s * 1000) if still_s >= 0 else -1
    state = "starting" if still_ms >= 0 else "ready"
    return ProcessStatus(
        name, 9, state, incarnation - 1, 0, incarnation, detail, fraction, still_ms
    )


def test_a_long_phase_that_gets_on_is_waited_for() -> None:
    headway = Headway(0)
    for minute in range(1, 60):
        # Every minute a little more is done; the phases of other processes do not change.
        looks = [process("worker-0", "compile kernels", minute / 60, 30), process("gateway", "")]
        headway.looked(looks, 60.0 * minute)
        assert headway.still_s(60.0 * minute) == 0


def test_signs_of_life_without_a_share_that_is_done_suffice() -> None:
    headway = Headway(0)
    for minute in range(1, 60):
        headway.looked([process("worker-0", "hash weights", -1, 2)], 60.0 * minute)
        assert headway.still_s(60.0 * minute) <= 2


def test_a_standstill_is_seen() -> None:
    headway = Headway(0)
    for second in range(200):
        headway.looked([process("worker-0", "load weights", 0.5, second)], second)
        assert headway.still_s(second) == pytest.approx(second)
    assert headway.still_s(199) > PATIENCE_S


def test_a_process_that_starts_again_and_again_gets_nowhere() -> None:
    headway, now = Headway(0), 0.0
    for incarnation in range(1, 20):
        for second in range(20):
            now += 1
            told = process("worker-0", "load weights", second / 20, 0, incarnation)
            headway.looked([told, process("supervisor", f"worker-0 died {incarnation} times")], now)
    assert headway.still_s(now) > PATIENCE_S


def test_a_group_that_does_not_form_is_a_standstill() -> None:
    headway = Headway(0)
    for second in range(200):
        headway.looked([process("worker-0", ""), process("gateway", "")], second)
    assert headway.still_s(199) > PATIENCE_S


def test_it_says_what_it_waits_for() -> None:
    told = (
        process("supervisor", "unhealthy"),
        process("worker-0", "compile kernels", 0.45, 1),
        process("worker-1", "start", -1, 1),
        process("gateway", ""),
    )
    assert waiting_for(told) == ["worker-0 (compile kernels, 45%)", "worker-1 (start)"]


def test_what_is_waited_for_is_said_once_and_again_when_it_is_another() -> None:
    waits, said = Waits(), []
    for second in range(100):
        text = "worker-0" if second < 40 else f"kernels, {min(second, 60)}%"
        said += [(second, news)] if (news := waits.news(text, float(second))) else []
    assert said == [(10, "worker-0"), (70, "kernels, 60%")]
