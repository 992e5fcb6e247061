"""A simulated host whose supervisor itself does not run now and then: a signal has stopped it, or it gets no CPU.

What happens meanwhile it hears of when it goes on, all at once. That time counts for nobody.
"""

import random
from dataclasses import dataclass, field

from phalanx.supervisor.events import AcksSeen, Event, Inspected
from sim.clock import Act
from sim.host import FAULTS_END_NS, MS, TICK_NS, Child, Host


@dataclass
class PausedHost(Host):
    paused: bool = False
    pauses: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    late: list[Act] = field(default_factory=list[Act])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance = random.Random(f"pauses {self.seed}")
        for _ in range(self.chance.randint(1, 4)):
            self.after(self.chance.randrange(FAULTS_END_NS), self._pause)
        if self.chance.random() < 0.3:
            self.after(self.chance.randrange(FAULTS_END_NS), self._starve)

    def _starve(self) -> None:
        """One gets no CPU, then the supervisor neither; and when that goes on, it hangs."""
        well = [c for c in self.children.values() if c.alive and c.mood == "well"]
        if not well or self.paused:
            return
        child = self.chance.choice(well)
        self.story.append(f"{self.now_ns / 1e9:.3f} {child.spec.name} is starved, then hangs")
        child.mood, child.mood_ns, child.afflicted = "starved", self.now_ns, True
        self.checks.hurt(child)
        self.after(900 * MS, lambda: self._pause(5_000 * MS))
        self.after(self.chance.randrange(1_000, 8_000) * MS, lambda: self._hang(child))

    def _hang(self, child: Child) -> None:
        if child.alive:
            child.beat_ns = child.mood_ns
            child.waited_ns += self.now_ns - child.mood_ns
            child.mood, child.mood_ns = "deadlocked", self.now_ns

    def _pause(self, length_ns: int = 0) -> None:
        if self.paused or self.finished is not None:
            return
        self.paused, begun_ns = True, self.now_ns
        drawn = self.chance.choice((700, 3000, 20_000)) * self.chance.random() * MS
        length_ns = length_ns or int(drawn)
        self.story.append(f"{self.now_ns / 1e9:.3f} the supervisor pauses for {length_ns // MS} ms")
        self.after(length_ns, lambda: self._go_on(begun_ns))

    def _go_on(self, begun_ns: int) -> None:
        self.story.append(f"{self.now_ns / 1e9:.3f} the supervisor goes on")
        self.paused = False
        self.pauses.append((begun_ns, self.now_ns))
        late, self.late = self.late, []
        for act in late:
            act()

    def awake_ns(self, since_ns: int) -> int:
        pauses = ((max(begin, since_ns), end) for begin, end in self.pauses)
        return self.now_ns - since_ns - sum(max(0, end - begin) for begin, end in pauses)

    def feed(self, event: Event) -> None:
        if not self.paused:
            super().feed(event)
        elif not isinstance(event, AcksSeen | Inspected):  # these are what it sees, at the time
            self.late.append(lambda: self.feed(event))

    def _hear_ready(self, child: Child) -> None:
        if self.paused:
            self.late.append(lambda: self._hear_ready(child))
        else:
            super()._hear_ready(child)

    def _settled(self) -> bool:
        return not self.paused and super()._settled()

    def _tick(self) -> None:
        if self.paused:
            self.after(TICK_NS // 10, self._tick)
        else:
            super()._tick()

    def _ask_for_a_change(self) -> None:
        if self.paused:
            self.after(TICK_NS, self._ask_for_a_change)
        else:
            super()._ask_for_a_change()
