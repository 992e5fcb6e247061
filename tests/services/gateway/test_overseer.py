"""The supervisor is judged as it judges others: stopped or stuck is named, starved is not."""

from itertools import pairwise

from phalanx.protocol.limits import SPIN_SUSPECT_MS, SUSPECT_MS, TOLD_MS
from phalanx.services.gateway.overseer import Overseer

MS = 1_000_000


class Supervisor:
    """Beats until `silent_ns`; then the kernel says `state`, and all its time is a wait if it is `starved`."""

    def __init__(self, state: str, starved: bool = False) -> None:
        self.overseer, self.now_ns = Overseer(1000 * MS), 1000 * MS
        self.state, self.starved, self.silent_ns = state, starved, 2000 * MS

    def look(self) -> str:
        beat_ns = min(self.now_ns, self.silent_ns)
        waited_ns = self.now_ns - beat_ns if self.starved else 0
        inspect = lambda: (self.state, waited_ns, 0)
        return self.overseer.look(beat_ns, self.now_ns, inspect)

    def named_after_ms(self, until_ms: int) -> float:
        """From its last sign of life; -1: not named."""
        while self.now_ns < self.silent_ns + until_ms * MS:
            self.now_ns += 50 * MS
            if self.look():
                return (self.now_ns - self.silent_ns) / MS
        return -1


def test_one_that_is_stopped_or_sleeps_is_named_within_a_second_and_not_when_it_goes_on() -> None:
    for state in "TS":
        supervisor = Supervisor(state)
        assert SUSPECT_MS <= supervisor.named_after_ms(2000) < 800
        assert state in supervisor.look()
        supervisor.silent_ns = 1 << 62
        assert supervisor.look() == ""


def test_one_that_spins_is_named_and_one_that_gets_no_cpu_is_not() -> None:
    assert SPIN_SUSPECT_MS <= Supervisor("R").named_after_ms(2000) < 900
    assert Supervisor("R", starved=True).named_after_ms(TOLD_MS - 1) == -1
    assert Supervisor("R", starved=True).named_after_ms(TOLD_MS + 100) > TOLD_MS


def test_a_pause_of_the_whole_node_is_no_silence_of_the_supervisor() -> None:
    supervisor = Supervisor("S")
    supervisor.named_after_ms(0)
    supervisor.now_ns += 60_000 * MS
    assert supervisor.look() == ""
    supervisor.silent_ns = supervisor.now_ns + 10 * MS  # it wakes a little later
    assert supervisor.named_after_ms(0) == -1
    assert SUSPECT_MS <= supervisor.named_after_ms(2000) < 800


def test_what_was_said_stays_until_the_next_sign_of_life() -> None:
    supervisor = Supervisor("S")
    assert supervisor.named_after_ms(2000) > 0
    supervisor.state, supervisor.starved = "R", True  # looked at while it waits for a CPU
    supervisor.now_ns += 50 * MS
    texts = []
    for _ in range(3):
        texts.append(supervisor.look())
        supervisor.now_ns += 50 * MS
    assert all(a != b and a for a, b in pairwise(texts)), "with its age"


def test_nothing_is_said_of_one_that_never_began() -> None:
    overseer = Overseer(0)
    assert [overseer.look(0, at * 50 * MS, lambda: ("T", 0, 0)) for at in range(100)] == [""] * 100
