"""Signs of life of a GPU that computes behind the host.

The host has launched a whole step long before the GPU is through with it. So it leaves a mark behind each
layer, and before it reads what the step made it waits for one mark after the other: each that comes is
progress, however long the step takes, and a GPU that hangs gives none.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    def synchronize(self) -> None:
        """Wait until the GPU has done what was launched before the mark."""


def event_mark() -> Mark:
    """A mark behind what was launched on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class Marks:
    def __init__(self, alive: Callable[[], None], make: Callable[[], Mark] | None) -> None:
        """`alive` is the sign of life. `make` leaves a mark; None where nothing runs behind the host."""
        self._alive, self._make = alive, make
        self._left: list[Mark] = []

    def begin(self) -> None:
        """A step begins: marks of one that was abandoned do not count."""
        self._left.clear()

    def layer(self) -> None:
        """A layer begins: a sign of life of the host, and a mark behind the layers before."""
        self._alive()
        if self._make is not None:
            self._left.append(self._make())

    def wait(self) -> None:
        """Until the layers are done."""
        for mark in self._left:
            mark.synchronize()
            self._alive()
        self._left.clear()
