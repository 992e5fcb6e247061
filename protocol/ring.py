"""A ring of messages in shared memory: one producer, one consumer, a futex wake. For the step loop.

Positions only grow (64-bit, in bytes); a message is its length (u32) and its bytes, padded to 8; a
length of WRAP sends the reader to the start. Only the producer writes `head`, only the consumer
`tail`; each publishes its position after its bytes are in place, so a process killed between the
two loses at most the message it was writing.
"""

import struct

from phalanx.protocol.errors import RingFull
from phalanx.protocol.futex import Word

RING_HEADER_BYTES = 64
_WRAP = 0xFFFFFFFF
_LENGTH = struct.Struct("<I")


def _padded(nbytes: int) -> int:
    return (nbytes + 4 + 7) & ~7


def positions_in(region: memoryview) -> memoryview:
    """The ring's head (bytes ever written) and tail (bytes ever read)."""
    return region[:16].cast("Q")


class Ring:
    """A view of a ring inside a mapped region; both ends construct it over the same bytes.

    The owner zeroes the region once. `bell` is the word that the consumer sleeps on.
    """

    def __init__(self, region: memoryview, name: str, bell: Word) -> None:
        self.name, self.bell = name, bell
        self._positions = positions_in(region)
        self._data = region[RING_HEADER_BYTES:]
        self.capacity = len(self._data) & ~7

    @property
    def positions(self) -> tuple[int, int]:
        """(bytes ever written, bytes ever read)."""
        return self._positions[0], self._positions[1]

    def write(self, message: bytes) -> None:
        """Append one message and wake the reader. Raises RingFull, naming how far the reader is."""
        head, tail = self.positions
        need, at = _padded(len(message)), head % self.capacity
        room = self.capacity - at
        skip = room if need > room else 0
        if need + skip > self.capacity - (head - tail):
            raise RingFull(
                f"ring {self.name}: {len(message)} bytes do not fit, the reader is"
                f" {head - tail} of {self.capacity} bytes behind"
            )
        if skip:
            _LENGTH.pack_into(self._data, at, _WRAP)
            at = 0
        self._data[at + 4 : at + 4 + len(message)] = message
        _LENGTH.pack_into(self._data, at, len(message))
        self._positions[0] = head + skip + need
        self.bell.ring()

    def read(self) -> bytes | None:
        """The oldest unread message, or None."""
        head, tail = self.positions
        if head == tail:
            return None
        at = tail % self.capacity
        (length,) = _LENGTH.unpack_from(self._data, at)
        if length == _WRAP:
            tail += self.capacity - at
            self._positions[1] = tail
            at = 0
            (length,) = _LENGTH.unpack_from(self._data, at)
        message = bytes(self._data[at + 4 : at + 4 + length])
        self._positions[1] = tail + _padded(length)
        return message

    def empty(self) -> bool:
        head, tail = self.positions
        return head == tail
