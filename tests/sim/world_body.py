"""What runs in a simulated process: a loop that takes what arrived, decides, and sleeps until it is due."""

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.host import Child
    from sim.world_node import Node

MS = 1_000_000
NEVER_NS = 10**15
TURN_NS = 200_000  # about how long a woken process takes until its loop turns


class Body:
    """Each kind of process overrides `turn`. All that a process knows is in its body and dies with it."""

    def __init__(self, node: "Node", child: "Child") -> None:
        self.node, self.child, self.world = node, child, node.world
        self.name, self.incarnation = child.spec.name, child.incarnation
        self.inbox: deque[Any] = deque()
        self._due_ns = NEVER_NS

    @property
    def now_ns(self) -> int:
        return self.node.now_ns

    @property
    def alive(self) -> bool:
        return self.child.alive

    @property
    def awake(self) -> bool:
        """Its loop turns. One that is `deaf` is deep in one long call."""
        return self.child.alive and self.child.mood == "well"

    def take(self, message: object) -> None:
        self.inbox.append(message)
        self.wake()

    def wake(self, delay_ns: int = -1) -> None:
        """Turn the loop then, or earlier if that is planned already."""
        if delay_ns < 0:
            delay_ns = self.node.rng.randrange(TURN_NS)
        due_ns = self.now_ns + max(delay_ns, 1000)
        if due_ns < self._due_ns:
            self._due_ns = due_ns
            self.node.after(due_ns - self.now_ns, lambda: self._due(due_ns))

    def _due(self, due_ns: int) -> None:
        if due_ns != self._due_ns:
            return  # planned for an earlier time since
        self._due_ns = NEVER_NS
        if self.awake:
            self.turn()

    def later(self, delay_ns: int, act: Any) -> None:
        """Work that is done after so long, if it lives; while it stands still, later."""

        def then() -> None:
            if self.awake:
                act()
            elif self.alive:
                self.node.after(20 * MS, then)

        self.node.after(delay_ns, then)

    def turn(self) -> None:
        """One turn of the loop; `wake` says when the next is due."""

    def told(self, message: object) -> None:
        """A message of the supervisor."""

    def died(self) -> None:
        """It is gone, from one instruction to the next."""
