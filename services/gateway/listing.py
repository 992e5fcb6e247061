"""What a scheduler says it runs, when a gateway asks: a list in pieces. Pure.

It counts once all of it is here. What breaks off (its scheduler died, a piece got lost) counts as none, and a scheduler
that lives is asked again.
"""

from dataclasses import dataclass, field

from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.messages import SequenceInfo, SequenceList

MS = 1_000_000
RETRY_NS = COMMAND_RETRY_MS * MS  # without another piece
AGAIN_NS = 30_000 * MS  # how often it is asked, in case a word was lost


@dataclass(eq=False)
class Listing:
    """Of one scheduler, from its first word to its last."""

    told: bool = False  # it answered once
    _call: int = 0  # of the question that is open; 0: none is
    _heard_ns: int = 0  # when it was asked, or a piece came
    _pieces: dict[int, tuple[SequenceInfo, ...]] = field(default_factory=dict)
    _count: int = 0  # of all pieces; 0: not known yet

    def due(self, now_ns: int) -> bool:
        """It is to be asked."""
        return now_ns - self._heard_ns >= (RETRY_NS if self._call else AGAIN_NS)

    def ask(self, call: int, now_ns: int) -> None:
        self._call, self._heard_ns = call, now_ns
        self._pieces, self._count = {}, 0

    def take(self, piece: SequenceList, now_ns: int) -> list[SequenceInfo] | None:
        """All of the list, if it is complete by this piece."""
        if not self._call or piece.call != self._call:
            return None  # an answer to nobody, or to a question that was asked again
        if piece.number not in self._pieces:
            self._pieces[piece.number], self._heard_ns = piece.items, now_ns
        if piece.last:
            self._count = piece.number + 1
        if len(self._pieces) != self._count:
            return None
        items = [info for number in range(self._count) for info in self._pieces[number]]
        self.told, self._call, self._pieces = True, 0, {}
        return items
