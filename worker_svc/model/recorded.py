"""Small steps without the host's part of them: recorded once, as CUDA graphs, and replayed.

A decode step is some 55 kernels a layer, and launching them takes a host several times as long as a
GPU computes. A record belongs to a room: so many rows, and contexts of so many blocks. A step takes the
smallest room that holds it and is filled up: the rows behind its own see themselves alone, go to no
expert, and are stored nowhere. Which rows are real, how long their contexts are, and what lies where is
read from memory when the record runs, so there are few rooms. No row's numbers depend on the room, as
they do not on the batch.

What a step reads comes in one copy; what it makes is left in memory that all records share, good until
the next step begins. Records see weights, caches and experts where these lay when they were made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.reference.quant import window_bytes
from phalanx.worker_svc.model.batch import Room, SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS
from phalanx.worker_svc.model.model import Model, PendingStep
from phalanx.worker_svc.model.moe import Experts
from phalanx.worker_svc.model.moving import Refilled
from phalanx.worker_svc.model.step import Inputs, Keep, Step

Work = Callable[[], None]
Record = Callable[[Work], Work]  # makes of some work what does it again


def cuda_graphs() -> Record:
    """Records work as CUDA graphs, which share the memory of what they compute in between."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(work: Work) -> Work:
        work()  # makes what is made once: kernels are compiled, libraries take their memory
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Other threads may use the GPU meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    return record


def done_again(work: Work) -> Work:
    """Records nothing: the work is done as it was. What is left is the fixed memory."""
    return work


@dataclass(frozen=True)
class _Results:
    """What a step leaves, of a room's P rows.

    Attributes:
        final: [P, D].
        logits: float32 [P, vocab].
        picks: int64 [layers, P, k].
        records: uint8 [rings, P, record].
        pairs: float32 [owners of ratio 2, P, 2, d].
    """

    final: Tensor
    logits: Tensor
    picks: Tensor
    records: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, model: Model, rows: int) -> "_Results":
        config, layout, device = model.config, model.pools.layout, model.pools.slots.device
        rings = layout.num_rings if model.drafter is not None else config.num_hidden_layers

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        layers, picks = config.num_hidden_layers, config.num_experts_per_tok
        return cls(
            final=empty(rows, config.hidden_size),
            logits=empty(rows, config.vocab_size),
            picks=empty(layers, rows, picks, dtype=torch.int64),
            records=empty(rings, rows, window_bytes(config.head_dim), dtype=torch.uint8),
            pairs=empty(len(layout.pair_owners), rows, 2, config.head_dim),
        )

    def first(self, rows: int) -> "_Results":
        """The same memory, for fewer rows."""

        def part(whole: Tensor, at: int) -> Tensor:
            shape = [*whole.shape[:at], rows, *whole.shape[at + 1 :]]
            return whole.flatten()[: torch.Size(shape).numel()].view(shape)

        return _Results(
            part(self.final, 0),
            part(self.logits, 0),
            part(self.picks, 1),
            part(self.records, 1),
            part(self.pairs, 1),
        )

    def take(self, step: Step, final: Tensor, logits: Tensor) -> None:
        self.final.copy_(final)
        self.logits.copy_(logits)
        torch.stack([step.expert_picks[i] for i in range(len(self.picks))], out=self.picks)
        torch.stack([step.window_records[i] for i in range(len(self.records))], out=self.records)
        if len(self.pairs):
            owners = step.pools.layout.pair_owners
            torch.stack([step.pending[owner] for owner in owners], out=self.pairs)


class _RoomRecord:
    """One room's inputs and results, and the records of what makes these from those and commits them."""

    def __init__(self, model: Model, room: Room, results: _Results, record: Record) -> None:
        self.room = room
        self._model, self._results = model, results.first(room.rows)
        max_len = model.pools.history.shape[1]
        self._batch = _full_room(room, max_len)
        self._batch.check(model.config, max_len)
        inputs, device = model.inputs(self._batch, room), model.pools.slots.device
        model.reach(inputs.rows.positions)
        self._inputs = Refilled(inputs, device)
        self._inputs.fill(inputs)
        self._places = model.engram.places(room.rows)
        model.engram.pick(inputs.units, self._places)
        self._replay = record(self._compute)
        nothing = torch.zeros(room.rows, dtype=torch.bool)
        self._keep = Refilled(Keep(nothing, nothing), device)
        self._commit = record(self._write)

    def _compute(self) -> None:
        there = self._inputs.value
        self._ropes = self._model.ropes(there.rows.positions)
        step = self._step(self._batch, there)
        final, logits, _ = self._model.compute(step)
        self._results.take(step, final, logits)

    def _write(self) -> None:
        self._computed(self._batch, self._inputs.value).write(self._keep.value)

    def _step(self, batch: StepBatch, host: Inputs) -> Step:
        there = self._inputs.value
        return Step(
            config=self._model.config,
            num_rows=self.room.rows,
            copy_keys=there.rows.positions,  # no copies are chosen from
            filling=there.rows.filling,
            batch=batch,
            rows=there.rows,
            host=host.rows,
            pools=self._model.pools,
            ropes=self._ropes,
            units=(host.units, there.units),
            engram_rows=self._places,
        )

    def _computed(self, batch: StepBatch, host: Inputs) -> Step:
        """The step with what the results hold of it."""
        step = self._step(batch, host)
        step.window_records = dict(enumerate(self._results.records))
        owners = self._model.pools.layout.pair_owners
        step.pending = dict(zip(owners, self._results.pairs, strict=True))
        step.writer = self._kept
        return step

    def _kept(self, keep: Keep) -> None:
        self._keep.fill(keep)
        self._commit()

    def run(self, batch: StepBatch) -> PendingStep:
        """Compute a checked batch that the room holds."""
        host = self._model.inputs(batch, self.room)
        if self._model.pools.slots.is_cuda:
            # Nobody waited for a step that was abandoned; what it reads is written now.
            torch.cuda.current_stream().synchronize()
        self._inputs.fill(host)
        self._model.engram.pick(host.units, self._places)
        self._replay()
        results, step = self._results, self._computed(batch, host)
        picks = dict(enumerate(results.picks[:, : batch.num_rows]))
        logits = results.logits[: len(batch.logit_rows)]
        return PendingStep(logits, picks, results.final, self._model, step, step)


def _full_room(room: Room, max_len: int) -> StepBatch:
    """One row, as late as the room has room for; whatever lies in the first block and slot."""
    last = min(room.columns * BLOCK_TOKENS, max_len) - 1
    return StepBatch.of([SequenceRows(0, last, [0], [1] * room.columns, logits=True)])


class RecordedSteps:
    """The records of a model, by room.

    Attributes:
        failure: why a room is missing, if one is: the last that was tried in vain.
    """

    def __init__(
        self,
        model: Model,
        experts: Experts,
        record: Record,
        wanted: Sequence[Room],
        *,
        suits: Callable[[], bool] = lambda: True,
        launched: Callable[[], None] = lambda: None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Record all rooms, from the largest on; what needs too much memory, or fails, is left out.

        Args:
            experts: with all experts at hand, where they will be; -1 is none.
            record: `cuda_graphs()`, or `done_again`.
            suits: whether these experts and their places are those of the next step.
            launched: called when a step's work is under way.
            progress: called with the share that is done.
        """
        self._model, self._suits, self._launched = model, suits, launched
        self._records: list[_RoomRecord] = []
        self.failure = ""
        rooms = sorted(wanted, key=lambda room: (room.rows, room.columns), reverse=True)
        others, model.experts = model.experts, experts
        try:
            results: _Results | None = None
            for done, room in enumerate(rooms):
                progress(done / len(rooms))
                try:
                    results = results or _Results.of(model, room.rows)
                    self._records.insert(0, _RoomRecord(model, room, results, record))
                except Exception as error:  # noqa: BLE001 - of torch, CUDA, Triton: no common class
                    told = (str(error) or type(error).__name__).partition("\n")[0]
                    self.failure = self.failure or f"{room}: {told}"
        finally:
            model.experts = others

    def __len__(self) -> int:
        return len(self._records)

    def run(self, batch: StepBatch) -> PendingStep | None:
        """See `model.Recorded`."""
        model = self._model
        if not self._suits():
            return None
        needed = Room.needed(batch)
        found = next((record for record in self._records if record.room.holds(needed)), None)
        if found is None or model.truncation.tail(batch) is not None:
            return None
        batch.check(model.config, model.pools.history.shape[1])
        pending = found.run(batch)
        self._launched()
        return pending
