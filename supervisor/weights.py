"""The host's copy of the weights: the file and its lock are the supervisor's, so no worker's end takes them.

What is in it is the business of `phalanx.worker_svc.host_weights`, which runs in a process of its own.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from phalanx.protocol.arena import SHM, arena_name, restore_name
from phalanx.protocol.log import Logger
from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor.lives import describe_end
from phalanx.supervisor.spawn import die_with

_FILLER = [sys.executable, "-P", "-m", "phalanx.worker_svc.host_weights"]
_GRACE_S = 1.0
# As long it may be without a tick of CPU time; it gives way to everybody, so it may be slow.
_STILL_NS = 120_000_000_000
_AGAIN_NS, _AGAIN_NS_MAX = (
    60_000_000_000,
    3_600_000_000_000,
)  # tried again after so long, then twice


class WeightsKeeper:
    """Without it, or while it is not filled, workers read the checkpoint's files."""

    def __init__(self, run_dir: Path, node: str, children_lock_fd: int, log: Logger) -> None:
        self._run_dir, self._lock_fd, self._log = run_dir, children_lock_fd, log
        self._path = SHM / arena_name(node, "weights", 0)
        self._out = run_dir / LOG_DIR / "weights.out"
        self._fd = -1
        self._filler: subprocess.Popen[bytes] | None = None
        self._ending: list[subprocess.Popen[bytes]] = []  # killed, not reaped yet
        self._ticks = self._moved_ns = 0  # its CPU time, and when that was seen to grow
        self._delay_ns, self._again_ns = _AGAIN_NS, 0
        self.missing = ""  # why it is not held, for people

    def start(self) -> None:
        """Begin to fill it; returns at once."""
        self._again_ns, self._moved_ns = 0, time.monotonic_ns()
        try:
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._out.open("wb") as out:
                self._filler = subprocess.Popen(
                    [*_FILLER, "--run-dir", str(self._run_dir), "--fd", str(self._fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(self._fd, self._lock_fd),
                    process_group=0,
                    preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509
                )
        except OSError as error:
            self._failed(str(error), time.monotonic_ns())

    @property
    def pids(self) -> list[int]:
        """Of processes that fill it, or did and are not reaped yet."""
        return [filler.pid for filler in (self._filler, *self._ending) if filler is not None]

    def look(self, now_ns: int) -> bool:
        """Note how the filling ended, once it has; begin anew when it is time. True when it has just been filled."""
        self._ending = [filler for filler in self._ending if filler.poll() is None]
        self._keep_name()
        if self._filler is None:
            if self._again_ns and now_ns >= self._again_ns:
                self.start()
            return False
        code = self._filler.poll()
        if code is None:
            if self._hangs(self._filler.pid, now_ns):
                self._kill(0)
                self._failed(f"filling it made no progress for {_STILL_NS // 10**9} s", now_ns)
            return False
        self._filler = None
        try:
            said = json.loads(self._out.read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            said = {}
        if code == 0 and said.pop("held", False):
            self.missing, self._delay_ns = "", _AGAIN_NS
            self._log.info("host weights are held", **said)
            return True
        ended = describe_end(code, "")
        self._failed(str(said.get("reason") or f"{ended}, see {self._out}"), now_ns)
        return False

    def _hangs(self, pid: int, now_ns: int) -> bool:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False  # it has just ended
        ticks = int(fields[11]) + int(fields[12])
        if ticks != self._ticks:
            self._ticks, self._moved_ns = ticks, now_ns
        return now_ns - self._moved_ns > _STILL_NS

    def _keep_name(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0 and restore_name(self._path, self._fd):
                self._log.warning(
                    "shared memory lost its name", name=self._path.name, error="restored"
                )

    def _failed(self, reason: str, now_ns: int) -> None:
        self._drop()
        self._log.warning(
            "host weights are not held", reason=reason, again_s=self._delay_ns // 10**9
        )
        self.missing = f"workers read the checkpoint's files, there is no copy in memory: {reason}"
        self._again_ns = now_ns + self._delay_ns
        self._delay_ns = min(2 * self._delay_ns, _AGAIN_NS_MAX)

    def _kill(self, wait_s: float) -> None:
        """One that sleeps in the kernel is left to it: its lock on the directory tells of it."""
        if self._filler is not None:
            self._filler.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._filler.wait(wait_s)
            self._ending, self._filler = [*self._ending, self._filler], None

    def close(self) -> None:
        self._kill(_GRACE_S)
        self._drop()

    def _drop(self) -> None:
        """The name goes, and with it the memory as soon as nobody maps it."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
