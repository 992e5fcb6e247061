"""One process of the node as the core sees it: where it stands, and whether it hangs. Pure."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.limits import (
    BUSY_SILENCE_MS,
    HANG_MS,
    SPIN_MS,
    SPIN_SUSPECT_MS,
    STALL_TOLD_MS,
    STALLED_MS,
    START_DEADLINE_MS,
    STARVED_MS_MAX,
    SUSPECT_MS,
    TOLD_MS,
)
from phalanx.protocol.patience import Patience
from phalanx.supervisor.events import Noticed, Observed
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.restart import RestartPolicy

_MS = 1_000_000


class Stage(Enum):
    """Where one process stands. Only STARTING, READY and DYING have a live incarnation."""

    WAITING = auto()  # to be spawned when due
    STARTING = auto()
    READY = auto()
    DYING = auto()  # its death pipe closed or it was sent SIGKILL; not reaped yet
    DOWN = auto()  # ended, not to be started again


@dataclass(slots=True)
class Process:
    spec: ProcessSpec
    policy: RestartPolicy
    life: Patience = field(default_factory=lambda: Patience(0))
    stage: Stage = Stage.WAITING
    incarnation: int = 0
    pid: int = 0
    due_ns: int = 0  # WAITING: when to spawn
    # WAITING: it ended then, and waits beyond `due_ns` while the group says so; 0: it does not (`Group.pause_ns`).
    put_off_ns: int = 0
    phase: ProcessPhase = ProcessPhase.NONE
    beat_ns: int = 0
    progress: int = 0
    progress_ns: int = 0  # when `progress` was last seen to grow, or the process had nothing to do
    awaits: int = 0  # a rank in a step: the seats that it waits for, one bit each
    # Since when its peers wait for this rank, and it gets nowhere; 0: they do not.
    awaited_ns: int = 0
    fraction: float = -1.0  # done of the phase of its start; -1: unknown
    detail: str = ""  # what it does, or why it is not there
    code: int = 0  # with which its last incarnation ended; minus the signal
    ended: str = ""  # the same, and why, for people
    silent: str = ""  # it seems to hang, for people; empty: it does not
    lacks: str = ""  # what its last incarnation could not start without, for people
    trouble: tuple[str, int] = (
        "",
        0,
    )  # what it cannot do though it runs, for people; since when said
    step: tuple[str, int] = ("", 0)  # of its start: name and since when
    leaving: bool = False  # was told to end: its end is no failure
    served: bool = False  # some incarnation of it was ready
    hopeless: bool = False  # the node would have been given up for it, but for others of its kind
    drains: bool = False  # a gateway that was told to end with what it has
    # A change that was asked for decides what follows its end, which is no failure either.
    in_hand: bool = False
    kill_ns: int = 0  # in hand and told to end: when it gets SIGKILL; 0: not told
    ends_ns: int = 0  # until then it may hand over or drain; it has been told to, and is told again
    say_again_ns: int = 0
    asked_starts: int = 0  # of its starts, those that no failure made necessary
    fingerprint: str = ""  # of the numerics, as a ready worker said

    @property
    def alive(self) -> bool:
        return self.stage in (Stage.STARTING, Stage.READY)

    @property
    def exists(self) -> bool:
        return self.alive or self.stage is Stage.DYING

    @property
    def comes(self) -> bool:
        """Whether it is on its way, or its successor, and likely to be there some time."""
        return self.stage is not Stage.DOWN and not self.hopeless

    @property
    def told(self) -> str:
        """What it does, or why it is not there, and what it waits for."""
        detail = self.detail or "not started"
        if self.stage is Stage.STARTING and detail != Stage.STARTING.name.lower():
            detail = f"starting: {detail}"
        return f"{detail} (before: {self.lacks})" if self.lacks and self.alive else detail

    def start_anew(self, now_ns: int) -> None:
        """It is to be started now, and what ended it does not count."""
        self.stage, self.due_ns, self.kill_ns, self.put_off_ns = Stage.WAITING, now_ns, 0, 0
        self.leaving = self.in_hand = False
        self.asked_starts += self.incarnation > 0

    def observed(self, event: Observed, now_ns: int) -> bool:
        """Take note of the heartbeat row. Whether something was done since the last time."""
        if not self.alive:
            return False
        advanced = event.progress != self.progress
        self.beat_ns, self.progress, self.phase = event.beat_ns, event.progress, event.phase
        self.awaits = event.awaits
        life_ns = max(self.life.since_ns, now_ns if advanced else min(event.beat_ns, now_ns))
        if life_ns > self.life.since_ns:
            self.life, self.silent = Patience(life_ns), ""
        idle = self.stage is Stage.READY and event.phase is not ProcessPhase.BUSY
        if advanced or idle:
            self.progress_ns = now_ns
        if advanced:
            self.awaited_ns = 0
        return advanced

    def hung(self, now_ns: int) -> tuple[Noticed, str] | None:
        """By what sign that is missing, and why, the process counts as hung; None when it does not."""
        asleep_ms = STALLED_MS if self.awaited_ns else math.inf
        if silence := self._silence(now_ns, HANG_MS, self._spin_ms, STARVED_MS_MAX, asleep_ms):
            waited_for = ", and its peers wait for it" if self.awaited_ns else ""
            return "heartbeat", f"hung: {silence}{waited_for}"
        still_ms = (now_ns - self.progress_ns) / _MS
        if self.stage is Stage.STARTING and still_ms > START_DEADLINE_MS:
            return "progress", f"stuck: not ready, and no progress for {still_ms:.0f} ms"
        if self.stage is Stage.READY and still_ms > BUSY_SILENCE_MS:
            return "progress", f"stuck: busy without progress for {still_ms:.0f} ms"
        return None

    def suspect(self, now_ns: int) -> str:
        """What makes it likely that it will count as hung soon; empty when nothing does."""
        spin_ms = SPIN_MS if self.spec.long_calls else SPIN_SUSPECT_MS
        return self._silence(now_ns, SUSPECT_MS, spin_ms, TOLD_MS, STALL_TOLD_MS)

    @property
    def _spin_ms(self) -> int:
        return BUSY_SILENCE_MS if self.spec.long_calls else SPIN_MS

    def idle_while_awaited(self, now_ns: int) -> str:
        """Whether its peers wait in vain although it gives signs of life; empty when they do not."""
        waited_ms = (now_ns - self.awaited_ns) / _MS
        if not self.awaited_ns or self.phase is ProcessPhase.COMPILING:
            return ""
        # One that is silent has its own limits.
        if self.life.silent_ms(now_ns) > HANG_MS or waited_ms < BUSY_SILENCE_MS:
            return ""
        return f"stuck: its peers have waited for it for {waited_ms:.0f} ms"

    def _silence(
        self, now_ns: int, limit_ms: float, spin_ms: float, cap_ms: float, asleep_ms: float
    ) -> str:
        if self.stage is Stage.STARTING or self.phase is ProcessPhase.COMPILING:
            limit_ms, asleep_ms = START_DEADLINE_MS, math.inf
            cap_ms = max(cap_ms, limit_ms)
        if self.spec.kind != "worker" and self.life.state == "R":
            # A service in one long call burns CPU; nobody waits for it as peers wait for a worker.
            limit_ms = max(limit_ms, spin_ms)
        if not self.life.exhausted(now_ns, limit_ms, cap_ms, asleep_ms):
            return ""
        silent_ms = self.life.silent_ms(now_ns)
        return f"no sign of life for {silent_ms:.0f} ms, state {self.life.state or '?'}"
