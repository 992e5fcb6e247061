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

    def inspect(self, now_ns: int) -> tuple[str, int] | None:
        """(state, nanoseconds spent runnable without a CPU, over all threads); None when it is gone.

        The state is the main thread's as in proc(5), but "R" when any thread runs: the main thread of a
        process may sleep while a pool of others computes for it.

        The kernel counts a wait when it is over, and on a loaded machine one takes seconds. So a thread that
        was runnable at an earlier look and has not run since has waited all that time.
        """
        states: list[str] = []
        waited_ns = 0
        runnable: dict[str, tuple[int, int]] = {}
        for task in (self.proc / str(self.pid) / "task").glob("*"):
            try:
                # The command name stands in parentheses and may contain anything, parentheses too.
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                ran_ns, counted_ns = map(int, (task / "schedstat").read_text().split()[:2])
            except (OSError, IndexError, ValueError):
                continue  # that thread ended meanwhile
            states.append(state)
            waited_ns += counted_ns
            if state == "R":
                before_ns, since_ns = self._runnable.get(task.name, (-1, 0))
                since_ns = since_ns if before_ns == ran_ns else now_ns
                runnable[task.name] = ran_ns, since_ns
                waited_ns += now_ns - since_ns
        self._runnable = runnable
        if not states:
            return None
        main = states[0]  # the task directory lists the main thread first
        return ("R" if main not in "TD" and "R" in states else main), waited_ns
