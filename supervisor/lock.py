"""One node in a run directory: who holds it, and what a killed one left behind."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from phalanx.protocol import arena
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.limits import OLD_NODE_MS
from phalanx.protocol.rundir import LOCK_FILE, PID_FILE

CHILDREN_LOCK_FILE = "children.lock"
FAILED_FILE = "failed.json"
_POLL_S = 0.02
_LOOK_S = 0.1  # `is_running` takes the lock for an instant to see whether it is free


class NodeBusy(PhalanxError):
    """The run directory belongs to a live node, or to what is left of one."""


class NodeLock:
    """Held by the supervisor for its whole life. The kernel releases it however the supervisor ends.

    `children_fd` is a second lock that every child inherits and so holds until it is gone: a pid file
    would prove nothing, and the children of a killed supervisor must be gone before their sockets and
    shared memory are taken away.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises NodeBusy, saying who is there and what to do."""
        self.run_dir = run_dir
        self._fd = os.open(run_dir / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _wait_lock(self._fd, _LOOK_S):
            os.close(self._fd)
            raise NodeBusy(
                f"a node is already running in {run_dir} (supervisor pid {read_pid(run_dir)}): stop it"
                " with `phalanx down`, or choose another --run-dir"
            )
        path = run_dir / CHILDREN_LOCK_FILE
        self.children_fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _wait_lock(self.children_fd, OLD_NODE_MS / 1000):
            pids = holders(path, self.children_fd)
            os.close(self.children_fd)
            os.close(self._fd)
            raise NodeBusy(
                f"processes of an earlier node in {run_dir} are still there after"
                f" {OLD_NODE_MS / 1000:g} s (pids {', '.join(map(str, pids)) or 'unknown'}):"
                " end them, or choose another --run-dir"
            )
        self.swept = clean(run_dir)
        self._write_pid()
        # systemd-tmpfiles, which tidies /tmp, leaves a locked directory and everything in it alone.
        self._directory_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _try_lock(self._directory_fd, fcntl.LOCK_SH)

    def _write_pid(self) -> None:
        (self.run_dir / PID_FILE).write_text(f"{os.getpid()}\n")

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
        os.close(self._directory_fd)
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
    """Remove what a killed node left: sockets, its failure report, shared memory. Returns the last."""
    for path in run_dir.glob("*.sock"):
        path.unlink(missing_ok=True)
    (run_dir / FAILED_FILE).unlink(missing_ok=True)
    return arena.sweep(node_name(run_dir))


def holders(path: Path, ours: int) -> list[int]:
    """Processes that have `path` open, other than this one."""
    key = (os.fstat(ours).st_dev, os.fstat(ours).st_ino)
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and key in _open_files(process / "fd"):
            found.append(int(process.name))
    return found


def _open_files(directory: Path) -> set[tuple[int, int]]:
    files: set[tuple[int, int]] = set()
    try:
        for entry in directory.iterdir():
            stat = entry.stat()
            files.add((stat.st_dev, stat.st_ino))
    except OSError:
        pass  # it ended, or is not ours to look at
    return files


def _wait_lock(fd: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not _try_lock(fd):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
