"""What goes wrong on purpose in this process: messages, slowness, full disks, named failpoints.

`active` is None unless the node was started with `fault_injection`, and every place where something
can go wrong asks for that first: that one look is all it costs others. `docs/faults.md` lists the kinds.
"""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phalanx.protocol.fault_table import Fault, FaultRow, FaultTable

MS = 1_000_000
_TYPE_AT = 1  # behind the map's first byte: b"\xa4type", then the length and the name
_TYPE_KEY = b"\xa4type"
Taken = TypeVar("Taken")  # how it was taken
_MESSAGES = ("drop", "delay", "duplicate", "corrupt")


class InjectedFault(Exception):
    """Raised by a failpoint that was told to."""


@dataclass(eq=False)
class Faults:
    """The faults of one process, read anew whenever its row has changed."""

    row: FaultRow
    rng: random.Random = field(default_factory=random.Random)
    clock: Callable[[], int] = time.monotonic_ns
    sleep: Callable[[float], None] = time.sleep
    kill: Callable[[int], None] = lambda number: os.kill(os.getpid(), number)
    _version: int = 0
    _faults: tuple[Fault, ...] = ()
    _leaving: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    _arriving: list[tuple[int, Any, Any]] = field(default_factory=list)  # due, socket, item

    def of(self, *kinds: str) -> list[Fault]:
        """Those of these kinds that are not over."""
        if self.row.version != self._version and (read := self.row.read()) is not None:
            self._version, self._faults = read
        if not self._faults:
            return []
        now_ns = self.clock()
        return [f for f in self._faults if f.kind in kinds and not 0 < f.until_ns <= now_ns]

    # ------------------------------------------------------------ failpoints, slowness, disks

    def failpoint(self, name: str) -> None:
        for fault in self.of("failpoint"):
            if fault.name != name:
                continue
            passed = self.row.add(fault.slot) - fault.nth
            if passed < 0 or (fault.count and passed >= fault.count):
                continue
            match fault.action:
                case "kill":
                    self.kill(signal.SIGKILL)
                case "stop":
                    self.kill(signal.SIGSTOP)
                case "sleep":
                    self.sleep(fault.ms / 1000)
                case "raise":
                    raise InjectedFault(f"failpoint {name}")

    def slow(self) -> None:
        """Once a turn of a service, once a step of a worker."""
        for fault in self.of("slow"):
            if self._happens(fault):
                self.sleep(fault.ms / 1000)

    def ulp(self) -> bool:
        """Once a step of a worker: whether its numbers are to be a little wrong."""
        return any(map(self._happens, self.of("ulp")))

    def bitflips(self) -> list[str]:
        """Once a turn of a worker: of which experts a bit is to be flipped, LAYER.EXPERT or "" for any."""
        return [fault.name for fault in self.of("bitflip") if self._happens(fault)]

    def check_disk(self, name: str) -> None:
        """Raises OSError as a full disk does."""
        for fault in self.of("diskfull"):
            if fault.name in ("", name) and self._happens(fault):
                raise OSError(errno.ENOSPC, "no space left on device (injected)")

    def _happens(self, fault: Fault) -> bool:
        if fault.count and self.row.count(fault.slot) >= fault.count:
            return False
        if fault.rate < 1.0 and self.rng.random() >= fault.rate:
            return False
        self.row.add(fault.slot)
        return True

    # ------------------------------------------------------------ messages

    def fates(self, frame: bytes, sealed: bool) -> list[tuple[int, bytes]]:
        """(delay in ns, bytes) of everything that becomes of this frame: nothing, one or more.

        Only a frame with a seal is damaged: without one nobody could tell.
        """
        fates = [(0, frame)]
        for fault in self.of(*_MESSAGES):
            if fault.name and type_of(frame) != fault.name:
                continue
            if (fault.kind == "corrupt" and not sealed) or not self._happens(fault):
                continue
            match fault.kind:
                case "drop":
                    return []
                case "duplicate":
                    fates += fates
                case "delay":
                    fates = [(wait + fault.ms * MS, copy) for wait, copy in fates]
                case "corrupt":
                    fates = [(wait, self._flip(copy)) for wait, copy in fates]
        return fates

    def _flip(self, frame: bytes) -> bytes:
        at, bit = self.rng.randrange(len(frame)), 1 << self.rng.randrange(8)
        return frame[:at] + bytes([frame[at] ^ bit]) + frame[at + 1 :]

    def leave(self, frame: bytes, sealed: bool, send: Callable[[bytes], Taken]) -> bool | Taken:
        """Send what becomes of the frame. A dropped one counts as sent: so it is with lost ones."""
        taken: bool | Taken = True
        for wait_ns, copy in self.fates(frame, sealed):
            if wait_ns:
                self._leaving.append((self.clock() + wait_ns, lambda copy=copy: send(copy)))  # type: ignore[misc]
            else:
                sent = send(copy)
                taken = taken and sent
        return taken

    @property
    def holds_back(self) -> bool:
        """Whether something that was sent has not left yet."""
        return bool(self._leaving)

    def arrive(self, socket: Any, peer: bytes, frame: bytes, sealed: bool) -> list[bytes]:
        """What becomes of a frame that came just now; the rest comes out of `due` later."""
        now: list[bytes] = []
        for wait_ns, copy in self.fates(frame, sealed):
            if wait_ns:
                self._arriving.append((self.clock() + wait_ns, socket, (peer, copy)))
            else:
                now.append(copy)
        return now

    def due(self, socket: Any) -> list[tuple[bytes, bytes]]:
        """(peer, frame) of what was held back on its way to `socket` and is due."""
        now_ns, found = self.clock(), list[tuple[bytes, bytes]]()
        for entry in [e for e in self._arriving if e[1] is socket and e[0] <= now_ns]:
            self._arriving.remove(entry)
            found.append(entry[2])
        return found

    def flush(self) -> list[Any]:
        """Send what was held back and is due; the sockets for which something has arrived."""
        now_ns = self.clock()
        due = [entry for entry in self._leaving if entry[0] <= now_ns]
        for entry in due:
            self._leaving.remove(entry)
            entry[1]()
        return list(dict.fromkeys(socket for at, socket, _ in self._arriving if at <= now_ns))

    def wait_ms(self, most: float) -> float:
        """How long to sleep at most, so that nothing is held back for longer than it should."""
        if not self._leaving and not self._arriving:
            return most
        next_ns = min(*(e[0] for e in self._leaving), *(e[0] for e in self._arriving), 1 << 62)
        return min(most, max(0, next_ns - self.clock()) // MS + 1)


def type_of(frame: bytes) -> str:
    """The type of an encoded message: its first field. Empty when that cannot be told."""
    if frame[_TYPE_AT : _TYPE_AT + 5] != _TYPE_KEY or len(frame) <= 6 or frame[6] & 0xE0 != 0xA0:
        return ""
    return frame[7 : 7 + (frame[6] & 0x1F)].decode("ascii", "replace")


active: Faults | None = None


def enable(node: str, index: int) -> None:
    """Obey row `index` of the node's table from now on."""
    global active
    active = Faults(FaultTable.attach(node).row(index))


def check_disk(name: str) -> None:
    """Raises OSError with ENOSPC while the disk called `name` is to be full."""
    if active is not None:
        active.check_disk(name)
