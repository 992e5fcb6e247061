"""Everything that must hold in a scheduler core after every event."""

from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.plan import Flight


def check(core: Scheduler) -> None:
    """Every invariant of the core; raises AssertionError. For tests: it looks at everything."""
    rank = core.rank
    fenced = [sequence for _, sequence in core._fences]
    holding = rank.prefilling + list(rank.decoding.values()) + fenced
    kept = core.store.holders() if core.store is not None else []
    rank.pool.check([s.blocks for s in holding] + kept)
    slots = [s.slot for s in holding] + rank.free_slots
    assert sorted(slots) == list(range(rank.total_slots)), "a slot is lost or owned twice"
    rows = rank.waiting + holding
    assert len(set(rows)) == len(rows), "a sequence is in two queues"
    assert set(rows) == set(core.table.by_row.values()), "a row without a queue"
    assert len(rows) + core.table.free == core.table.columns.rows, "a row is lost"
    assert all(not s.blocks and s.slot < 0 and s.finish is None for s in rank.waiting)
    assert all(s.finish is not None for s in fenced)
    live = {s for s in core.sequences.values() if s.finish is None}
    assert live == set(rows).difference(fenced), "a live sequence is in no queue"
    counted = rank.t.blocks[[s.row for s in holding]].tolist()
    assert counted == [len(s.blocks) for s in holding], "the table counts other blocks"
    _check_flights(core)


def _check_flights(core: Scheduler) -> None:
    """What is under way is what the table says is under way."""
    t = core.rank.t
    rows: dict[int, int] = {}
    plans: dict[int, int] = {}
    for flight in core.flights:
        decoders = flight.decoders
        places = zip(decoders.rows.tolist(), decoders.drafts.tolist(), strict=True)
        parts = [(row, drafts + 1) for row, drafts in places]
        parts += [(chunk.sequence.row, chunk.count) for chunk in flight.chunks]
        for row, count in parts:
            rows[row] = rows.get(row, 0) + count
            plans[row] = plans.get(row, 0) + 1
    for row in core.table.by_row:
        assert t.planned[row] == t.committed[row] + rows.get(row, 0), (
            "rows under way are miscounted"
        )
        assert t.in_flight[row] == plans.get(row, 0), "plans under way are miscounted"
        assert t.told[row] <= t.blocks[row]
        newest = [flight.seq for flight in core.flights if _contains(flight, row)]
        assert not newest or t.last_plan[row] == newest[-1], "the newest plan is not the last one"


def _contains(flight: Flight, row: int) -> bool:
    return row in flight.decoders.rows or any(c.sequence.row == row for c in flight.chunks)
