"""What came of a sequence after its final. Nothing of it is delivered; no gateway may say it, so it is counted. Pure."""

from collections import Counter
from collections.abc import Sequence

from phalanx.protocol.messages import Delta, Final
from phalanx.services.early_ends import told_at

REQUESTS_MAX = 1_000  # that have ended and are remembered; what comes of older ones is not counted
SAID_MAX = 20


class Ended:
    """Counts finals that contradict the first one, and tokens beyond it.

    The same final again, and tokens before it, are legal: an Attach is answered from its offset on.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # `finals` and `tokens`
        self.said: list[str] = []  # the first of them, for people
        self._finals: dict[str, Sequence[Final | None]] = {}  # by request, of those that ended last

    def keep(self, request_id: str, finals: Sequence[Final | None]) -> None:
        """The request is over."""
        self._finals[request_id] = finals
        if len(self._finals) > REQUESTS_MAX:
            del self._finals[next(iter(self._finals))]

    def hear_late(self, message: Delta | Final) -> None:
        """Of a request that is not open."""
        finals = self._finals.get(message.request_id, ())
        if 0 <= message.index < len(finals) and (first := finals[message.index]) is not None:
            self.hear(first, message)

    def hear(self, first: Final, message: Delta | Final) -> None:
        """It came of a sequence that has ended with `first`."""
        if isinstance(message, Final):
            if _meaning(told_at(message, first.offset)) != _meaning(first):
                self._count("finals", 1, first, f"then {_said(message)}")
        else:
            self.beyond(first, message.offset + len(message.token_ids))

    def beyond(self, final: Final, offset: int) -> None:
        """The sequence has tokens up to `offset`."""
        if (more := offset - final.offset) > 0:
            self._count("tokens", more, final, f"tokens up to {offset}")

    def _count(self, what: str, count: int, final: Final, detail: str) -> None:
        self.counts[what] += count
        if len(self.said) < SAID_MAX:
            where = f"request {final.request_id}, index {final.index}"
            self.said.append(f"{where}: {_said(final)}; {detail}")


def _meaning(final: Final) -> tuple[int, str, str]:
    """What a client goes by. `cached_tokens` and `digest` may differ: of another gateway that made it again."""
    return final.offset, final.finish_reason, final.text


def _said(final: Final) -> str:
    return f"final {final.finish_reason} at {final.offset}"
