"""A process that was started ahead of need: it imports and makes what a start takes long for, and forks whenever
a turn has come. So the next one is ready at once, and all share the pages of what was made.

The supervisor has the other end of its standard input (`supervisor/spawn.py`). Each order there is a byte, with
two descriptors: where the fork reads its turn, and its death pipe. The answer is the fork's pid. It is forked
twice, so that it becomes a child of the supervisor, which adopts orphans; and nothing of the process that waits
stays open in it.

What a fork may not inherit must not be there: threads, ZeroMQ's sockets, CUDA's context.
"""

import gc
import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import LOG_DIR, open_output
from phalanx.protocol.title import show_arguments

READY = b"ready"  # said once, when it can fork
ORDER = b"f"
_TURN_BYTES_MAX = 1 << 10
_LEAVING_S = 1.0
_BETWEEN_S = 0.0005


class Turn(msgspec.Struct, frozen=True):
    """Who a fork is from now on. The end of its input without a turn: it is not needed after all."""

    name: str
    incarnation: int
    index: int
    seat: int


def await_turn(run_dir: Path, *own_fds: int) -> tuple[Turn, int]:
    """Returns in each fork, once its turn has come: the turn, and the write end of its death pipe.

    Args:
        own_fds: of the process that waits; closed in forks.
    """
    gc.collect()
    gc.freeze()  # else the first collection in a fork would copy every page that objects are on
    check_single()
    with socket.socket(fileno=os.dup(0)) as control:
        _read_nothing()
        control.send(READY)
        while True:
            order, fds, *_ = socket.recv_fds(control, len(ORDER), 2)
            if not order:
                os._exit(ExitCode.OK)  # the supervisor wants no more forks
            turn_fd, death_fd = fds
            if _fork(control):
                break
            os.close(turn_fd)
            os.close(death_fd)
    for fd in own_fds:
        os.close(fd)
    os.set_inheritable(death_fd, False)
    os.setpgid(0, 0)
    turn = _take(run_dir, turn_fd)
    told = {f"--{name}": value for name, value in msgspec.structs.asdict(turn).items()}
    show_arguments({**told, "--death-fd": death_fd}, but="--standby")
    return turn, death_fd


def _read_nothing() -> None:
    """Standard input is no way to the supervisor any more."""
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)


def check_single() -> None:
    """Threads do not survive a fork, and may hold locks then. One that was waited for may still be on its way out."""
    deadline = time.monotonic() + _LEAVING_S
    while (count := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} threads run in a process that is to fork")
        time.sleep(0.001)


def _fork(control: socket.socket) -> bool:
    """True in the fork. Ends this process when there is no room for another one."""
    between = os.fork()
    if between == 0:
        _fork_again(control)
        return True
    if os.waitpid(between, 0)[1]:
        raise RuntimeError("no fork: see the lines above")
    return False


def _fork_again(control: socket.socket) -> None:
    """Returns in the fork; the process in between ends, which makes the fork the supervisor's."""
    failed, between = True, os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            while os.getppid() == between:
                time.sleep(_BETWEEN_S)
            return
        control.send(str(pid).encode())
        failed = False
    except OSError as error:
        print(f"cannot fork: {error}", file=sys.stderr, flush=True)
    os._exit(failed)


def _take(run_dir: Path, turn_fd: int) -> Turn:
    told = b""
    while more := os.read(turn_fd, _TURN_BYTES_MAX):
        told += more
    os.close(turn_fd)
    if not told:
        os._exit(ExitCode.OK)
    turn = msgspec.json.decode(told, type=Turn)
    with open_output(run_dir / LOG_DIR / f"{turn.name}.out") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    return turn
