"""Changes on their way to the journal, and who waits for them to be durable. Pure."""

from collections import deque
from typing import Generic, TypeVar

from phalanx.services.gateway.entries import Op

Waiter = TypeVar("Waiter")


class Ledger(Generic[Waiter]):
    """Changes are numbered from 1; they become durable in order."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._last = 0
        self._waiters: deque[tuple[int, Waiter]] = deque()

    def add(self, op: Op) -> None:
        self._last += 1
        self._ops.append(op)

    def wait(self, waiter: Waiter) -> None:
        """Name it once everything added so far is durable."""
        self._waiters.append((self._last, waiter))

    def take(self) -> tuple[int, list[Op]]:
        """What is new, and the number of its last change."""
        taken, self._ops = self._ops, []
        return self._last, taken

    def settle(self, done: int) -> list[Waiter]:
        """Everything up to number `done` is settled: those who waited for no more than that."""
        settled = []
        while self._waiters and self._waiters[0][0] <= done:
            settled.append(self._waiters.popleft()[1])
        return settled

    def awaited_by(self, waiter: Waiter) -> bool:
        return any(other is waiter for _, other in self._waiters)

    @property
    def idle(self) -> bool:
        return not self._waiters
