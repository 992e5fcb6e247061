"""One step's context: what layers publish for later layers, and what is written only at the commit.

A step may be abandoned and done again. So it writes block records at once (an entry's place follows
from its position, a second run writes the same bytes), but keeps window records and waiting tokens
aside: a prompt chunk longer than the ring's slack would overwrite entries that a redo still reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from phalanx.kernels.reference.rope import GrowingRope, RopeTable
from phalanx.worker_svc.model.batch import (
    Pages,
    StepBatch,
    StepRows,
    Windows,
    step_pages,
    step_windows,
)
from phalanx.worker_svc.model.caches import CPU, CachePools
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.moving import moved
from phalanx.worker_svc.model.truncation import Tail

Observer = Callable[[str, int, Tensor], None]  # name, layer, value


@dataclass(frozen=True)
class Ropes:
    """Rotary tables of one step: `plain` and `yarn` at the rows, all positions for new entries."""

    plain: RopeTable
    yarn: RopeTable
    yarn_all: GrowingRope


@dataclass(frozen=True)
class Chosen:
    """Which compressed entries each row attends to.

    Attributes:
        vectors: float32 [U, d], every entry that some row chose.
        place: int64 [P, top-k], indices into vectors.
        empty: bool [P, top-k], True where a row has fewer.
    """

    vectors: Tensor
    place: Tensor
    empty: Tensor


@dataclass(frozen=True)
class _Keep:
    """What a commit writes: int64 each."""

    rows: Tensor  # whose window records are kept
    slots: Tensor
    places: Tensor  # in the ring
    waiting: Tensor  # rows whose token waits for its partner
    waiting_slots: Tensor


@dataclass(kw_only=True)
class LayerContext:
    """What any stack of layers needs to know of its rows: R real ones, filled up to P.

    Attributes:
        copy_keys: int64 [P], choose among the copies of an expert.
        expert_picks: int64 [R, k] by layer.
    """

    config: ModelConfig
    num_rows: int
    copy_keys: Tensor
    observer: Observer | None = None
    expert_picks: dict[int, Tensor] = field(default_factory=dict)

    def note(self, name: str, layer: int, value: Tensor) -> None:
        """Show an intermediate result to whoever observes; rows that fill tiles included."""
        if self.observer is not None:
            self.observer(name, layer, value)


@dataclass(kw_only=True)
class Step(LayerContext):
    """State of one running step of the backbone.

    Attributes:
        batch: what was asked for.
        host: the same geometry on the CPU; `rows` lies where the rows are computed.
        window_records: uint8 [P, record] by ring.
        pending: float32 [P, 2, d] (kv, score) by owner of ratio 2.
        index_keys: float32 [pages, entries, index dim] by KV owner.
        chosen: on a CPU, the entries that rows attend to, by index owner.
        picked: on a GPU, int64 [P, top-k], entries of each row's sequence, by index owner.
        candidates: bool [P, entries], once the candidate source has run.
        tail: what the decoder half computes, if not this whole step.
        entries_stored: whether this is such a tail, whose owner's entries were stored for all rows.
    """

    batch: StepBatch
    rows: StepRows
    host: StepRows
    pools: CachePools
    ropes: Ropes
    window_records: dict[int, Tensor] = field(default_factory=dict)
    pending: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Chosen] = field(default_factory=dict)
    picked: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    tail: Tail | None = None
    entries_stored: bool = False
    _pages: dict[int, Pages] = field(default_factory=dict)

    @cached_property
    def windows(self) -> Windows:
        """Which vectors stand in the rows' windows."""
        ring_size = self.pools.layout.ring_size
        return step_windows(self.batch, self.host, self.config, ring_size)

    def pages(self, ratio: int) -> Pages:
        """Where rows meet the entries of a ratio."""
        if ratio not in self._pages:
            self._pages[ratio] = step_pages(self.batch, self.host, ratio)
        return self._pages[ratio]

    def rope(self, layer: int) -> RopeTable:
        """The layer's rotary table at the rows."""
        return self.ropes.yarn if self.config.uses_yarn(layer) else self.ropes.plain

    def commit(self, num_accepted: Tensor) -> None:
        """Write the accepted rows' window records and waiting tokens into the slots.

        Args:
            num_accepted: int64 [S], how many rows of each sequence count, from its first; 0 leaves
                the sequence as it was.
        """
        rows = self.host
        ring_size = self.pools.layout.ring_size
        real = slice(0, rows.num_rows)
        seqs, within = rows.seqs[real], rows.within[real]
        accepted = num_accepted[seqs]
        (kept,) = torch.nonzero(
            (within < accepted) & (within >= accepted - ring_size), as_tuple=True
        )
        # Only a token at an even position waits, and only the last one.
        waits = (within == accepted - 1) & (rows.positions[real] % 2 == 0)
        (waiting,) = torch.nonzero(waits, as_tuple=True)
        keep = _Keep(
            kept, rows.slots[kept], rows.positions[kept] % ring_size, waiting, rows.slots[waiting]
        )
        if self.pools.slots.device != CPU:
            keep = moved(keep, self.pools.slots.device)
        for ring, records in self.window_records.items():
            self.pools.rings[keep.slots, ring, keep.places] = records[keep.rows]
        for owner, pairs in self.pending.items():
            i = self.pools.layout.pair_owners.index(owner)
            self.pools.pairs[keep.waiting_slots, i] = pairs[keep.waiting]
