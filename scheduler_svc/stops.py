"""When a sequence ends of itself. Pure.

The token that ends it is part of its outputs. Stop strings are the gateway's affair.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason, Sampling

if TYPE_CHECKING:
    from phalanx.scheduler_svc.outputs import Spans
    from phalanx.scheduler_svc.state import Sequence

Rows = npt.NDArray[np.intp]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

STATUS_ALL_BLOCKED, STATUS_NAN = 1, 2  # SampleStatus of the sampler
_ERRORS: dict[int, tuple[Code, str]] = {
    STATUS_ALL_BLOCKED: (
        Code.ALL_BLOCKED,
        "bans and masks leave no token to choose at output {}: loosen logit_bias or the stop bans",
    ),
    STATUS_NAN: (
        Code.NAN_LOGITS,
        "the model gave logits that are not numbers at output {}; the request was ended",
    ),
}


def sample_error(status: int, output: int) -> tuple[Code, str]:
    """Why no token was sampled for output number `output`, for programs and for people."""
    code, text = _ERRORS.get(
        status, (Code.INTERNAL, f"the sampler reported status {status} at output {{}}")
    )
    return code, text.format(output)


class _Ids:
    """Tokens that end the sequences of so many rows. Most rows have the same."""

    __slots__ = ("ids", "rows", "tokens")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids, self.tokens, self.rows = ids, frozenset(ids), 0


_NO_IDS = _Ids(())


class StopIds:
    """The tokens that end each row of the table: its end token and its stop ids.

    A mark for every token id that would end any row tells at once that a step has no such token, or
    which few of its tokens are worth a look.
    """

    def __init__(self, rows: int) -> None:
        self._of: list[_Ids] = [_NO_IDS] * rows
        self._ids: dict[tuple[int, ...], _Ids] = {}  # those that any row has
        self._marks: dict[int, int] = {}  # token id -> in how many of these sets it is
        self._ends_any = np.zeros(1, bool)  # the last entry stays False, for all ids beyond

    def open(self, row: int, sampling: Sampling, end_token: int) -> None:
        ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ids = (*ids, end_token)
        of_row = self._ids.get(ids)
        if of_row is None:
            of_row = self._ids[ids] = _Ids(ids)
            self._mark(of_row.tokens, 1)
        of_row.rows += 1
        self._of[row] = of_row

    def close(self, rows: list[int]) -> None:
        for row in rows:
            of_row = self._of[row]
            of_row.rows -= 1
            if not of_row.rows:
                del self._ids[of_row.ids]
                self._mark(of_row.tokens, -1)

    def _mark(self, ids: frozenset[int], change: int) -> None:
        """A set of ids comes or goes. Most sequences have the same one, so this is rare."""
        top = max(ids, default=0) + 2
        if top > len(self._ends_any):
            more = np.zeros(2 * top - len(self._ends_any), bool)
            self._ends_any = np.concatenate((self._ends_any, more))
        for token in ids:
            count = self._marks.pop(token, 0) + change
            self._ends_any[token] = count > 0
            if count:
                self._marks[token] = count

    def hits(self, rows: Rows, spans: "Spans") -> list[tuple[int, int, int]]:
        """(place in `rows`, row, which of its tokens, from 1) for tokens among the row's ids; in order."""
        seen = self._ends_any.take(spans.tokens, mode="clip").nonzero()[0]
        if not len(seen):
            return []
        places = spans.ends.searchsorted(seen, "right")
        nths = seen - spans.starts.take(places) + 1
        columns = zip(
            spans.tokens.take(seen).tolist(),
            places.tolist(),
            rows.take(places).tolist(),
            nths.tolist(),
            strict=True,
        )
        of = self._of
        return [(place, row, nth) for token, place, row, nth in columns if token in of[row].tokens]


def finished_already(sequence: "Sequence", end_token: int) -> FinishReason | None:
    """How a resumed sequence had ended before it came here: its last token, but not its end, arrived."""
    outputs = sequence.outputs()
    if not len(outputs):
        return None
    sampling, last = sequence.sampling, int(outputs[-1])
    stops = last in sampling.stop_token_ids or (last == end_token and not sampling.ignore_eos)
    if stops and len(outputs) >= sampling.min_tokens:
        return "stop"
    return "length" if len(outputs) >= sequence.max_outputs else None
