"""What must stay in the run directory while the node runs, and what is missing of it."""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.protocol import link
from phalanx.protocol.config import CONFIG_FILE
from phalanx.protocol.rundir import (
    BUS_SOCKET,
    CLIENT_SOCKET,
    EPLB_SOCKET,
    HTTP_FILE,
    JOURNAL_FILE,
    KVSTORE_SOCKET,
    PID_FILE,
    SUPERVISOR_SOCKET,
    write_whole,
)
from phalanx.supervisor.lock import NodeLock

CONFIG_GONE = "the node's configuration was deleted or changed"
_FRESH_NS = 1_000_000_000
_KEPT = (PID_FILE, HTTP_FILE)  # small, and read later: by a second start, by the next HTTP server
_OWNERS = {
    CLIENT_SOCKET: "gateway",
    BUS_SOCKET: "gateway",
    JOURNAL_FILE: "gateway",
    KVSTORE_SOCKET: "kvstore",
    EPLB_SOCKET: "eplb",
    SUPERVISOR_SOCKET: "supervisor",
}


@dataclass(frozen=True)
class Tended:
    """What a look at the run directory came to."""

    missing: tuple[str, ...] = ()  # for people
    unbound: tuple[str, ...] = ()  # endpoints of our sockets that were deleted
    told: tuple[tuple[str, str], ...] = ()  # (what was deleted, what became of it)


class Files:
    """Knows which files were there, and so can miss them."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: set[str] = set()
        self._mtime_ns = -1
        self._kept: dict[str, bytes] = {}

    def changed(self) -> bool:
        """Whether anything may have come or gone since this was asked last. It costs one system call."""
        try:
            mtime_ns = os.stat(self._run_dir).st_mtime_ns
        except OSError:
            return True
        before, self._mtime_ns = self._mtime_ns, mtime_ns
        # The clock of files is coarse: two changes in a row may leave one time.
        return mtime_ns != before or time.time_ns() - mtime_ns < _FRESH_NS

    def tend(
        self,
        lock: NodeLock,
        keep_config: Callable[[], str],
        ready: Collection[str],
        missing: tuple[str, ...],
    ) -> Tended:
        """Make anew what somebody deleted, as far as that is ours alone, and look at the rest.

        Args:
            keep_config: writes the configuration; returns what came of it.
            ready: see `missing`.
            missing: what was, when this was asked last.
        """
        if not (self.changed() or missing):
            return Tended()
        told: list[tuple[str, str]] = []
        try:
            if lock.restore():
                told.append(("the node's lock was deleted", "made anew"))
            if not (self._run_dir / CONFIG_FILE).exists() and (kept := keep_config()):
                told.append((CONFIG_GONE, kept))
            if names := self.bring_back():
                told.append((f"files were deleted: {', '.join(names)}", "written anew"))
        except OSError:
            pass  # the directory is gone: that is told below
        return Tended(self.missing(ready), tuple(link.unbound()), tuple(told))

    def bring_back(self) -> list[str]:
        """Write the small files anew that somebody deleted. Returns their names. Raises OSError when one
        cannot be written."""
        back: list[str] = []
        for name in _KEPT:
            path = self._run_dir / name
            try:
                self._kept[name] = path.read_bytes()
            except FileNotFoundError:
                if name in self._kept:
                    write_whole(path, self._kept[name])
                    back.append(name)
        return back

    def missing(self, ready: Collection[str]) -> tuple[str, ...]:
        """What somebody deleted, for people. `ready` are the processes that are: others make theirs."""
        if not self._run_dir.is_dir():
            told = (
                f"the run directory {self._run_dir} is gone, and nobody can reach the node: end it"
                f" (kill {os.getpid()}) and start another"
            )
            return (told,)
        return tuple(
            self._told(name) for name, owner in _OWNERS.items() if self._lacks(name, owner, ready)
        )

    def _lacks(self, name: str, owner: str, ready: Collection[str]) -> bool:
        if (self._run_dir / name).exists():
            self._seen.add(name)
            return False
        return name in self._seen and owner in (*ready, "supervisor")

    def _told(self, name: str) -> str:
        does = "writes" if name == JOURNAL_FILE else "binds"
        return f"{self._run_dir / name} is gone: {_OWNERS[name]} {does} it anew"
