"""What this scheduler runs, for a gateway that asks: told in pieces, one a step. Pure.

There may be many sequences, with long outputs. No message is too long for its receiver then, no step waits for all of
them, and each is told as it is when its piece is made: its tokens come after that, or are asked for (`Resend`).
"""

from collections import deque
from collections.abc import Iterable, Mapping

from phalanx.protocol.limits import LIST_BYTES_MAX, LIST_SEQUENCES_MAX
from phalanx.protocol.messages import SequenceInfo, SequenceList
from phalanx.scheduler_svc.state import Key, Sequence

_ID_BYTES = 4


class Listing:
    def __init__(self, seat: int, incarnation: int) -> None:
        self._seat, self._incarnation = seat, incarnation
        self._call = 0  # of the newest question
        self._answered = True
        self._number = 0  # of the next piece
        self._outputs = True  # are told, too
        self._left: deque[Sequence] = deque()  # not told yet

    @property
    def busy(self) -> bool:
        return not self._answered

    def begin(self, call: int, sequences: Iterable[Sequence], *, outputs: bool = True) -> None:
        """Who asks again gets all of it again. But a question that comes twice has one answer, whose pieces fit
        together: later ones have greater calls."""
        if call > self._call:
            self._call, self._answered, self._outputs = call, False, outputs
            self._number, self._left = 0, deque(sequences)

    def piece(self, known: Mapping[Key, Sequence]) -> SequenceList | None:
        """What is to be said next, without those that are not `known` any more."""
        if not self.busy:
            return None
        infos: list[SequenceInfo] = []
        nbytes = 0
        for _ in range(min(LIST_SEQUENCES_MAX, len(self._left))):
            one = self._left[0]
            if known.get(one.key) is one:
                nbytes += _ID_BYTES * one.num_outputs if self._outputs else 0
                if infos and nbytes > LIST_BYTES_MAX:
                    break
                outputs = one.outputs().tobytes() if self._outputs else b""
                infos.append(
                    SequenceInfo(
                        one.request_id,
                        one.index,
                        one.attempt,
                        outputs,
                        one.finish,
                        one.first_score,
                    )
                )
            self._left.popleft()
        number, last = self._number, not self._left
        self._number, self._answered = number + 1, last
        return SequenceList(
            self._call, self._seat, self._incarnation, tuple(infos), number, last=last
        )
