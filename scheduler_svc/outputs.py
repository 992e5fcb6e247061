"""The output tokens of all running sequences in one int32 array, so that a step enters with one write.

Each row has a region of its own, a power of two of tokens, and gets one of twice the size when it is
full. Regions given back serve later rows; the array itself doubles when no region is left. Pure.
"""

from collections import defaultdict
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.scheduler_svc.stops import Int64, Rows

FIRST_TOKENS = 256  # room of a row at first
_START_TOKENS = 1 << 16
_COUNTED = 1 << 12  # tokens of a step; more take a moment longer

Int32 = npt.NDArray[np.int32]
T = TypeVar("T", bound=np.generic)


class Spans:
    """The tokens of a step: `counts[i]` of them belong to its i-th sequence, in order."""

    def __init__(self, counts: Int32, tokens: Int32) -> None:
        self.counts, self.tokens = counts, tokens
        self._wide = counts.astype(np.intp)  # numpy is quickest with what it would convert to
        self.ends: Int64 = self._wide.cumsum()
        self.starts: Int64 = self.ends - self._wide

    def spread(self, values: npt.NDArray[T]) -> npt.NDArray[T]:
        """A value of each sequence to each of its tokens."""
        return values.repeat(self._wide)


class Outputs:
    """`rows` is the number of rows of the table."""

    def __init__(self, rows: int) -> None:
        self._data: Int32 = np.zeros(_START_TOKENS, np.int32)
        self._base: Int64 = np.zeros(rows, np.int64)
        self._room: Int32 = np.zeros(rows, np.int32)
        self._most: Int32 = np.zeros(rows, np.int32)
        self._mark: Int32 = np.zeros(rows, np.int32)  # the smaller of both: from there on, a look
        self._counting: Int64 = np.arange(_COUNTED)
        # Size -> where such regions lie.
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0

    @property
    def columns(self) -> dict[str, Int32 | Int64]:
        """What the compiled passes use, by row."""
        return {"base": self._base, "room": self._room, "mark": self._mark}

    def open(self, row: int, tokens: bytes, most: int) -> None:
        """Give `row`, which may have at most so many, a region that begins with these int32 tokens."""
        count = len(tokens) // 4
        self._most[row] = most
        self._place(row, max(FIRST_TOKENS, 1 << count.bit_length()))
        if count:
            base = self._base.item(row)
            self._data[base : base + count] = np.frombuffer(tokens, np.int32)

    def close(self, rows: Rows, counts: list[int]) -> list[bytes]:
        """Take the regions of `rows` back. The first `counts[i]` tokens of each, int32."""
        closed: list[bytes] = []
        bases, rooms = self._base.take(rows).tolist(), self._room.take(rows).tolist()
        data, free = self._data, self._free
        for base, room, count in zip(bases, rooms, counts, strict=True):
            closed.append(data[base : base + count].tobytes())
            free[room].append(base)
        return closed

    def of(self, row: int, count: int) -> Int32:
        """A view of the first `count` tokens of `row`; good until the next write."""
        base = self._base.item(row)
        return self._data[base : base + count]

    def append(self, rows: Rows, have: Int32, behind: Int32, spans: Spans) -> list[int]:
        """Enter the tokens of span i behind the `have[i]` ones of `rows[i]`, which makes them `behind[i]`.

        What lies behind the outputs of a row is free to be overwritten: tokens that turn out not to
        count need not be left out.

        Returns:
            Places of rows that have reached the most they may have.
        """
        full: list[int] = []
        for place in (behind >= self._mark.take(rows)).nonzero()[0].tolist():
            row, count = rows.item(place), behind.item(place)
            if count > self._room.item(row):
                self._enlarge(row, have.item(place))
            if count >= self._most.item(row):
                full.append(place)
        at, total = spans.spread(self._base.take(rows) + have - spans.starts), len(spans.tokens)
        at += self._counting[:total] if total <= _COUNTED else np.arange(total)
        self._data[at] = spans.tokens
        return full

    def _enlarge(self, row: int, have: int) -> None:
        base, room = self._base.item(row), self._room.item(row)
        self._place(row, 2 * room)
        new = self._base.item(row)
        self._data[new : new + have] = self._data[base : base + have]
        self._free[room].append(base)

    def _place(self, row: int, size: int) -> None:
        regions = self._free[size]
        if regions:
            self._base[row] = regions.pop()
        else:
            self._grow(self._end + size)
            self._base[row] = self._end
            self._end += size
        self._room[row] = size
        self._mark[row] = min(size, self._most.item(row))

    def _grow(self, least: int) -> None:
        """Make the array at least so long."""
        size = len(self._data)
        if least > size:
            # Pages that no row has yet are not touched, and so cost nothing now.
            more = np.zeros(1 << (least - 1).bit_length(), np.int32)
            more[:size] = self._data
            self._data = more
