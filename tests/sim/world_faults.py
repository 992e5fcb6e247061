"""What goes wrong in a run, and when."""

import random
from typing import TYPE_CHECKING

from phalanx.supervisor.events import ShutdownAsked
from sim.host import MOODS, Child
from sim.world_body import MS

if TYPE_CHECKING:
    from sim.world import World
    from sim.world_node import Node

CHAIN_NS = 400 * MS  # a fault during the recovery from another comes within this time
WAIT_NS = 300 * MS
STRUCK_UNTIL_MS = (
    2_000  # after the end of a drain: then there is time to tell the ends all the same
)
TOGETHER_NS = 100 * MS  # what falls with the gateway does so within this time


class Faults:
    def __init__(self, world: "World") -> None:
        self.world, self.rng = world, world.rng
        shape = world.shape
        for _ in range(shape.faults):
            self._strike_at(
                self.rng.randrange(shape.faults_ns), 0 if self.rng.random() < 0.2 else 20
            )
        for _ in range(shape.node_deaths):
            world.clock.after(self.rng.randrange(shape.faults_ns), self._node_dies)
        if shape.shut_down:
            world.clock.after(self.rng.randrange(shape.faults_ns), self._shut_down)
        if shape.disk_full:
            world.clock.after(self.rng.randrange(shape.faults_ns), self._disk_full)
        for _ in range(shape.changes):
            self._ask_at(self.rng.randrange(shape.faults_ns), 20)
        for client in list(world.clients):
            if self.rng.random() < 0.3:
                world.clock.after(self.rng.randrange(shape.faults_ns), self._stall(client))
        self._own = random.Random(world.seed)  # other draws than those of all other faults
        if world.seed % 3 == 2:
            for _ in range(self._own.randint(1, 2)):
                world.clock.after(self._own.randrange(shape.faults_ns), lambda: self._double(20))
        if shape.faults and world.seed % 4 == 1:
            self._grace = random.Random(world.seed)  # likewise
            for _ in range(self._grace.randint(1, 2)):
                world.clock.after(
                    self._grace.randrange(shape.faults_ns), lambda: self._gracefully(20)
                )

    def _strike_at(self, delay_ns: int, patience: int) -> None:
        self.world.clock.after(delay_ns, lambda: self._strike(patience))

    def _strike(self, patience: int) -> None:
        """Mostly when there is something to lose: with patience it waits for work for a while."""
        world, node = self.world, self.world.node
        if not world.faulty or node is None:
            return
        if patience and not any(s.core.live for s in node.schedulers()):
            self._strike_at(self.rng.randrange(WAIT_NS), patience - 1)
            return
        kind = self.rng.choice(
            ("one",) * 3 + ("gateway",) * 2 + ("scheduler", "two", "seat", "all but one", "workers")
        )
        for child in self._victims(node, kind):
            self._hit(node, child, kind)
        if self.rng.random() < world.shape.chains:
            self._strike_at(self.rng.randrange(CHAIN_NS), 0)

    def _double(self, patience: int) -> None:
        """The gateway falls together with a rank's scheduler, its worker or both."""
        world, node, rng = self.world, self.world.node, self._own
        if not world.faulty or node is None or node.gone:
            return
        if patience and not any(s.core.live for s in node.schedulers()):
            world.clock.after(rng.randrange(WAIT_NS), lambda: self._double(patience - 1))
            return
        seat = rng.choice(sorted(node.core.workers))
        names = [f"scheduler-{seat}", f"worker-{seat}"]
        for name in ["gateway", *rng.sample(names, rng.randint(1, 2))]:
            world.clock.after(rng.randrange(TOGETHER_NS), lambda name=name: self._fell(name))  # type: ignore[misc]

    def _fell(self, name: str) -> None:
        node = self.world.node
        child = node.children.get(name) if node is not None and not node.gone else None
        if node is not None and child is not None and child.alive:
            self._hit(node, child, "workers")

    def _gracefully(self, patience: int) -> None:
        """Somebody stops the node, or changes it, in good order, while there are streams; and who takes part in it
        falls in the middle."""
        world, node, rng = self.world, self.world.node, self._grace
        if not world.faulty or node is None:
            return
        busy = any(scheduler.core.live for scheduler in node.schedulers())
        if not node.can_change or (patience and not busy):
            if patience:
                world.clock.after(rng.randrange(WAIT_NS), lambda: self._gracefully(patience - 1))
            return
        window_ns = 1_500 * MS
        if rng.random() < 0.5:
            node.ask_for_a_change()
        if rng.random() < 0.75:
            drain_ms = rng.choice((0, 300, 1500, 4000))
            window_ns = (drain_ms + STRUCK_UNTIL_MS) * MS
            world.clock.after(
                rng.choice((0, rng.randrange(1_000 * MS))), lambda: self._stop(node, drain_ms)
            )
        for _ in range(rng.choice((0, 1, 2, 3))):
            world.clock.after(rng.randrange(window_ns), lambda: self._strike_one_of(node))

    def _strike_one_of(self, node: "Node") -> None:
        living = [child for child in node.children.values() if child.alive and child.mood == "well"]
        if node.gone or node.finished is not None or not self.world.faulty or not living:
            return
        gateway = node.children.get("gateway")
        child = self._grace.choice(living)
        if gateway in living and self._grace.random() < 0.6:
            child = gateway
        mood = self._grace.choice(("crash", "crash", "crash", "stopped", "deadlocked"))
        node.story.append(f"{node.now_ns / 1e9:.3f} {mood} {child.spec.name}#{child.incarnation}")
        if mood == "crash":
            node.die(child, -9)
        else:
            node.afflict(child, mood)

    def _victims(self, node: "Node", kind: str) -> list[Child]:
        rng = self.rng
        living = [child for child in node.children.values() if child.alive]
        workers = [child for child in living if child.spec.kind == "worker"]
        match kind:
            case "gateway" | "scheduler":
                living = [child for child in living if child.spec.kind == kind]
                return rng.sample(living, min(1, len(living)))
            case "two":
                return rng.sample(living, min(2, len(living)))
            case "seat":
                seat = rng.choice(sorted(node.core.workers))
                return [child for child in living if child.spec.seat == seat]
            case "all but one":
                return rng.sample(workers, max(0, len(workers) - 1))
            case "workers":
                return workers
            case _:
                some = workers if workers and rng.random() < 0.5 else living
                return rng.sample(some, min(1, len(some)))

    def _hit(self, node: "Node", child: Child, kind: str) -> None:
        moods = ["crash"] * 5 + list(MOODS)
        mood = "crash" if kind in ("all but one", "workers") else self.rng.choice(moods)
        node.story.append(f"{node.now_ns / 1e9:.3f} {mood} {child.spec.name}#{child.incarnation}")
        if mood == "crash":
            node.die(child, -9)
        elif child.mood == "well":
            node.afflict(child, mood)

    def _node_dies(self) -> None:
        if self.world.faulty and self.world.node is not None:
            self.world.kill_node()

    def _shut_down(self) -> None:
        """Somebody stops the node in good order, and somebody starts it again."""
        if (node := self.world.node) is not None:
            self._stop(node, self.rng.choice((0, 500, 3000)))

    def _stop(self, node: "Node", drain_ms: int) -> None:
        if self.world.faulty and not node.gone and node.finished is None:
            self.world.shut_down = True
            node.story.append(f"{node.now_ns / 1e9:.3f} told to stop within {drain_ms} ms")
            node.checks.told_to_stop(drain_ms)
            node.feed(ShutdownAsked(drain_ms))

    def _ask_at(self, delay_ns: int, patience: int) -> None:
        self.world.clock.after(delay_ns, lambda: self._ask(patience))

    def _ask(self, patience: int) -> None:
        """Somebody wants another number of ranks, or fresh processes: mostly of a node that can do so, and
        while there are streams."""
        world, node = self.world, self.world.node
        if not world.faulty or node is None or node.gone or node.finished is not None:
            return
        busy = any(scheduler.core.live for scheduler in node.schedulers())
        if (node.can_change and busy) or self.rng.random() < 0.01:
            node.ask_for_a_change()
        elif patience:
            self._ask_at(self.rng.randrange(WAIT_NS), patience - 1)

    def _disk_full(self) -> None:
        if self.world.faulty:
            self.world.disk.full = self.world.disk_was_full = True
            self.world.clock.after(self.rng.randint(50, 1500) * MS, self._disk_again)

    def _disk_again(self) -> None:
        self.world.disk.full = False

    def _stall(self, client: object):  # type: ignore[no-untyped-def]
        def stall() -> None:
            if self.world.faulty:
                client.stalled = client.stalled_once = True  # type: ignore[attr-defined]
                self.world.clock.after(self.rng.randint(100, 5000) * MS, client.wake)  # type: ignore[attr-defined]

        return stall
