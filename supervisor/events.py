"""What happens to the supervisor's core (events) and what it wants done (actions). Plain data."""

from dataclasses import dataclass
from typing import Literal

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.messages import (
    Drain,
    Error,
    ExpertReport,
    HandOver,
    HealthUpdate,
    HistoryEntry,
    PhaseTime,
    Rebalance,
    Rebalanced,
    Restart,
    Restarted,
    Scale,
    Scaled,
    ScrubReport,
    TopologyChanged,
)
from phalanx.protocol.topology import Proposal, Topology

# How it was noticed that a process is dead, or as good as dead.
Noticed = Literal[
    "death mark",  # `protocol/mark.py`
    "death pipe",
    "exit",  # it could be reaped before either of them told
    "heartbeat",  # there is none
    "progress",  # there is none: in its start, its work, a step that its peers wait for
    "acknowledgement",  # of STOP or GO: there is none
    "fingerprint",  # of its numerics: it is not the group's
    "asked",  # it was told to end
]

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Began:
    """The supervisor starts. `before`: how the last one in this run directory ended: `stopped`, `died`, or nothing
    is known of one; `silent_ms`: since its last sign of life, where that is known."""

    before: str
    silent_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Spawned:
    name: str
    incarnation: int
    pid: int
    standby: str = ""  # it was forked from this one


@dataclass(frozen=True, slots=True)
class BecameReady:
    name: str
    incarnation: int
    fingerprint: str = ""
    expert_slots: int = 0  # see `Ready`
    note: str = ""  # see `Ready`


@dataclass(frozen=True, slots=True)
class Progressed:
    """A starting process says what it does now."""

    name: str
    incarnation: int
    phase: str
    fraction: float = -1.0


@dataclass(frozen=True, slots=True)
class PipeClosed:
    """Its death mark shows, or the end of file on its death pipe: the process is dead or about to be, but perhaps
    not reapable."""

    name: str
    incarnation: int
    seen_ns: int
    by: Noticed = "death pipe"


@dataclass(frozen=True, slots=True)
class Reaped:
    """The process is gone. `code` is its exit code, or minus the signal that ended it."""

    name: str
    incarnation: int
    code: int
    detail: str = ""  # its last words, for people


@dataclass(frozen=True, slots=True)
class Observed:
    """The process's heartbeat row as it is now."""

    name: str
    incarnation: int
    beat_ns: int
    progress: int
    phase: ProcessPhase
    awaits: int = 0  # WAITING: for which seats, one bit each


@dataclass(frozen=True, slots=True)
class Inspected:
    """Answer to Inspect, see `protocol/proc.py`. `state` as in /proc/PID/stat ("R" if any thread runs);
    `waited_ns` is the time its threads have spent runnable but without a CPU, since they started; `asleep_ns`
    the longest sleep in state D that one of them is in."""

    name: str
    incarnation: int
    state: str
    waited_ns: int
    asleep_ns: int = 0


@dataclass(frozen=True, slots=True)
class AcksSeen:
    """The acknowledgement words of one seat as they are now."""

    seat: int
    incarnation: int
    stop: int
    go: int
    run: int = 0  # the placement version that it runs, or ran when it stopped


@dataclass(frozen=True, slots=True)
class Stranded:
    """So many sequences were at a rank whose worker or scheduler fell, or that is to leave."""

    count: int
    name: str = ""  # who fell


@dataclass(frozen=True, slots=True)
class ScrubHeard:
    """What the gateway's scrubber, or that of a worker, has found so far."""

    report: ScrubReport | ExpertReport


@dataclass(frozen=True, slots=True)
class Troubled:
    """What the process cannot do though it runs, for people; empty: it can again."""

    name: str
    incarnation: int
    text: str


@dataclass(frozen=True, slots=True)
class StandbySeen:
    """The successor of this name is to be there. `ready`: it has imported everything, and waits."""

    name: str
    ready: bool


@dataclass(frozen=True, slots=True)
class StandbyEnded:
    """One that waited, or was to, is gone; how it ended, for people."""

    name: str
    how: str
    delay_ms: int  # until the next one is started


@dataclass(frozen=True, slots=True)
class FilesMissing:
    """What somebody has deleted from the run directory under the running node, for people; empty: nothing,
    or it is there again."""

    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChangeAsked:
    """Somebody wants another number of ranks, or processes replaced. Exactly one Reply follows."""

    peer: bytes  # who asks: given back with the Reply
    request: Scale | Restart


@dataclass(frozen=True, slots=True)
class RebalanceAsked:
    """The planner wants the running group to use another placement. Exactly one Reply follows."""

    peer: bytes
    request: Rebalance
    slots: tuple[
        tuple[int, int], ...
    ] = ()  # of each member, the expert slots of a layer it has; 0: any

    def same(self, other: "RebalanceAsked") -> bool:
        """Whether it is the same question, said again."""
        return (self.peer, self.request) == (other.peer, other.request)


@dataclass(frozen=True, slots=True)
class PlacementWords:
    """How far one member is with what is proposed."""

    seat: int
    incarnation: int
    ready: int  # the highest version that it could run
    run: int  # the one that it runs
    copied: int  # grows as it gets on
    steps: int  # that it has taken


@dataclass(frozen=True, slots=True)
class PlacementsSeen:
    """The words of all members, as they are now. They are read after all actions so far are carried out."""

    words: tuple[PlacementWords, ...]


@dataclass(frozen=True, slots=True)
class ShutdownAsked:
    drain_ms: int


@dataclass(frozen=True, slots=True)
class KillAsked:
    """Stop without drain and without grace."""


Event = (
    Began
    | Spawned
    | BecameReady
    | Progressed
    | PipeClosed
    | Reaped
    | Observed
    | Inspected
    | AcksSeen
    | StandbySeen
    | StandbyEnded
    | Stranded
    | ScrubHeard
    | Troubled
    | FilesMissing
    | ChangeAsked
    | RebalanceAsked
    | PlacementsSeen
    | ShutdownAsked
    | KillAsked
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Spawn:
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    name: str
    incarnation: int
    signal: int


@dataclass(frozen=True, slots=True)
class SetEpoch:
    """Write the epoch word, then wake the workers of `seats`. `ends_steps`: see `Board.set_epoch`."""

    epoch: int
    seats: tuple[int, ...]
    ends_steps: bool = True


@dataclass(frozen=True, slots=True)
class Publish:
    """Put the topology on the board, then wake the workers of `seats`."""

    topology: Topology
    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """Put the placement on the board beside the topology, None: take it away; then wake the workers of `seats`."""

    proposal: Proposal | None
    seats: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Doubt:
    """Tell the worker of the seat, on the board, that another rank computed otherwise with its expert."""

    seat: int
    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove shared memory whose owner is gone."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look into /proc: is this silent process stopped, starved or hung? Answer: Inspected."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Send:
    name: str
    incarnation: int
    message: HealthUpdate | TopologyChanged | Drain | HandOver


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a ChangeAsked or a RebalanceAsked."""

    peer: bytes
    message: Scaled | Restarted | Rebalanced | Error


@dataclass(frozen=True, slots=True)
class Resized:
    """The node is to have so many ranks from now on: what starts later must read it so."""

    ranks: int


@dataclass(frozen=True, slots=True)
class RenewStandbys:
    """Successors that wait for their turn were started from what lay on the disk then: have new ones."""


@dataclass(frozen=True, slots=True)
class CountStranded:
    """How many sequences do these seats hold? They are about to move. Answer: Stranded."""

    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """For the log and the live display."""

    kind: str
    process: str = ""
    text: str = ""
    fraction: float = -1.0
    phases: tuple[PhaseTime, ...] = ()  # of the node's start, when it is ready


@dataclass(frozen=True, slots=True)
class Record:
    """For the history: an entry that begins, or what an earlier one has become."""

    entry: HistoryEntry
    noticed_ns: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every process is gone, or nothing more can be done about those in `left`."""

    code: ExitCode
    reason: str
    left: tuple[str, ...]


Action = (
    Spawn
    | Kill
    | SetEpoch
    | Publish
    | Propose
    | Doubt
    | Sweep
    | Inspect
    | Send
    | Reply
    | Resized
    | RenewStandbys
    | CountStranded
    | Tell
    | Record
    | Finished
)
