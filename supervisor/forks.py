"""The supervisor's end of a process that forks others when their turn comes (`protocol/standby.py`)."""

import ctypes
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from phalanx.protocol.standby import ORDER, READY, Turn
from phalanx.supervisor.processes import ProcessSpec

_PR_SET_CHILD_SUBREAPER = 36
# A fork takes milliseconds, and long only where nobody gets a CPU. The supervisor does not wait for it.
FORK_NS = 10_000_000_000
READY_NS = 60_000_000_000  # the same while it still imports: another one would have to do that, too
STOPPED_NS = 100_000_000  # one that a signal has stopped is not waited for: streams would be, as long as it is
_PID_BYTES_MAX = 32
_ADOPT_S = 5.0
_libc = ctypes.CDLL(None)


class Reapable(Protocol):
    """What of `subprocess.Popen` is used of every child."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def adopt_orphans(on: bool) -> bool:
    """Whether forks of our children become our own, so that we hear how they end and they with us."""
    return bool(_libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0)


@dataclass(slots=True)
class Forked:
    """A child that another child of ours has forked."""

    pid: int
    _code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal; None while it lives, or is not ours yet."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            except ChildProcessError:
                self._code = self._gone()
        return self._code

    def _gone(self) -> int | None:
        """What it counts as when somebody else has reaped it; None: nobody has."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -signal.SIGKILL
        return None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (_ADOPT_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.0005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@dataclass(slots=True)
class Order:
    """A fork that was asked for. It does nothing until it is told whose turn it takes."""

    spec: ProcessSpec
    incarnation: int
    since_ns: int
    death_fd: int  # end of file when it dies
    turn_fd: int
    wanted: bool = True

    def begin(self) -> None:
        """Raises OSError when it is dead."""
        spec = self.spec
        turn = Turn(spec.name, self.incarnation, spec.index, spec.seat)
        try:
            os.write(self.turn_fd, msgspec.json.encode(turn))
        finally:
            os.close(self.turn_fd)

    def drop(self) -> None:
        """It ends by itself, now or once it is there."""
        os.close(self.turn_fd)
        os.close(self.death_fd)


@dataclass(slots=True)
class Control:
    """The line to one process that forks."""

    line: socket.socket
    ready: bool = False  # it has imported everything
    ready_ns: int = 0
    broken: bool = False
    orders: deque[Order] = field(default_factory=deque[Order])

    def order(self, spec: ProcessSpec, incarnation: int, now_ns: int) -> None:
        """Ask for a fork; returns at once. Raises OSError."""
        death_read, death_write = os.pipe()
        try:
            turn_read, turn_write = os.pipe()
        except OSError:  # no descriptor is left: those that were are needed
            os.close(death_read)
            os.close(death_write)
            raise
        order = Order(spec, incarnation, now_ns, death_read, turn_write)
        try:
            socket.send_fds(self.line, [ORDER], [turn_read, death_write])
        except OSError:
            order.drop()
            raise
        finally:
            os.close(turn_read)
            os.close(death_write)
        self.orders.append(order)

    def hear(self, now_ns: int) -> list[tuple[Order, int]]:
        """The orders that were carried out, with the pids. It is `broken` when it can carry out no more."""
        done: list[tuple[Order, int]] = []
        while not self.broken:
            try:
                said = self.line.recv(_PID_BYTES_MAX)
            except BlockingIOError:
                self.broken = self._late(now_ns)
                break
            except OSError:
                said = b""
            if said == READY:
                self.ready, self.ready_ns = True, now_ns
            elif said and self.orders:
                done.append((self.orders.popleft(), int(said)))
            else:
                self.broken = True
        return done

    def _late(self, now_ns: int) -> bool:
        if not self.orders:
            return False
        since_ns = max(self.ready_ns, self.orders[0].since_ns)
        return now_ns - since_ns > (FORK_NS if self.ready else READY_NS)

    def owes(self, now_ns: int) -> bool:
        """Whether an order waits for so long that it may be stopped."""
        return bool(self.orders) and now_ns - self.orders[0].since_ns > STOPPED_NS

    def drop_all(self) -> list[Order]:
        """Returns the orders that were not carried out, and will not be."""
        left, self.orders = list(self.orders), deque()
        for order in left:
            order.drop()
        return left
