"""What the history tells of the node: what ended, how that was noticed, what was decided, and how long each part
took until all was well again. Pure.

An entry is told when it begins, and again when there is more to say; of one id the last word counts. A process
has one from its fall until it serves again, however many of its successors fall meanwhile: one that cannot start
does not fill the history.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from phalanx.protocol.messages import EpochRecord, HistoryEntry, HistoryKind, PhaseTime
from phalanx.supervisor.events import Noticed, Record
from phalanx.supervisor.group import Group
from phalanx.supervisor.processes import ProcessSpec

UNDER_WAY = "under way"
CUT_OFF = "cut off: the supervisor died"  # what was under way in an earlier start
_WAIT = "wait"  # until it is started again: often no time at all
_NODE_STOPPED = "the node stopped"
_MS = 1_000_000
_TEXT_MAX = 600  # characters
_PHASES_MAX = 64
_REPEATS_MAX = 4  # that are all told; then every second, fourth, eighth ...


@dataclass(slots=True)
class Story:
    """One entry that is not over yet."""

    id: int
    kind: HistoryKind
    cause: str
    noticed_ns: int
    epoch: int
    survivors: tuple[int, ...]
    process: str = ""
    incarnation: int = 0
    seat: int = -1  # of a worker: it is over when that is in the group again
    noticed: str = ""
    detected_ms: float = 0.0
    ended: str = ""
    deaths: int = 0
    went_on: str = ""  # the group, without it
    decision: str = ""
    note: str = ""  # how its successor began
    moved: int = 0
    phases: list[PhaseTime] = field(default_factory=list[PhaseTime])
    step: str = ""
    step_ns: int = 0
    outcome: str = UNDER_WAY
    resumed_ms: float = -1.0

    def begin(self, step: str, now_ns: int) -> None:
        """This is done from now on; empty: nothing any more."""
        if self.step == step:
            return
        seconds = round((now_ns - self.step_ns) / 1e9, 4)
        if self.step and (seconds or self.step != _WAIT):
            self.phases.append(PhaseTime(self.step, self.process, seconds))
        self.step, self.step_ns = step, now_ns

    def end(self, outcome: str, now_ns: int) -> None:
        self.begin("", now_ns)
        self.outcome, self.resumed_ms = outcome, round((now_ns - self.noticed_ns) / _MS, 3)

    def entry(self) -> HistoryEntry:
        decided = "; ".join(filter(None, (self.went_on, self.decision, self.note)))
        return HistoryEntry(
            id=self.id,
            kind=self.kind,
            epoch=self.epoch,
            cause=_short(self.cause),
            process=self.process,
            incarnation=self.incarnation,
            noticed=self.noticed,
            detected_ms=round(self.detected_ms, 3),
            ended=_short(self.ended),
            deaths=self.deaths,
            decided=_short(decided),
            moved_requests=self.moved,
            survivors=self.survivors,
            phases=tuple(self.phases[:_PHASES_MAX]),
            resumed_ms=self.resumed_ms,
            outcome=_short(self.outcome),
        )


class History:
    """The entries that are not over. What is new is taken by `take`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ids = 0
        self._falls: dict[str, Story] = {}  # by the name of the process
        self._start: Story | None = None
        self._asked: Story | None = None
        self._stop: Story | None = None
        self._told_epoch = 0
        self._new: dict[int, Record] = {}

    def take(self) -> list[Record]:
        """The entries that have begun or changed since this was asked last, as they are now."""
        new, self._new = list(self._new.values()), {}
        return new

    # ------------------------------------------------------------ the node

    def began(self, before: str, silent_ms: float, now_ns: int) -> None:
        """The supervisor starts. `before`: how the last start in this run directory ended; empty: there was none."""
        died = before == "died"
        cause = "supervisor died" if died else "started again" if before else "started"
        story = self._start = self._open("start", cause, now_ns, process="supervisor")
        if died:
            story.noticed, story.detected_ms = "next start", silent_ms
            story.went_on = "the node ended with it, and is started anew"
        self._tell(story)

    def whole(self, phases: Sequence[PhaseTime], now_ns: int) -> None:
        """All processes serve for the first time."""
        if self._start is not None:
            self._start.phases += phases
            self._end(self._start, "ready", now_ns)
            self._start = None

    def stopping(self, why: str, drain_ms: int, now_ns: int) -> None:
        """The node is told to stop, or cannot go on: then `why` is not empty."""
        if self._stop is not None:
            return
        self.asked_ended(_NODE_STOPPED, (), now_ns)
        cause = f"failed: {why}" if why else "told to stop"
        story = self._stop = self._open("stop", cause, now_ns)
        story.decision = f"requests have {drain_ms / 1000:g} s to finish" if drain_ms else "at once"
        story.begin("drain", now_ns)
        self._tell(story)

    def stop_goes_on(self, step: str, now_ns: int) -> None:
        """The drain is over: from now on nobody is started again."""
        self.over(list(self._falls), _NODE_STOPPED, now_ns)
        if self._start is not None:
            self._end(self._start, _NODE_STOPPED, now_ns)
            self._start = None
        if self._stop is not None:
            self._stop.begin(step, now_ns)

    def stopped(self, how: str, now_ns: int) -> None:
        if self._stop is not None:
            self._end(self._stop, how, now_ns)

    # ------------------------------------------------------------ one process

    def fell(
        self,
        spec: ProcessSpec,
        incarnation: int,
        why: str,
        noticed: Noticed,
        detected_ms: float,
        now_ns: int,
    ) -> None:
        """It is dead, or will be killed."""
        story = self._falls.get(spec.name)
        if story is None:
            story = self._open("process", f"{spec.name} {why}", now_ns, process=spec.name)
            story.incarnation, story.noticed, story.detected_ms = incarnation, noticed, detected_ms
            if spec.kind == "worker":
                story.seat = spec.seat
                story.survivors = tuple(s for s in story.survivors if s != spec.seat)
            self._falls[spec.name] = story
        else:  # a successor, before it served
            story.phases.clear()
            story.step, story.note = "starts in vain", ""
            story.step_ns = story.noticed_ns
        story.deaths += 1
        story.begin("end", now_ns)
        self._tell_again(story)

    def reaped(self, name: str, how: str, now_ns: int) -> None:
        """It is gone, and said this of its end."""
        if story := self._falls.get(name):
            story.ended = (
                how if story.deaths == 1 else f"{story.ended.split(', then ')[0]}, then {how}"
            )
            story.begin(_WAIT, now_ns)

    def decided(self, name: str, text: str) -> None:
        """What follows from its end."""
        if story := self._falls.get(name):
            story.decision = text
            self._tell_again(story)

    def starts(self, name: str, now_ns: int) -> None:
        if story := self._falls.get(name):
            story.begin("start", now_ns)

    def forked(self, name: str, standby: str) -> None:
        if story := self._falls.get(name):
            story.note = f"forked from {standby}"

    def gets_on(self, name: str, phase: str, now_ns: int) -> None:
        """Its successor is at this now."""
        if story := self._falls.get(name):
            story.begin(phase, now_ns)

    def ready(self, name: str, note: str, now_ns: int) -> None:
        """It serves again; a rank only when it is in the group. `note`: what it says of its start."""
        story = self._falls.get(name)
        if story is None:
            if note and self._start is not None:
                self._start.note = f"{name}: {note}"
                self._tell(self._start)
            return
        story.note = "; ".join(filter(None, (story.note, note)))
        if story.seat < 0:
            self._over(name, "ready", now_ns)
        else:
            story.begin("join", now_ns)

    def over(self, names: Collection[str], outcome: str, now_ns: int) -> None:
        """None of these is started again."""
        for name in names:
            if name in self._falls:
                self._over(name, outcome, now_ns)

    def moved(self, name: str, count: int) -> None:
        """So many sequences were at the process that fell: they go to other ranks."""
        if (story := self._falls.get(name)) and count:
            story.moved += count
            self._tell(story)

    def standby_ended(self, name: str, how: str, delay_ms: int, now_ns: int) -> None:
        """A process that waited to be forked died: no part of the node, but who falls now starts from nothing."""
        story = self._falls.get(name) or self._open("standby", f"{name} died", now_ns, process=name)
        self._falls[name] = story
        story.noticed, story.ended, story.deaths = "exit", how, story.deaths + 1
        story.decision = f"another one follows in {delay_ms / 1000:g} s"
        story.begin("start", now_ns)
        self._tell_again(story)

    # ------------------------------------------------------------ the group, and what was asked for

    def follow(self, records: Sequence[EpochRecord], now_ns: int) -> None:
        """Tell of changes of the group that are over, and of the ranks that joined by them."""
        if not records or records[-1].epoch <= self._told_epoch:
            return  # mostly: this is asked after every event
        for record in [record for record in records if record.epoch > self._told_epoch]:
            self._told_epoch = record.epoch
            self._ids += 1
            begun_ns = now_ns - int(record.resumed_ms * _MS)
            stop, go = (round(ms / 1000, 4) for ms in (record.stop_ms, record.go_ms))
            entry = HistoryEntry(
                id=self._ids,
                kind="group",
                **{name: getattr(record, name) for name in record.__struct_fields__},
                decided=_who_runs(record.survivors),
                outcome="over",
                phases=(PhaseTime("stop", "", stop), PhaseTime("go", "", go)),
            )
            self._new[entry.id] = Record(entry, begun_ns)
            for story in [story for story in self._falls.values() if story.seat >= 0]:
                if story.seat in record.survivors:
                    self._over(story.process, "joined", now_ns)
                elif not story.went_on:
                    story.went_on = f"the group goes on without it (epoch {record.epoch})"

    def asked(self, text: str, step: str, now_ns: int) -> None:
        """Somebody wants another number of ranks, or processes replaced."""
        story = self._asked = self._open("change", f"asked for: {text}", now_ns)
        story.noticed = "asked"
        if step:
            story.begin(step, now_ns)
        self._tell(story)

    def asked_goes_on(self, step: str, now_ns: int) -> None:
        if self._asked is not None:
            self._asked.begin(step, now_ns)

    def asked_ended(self, outcome: str, phases: Sequence[PhaseTime], now_ns: int) -> None:
        if self._asked is not None:
            self._asked.phases += phases
            self._end(self._asked, outcome, now_ns)
            self._asked = None

    # ------------------------------------------------------------ entries

    def _open(self, kind: HistoryKind, cause: str, now_ns: int, process: str = "") -> Story:
        self._ids += 1
        epoch = self._group.epoch - self._group.epoch % 2
        members = tuple(sorted(self._group.members))
        return Story(self._ids, kind, cause, now_ns, epoch, members, process)

    def _over(self, name: str, outcome: str, now_ns: int) -> None:
        self._end(self._falls.pop(name), outcome, now_ns)

    def _end(self, story: Story, outcome: str, now_ns: int) -> None:
        story.end(outcome, now_ns)
        self._tell(story)

    def _tell(self, story: Story) -> None:
        self._new[story.id] = Record(story.entry(), story.noticed_ns)

    def _tell_again(self, story: Story) -> None:
        """Of one that repeats itself without end, less and less often."""
        times = story.deaths
        if times <= _REPEATS_MAX or times & (times - 1) == 0:
            self._tell(story)


def how_it_ended(entries: Sequence[HistoryEntry]) -> str:
    """How the last start ended that these entries tell of: `stopped` or `died`; empty: there was none."""
    if not entries:
        return ""
    run = max(entry.run for entry in entries)
    last = [entry for entry in entries if entry.run == run]
    stopped = any(entry.kind == "stop" and entry.outcome != UNDER_WAY for entry in last)
    return "stopped" if stopped else "died"


def _who_runs(ranks: Sequence[int]) -> str:
    one = len(ranks) == 1
    return f"rank{'' if one else 's'} {', '.join(map(str, ranks))} run{'s' if one else ''}"


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 3]}..."
