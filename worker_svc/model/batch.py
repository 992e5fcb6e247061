"""One step's work: prompt chunks, decode rows and verification rows side by side.

`StepBatch` is what the scheduler asks for; `StepRows` is the geometry that follows from it, computed
once and read by every layer. `Windows` and `Pages` are what a CPU needs beyond that, which gathers the
vectors that rows see; a GPU's kernels find them by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.reference.rows import padded
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, NULL_BLOCK
from phalanx.worker_svc.model.config import ModelConfig

Int: TypeAlias = npt.NDArray[np.int64]
_ROOM_ROWS: Final = (8, 16, 32, 64, 128, 256)
_ROOM_COLUMNS: Final = (32, 256, 2048, 8192)  # up to 4k, 32k, 262k, a million tokens
SPAN_ROWS: Final = 16  # rows of a sequence from which it pays to go page by page


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's part of a step."""

    slot: int
    start: int  # tokens committed before this step; position of the first row
    token_ids: Sequence[int]
    blocks: Sequence[int]  # block ids, from the sequence's first block
    logits: bool | Sequence[int] = False  # True: the last row; or offsets of rows within the part
    copy_key: int = 0  # chooses among copies of an expert, together with the position
    prompt_len: int = 0  # tokens of the prompt
    window_from: int = 0  # windows start no earlier than this position
    stored: int = 0  # tokens whose entries lie in the blocks already, and are not written again


@dataclass(frozen=True)
class StepBatch:
    """Rows of all sequences, one sequence after the other.

    Attributes:
        slot_ids: int64 [S], all different.
        starts: int64 [S], tokens committed before the step.
        cu_seqlens_q: int64 [S + 1], row ranges, starting with 0; no sequence is empty.
        token_ids: int64 [R].
        block_table: int64 [S, max_blocks], padded with the null block.
        logit_rows: int64 [L], rows whose logits are wanted.
        copy_keys: int64 [S].
        prompt_lens: int64 [S], prompt tokens of each sequence; needed only where prompts are truncated.
        window_from: int64 [S]: windows of rows from this position on start no earlier than it. None:
            0. Anything else leaves exactness: for rows whose past was not computed.
        stored: int64 [S], tokens whose entries lie in the blocks already. None: 0.
    """

    slot_ids: Int
    starts: Int
    cu_seqlens_q: Int
    token_ids: Int
    block_table: Int
    logit_rows: Int
    copy_keys: Int
    prompt_lens: Int | None = None
    window_from: Int | None = None
    stored: Int | None = None

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows]) -> "StepBatch":
        """Lay the sequences out in the given order."""
        lengths = [len(s.token_ids) for s in sequences]
        cu = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        table = np.full(
            (len(sequences), max((len(s.blocks) for s in sequences), default=0)),
            NULL_BLOCK,
            np.int64,
        )
        logit_rows: list[int] = []
        for i, s in enumerate(sequences):
            table[i, : len(s.blocks)] = s.blocks
            offsets = [lengths[i] - 1] * s.logits if isinstance(s.logits, bool) else s.logits
            logit_rows += [int(cu[i]) + offset for offset in offsets]
        tokens = [token for s in sequences for token in s.token_ids]
        return cls(
            slot_ids=np.array([s.slot for s in sequences], np.int64),
            starts=np.array([s.start for s in sequences], np.int64),
            cu_seqlens_q=cu,
            token_ids=np.array(tokens, np.int64),
            block_table=table,
            logit_rows=np.array(logit_rows, np.int64),
            copy_keys=np.array([s.copy_key for s in sequences], np.int64),
            prompt_lens=np.array([s.prompt_len for s in sequences], np.int64),
            window_from=np.array([s.window_from for s in sequences], np.int64),
            stored=np.array([s.stored for s in sequences], np.int64),
        )

    @property
    def num_seqs(self) -> int:
        return len(self.slot_ids)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def seqlens_q(self) -> Int:
        return np.diff(self.cu_seqlens_q)

    def check(self, config: ModelConfig, max_len: int) -> None:
        """Raises ValueError with the first thing that this step could not compute.

        Args:
            max_len: tokens that a sequence may have.
        """
        if self.num_rows == 0:
            raise ValueError("the step has no rows")
        lengths = self.seqlens_q
        if lengths.min() < 1:
            raise ValueError("a sequence of the step has no rows; leave it out of the batch")
        if len(np.unique(self.slot_ids)) != self.num_seqs:
            raise ValueError("two sequences of the step share a state slot")
        ends = self.starts + lengths
        if ends.max() > max_len:
            raise ValueError(
                f"a sequence would reach {ends.max()} tokens; a slot has room for {max_len}"
            )
        bad = (self.token_ids < 0) | (self.token_ids >= config.vocab_size)
        if bad.any():
            raise ValueError(
                f"token id {self.token_ids[bad][0]} is outside the vocabulary of {config.vocab_size}"
            )
        needed = -(-ends // BLOCK_TOKENS)
        have = (self.block_table != NULL_BLOCK).sum(axis=1)
        if (have < needed).any():
            row = int(np.argmax(have < needed))
            raise ValueError(
                f"sequence {row} of the step has {have[row]} blocks; {ends[row]} tokens need "
                f"{needed[row]} blocks of {BLOCK_TOKENS} tokens"
            )


@dataclass(frozen=True)
class EntryRows:
    """Geometry of the compressed entries of one ratio r. M rows complete an entry in this step."""

    ratio: int
    num_entries: int  # entries per block
    rows: Tensor  # int64 [M]: the row of each new entry's last token
    partners: Tensor  # int64 [M]: row of its first token, counted after the S pending tokens
    blocks: Tensor  # int64 [M]: where the entry is stored
    offsets: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]: position of the entry's first token
    visible: Tensor  # int64 [P]: entries that a row may see
    num_columns: int  # blocks of the longest sequence that have visible entries


@dataclass(frozen=True)
class Pages:
    """Where rows meet the entries of one ratio: a *page* is one (sequence, block) with visible entries.

    For speed alone there are two forms: sequences with many rows have *spans* of neighbouring rows that
    see a page, the others *pairs* of one row and one page, Q in all.
    """

    blocks: Tensor  # int64 [pages], sequence by sequence
    pair_rows: Tensor  # int64 [Q]
    pair_pages: Tensor  # int64 [Q]: index into `blocks`
    pair_columns: Tensor  # int64 [Q]: which block of the sequence
    spans: list[tuple[int, int, int, int]]  # page, column, first row, end row


@dataclass(frozen=True)
class Windows:
    """Which vectors stand in each row's window of W positions.

    Attributes:
        ring_indices: int64 [S, W - 1]: the ring entries before each sequence's first row.
        places: int64 [P, W]: rows of the table (S * (W - 1) ring entries, then P step rows).
        empty: bool [P, W].
    """

    ring_indices: Tensor
    places: Tensor
    empty: Tensor


@dataclass(frozen=True)
class Room:
    """Fixed sizes of a step's geometry, for steps that are computed in the same memory.

    Attributes:
        rows: P. There is room for as many sequences, and for as many new entries of each ratio.
        columns: blocks of a sequence.
    """

    rows: int
    columns: int

    @classmethod
    def needed(cls, batch: StepBatch) -> "Room":
        """The least that holds the batch."""
        ends = batch.starts + batch.seqlens_q
        return cls(batch.num_rows, -(-int(ends.max(initial=0)) // BLOCK_TOKENS))

    def holds(self, other: "Room") -> bool:
        return other.rows <= self.rows and other.columns <= self.columns


def step_rooms(max_seqs: int, max_len: int) -> list[Room]:
    """For decode steps of up to `max_seqs` sequences of up to `max_len` tokens, the largest first.

    A few will do: rows that fill a room, and entries that no row sees, are passed over.
    """
    most, blocks = min(max_seqs, _ROOM_ROWS[-1]), -(-max_len // BLOCK_TOKENS)
    rows = [count for count in _ROOM_ROWS if count < 2 * most] or [_ROOM_ROWS[0]]
    columns = [*(count for count in _ROOM_COLUMNS if count < blocks), blocks]
    columns = columns[: len(_ROOM_COLUMNS)]
    return [Room(r, c) for r in reversed(rows) for c in reversed(columns)]


@dataclass(frozen=True)
class StepRows:
    """Geometry of a step of R rows, filled up to P rows. Filling rows see themselves alone.

    In a `Room`, tables of sequences, new entries and rows with logits are filled up too: with a slot and
    a row that there are, and with entries that are stored nowhere (block -1).

    Attributes:
        num_rows, num_padded: R and P.
        seqs, within, positions, slots, token_ids: int64 [P]; `within` counts from the sequence's
            first row of this step.
        slot_ids: int64 [S].
        window_from: int64 [P]: windows of rows from this position on start no earlier.
        block_table: int64 [S, max_blocks].
        logit_rows: int64 [L].
        entries: geometry by ratio.
        filling: in a room, bool [P], True for the rows after the first R.
    """

    num_rows: int
    num_padded: int
    seqs: Tensor
    within: Tensor
    positions: Tensor
    slots: Tensor
    token_ids: Tensor
    slot_ids: Tensor
    window_from: Tensor
    block_table: Tensor
    logit_rows: Tensor
    entries: dict[int, EntryRows]
    filling: Tensor | None = None


def step_rows(batch: StepBatch, config: ModelConfig, room: Room | None = None) -> StepRows:
    """Derive the geometry of a checked batch, which the room holds if there is one."""
    num_rows, num_seqs = batch.num_rows, batch.num_seqs
    num_padded = room.rows if room else padded(num_rows)
    lengths, cu = batch.seqlens_q, batch.cu_seqlens_q
    seqs = np.zeros(num_padded, np.int64)
    seqs[:num_rows] = np.repeat(np.arange(num_seqs), lengths)
    within = np.zeros(num_padded, np.int64)
    within[:num_rows] = np.arange(num_rows) - cu[seqs[:num_rows]]
    positions = within.copy()
    positions[:num_rows] += batch.starts[seqs[:num_rows]]
    tokens = np.zeros(num_padded, np.int64)
    tokens[:num_rows] = batch.token_ids
    ratios = {config.ratio(layer) for layer in config.kv_source_layer_ids}
    slot_ids, table, logit_rows = batch.slot_ids, batch.block_table, batch.logit_rows
    if room:
        slot_ids, logit_rows = _filled(slot_ids, num_padded), _filled(logit_rows, num_padded)
        table = np.full((num_padded, room.columns), NULL_BLOCK, np.int64)
        columns = min(room.columns, batch.block_table.shape[1])
        table[:num_seqs, :columns] = batch.block_table[:, :columns]
    return StepRows(
        num_rows=num_rows,
        num_padded=num_padded,
        seqs=torch.from_numpy(seqs),
        within=torch.from_numpy(within),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(batch.slot_ids[seqs]),
        token_ids=torch.from_numpy(tokens),
        slot_ids=torch.from_numpy(slot_ids),
        window_from=torch.from_numpy(_window_from(batch, seqs)),
        block_table=torch.from_numpy(table),
        logit_rows=torch.from_numpy(logit_rows),
        entries={r: _entry_rows(batch, seqs, within, positions, r, room) for r in sorted(ratios)},
        filling=torch.from_numpy(np.arange(num_padded) >= num_rows) if room else None,
    )


def _filled(values: Int, length: int, filling: int = 0) -> Int:
    filled = np.full(length, filling, np.int64)
    filled[: len(values)] = values
    return filled


def _window_from(batch: StepBatch, seqs: Int) -> Int:
    return np.zeros_like(seqs) if batch.window_from is None else batch.window_from[seqs]


def step_windows(batch: StepBatch, rows: StepRows, config: ModelConfig, ring_size: int) -> Windows:
    """Which vector stands in each window slot: slot i of a row at position t is position t - W + 1 + i.

    Empty slots hold the row itself: weighed with zero any finite vector does, but a ring may still
    hold a broken one, of a sequence that is gone.
    """
    num_rows, num_seqs, before = batch.num_rows, batch.num_seqs, config.sliding_window - 1
    seqs, within, positions = rows.seqs.numpy(), rows.within.numpy(), rows.positions.numpy()
    indices = (batch.starts[:, None] - before + np.arange(before)) % ring_size
    back = np.arange(-before, 1)
    relative = within[:, None] + back  # to the sequence's first row of this step
    own = num_seqs * before + np.arange(len(seqs))[:, None] + back
    ring = seqs[:, None] * before + before + relative
    places = np.where(relative >= 0, own, ring)
    at = positions[:, None] + back
    empty = at < 0
    if batch.window_from is not None and batch.window_from.any():
        first = batch.window_from[seqs, None]
        empty |= (at < first) & (positions[:, None] >= first)
    empty[num_rows:, :-1] = True
    return Windows(
        ring_indices=torch.from_numpy(indices),
        places=torch.from_numpy(np.where(empty, own[:, -1:], places)),
        empty=torch.from_numpy(empty),
    )


def _entry_rows(
    batch: StepBatch, seqs: Int, within: Int, positions: Int, ratio: int, room: Room | None
) -> EntryRows:
    num_rows, num_seqs = batch.num_rows, room.rows if room else batch.num_seqs
    num_entries = BLOCK_TOKENS // ratio
    visible = (positions + 1) // ratio
    visible[num_rows:] = 0
    closes = (positions[:num_rows] + 1) % ratio == 0
    if batch.stored is not None:
        closes &= positions[:num_rows] >= batch.stored[seqs[:num_rows]]
    (closing,) = np.nonzero(closes)
    is_first = within[closing] == 0
    at = positions[closing]
    last_visible = visible[batch.cu_seqlens_q[1:] - 1]

    def each(values: Int, filling: int = 0) -> Tensor:
        return torch.from_numpy(_filled(values, room.rows, filling) if room else values)

    return EntryRows(
        ratio=ratio,
        num_entries=num_entries,
        rows=each(closing),
        partners=each(np.where(is_first, seqs[closing], num_seqs + closing - 1)),
        blocks=each(batch.block_table[seqs[closing], at // BLOCK_TOKENS], NULL_BLOCK - 1),
        offsets=each(at % BLOCK_TOKENS // ratio),
        positions=each(at // ratio * ratio),
        visible=torch.from_numpy(visible),
        num_columns=room.columns if room else -(-int(last_visible.max(initial=0)) // num_entries),
    )


def step_pages(batch: StepBatch, rows: StepRows, ratio: int) -> Pages:
    """Sequences one after the other, each with as many pages as its last row can see."""
    entries, seqs = rows.entries[ratio], rows.seqs.numpy()
    num_entries, visible = entries.num_entries, entries.visible.numpy()
    pages = -(-visible[batch.cu_seqlens_q[1:] - 1] // num_entries)
    first_page = np.cumsum(pages) - pages
    page_seqs = np.repeat(np.arange(batch.num_seqs), pages)
    page_columns = np.arange(len(page_seqs)) - first_page[page_seqs]
    many = batch.seqlens_q >= SPAN_ROWS
    row_pages = np.where(many[seqs], 0, -(-visible // num_entries))
    spans = []
    for seq in np.flatnonzero(many).tolist():
        part = slice(batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1])
        seen = np.arange(pages[seq]) * num_entries  # entries before each page
        first = part.start + np.searchsorted(visible[part], seen, side="right")
        for column, row in enumerate(first.tolist()):
            spans.append((int(first_page[seq]) + column, column, row, int(part.stop)))
    pair_rows = np.repeat(np.arange(len(seqs)), row_pages)
    pair_columns = np.arange(len(pair_rows)) - (np.cumsum(row_pages) - row_pages)[pair_rows]
    return Pages(
        blocks=torch.from_numpy(batch.block_table[page_seqs, page_columns]),
        pair_rows=torch.from_numpy(pair_rows),
        pair_pages=torch.from_numpy(first_page[seqs[pair_rows]] + pair_columns),
        pair_columns=torch.from_numpy(pair_columns),
        spans=spans,
    )
