"""The run directory: sockets, journal, logs and pid files of one node, mode 0700."""

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import BinaryIO

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.limits import IPC_PATH_BYTES_MAX

CLIENT_SOCKET = "gateway.sock"  # clients of the message API
BUS_SOCKET = "bus.sock"  # the gateway's side for tokenizers, schedulers and the kvstore
SUPERVISOR_SOCKET = "supervisor.sock"
KVSTORE_SOCKET = "kvstore.sock"
EPLB_SOCKET = "eplb.sock"
PID_FILE = "supervisor.pid"
LOCK_FILE = "node.lock"
LOG_DIR = "logs"
HTTP_FILE = "http.json"  # where the HTTP server listens
PLAN_FILE = "memory-{seat}.json"  # what a rank's memory goes to, for people
JOURNAL_FILE = "journal.sqlite"
# Of what nodes write here, for all of which a directory in its place would be in the way.
_FILES = (".sock", ".pid", ".lock", ".json", ".jsonl", ".sqlite", ".sqlite-wal", ".sqlite-shm")
_LONGEST = max(
    map(len, (CLIENT_SOCKET, BUS_SOCKET, SUPERVISOR_SOCKET, KVSTORE_SOCKET, EPLB_SOCKET))
)


def open_output(path: Path) -> BinaryIO:
    """Where a process's prints go. A deleted folder is made anew; without disk they go nowhere."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file, whole or not at all. Raises OSError: the disk may be full."""
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def prepare(run_dir: Path) -> Path:
    """Create the run directory (mode 0700) and return its absolute path.

    Raises ConfigError when it belongs to someone else, its sockets would not fit a socket address, or something is in
    the way there.
    """
    path = run_dir.absolute()
    longest = len(os.fsencode(path)) + 1 + _LONGEST
    if longest > IPC_PATH_BYTES_MAX:
        raise ConfigError(
            f"the run directory {path} is too long: its socket names would take {longest} bytes, the"
            f" system allows {IPC_PATH_BYTES_MAX}; choose a shorter --run-dir"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ConfigError(
                f"the run directory {path} belongs to uid {path.stat().st_uid}, not to you"
            )
        path.chmod(0o700)
        (path / LOG_DIR).mkdir(mode=0o700, exist_ok=True)
        for entry in path.iterdir():
            if entry.suffix in _FILES and entry.is_dir():
                raise ConfigError(
                    f"{entry} is a directory, where a file of the node belongs: move it away, or choose"
                    " another --run-dir"
                )
    except OSError as error:
        raise unusable(Path(error.filename or path), error) from error
    return path


def unusable(path: Path, error: OSError) -> ConfigError:
    """What is wrong with a place in the run directory, and what to do."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        what = f"{path} is a file, where a directory of the node belongs: move it away"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = f"cannot write {path}: {error.strerror}: free some of its disk"
    else:
        what = f"cannot use {path}: {error.strerror}: see why"
    return ConfigError(f"{what}, or choose another --run-dir")


def endpoint(run_dir: Path, socket: str) -> str:
    """The ZeroMQ address of one of the node's sockets."""
    return f"ipc://{run_dir / socket}"


def is_running(run_dir: Path) -> bool:
    """Whether a supervisor holds the node's lock."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def write_plan(run_dir: Path, seat: int, plan: list[tuple[str, str]]) -> None:
    """Say what a rank's memory goes to: (item, size) in the order to be shown. Raises OSError."""
    write_whole(run_dir / PLAN_FILE.format(seat=seat), json.dumps(dict(plan)).encode())


def forget_plans(run_dir: Path) -> None:
    """Of an earlier start, which may have had other ranks."""
    for path in run_dir.glob(PLAN_FILE.format(seat="*")):
        path.unlink(missing_ok=True)


def read_plans(run_dir: Path) -> dict[int, dict[str, str]]:
    """What the ranks said, by seat; those that said nothing are left out."""
    found: dict[int, dict[str, str]] = {}
    for path in run_dir.glob(PLAN_FILE.format(seat="*")):
        seat = path.stem.removeprefix("memory-")
        if seat.isdigit():
            with contextlib.suppress(OSError, ValueError):
                found[int(seat)] = json.loads(path.read_bytes())
    return dict(sorted(found.items()))
