"""Where a node that was started for it keeps the faults to be made on purpose: one arena, a row a process.

The supervisor writes what a process shall do wrong; the process looks at one word to see whether that
has changed, and counts how often each fault came up. Rows outlive the processes, so a fault can be
waiting for one that is yet to start, and one that killed it once does not kill its successor.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.errors import ArenaError
from phalanx.protocol.limits import FAULTS_MAX, MAX_PROCESSES

_ROW_BYTES = 8192
_COUNTERS_AT = 16
_PAYLOAD_AT = _COUNTERS_AT + 4 * FAULTS_MAX
SUPERVISOR_ROW = MAX_PROCESSES - 1  # processes are far fewer

MessageKind = Literal["drop", "delay", "duplicate", "corrupt"]
FaultKind = MessageKind | Literal["slow", "diskfull", "ulp", "bitflip", "failpoint"]
Action = Literal["kill", "stop", "sleep", "raise"]


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """One thing that goes wrong. `slot` is its counter in the row."""

    slot: int
    kind: FaultKind
    name: str = ""  # type of message, name of the failpoint, which disk, LAYER.EXPERT; empty: any
    rate: float = 1.0  # of the messages, at random
    count: int = 0  # it happens so often, then no more; 0: without end
    ms: int = 0  # of one delay, one sleep, one turn
    until_ns: int = 0  # CLOCK_MONOTONIC of its end; 0: never
    action: Action = "kill"  # of a failpoint
    nth: int = 1  # a failpoint acts from the n-th time on that it is passed


class FaultRow:
    """The faults of one process: written by the supervisor; the counters by the process."""

    def __init__(self, region: memoryview) -> None:
        self._u64 = region[:_COUNTERS_AT].cast("Q")  # version (odd while written), length
        self._counters = region[_COUNTERS_AT:_PAYLOAD_AT].cast("I")
        self._payload = region[_PAYLOAD_AT:]

    @property
    def version(self) -> int:
        return self._u64[0]

    def write(self, faults: Iterable[Fault], fresh: Iterable[int] = ()) -> None:
        """Replace the faults; the counters of the slots in `fresh` begin again. Raises ArenaError
        when there are more than the row holds."""
        encoded = msgspec.msgpack.encode(tuple(faults))
        if len(encoded) > len(self._payload):
            raise ArenaError(f"the faults take {len(encoded)} bytes, a row {len(self._payload)}")
        self._u64[0] += 1
        for slot in fresh:
            self._counters[slot] = 0
        self._payload[: len(encoded)] = encoded
        self._u64[1] = len(encoded)
        self._u64[0] += 1

    def read(self) -> tuple[int, tuple[Fault, ...]] | None:
        """(version, faults); None while they are being replaced."""
        version = self._u64[0]
        encoded = bytes(self._payload[: self._u64[1]])
        if version % 2 or version != self._u64[0]:
            return None
        return version, (msgspec.msgpack.decode(encoded, type=tuple[Fault, ...]) if encoded else ())

    def count(self, slot: int) -> int:
        """How often the fault in `slot` came up: was passed, or hit a message."""
        return self._counters[slot]

    def add(self, slot: int) -> int:
        """Count once more; the new count. In memory at once: a process may be killed right after."""
        self._counters[slot] += 1
        return self._counters[slot]


class FaultTable:
    """All rows. `FaultTable.create` in the supervisor, `FaultTable.attach` elsewhere."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @classmethod
    def create(cls, node: str) -> "FaultTable":
        name, nbytes = arena_name(node, "faults", 0), MAX_PROCESSES * _ROW_BYTES
        return cls(Arena.create(name, nbytes, "supervisor"))

    @classmethod
    def attach(cls, node: str) -> "FaultTable":
        return cls(Arena.attach(arena_name(node, "faults", 0)))

    def row(self, index: int) -> FaultRow:
        return FaultRow(self._arena.data[index * _ROW_BYTES : (index + 1) * _ROW_BYTES])

    def close(self) -> None:
        self._arena.close()
