"""What the supervisor waits for: death pipes, pidfds, its socket, and, while the group changes, its bell."""

import os
import time

import zmq

from phalanx.protocol.board import Board
from phalanx.protocol.link import bind_router
from phalanx.supervisor.events import AcksSeen, Event, Observed, PipeClosed
from phalanx.supervisor.spawn import Child

_SLICE_MS = 1.0  # of waiting on the bell; a death pipe is looked at between two slices


class Watch:
    """Registers children and turns what the kernel says of them into events."""

    def __init__(self, endpoint: str, board: Board, max_message_bytes: int) -> None:
        self.socket = bind_router(endpoint, max_message_bytes)
        self.children: dict[str, Child] = {}
        self._board = board
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._owners: dict[int, Child] = {}  # file descriptor -> child

    def add(self, child: Child) -> None:
        self.children[child.spec.name] = child
        for fd in (child.death_fd, child.pidfd):
            self._owners[fd] = child
            self._poller.register(fd, zmq.POLLIN | zmq.POLLERR)

    def wait(self, timeout_ms: int) -> tuple[list[PipeClosed], list[Child], bool]:
        """Sleep until something happens or time is up.

        Returns:
            deaths seen on pipes, children that can be reaped, whether the socket has messages.
        """
        ready = dict(self._poller.poll(timeout_ms))
        woke_ns = time.monotonic_ns()
        messages = ready.pop(self.socket, 0) != 0
        deaths: list[PipeClosed] = []
        ended: list[Child] = []
        for fd in ready:
            child = self._owners[fd]  # raw descriptors come back as themselves
            if fd == child.pidfd:
                ended.append(child)
            else:
                self._forget_pipe(child)
                deaths.append(PipeClosed(child.spec.name, child.incarnation, woke_ns))
        return deaths, ended, messages

    def wait_bell(self, seen: int) -> None:
        """Sleep until somebody acknowledges something, one slice at most."""
        self._board.supervisor_bell.wait(seen, _SLICE_MS)

    def remove(self, child: Child) -> int:
        """Reap a child that ended. Returns its exit code, or minus the signal."""
        self._forget_pipe(child)
        self._drop(child.pidfd)
        del self.children[child.spec.name]
        return child.process.wait()

    def _forget_pipe(self, child: Child) -> None:
        if child.death_fd >= 0:
            self._drop(child.death_fd)
            child.death_fd = -1

    def _drop(self, fd: int) -> None:
        self._poller.unregister(fd)
        del self._owners[fd]
        os.close(fd)

    def observe(self) -> list[Event]:
        """The heartbeat rows of all live children."""
        events: list[Event] = []
        for child in self.children.values():
            row = self._board.processes[child.spec.index]
            events.append(
                Observed(child.spec.name, child.incarnation, row.beat_ns, row.progress, row.phase)
            )
        return events

    def acks(self, seats: list[int]) -> list[Event]:
        """What the workers of `seats` have acknowledged."""
        events: list[Event] = []
        for seat in seats:
            row = self._board.seats[seat]
            events.append(AcksSeen(seat, row.worker_incarnation, row.stop_ack, row.go_ack))
        return events

    def close(self) -> None:
        self.socket.close()
