"""Starting one child, as a fork of one that was started ahead if streams would wait for it, and reading its
last words when it is gone."""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from phalanx.protocol.background import within
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import LOG_DIR, open_output
from phalanx.supervisor.forks import Control, Forked, Order, Reapable, adopt_orphans
from phalanx.supervisor.processes import ProcessSpec

_TAIL_BYTES = 64 << 10
_WORDS_MAX = 500  # characters
_WORDS_S = 0.2  # for reading them: the disk may hang
_END_S = 1.0  # for those that were killed to be gone, when the node ends
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(slots=True)
class Child:
    """A live (or not yet reaped) incarnation of one process."""

    spec: ProcessSpec
    incarnation: int
    process: Reapable
    death_fd: int  # end of file when it dies; -1 once that was seen
    pidfd: int  # readable when it can be reaped
    out: Path
    out_start: int  # where its own output begins in `out`
    looks: Looks = field(init=False)

    def __post_init__(self) -> None:
        self.looks = Looks(self.process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, number: int) -> None:
        # Not reaped yet, so the pid cannot have been reused; by pidfd all the same.
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            pass  # a zombie: its end is about to be noticed


def die_with(parent: int) -> None:
    """In the child, before its program starts: let the kernel kill it when the supervisor dies.

    The life pipe does the same, but a child looks at it only after seconds of imports. The signal is
    tied to the parent's thread that forks, so `run_node` stays in one thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(ExitCode.PARENT_DIED)


@dataclass(slots=True)
class Standby:
    """It has imported what its forks need, and what else takes long."""

    child: Child
    control: Control
    told: bool = False  # that it is ready


class Spawner:
    """Starts children that die with this process: all share one life pipe, whose write end is here."""

    def __init__(self, run_dir: Path, children_lock_fd: int) -> None:
        self._run_dir, self._lock_fd = run_dir, children_lock_fd
        self._life_read, self._life_write = os.pipe()
        self._adopts = adopt_orphans(True)
        self._standbys: dict[str, Standby] = {}  # by their names
        self._outdated: set[str] = set()  # of those, the ones that are to have a successor ...
        self._next: dict[str, Standby] = {}  # ... and that, until it is ready
        self._lines = select.epoll()  # to them
        self._unstarted: list[tuple[str, int, str]] = []
        self._unforked: list[tuple[str, int]] = []
        self._ending: list[Reapable] = []  # killed, not reaped yet

    def fileno(self) -> int:
        """Readable when there is something for `take_forked`."""
        return self._lines.fileno()

    def spawn(self, spec: ProcessSpec, incarnation: int) -> Child | None:
        """None: it is being forked, and comes with `take_forked`.

        Raises OSError when the system has no room for another process.
        """
        standby = self._standbys.get(spec.standby)
        if standby is not None and not standby.control.broken:
            with contextlib.suppress(OSError):
                standby.control.order(spec, incarnation, time.monotonic_ns())
                return None
        return self._start(spec, incarnation)

    def forks(self, spec: ProcessSpec) -> bool:
        """Whether it would be there at once."""
        standby = self._standbys.get(spec.standby)
        return standby is not None and standby.control.ready and not standby.control.broken

    def take_forked(self, now_ns: int) -> tuple[list[Child], list[tuple[str, int]]]:
        """The children that have been forked since this was asked last; and (name, incarnation) of those that
        will not be: they are to be started anew."""
        forked: list[Child] = []
        unforked, self._unforked = self._unforked, []
        for standby in self._all():
            control, broken = standby.control, standby.control.broken
            for order, pid in control.hear(now_ns):
                if (child := self._begin(order, pid)) is not None:
                    forked.append(child)
                elif order.wanted:
                    unforked.append((order.spec.name, order.incarnation))
            control.broken |= control.owes(now_ns) and _is_stopped(standby.child, now_ns)
            if control.broken and not broken:
                standby.child.process.kill()  # it is found among those that ended
                self._lines.unregister(control.line)
            if control.broken:
                unforked += _undone(control)
        return forked, unforked

    def cancel(self, name: str, incarnation: int) -> bool:
        """Whether it was being forked. It ends then without having done anything."""
        if (name, incarnation) in self._unforked:
            self._unforked.remove((name, incarnation))
            return True
        orders = [order for s in self._standbys.values() for order in s.control.orders]
        for order in orders:
            if order.wanted and (order.spec.name, order.incarnation) == (name, incarnation):
                order.wanted = False
                return True
        return False

    def prepare(self, spec: ProcessSpec) -> None:
        """Have a process ready that forks this one, and those that share it: imports are most of a start."""
        renews = spec.standby in self._outdated
        there = self._next if renews else self._standbys
        if spec.standby in there or not self._adopts:
            return
        waiting = replace(spec, name=spec.standby, index=-1, seat=-1)
        try:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._unstarted.append((spec.standby, ExitCode.INTERNAL, str(error)))
            return
        ours.setblocking(False)
        try:
            child = self._start(waiting, 0, its)
            there[spec.standby] = Standby(child, Control(ours))
            self._lines.register(ours, select.EPOLLIN)
        except OSError as error:
            ours.close()
            self._unstarted.append((spec.standby, ExitCode.INTERNAL, str(error)))
        finally:
            its.close()

    def ready_standbys(self) -> list[str]:
        """Names of those that have become ready since this was asked last."""
        for name in [name for name, standby in self._next.items() if standby.control.ready]:
            self.drop_outdated(name)
        new = [
            name
            for name, standby in self._standbys.items()
            if name not in self._outdated and not standby.told and standby.control.ready
        ]
        for name in new:
            self._standbys[name].told = True
        return new

    def ended_standbys(self) -> list[tuple[str, int, str]]:
        """(name, exit code or minus the signal, last words) of those that died, or could not be started,
        since this was asked last."""
        self._ending = [process for process in self._ending if process.poll() is None]
        ended, self._unstarted = self._unstarted, []
        for name in [
            n for n in self._outdated if self._standbys[n].child.process.poll() is not None
        ]:
            self.drop_outdated(name)  # another one is on its way, or due
        for standbys in (self._standbys, self._next):
            for name, standby in list(standbys.items()):
                if standbys is self._standbys and name in self._outdated:
                    continue  # looked at above, or the next time
                if (code := standby.child.process.poll()) is not None:
                    self._discard(standbys.pop(name))
                    ended.append((name, code, last_words(self._run_dir, standby.child)))
        return ended

    def renew_standbys(self, names: Collection[str]) -> set[str]:
        """Each of these is to be replaced by one that is made from what there is now. Until that is ready the old
        one forks: somebody may fall meanwhile. Returns those that are there."""
        there = self._standbys.keys() & names
        for name in there & self._next.keys():
            self._discard(self._next.pop(name))
        self._outdated |= there
        return there

    def drop_outdated(self, name: str) -> None:
        """Who is started from now on is forked by its successor."""
        if name in self._outdated:
            self._outdated.remove(name)
            self._discard(self._standbys.pop(name))
            if name in self._next:
                self._standbys[name] = self._next.pop(name)

    def reap_orphans(self, ours: Collection[int]) -> None:
        """Nobody else waits for what dead children of ours have left: all that ended but `ours`."""
        standbys = (standby.child.pid for standby in self._all())
        mine = {*ours, *standbys, *(process.pid for process in self._ending)}
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, ended)) is not None and found.si_pid not in mine:
                os.waitpid(found.si_pid, 0)

    def _begin(self, order: Order, pid: int) -> Child | None:
        """Tell a fork who it is; None when it is not wanted any more, or dead, or cannot be watched."""
        spec, process = order.spec, Forked(pid)
        if not order.wanted:
            order.drop()
            return None
        out, start = self._output(spec), 0
        with contextlib.suppress(OSError):
            start = out.stat().st_size  # the rest was said by the one before it
        try:
            pidfd = self._watchable(process)
        except OSError:
            order.drop()
            return None
        with contextlib.suppress(OSError):  # its death shows as any other
            order.begin()
        return Child(spec, order.incarnation, process, order.death_fd, pidfd, out, start)

    def _all(self) -> list[Standby]:
        return [*self._standbys.values(), *self._next.values()]

    def _output(self, spec: ProcessSpec) -> Path:
        return self._run_dir / LOG_DIR / f"{spec.name}.out"

    def _start(
        self, spec: ProcessSpec, incarnation: int, control: socket.socket | None = None
    ) -> Child:
        out = self._output(spec)
        death_read, death_write = os.pipe()
        try:
            with open_output(out) as log:
                start = log.tell()
                process = self._popen(spec, incarnation, death_write, log.fileno(), control)
            pidfd = self._watchable(process)
        except BaseException:
            os.close(death_read)
            raise
        finally:
            os.close(death_write)  # only the child holds it now: its death is the end of file
        return Child(spec, incarnation, process, death_read, pidfd, out, start)

    def _popen(
        self,
        spec: ProcessSpec,
        incarnation: int,
        death_fd: int,
        output: int,
        control: socket.socket | None,
    ) -> "subprocess.Popen[bytes]":
        arguments = {
            "--run-dir": self._run_dir,
            "--name": spec.name,
            "--incarnation": incarnation,
            "--index": spec.index,
            "--seat": spec.seat,
            "--death-fd": death_fd,
            "--life-fd": self._life_read,
        }
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", spec.module),
                *(str(part) for pair in arguments.items() for part in pair),
                *(["--standby"] if control else []),
            ],
            stdin=control.fileno() if control else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **spec.environment()},
            pass_fds=(death_fd, self._life_read, self._lock_fd),
            process_group=0,  # Ctrl-C at the terminal is for the supervisor alone
            # Other threads of ours (ZeroMQ's, of the log, that look at disks) may hold locks: it takes none.
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509
        )

    def close(self) -> None:
        for standby in self._all():
            self._discard(standby)
        until = time.monotonic() + _END_S
        for process in self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                process.wait(max(0.0, until - time.monotonic()))
        adopt_orphans(False)
        self._lines.close()
        os.close(self._life_read)
        os.close(self._life_write)

    def _watchable(self, process: Reapable) -> int:
        """Its pidfd. Raises OSError, and ends it, when there is none: nobody would know of it."""
        try:
            return os.pidfd_open(process.pid)
        except OSError:
            self._kill(process)
            raise

    def _discard(self, standby: Standby) -> None:
        self._unforked += _undone(standby.control)
        standby.control.line.close()
        self._kill(standby.child.process)
        os.close(standby.child.death_fd)
        os.close(standby.child.pidfd)

    def _kill(self, process: Reapable) -> None:
        """It is not waited for: one that sleeps in the kernel ends when the kernel lets it."""
        process.kill()
        self._ending.append(process)


def _is_stopped(child: Child, now_ns: int) -> bool:
    found = child.looks.inspect(now_ns)
    return found is not None and found[0] == "T"


def _undone(control: Control) -> list[tuple[str, int]]:
    """(name, incarnation) of what it was asked for in vain."""
    return [(order.spec.name, order.incarnation) for order in control.drop_all() if order.wanted]


def last_words(run_dir: Path, child: Child) -> str:
    """Why the child ended, as far as it said: its last logged error, else its last line of output. Empty, too, if
    the disk cannot tell in time."""
    return within(_WORDS_S, partial(_last_words, run_dir, child), "")


def _last_words(run_dir: Path, child: Child) -> str:
    said = _last_error(run_dir / LOG_DIR / f"{child.spec.name}.log", child.incarnation)
    if not said:
        lines = [line.strip() for line in _tail(child.out, child.out_start).splitlines()]
        said = next((line for line in reversed(lines) if line), "")
    return said[:_WORDS_MAX]


def _last_error(log: Path, incarnation: int) -> str:
    for line in reversed(_tail(log, 0).splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut by the start of the tail, or by the death of the writer
        if not isinstance(entry, dict) or entry.get("incarnation") != incarnation:
            continue
        if entry.get("level") in ("error", "critical"):
            trace = str(entry.get("exception", "")).strip().splitlines()
            cause = entry.get("error") or (trace[-1] if trace else "")
            return f"{entry.get('event', '')}: {cause}" if cause else str(entry.get("event", ""))
    return ""


def _tail(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
