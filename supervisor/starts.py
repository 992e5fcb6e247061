"""Starting processes, and the standbys that fork them. What comes of it are events for the core."""

import errno
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Collection

from phalanx.protocol.board import Board
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.log import Logger
from phalanx.supervisor.core import SupervisorCore
from phalanx.supervisor.events import Event, Reaped, Spawned, StandbyEnded, StandbySeen
from phalanx.supervisor.files import CONFIG_GONE
from phalanx.supervisor.lives import describe_end
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.spawn import Child, Spawner
from phalanx.supervisor.standbys import DELAY_MS, Standbys
from phalanx.supervisor.watch import Watch


class Starts:
    """Args:
    events: where to note what happens.
    keep_config: writes the configuration if it is not there as it is; returns what came of it.
    """

    def __init__(
        self,
        core: SupervisorCore,
        spawner: Spawner,
        watch: Watch,
        board: Board,
        events: deque[Event],
        keep_config: Callable[[], str],
        log: Logger,
    ) -> None:
        self._core, self._spawner, self._watch, self._board = core, spawner, watch, board
        self._events, self._keep_config, self._log = events, keep_config, log
        self._standbys = Standbys()

    def forks(self, name: str) -> bool:
        """Whether the process would be there at once."""
        return self._spawner.forks(self._core.processes[name].spec)

    def kill(self, name: str, incarnation: int, number: int) -> None:
        """Send a signal to this incarnation; one that is yet to be forked will not be."""
        child = self._watch.children.get(name)
        if child is not None and child.incarnation == incarnation:
            child.kill(number)
        elif self._spawner.cancel(name, incarnation):
            self._events.append(Reaped(name, incarnation, -number, ""))

    def spawn(self, name: str, incarnation: int) -> None:
        spec = self._core.processes[name].spec
        failpoint("supervisor.spawn.before")
        if kept := self._keep_config():
            self._log.warning(CONFIG_GONE, error=kept)
        self._board.processes[spec.index].clear()
        if spec.kind == "worker":  # nobody may take the old worker's answers for the new one's
            row = self._board.seats[spec.seat]
            row.worker_incarnation = row.stop_ack = row.go_ack = 0
            row.placement_ready = row.placement_run = row.placement_slots = 0
            row.forget_doubt()
        if self._core.changes.replaces(name):
            self._spawner.drop_outdated(spec.standby)  # it is asked for because of what is new
        try:
            child = self._spawner.spawn(spec, incarnation)
        except OSError as error:
            self._events.append(Reaped(name, incarnation, *how_it_failed(error)))
            return
        if child is not None:
            self._add(child)

    def _add(self, child: Child, standby: str = "") -> None:
        self._watch.add(child)
        self._events.append(Spawned(child.spec.name, child.incarnation, child.pid, standby))

    def take_forked(self) -> None:
        """Those that have been forked since, and are there."""
        children, unforked = self._spawner.take_forked(time.monotonic_ns())
        for child in children:
            self._add(child, child.spec.standby)
        for name, incarnation in unforked:
            process = self._core.processes.get(name)
            if process is not None and process.alive and process.incarnation == incarnation:
                self.spawn(name, incarnation)

    # ------------------------------------------------------------ standbys

    def begin_shared(self) -> None:
        """Before the first starts: what several of them import, one process imports for all, and forks them."""
        counts = Counter(spec.standby for spec in self._specs())
        shared = [name for name, count in counts.items() if name and count > 1]
        self._standbys.want(shared, now_ns := time.monotonic_ns(), delay_ms=0)
        self._begin_standbys(now_ns)

    def want_standbys(self) -> None:
        names = {spec.standby for spec in self._specs()} - {""}
        self._standbys.want(names, time.monotonic_ns())
        self._events.extend(StandbySeen(name, ready=False) for name in sorted(names))

    def renew_standbys(self, kind: str = "", delay_ms: int = DELAY_MS) -> None:
        """Those that are there; of one kind of process, or all."""
        names = {spec.standby for spec in self._specs() if kind in ("", spec.kind)}
        renewed = self._spawner.renew_standbys(names)
        self._standbys.want(renewed, time.monotonic_ns(), delay_ms)
        self._events.extend(StandbySeen(name, ready=False) for name in sorted(renewed))

    def reap_orphans(self, others: Collection[int]) -> None:
        """What dead processes left behind; `others` are pids of children that somebody else reaps."""
        children = [child.pid for child in self._watch.children.values()]
        self._spawner.reap_orphans([*children, *others])

    def _begin_standbys(self, now_ns: int) -> None:
        for name in self._standbys.take_due(now_ns):
            self._spawner.prepare(next(spec for spec in self._specs() if spec.standby == name))

    def look_at_standbys(self, now_ns: int) -> None:
        """Start those that are due; take note of those that are ready, and of those that died."""
        self._begin_standbys(now_ns)
        for name in self._spawner.ready_standbys():
            self._log.info("standby ready", about=name)
            self._events.append(StandbySeen(name, ready=True))
        for name, code, words in self._spawner.ended_standbys():
            delay_ms = self._standbys.ended(name, now_ns)
            how = describe_end(code, words)
            self._events.append(StandbyEnded(name, how, delay_ms))
            text = f"{how}; another one follows in {delay_ms / 1000:g} s"
            self._log.warning("standby ended", about=name, text=text)

    def _specs(self) -> list[ProcessSpec]:
        return [process.spec for process in self._core.processes.values()]


def how_it_failed(error: OSError) -> tuple[ExitCode, str]:
    """How a process ended that could not be started. One for which the machine has no room is waited for; anything
    else is an early death."""
    match error.errno:
        case errno.EAGAIN:
            most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            limit = "without limit" if most == resource.RLIM_INFINITY else f"{most}"
            lacks = f"its user's may be {limit} (ulimit -u), others are in pids.max of its cgroup"
        case errno.ENOMEM:
            lacks = "the machine has no memory for it"
        case errno.EMFILE:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            lacks = f"the supervisor may have {most} files open (ulimit -n), and has"
        case errno.ENFILE:
            lacks = "the machine has as many files open as it may (fs.file-max)"
        case _:
            return ExitCode.INTERNAL, str(error)
    return ExitCode.NO_ROOM, f"no room for another process: {error.strerror}; {lacks}"
