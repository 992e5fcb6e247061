"""One node in a run directory: who holds it, and what a killed one left behind."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.protocol import arena
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import ExitCode, PhalanxError
from phalanx.protocol.limits import OLD_NODE_MS
from phalanx.protocol.rundir import LOCK_FILE, PID_FILE, write_whole

FAILED_FILE = "failed.json"
_POLL_S = 0.02
_TOLD_S = 0.5  # of waiting for an earlier node, before it is told
_LOOK_S = 0.1  # `is_running` takes the lock for an instant to see whether it is free


class NodeBusy(PhalanxError):
    """The run directory belongs to a live node, or to what is left of one."""


class NodeLock:
    """Held by the supervisor for its whole life. The kernel releases it however the supervisor ends.

    `children_fd` is a second lock, on the run directory itself, that every child inherits and so holds until
    it is gone: a pid file would prove nothing, and the children of a killed supervisor must be gone before
    their sockets and shared memory are taken away. Nobody deletes it with the files. systemd-tmpfiles, which
    tidies /tmp, leaves a locked directory and everything in it alone.

    Args:
        on_wait: told what is waited for, when it takes a while.
    """

    def __init__(self, run_dir: Path, on_wait: Callable[[str], None] = lambda text: None) -> None:
        """Raises NodeBusy, saying who is there and what to do."""
        self.run_dir = run_dir
        self._fd = os.open(run_dir / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _wait_lock(self._fd, _LOOK_S):
            os.close(self._fd)
            raise NodeBusy(
                f"a node is already running in {run_dir} (supervisor pid {read_pid(run_dir)}): stop it"
                " with `phalanx down`, or choose another --run-dir"
            )
        self._write_pid()  # before a long wait: until then it is the dead one's
        self.children_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _wait_lock(self.children_fd, _TOLD_S):
            most_s = OLD_NODE_MS / 1000
            on_wait(
                f"{of_earlier_node(holders(run_dir))} in {run_dir} to end, {most_s:g} s at most"
            )
            if not _wait_lock(self.children_fd, most_s - _TOLD_S):
                who = of_earlier_node(holders(run_dir))
                self.release()
                raise NodeBusy(
                    f"{who} in {run_dir} are still there after {most_s:g} s: end them, or choose another"
                    " --run-dir"
                )
        self.swept = clean(run_dir)

    def _write_pid(self) -> None:
        path = self.run_dir / PID_FILE
        with contextlib.suppress(OSError):  # it is for people, and the disk may be full
            write_whole(path, f"{os.getpid()}\n".encode())

    def restore(self) -> bool:
        """Make the lock's file anew when somebody deleted it: without it nobody sees that a node runs.
        Returns whether that was so. Raises OSError when it cannot be made."""
        path = self.run_dir / LOCK_FILE
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(self._fd)):
                return False
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _try_lock(
            fd
        ):  # somebody looks at it just now, or was quicker and starts a node here
            os.close(fd)
            return False
        os.close(self._fd)
        self._fd = fd
        self._write_pid()
        return True

    def release(self) -> None:
        (self.run_dir / PID_FILE).unlink(missing_ok=True)
        os.close(self.children_fd)
        os.close(self._fd)


def read_pid(run_dir: Path) -> int:
    """The supervisor's pid as it wrote it, for people; 0 when unknown."""
    try:
        return int((run_dir / PID_FILE).read_text())
    except (OSError, ValueError):
        return 0


def clean(run_dir: Path) -> list[str]:
    """Remove what a killed node left: sockets and shared memory. Returns the latter.

    Also under the names that it had before they told run directories apart: nobody else would remove that
    after an upgrade, and it may be most of the memory.
    """
    for path in run_dir.glob("*.sock"):
        path.unlink(missing_ok=True)
    for path in run_dir.glob(
        "config.*.json*"
    ):  # of a command that was killed while its node started
        pid = path.name.split(".")[1]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)
    swept = arena.sweep(node_name(run_dir), keep=arena.TOKENS)
    return swept + arena.sweep_if_dead(run_dir.name)


def sweep_dead(run_dir: Path) -> tuple[str, ...]:
    """What a supervisor that died left behind is removed, once its processes are gone. Returns names, none
    after a clean stop. What the next start goes on from stays, and why a node failed. Raises NodeBusy."""
    died = (run_dir / PID_FILE).exists()  # else it removed that itself
    lock = NodeLock(run_dir)
    lock.release()
    swept = tuple(f"{name} (swept)" for name in lock.swept)
    return ("supervisor (died)", *swept) if died else swept


def holders(run_dir: Path) -> list[int]:
    """Processes that hold the lock on the run directory: of the node there, or of one whose supervisor was
    killed."""
    try:
        stat = run_dir.stat()
    except OSError:
        return []
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        if any(_locks(process, entry, (stat.st_dev, stat.st_ino)) for entry in _open_in(process)):
            found.append(int(process.name))
    return sorted(found)


def of_earlier_node(pids: Sequence[int]) -> str:
    """Who that is, for people."""
    return f"processes of an earlier node (pids {', '.join(map(str, pids)) or 'unknown'})"


def _open_in(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []  # it ended, or is not ours to look at


def _locks(process: Path, entry: Path, key: tuple[int, int]) -> bool:
    try:
        if "lock:" not in (process / "fdinfo" / entry.name).read_text():
            return False
        stat = entry.stat()
        return (stat.st_dev, stat.st_ino) == key
    except OSError:
        return False


def _wait_lock(fd: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not _try_lock(fd):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_failure(run_dir: Path, code: ExitCode, reason: str) -> None:
    """Leave word for whoever waits for the node: the command line reads it when we are gone. Without disk, or
    without a directory, nobody is told more than the exit code."""
    text = json.dumps({"code": int(code), "reason": reason})
    with contextlib.suppress(OSError):
        write_whole(run_dir / FAILED_FILE, f"{text}\n".encode())


def forget_failure(run_dir: Path) -> None:
    """Of an earlier start."""
    (run_dir / FAILED_FILE).unlink(missing_ok=True)
