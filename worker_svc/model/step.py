"""One step's context: what layers publish for later layers, and what is written only at the commit.

A step may be abandoned and done again. So it writes block records at once (an entry's place follows
from its position, a second run writes the same bytes), but keeps window records and waiting tokens
aside: a prompt chunk longer than the ring's slack would overwrite entries that a redo still reads.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from phalanx.kernels.ops import store_pairs, store_window
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
from phalanx.worker_svc.model.host_tables import PickedRows
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
class Inputs:
    """What a step's computation reads of it.

    Attributes:
        units: int64 [P, n], what Engram hashes: each row's token and those before it, nearest first.
    """

    rows: StepRows
    units: Tensor


@dataclass(frozen=True)
class Picked:
    """Rows of an Engram table that the host picked, and which of them each row of the step needs."""

    rows: PickedRows
    ids: Tensor  # int64 [P, columns]


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
class Keep:
    """Which rows a commit writes: bool [P] each."""

    windows: Tensor
    pairs: Tensor  # whose token waits for its partner


@dataclass(kw_only=True)
class LayerContext:
    """What any stack of layers needs to know of its rows: R real ones, filled up to P.

    Attributes:
        copy_keys: int64 [P], choose among the copies of an expert.
        filling: where only the GPU knows which rows are real (then R is P): bool [P], True for the others.
        expert_picks: int64 [R, k] by layer; -1 for rows that are not real.
    """

    config: ModelConfig
    num_rows: int
    copy_keys: Tensor
    filling: Tensor | None = None
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
        units: `Inputs.units` on the CPU, and where the rows are computed.
        engram_rows: by layer, of tables from which the host picked already.
        window_records: uint8 [P, record] by ring.
        pending: float32 [P, 2, d] (kv, score) by owner of ratio 2.
        index_keys: float32 [pages, entries, index dim] by KV owner.
        chosen: on a CPU, the entries that rows attend to, by index owner.
        picked: on a GPU, int64 [P, top-k], entries of each row's sequence, by index owner.
        candidates: on a CPU, bool [P, entries], once the candidate source has run.
        candidate_blocks: on a GPU, int64 [P, blocks] of each row's sequence, likewise; None where
            they would be all blocks.
        tail: what the decoder half computes, if not this whole step.
        writer: does what `write` does from a `Keep` on the CPU, if there is a quicker way.
        entries_stored: whether this is such a tail, whose owner's entries were stored for all rows.
    """

    batch: StepBatch
    rows: StepRows
    host: StepRows
    pools: CachePools
    ropes: Ropes
    units: tuple[Tensor, Tensor]
    engram_rows: dict[int, Picked] = field(default_factory=dict)
    window_records: dict[int, Tensor] = field(default_factory=dict)
    pending: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Chosen] = field(default_factory=dict)
    picked: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    candidate_blocks: Tensor | None = None
    tail: Tail | None = None
    entries_stored: bool = False
    writer: Callable[[Keep], None] | None = None
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

    def keep(self, num_accepted: Tensor) -> Keep:
        """Which rows a commit writes, on the CPU; see `commit`."""
        host, ring_size = self.host, self.pools.layout.ring_size
        accepted = num_accepted[host.seqs]
        real = torch.arange(host.num_padded) < host.num_rows
        return Keep(
            windows=real & (host.within < accepted) & (host.within >= accepted - ring_size),
            # Only a token at an even position waits, and only the last one.
            pairs=real & (host.within == accepted - 1) & (host.positions % 2 == 0),
        )

    def commit(self, num_accepted: Tensor) -> None:
        """Write the accepted rows' window records and waiting tokens into the slots.

        Args:
            num_accepted: int64 [S], how many rows of each sequence count, from its first; 0 leaves
                the sequence as it was.
        """
        keep, device = self.keep(num_accepted), self.pools.slots.device
        if self.writer is not None:
            self.writer(keep)
        else:
            self.write(keep if device == CPU else moved(keep, device))

    def write(self, keep: Keep) -> None:
        """The commit of these rows, where they were computed."""
        rows, pools = self.rows, self.pools
        places = rows.positions % pools.layout.ring_size
        for first, records in _runs(self.window_records):
            rings = pools.rings[:, first : first + len(records)]
            store_window(records, rings, rows.slots, places, keep.windows)
        owners = pools.layout.pair_owners
        for first, pairs in _runs({owners.index(o): p for o, p in self.pending.items()}):
            waiting = pools.pairs[:, first : first + len(pairs)]
            store_pairs(pairs, waiting, rows.slots, keep.pairs)


def _runs(found: dict[int, Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """What belongs to neighbouring numbers, together, with the first number."""
    for first in sorted(found):
        if first - 1 not in found:
            last = next(i for i in itertools.count(first) if i + 1 not in found)
            yield first, [found[i] for i in range(first, last + 1)]
