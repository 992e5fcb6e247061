"""A scheduler twice: with the compiled passes and with those in Python, side by side on the same events."""

from typing import Any

import numpy as np

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import KVRequest
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Actions
from phalanx.scheduler_svc.plan import Flight


class Twin(Scheduler):
    """The compiled one, which asserts after every event that the other one decided and holds the same."""

    def __init__(
        self,
        config: SchedulerConfig,
        seat: int,
        incarnation: int,
        columns: QueueTable,
        *,
        store_enabled: bool = False,
        compiled: bool = True,
    ) -> None:
        super().__init__(
            config, seat, incarnation, columns, store_enabled=store_enabled, compiled=compiled
        )
        rows = columns.rows
        zeroed = memoryview(bytearray(queue_bytes(rows)))
        self.other = Scheduler(
            config,
            seat,
            incarnation,
            QueueTable.create(zeroed, rows, seat, incarnation),
            store_enabled=store_enabled,
            compiled=False,
        )
        assert self.other.table.passes is None

    def handle(self, event: object, now_ns: int) -> None:
        super().handle(event, now_ns)
        self.other.handle(event, now_ns)
        self._compare()

    def step(self, now_ns: int) -> Actions:
        actions = super().step(now_ns)
        assert actions == self.other.step(now_ns)
        self._compare()
        return actions

    def store_step(self, now_ns: int) -> list[KVRequest]:
        asked = super().store_step(now_ns)
        assert asked == self.other.store_step(now_ns)
        return asked

    def store_stands(self) -> None:
        super().store_stands()
        self.other.store_stands()

    def _compare(self) -> None:
        for name, ours in vars(self.table.columns).items():
            theirs = getattr(self.other.table.columns, name)
            assert np.array_equal(ours, theirs), f"column {name}"
        assert _held(self) == _held(self.other)


def _held(core: Scheduler) -> dict[str, Any]:
    """Everything that a scheduler decides by, in its order; what it has of sequences by their keys."""
    rank, table = core.rank, core.table
    queues = rank.waiting, rank.prefilling, rank.decoding.values(), rank.loading, rank.aside
    of_sequences = [
        (s.key, s.row, s.slot, s.blocks, s.known, s.order, s.overtaken, s.cached, s.logprobs)
        for s in core.sequences.values()
    ]
    ends = [
        (s.finish, s.code, s.error, s.ended, s.outputs().tolist(), s.finished_ns, s.final_due_ns)
        for s in core.sequences.values()
    ]
    outputs = table.outputs
    regions = outputs._base.tolist(), outputs._room.tolist(), outputs._mark.tolist()
    return {
        "sequences": of_sequences,
        "ends": ends,
        "queues": [[s.key for s in queue] for queue in queues],
        "requests": {name: [s.key for s in of] for name, of in rank._waiting_of.items()},
        "decode_rows": rank.decode_rows.tolist(),
        "decodes": rank.decodes.tolist(),
        "fences": [(seq, s.key) for seq, group in core._fences for s in group],
        "finals": list(core._finals.kept),
        "flights": [_flight(flight) for flight in core.flights],
        "pool": (rank.pool._refs, rank.pool._free),
        "free": (rank.free_slots, table._free),
        "rows": {row: s.key for row, s in table.by_row.items()},
        "regions": (regions, dict(outputs._free), outputs._end),
        "stop ids": [ids.rows for ids in table.stop_ids._of],
    }


def _flight(flight: Flight) -> tuple[object, ...]:
    decoders = flight.decoders
    arrays = decoders.rows, decoders.drafts, flight.rows, flight.asked, flight.added, flight.sampled
    chunks = [
        [(c.sequence.key, c.start, c.count, c.samples, c.region) for c in of]
        for of in (flight.chunks, flight.new)
    ]
    return (
        flight.seq,
        [array.tolist() for array in arrays],
        chunks,
        [load.sequence.key for load in flight.loads],
        (flight.scored, flight.drafted, flight.num_rows, flight.context, decoders.num_rows),
    )
