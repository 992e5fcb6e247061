"""What the kernel says of a process that gives no sign of life."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Looks:
    """One look after another at one process."""

    pid: int
    proc: Path = Path("/proc")
    # Thread -> (time on a CPU, since when it waits for one with that): of those that were runnable.
    _runnable: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    # The same of those that slept in the kernel where nothing can wake them.
    _asleep: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    _waits: dict[str, int] = field(default_factory=dict[str, int])  # of each thread, as told last
    _ended_ns: int = 0  # waits of threads that are gone

    def inspect(self, now_ns: int) -> tuple[str, int, int] | None:
        """(state, nanoseconds spent runnable without a CPU, over all threads, nanoseconds of the longest sleep
        in state D that goes on); None when it is gone.

        The state is the main thread's as in proc(5), but "R" when any thread runs, and else "D" when any is in
        that: the main thread of a process may sleep while a pool of others computes, or reads, for it.

        A sleep in state D counts from the look that found it first. A thread that runs in between has got on:
        one that reads page after page from a slow disk sleeps often, and never for long.

        The kernel counts a wait when it is over, and on a loaded machine one takes seconds. So a thread that
        was runnable at an earlier look and has not run since has waited all that time. What a thread has waited
        remains when it ends: the sum never falls.
        """
        states: list[str] = []
        waits: dict[str, int] = {}
        runnable: dict[str, tuple[int, int]] = {}
        asleep: dict[str, tuple[int, int]] = {}
        for task in (self.proc / str(self.pid) / "task").glob("*"):
            try:
                # The command name stands in parentheses and may contain anything, parentheses too.
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                ran_ns, counted_ns = map(int, (task / "schedstat").read_text().split()[:2])
            except (OSError, IndexError, ValueError):
                continue  # that thread ended meanwhile
            states.append(state)
            if state == "R":
                runnable[task.name] = _since(self._runnable.get(task.name), ran_ns, now_ns)
                counted_ns += now_ns - runnable[task.name][1]
            waits[task.name] = max(counted_ns, self._waits.get(task.name, 0))
            if state == "D":
                asleep[task.name] = _since(self._asleep.get(task.name), ran_ns, now_ns)
        self._runnable, self._asleep = runnable, asleep
        if not states:
            return None
        self._ended_ns += sum(ns for name, ns in self._waits.items() if name not in waits)
        self._waits = waits
        waited_ns = self._ended_ns + sum(waits.values())
        main = states[0]  # the task directory lists the main thread first
        found = [state for state in "RD" if main not in "TD" and state in states]
        slept_ns = max((now_ns - since_ns for _, since_ns in asleep.values()), default=0)
        return (found[0] if found else main), waited_ns, slept_ns


def _since(before: tuple[int, int] | None, ran_ns: int, now_ns: int) -> tuple[int, int]:
    """Since when a thread is as it is, with the CPU time that it had then."""
    return before if before is not None and before[0] == ran_ns else (ran_ns, now_ns)
