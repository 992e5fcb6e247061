"""The output tokens of all running sequences in one int32 array, so that a step enters with one write.

Each row has a region of its own, a power of two of tokens, and gets one of twice the size when it is
full. Regions given back serve later rows; the array itself doubles when no region is left. Pure.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.scheduler_svc.stops import Int64, Rows

FIRST_TOKENS = 256  # room of a row at first
_START_TOKENS = 1 << 16

Int32 = npt.NDArray[np.int32]
T = TypeVar("T", bound=np.generic)


class Spans:
    """The tokens of a step: `counts[i]` of them belong to its i-th sequence, in order."""

    def __init__(self, counts: Int32, tokens: Int32) -> None:
        self.counts, self.tokens = counts, tokens
        self.ends: Int64 = counts.cumsum()
        self.starts: Int64 = self.ends - counts
        self.positions: Int64 = np.arange(len(tokens))
        self._owners: Rows = np.arange(len(counts)).repeat(counts)

    def spread(self, values: npt.NDArray[T]) -> npt.NDArray[T]:
        """A value of each sequence to each of its tokens."""
        return values.take(self._owners)


class Outputs:
    """`rows` is the number of rows of the table."""

    def __init__(self, rows: int) -> None:
        self._data: Int32 = np.zeros(_START_TOKENS, np.int32)
        self._base: Int64 = np.zeros(rows, np.int64)
        self._room: Int64 = np.zeros(rows, np.int64)
        self._free: dict[int, list[int]] = {}  # size -> where such regions lie
        self._end = 0

    def open(self, row: int, tokens: bytes) -> None:
        """Give `row` a region that begins with these int32 tokens."""
        count = len(tokens) // 4
        self._place(row, max(FIRST_TOKENS, 1 << count.bit_length()))
        if count:
            base = self._base.item(row)
            self._data[base : base + count] = np.frombuffer(tokens, np.int32)

    def close(self, row: int) -> None:
        self._free.setdefault(self._room.item(row), []).append(self._base.item(row))

    def of(self, row: int, count: int) -> Int32:
        """A view of the first `count` tokens of `row`; good until the next write."""
        base = self._base.item(row)
        return self._data[base : base + count]

    def append(self, rows: Rows, have: Int32, spans: Spans) -> None:
        """Enter the tokens of span i behind the `have[i]` ones of `rows[i]`.

        What lies behind the outputs of a row is free to be overwritten: tokens that turn out not to
        count need not be left out.
        """
        full = have + spans.counts > self._room.take(rows)
        if np.count_nonzero(full):
            for place in full.nonzero()[0].tolist():
                self._enlarge(rows.item(place), have.item(place))
        at = spans.spread(self._base.take(rows) + have - spans.starts)
        at += spans.positions
        self._data[at] = spans.tokens

    def _enlarge(self, row: int, have: int) -> None:
        base, room = self._base.item(row), self._room.item(row)
        self._place(row, 2 * room)
        new = self._base.item(row)
        self._data[new : new + have] = self._data[base : base + have]
        self._free.setdefault(room, []).append(base)

    def _place(self, row: int, size: int) -> None:
        regions = self._free.get(size)
        if regions:
            self._base[row] = regions.pop()
        else:
            while self._end + size > len(self._data):
                self._data = np.concatenate((self._data, np.zeros_like(self._data)))
            self._base[row] = self._end
            self._end += size
        self._room[row] = size
