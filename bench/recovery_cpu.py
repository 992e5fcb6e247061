"""Who used the CPUs, and who waited for one, during a recovery: read from /proc by a thread of the benchmark."""

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_EVERY_S = 0.02
_TOLD_NS = 500_000  # less is not worth telling

# Name of a process -> nanoseconds that its threads have spent on a CPU, and runnable without one.
Use = dict[str, tuple[int, int]]


class CpuWatch:
    """Looks at the processes of a node, from `begin` on, until it is left."""

    def __init__(self, child: int) -> None:
        """`child`: the pid of one of them."""
        status = Path(f"/proc/{child}/status").read_text()
        self._supervisor = int(status.partition("PPid:")[2].split()[0])
        self._seen: list[tuple[int, Use]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._seen:
            self._thread.join()

    def begin(self) -> None:
        self._look()
        self._thread.start()

    def _look(self) -> None:
        self._seen.append((time.monotonic_ns(), look(self._supervisor)))

    def _watch(self) -> None:
        while not self._end.wait(_EVERY_S):
            self._look()

    def seen(self) -> list[tuple[int, Use]]:
        return self._seen[:]


def look(supervisor: int) -> Use:
    """At this moment; processes of one name are told apart by their pids."""
    found: Use = {}
    for pid in (supervisor, *_children(supervisor)):
        with contextlib.suppress(OSError, ValueError):
            process = Path(f"/proc/{pid}")
            name = (process / "comm").read_text().strip()
            ran_ns = waited_ns = 0
            for thread in os.listdir(process / "task"):
                words = (process / "task" / thread / "schedstat").read_text().split()
                ran_ns, waited_ns = ran_ns + int(words[0]), waited_ns + int(words[1])
            found[f"{name} {pid}"] = ran_ns, waited_ns
    return found


def used(seen: list[tuple[int, Use]], start_ns: int, end_ns: int) -> dict[str, list[float]]:
    """Name -> ms on a CPU and ms without one, between the looks that lie around this time."""
    before = [use for at_ns, use in seen if at_ns <= start_ns] or [use for _, use in seen[:1]]
    after = [use for at_ns, use in seen if at_ns >= end_ns] or [use for _, use in seen[-1:]]
    told: dict[str, list[float]] = {}
    for name, (ran_ns, waited_ns) in after[0].items() if after else ():
        ran_before, waited_before = before[-1].get(name, (0, 0))
        ran_ns, waited_ns = ran_ns - ran_before, waited_ns - waited_before
        if max(ran_ns, waited_ns) > _TOLD_NS:
            told[name] = [round(ran_ns / 1e6, 1), round(waited_ns / 1e6, 1)]
    return told


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []
