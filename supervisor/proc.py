"""What the kernel says of a process that gives no sign of life."""

from pathlib import Path


def inspect(pid: int) -> tuple[str, int] | None:
    """(state, nanoseconds spent runnable without a CPU, over all threads); None when it is gone.

    The state is the main thread's as in proc(5), but "R" when any thread runs: the main thread of a
    process may sleep while a pool of others computes for it.
    """
    states: list[str] = []
    waited_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            # The command name stands in parentheses and may contain anything, parentheses too.
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
            waited_ns += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue  # that thread ended meanwhile
    if not states:
        return None
    main = states[0]  # the task directory lists the main thread first
    return ("R" if main not in "TD" and "R" in states else main), waited_ns
