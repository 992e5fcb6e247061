"""What the supervisor waits for: death marks and pipes, pidfds, its socket, and, while the group changes, its bell."""

import os
import time
from collections.abc import Collection
from typing import Any

import zmq

from phalanx.protocol.board import Board, ProcessPhase
from phalanx.protocol.link import bind_router
from phalanx.supervisor.events import (
    AcksSeen,
    Event,
    Noticed,
    Observed,
    PipeClosed,
    PlacementsSeen,
    PlacementWords,
)
from phalanx.supervisor.spawn import Child

_SLICE_MS = 3.0  # of waiting on the bell; deaths are looked for between two slices
LOOK_MS = 3  # between two looks at the death marks while a worker computes


class Watch:
    """Registers children and turns what the kernel says of them into events."""

    def __init__(
        self, endpoint: str, board: Board, max_message_bytes: int, wake_fd: int = -1
    ) -> None:
        """`wake_fd`: what else ends a wait when it is readable, without being told of."""
        self.socket = bind_router(endpoint, max_message_bytes)
        self.children: dict[str, Child] = {}
        self._board = board
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._wake_fd = wake_fd
        if wake_fd >= 0:
            self._poller.register(wake_fd, zmq.POLLIN)
        self._owners: dict[int, Child] = {}  # file descriptor -> child
        self._stepping = False  # a worker was at work when it was last observed

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
        dead, ready = self._sleep(timeout_ms)
        woke_ns = time.monotonic_ns()
        messages = ready.pop(self.socket, 0) != 0
        ready.pop(self._wake_fd, None)
        by: dict[str, Noticed] = {child.spec.name: "death mark" for child in dead}
        ended: list[Child] = []
        for fd in ready:
            child = self._owners[fd]  # raw descriptors come back as themselves
            if fd == child.pidfd:
                # A fork whose parent has not ended yet, as it should within a millisecond, is not ours to reap.
                if child.process.poll() is not None:
                    ended.append(child)
            elif child not in dead:
                dead.append(child)
        for child in dead:
            self._forget_pipe(child)
        deaths = [
            PipeClosed(
                *(child.spec.name, child.incarnation, woke_ns),
                by.get(child.spec.name, "death pipe"),
            )
            for child in dead
        ]
        return deaths, ended, messages

    def _sleep(self, timeout_ms: int) -> tuple[list[Child], dict[Any, int]]:
        """(children whose death mark shows, what is ready), as soon as there is one of them or time is up.

        Nothing wakes us for a mark. While workers compute, peers wait for each of them, so we look often.
        """
        until_ns = time.monotonic_ns() + timeout_ms * 1_000_000
        slice_ms = min(timeout_ms, LOOK_MS) if self._stepping else timeout_ms
        dead = self._marked()
        while True:
            ready = dict(self._poller.poll(0 if dead else slice_ms))
            dead = self._marked()
            if dead or ready or time.monotonic_ns() >= until_ns:
                return dead, ready

    def _marked(self) -> list[Child]:
        rows = self._board.processes
        living = [child for child in self.children.values() if child.death_fd >= 0]
        return [child for child in living if rows[child.spec.index].mark.holder_died]

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
        self._stepping = False
        for child in self.children.values():
            row = self._board.processes[child.spec.index]
            phase = row.phase
            awaits = row.awaits if phase is ProcessPhase.WAITING else 0
            name, incarnation = child.spec.name, child.incarnation
            events.append(Observed(name, incarnation, row.beat_ns, row.progress, phase, awaits))
            busy = phase in (ProcessPhase.BUSY, ProcessPhase.WAITING)
            self._stepping |= busy and child.spec.kind == "worker"
        return events

    def acks(self, seats: list[int]) -> list[Event]:
        """What the workers of `seats` have acknowledged."""
        events: list[Event] = []
        for seat in seats:
            row = self._board.seats[seat]
            acks = row.stop_ack, row.go_ack
            events.append(AcksSeen(seat, row.worker_incarnation, *acks, row.placement_run))
        return events

    def placements(self, seats: Collection[int]) -> PlacementsSeen:
        """How far the workers of `seats` are with what is proposed."""
        words: list[PlacementWords] = []
        for seat in seats:
            row = self._board.seats[seat]
            found = row.placement_ready, row.placement_run, row.placement_copied, row.steps_run
            words.append(PlacementWords(seat, row.worker_incarnation, *found))
        return PlacementsSeen(tuple(words))

    def expert_slots(self, seats: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Of each of these seats, the expert slots of a layer that its worker has now."""
        return tuple((seat, self._board.seats[seat].placement_slots) for seat in seats)

    def close(self) -> None:
        self.socket.close()
