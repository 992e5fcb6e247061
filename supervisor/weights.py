"""The host's copy of the weights: the file and its lock are the supervisor's, so no worker's end takes them.

What is in it is the business of `phalanx.worker_svc.host_weights`, which runs in a process of its own.
"""

import fcntl
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from phalanx.protocol.arena import SHM, arena_name
from phalanx.protocol.log import Logger
from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor.spawn import die_with

_FILLER = [sys.executable, "-P", "-m", "phalanx.worker_svc.host_weights"]
_GRACE_S = 5.0


class WeightsKeeper:
    """Without it, or while it is not filled, workers read the checkpoint's files."""

    def __init__(self, run_dir: Path, node: str, children_lock_fd: int, log: Logger) -> None:
        self._run_dir, self._lock_fd, self._log = run_dir, children_lock_fd, log
        self._path = SHM / arena_name(node, "weights", 0)
        self._out = run_dir / LOG_DIR / "weights.out"
        self._fd = -1
        self._filler: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to fill it; returns at once."""
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
            self._log.warning("host weights are not held", reason=str(error))

    def look(self) -> None:
        """Note how the filling ended, once it has."""
        if self._filler is None or self._filler.poll() is None:
            return
        self._filler = None
        try:
            said = json.loads(self._out.read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            said = {"held": False, "reason": f"see {self._out}"}
        if said.pop("held", False):
            self._log.info("host weights are held", **said)
        else:
            self._log.warning("host weights are not held", **said)
            self._drop()

    def close(self) -> None:
        if self._filler is not None:
            self._filler.kill()
            self._filler.wait(_GRACE_S)
            self._filler = None
        self._drop()

    def _drop(self) -> None:
        """The name goes, and with it the memory as soon as nobody maps it."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
