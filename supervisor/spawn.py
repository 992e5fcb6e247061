"""Starting one child, ahead of time if streams would wait for it, and reading its last words when it is
gone."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import LOG_DIR, open_output
from phalanx.protocol.service import Turn
from phalanx.supervisor.processes import ProcessSpec

_TAIL_BYTES = 64 << 10
_WORDS_MAX = 500  # characters
_END_S = 1.0  # for those that were killed to be gone, when the node ends
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(slots=True)
class Child:
    """A live (or not yet reaped) incarnation of one process."""

    spec: ProcessSpec
    incarnation: int
    process: "subprocess.Popen[bytes]"
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


class Spawner:
    """Starts children that die with this process: all share one life pipe, whose write end is here."""

    def __init__(self, run_dir: Path, children_lock_fd: int) -> None:
        self._run_dir, self._lock_fd = run_dir, children_lock_fd
        self._life_read, self._life_write = os.pipe()
        # By their names: started, imported, waiting to be told whose turn they take.
        self._standbys: dict[str, Child] = {}
        self._unstarted: list[tuple[str, int, str]] = []
        self._ending: list[subprocess.Popen[bytes]] = []  # killed, not reaped yet

    def spawn(self, spec: ProcessSpec, incarnation: int) -> Child:
        """Raises OSError when the system has no room for another process."""
        standby = self._standbys.pop(spec.standby, None)
        if standby is not None:
            if self._set_going(standby, spec, incarnation):
                return standby
            self._discard(standby)
        return self._start(spec, incarnation)

    def prepare(self, spec: ProcessSpec) -> None:
        """Have a successor ready for this process, and for those that share it: imports are most of a start."""
        if spec.standby not in self._standbys:
            waiting = replace(spec, name=spec.standby, index=-1, seat=-1)
            try:
                self._standbys[spec.standby] = self._start(waiting, 0, standby=True)
            except OSError as error:
                self._unstarted.append((spec.standby, ExitCode.INTERNAL, str(error)))

    def ended_standbys(self) -> list[tuple[str, int, str]]:
        """(name, exit code or minus the signal, last words) of those that died while they waited, or could
        not be started, since this was asked last."""
        self._ending = [process for process in self._ending if process.poll() is None]
        ended, self._unstarted = self._unstarted, []
        for name, standby in list(self._standbys.items()):
            if (code := standby.process.poll()) is not None:
                del self._standbys[name]
                self._discard(standby)
                ended.append((name, code, last_words(self._run_dir, standby)))
        return ended

    def forget_standbys(self) -> None:
        """What is started from now on is to be started from what lies on the disk now."""
        for standby in self._standbys.values():
            self._discard(standby)
        self._standbys.clear()

    def _set_going(self, standby: Child, spec: ProcessSpec, incarnation: int) -> bool:
        """Tell it who it is, now that its turn has come; False when it has died while it waited."""
        standby.spec, standby.incarnation = spec, incarnation
        standby.out, standby.out_start = self._output(spec), 0
        with contextlib.suppress(OSError):
            standby.out_start = standby.out.stat().st_size  # the rest was said by the one before it
        assert standby.process.stdin is not None
        try:
            turn = Turn(spec.name, incarnation, spec.index, spec.seat)
            os.write(standby.process.stdin.fileno(), msgspec.json.encode(turn))
        except BrokenPipeError:
            return False
        finally:
            standby.process.stdin.close()
        return standby.process.poll() is None

    def _output(self, spec: ProcessSpec) -> Path:
        return self._run_dir / LOG_DIR / f"{spec.name}.out"

    def _start(self, spec: ProcessSpec, incarnation: int, standby: bool = False) -> Child:
        out = self._output(spec)
        death_read, death_write = os.pipe()
        try:
            with open_output(out) as log:
                start = log.tell()
                process = self._popen(spec, incarnation, death_write, log.fileno(), standby)
            try:
                pidfd = os.pidfd_open(process.pid)
            except OSError:  # nobody would know of it
                self._kill(process)
                raise
        except BaseException:
            os.close(death_read)
            raise
        finally:
            os.close(death_write)  # only the child holds it now: its death is the end of file
        return Child(spec, incarnation, process, death_read, pidfd, out, start)

    def _popen(
        self, spec: ProcessSpec, incarnation: int, death_fd: int, output: int, standby: bool
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
                *(["--standby"] if standby else []),
            ],
            stdin=subprocess.PIPE if standby else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **spec.environment()},
            pass_fds=(death_fd, self._life_read, self._lock_fd),
            process_group=0,  # Ctrl-C at the terminal is for the supervisor alone
            # Our only other threads are ZeroMQ's, and they hold no lock of Python's.
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509
        )

    def close(self) -> None:
        self.forget_standbys()
        until = time.monotonic() + _END_S
        for process in self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        os.close(self._life_read)
        os.close(self._life_write)

    def _discard(self, standby: Child) -> None:
        self._kill(standby.process)
        os.close(standby.death_fd)
        os.close(standby.pidfd)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """It is not waited for: one that sleeps in the kernel ends when the kernel lets it."""
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        self._ending.append(process)


def last_words(run_dir: Path, child: Child) -> str:
    """Why the child ended, as far as it said: its last logged error, else its last line of output."""
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
