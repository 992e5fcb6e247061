"""The callers' shared memory as the store uses it: mapped when first named, let go when its owner ends."""

import os
import time

from phalanx.kvstore_svc.events import Call
from phalanx.protocol.arena import SHM, Arena, Handle
from phalanx.protocol.errors import ArenaError

ARENAS_MAX = 256  # mapped at once; beyond: all are let go and mapped again on demand


class Arenas:
    """Copies between handles and the store's frames; the generation is checked before and after.

    A mapping is a lease on the owner's memory: it ends once the arena's name is gone or names another
    file, because then the owner's incarnation is over and its memory must return to the system.
    """

    def __init__(self, node: str) -> None:
        self._prefix = f"ph-{node}-"
        self._expected: dict[Call, tuple[Handle, int]] = {}
        self._mapped: dict[str, tuple[Arena, int]] = {}  # with the file's inode

    def expect(self, call: Call, handle: Handle, deadline_ns: int = 0) -> None:
        """The call's handle, until `forget`. Its owner reuses the memory after `deadline_ns`
        (monotonic; 0: never before the answer)."""
        self._expected.setdefault(call, (handle, deadline_ns))  # a repeated call is the same call

    def forget(self, call: Call) -> None:
        self._expected.pop(call, None)

    def copy_in(self, call: Call, into: memoryview) -> str:
        """Fill `into` from the call's region; empty, or why the bytes cannot be trusted."""
        handle, deadline_ns = self._expected[call]
        try:
            arena = self._attach(handle.arena)
            into[:] = arena.view(handle)
            arena.check(handle)
        except ArenaError as error:
            return f"stale handle: {error}"
        late_ns = time.monotonic_ns() - deadline_ns
        if deadline_ns and late_ns > 0:
            return f"late: the copy ended {late_ns / 1e6:.3f} ms after the caller's deadline"
        return ""

    def copy_out(self, call: Call, data: memoryview) -> str:
        """Fill the head of the call's region; empty, or why the caller must not use it."""
        handle, _ = self._expected[call]
        try:
            arena = self._attach(handle.arena)
            arena.view(handle)[: len(data)] = data
            arena.check(handle)
        except ArenaError as error:
            return f"stale handle: {error}"
        return ""

    def end_leases(self) -> list[str]:
        """Let go of the arenas whose owner is gone; their names."""
        gone = [name for name, (_, inode) in self._mapped.items() if _inode(name) != inode]
        for name in gone:
            self._mapped.pop(name)[0].close()
        return gone

    def close(self) -> None:
        for arena, _ in self._mapped.values():
            arena.close()
        self._mapped.clear()

    def _attach(self, name: str) -> Arena:
        found = self._mapped.get(name)
        if found is None:
            if not name.startswith(self._prefix):
                raise ArenaError(f"arena {name!r} is not of this node ({self._prefix}*)")
            if len(self._mapped) >= ARENAS_MAX:
                self.close()
            if (inode := _inode(name)) == 0:
                raise ArenaError(f"there is no arena {name!r}")
            found = self._mapped[name] = (Arena.attach(name), inode)
        return found[0]


def _inode(name: str) -> int:
    """0 when there is no such arena, nor could be."""
    try:
        return os.stat(SHM / name).st_ino
    except (OSError, ValueError):
        return 0
