"""Everything that must hold in a scheduler core after every event."""

from phalanx.protocol.messages import AbortSequence, FinishReason, HandBack, Submit, Tokens
from phalanx.protocol.steps import StepPlan
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.plan import Flight
from phalanx.scheduler_svc.state import Sequence
from sim.token_rows import Handles

Attempt = tuple[str, int, int]  # request id, index, attempt


class Onlooker:
    """Sees what one core takes and gives, and checks what no core can see of itself."""

    def __init__(self, core: Scheduler) -> None:
        self.core = core
        self.handles = Handles()
        self._ends: dict[Attempt, tuple[int, FinishReason]] = {}  # tokens and reason, as said
        self._aborted: dict[Attempt, tuple[int, FinishReason]] = {}  # not said yet
        self._sent: dict[Attempt, int] = {}  # tokens
        self._admitted: dict[Attempt, Sequence] = {}
        self._writing: dict[int, set[int]] = {}  # plan -> blocks that it may write
        self._resumed: dict[Attempt, bool] = {}  # as its Submit said
        self._no_room: set[Attempt] = set()  # arrivals that came to a full queue
        self._begun: list[Sequence] = []  # were asked back, and are to go on

    def new_worker(self) -> None:
        """Sequences begin anew, under the same attempt if nobody has heard of their tokens."""
        self._writing.clear()
        self._admitted.clear()
        self._sent.clear()

    def takes(self, event: object) -> None:
        """Before the core does: an abort decides the end of a sequence, a full queue that of an arrival."""
        if isinstance(event, Submit):
            self._arrives(event)
        if isinstance(event, HandBack):
            self._asked_back(event)
        if not isinstance(event, AbortSequence):
            return
        known = self.core.sequences.get((event.request_id, event.index))
        if known is not None and known.attempt == event.attempt and known.finish is None:
            attempt = (event.request_id, event.index, event.attempt)
            self._begun = [one for one in self._begun if one is not known]
            self._aborted[attempt] = (self._sent.get(attempt, known.num_outputs), event.reason)

    def _arrives(self, submit: Submit) -> None:
        assert submit.resumed or not submit.outputs, "it has run before, and comes as an arrival"
        core, key = self.core, (submit.request_id, submit.index)
        known, attempt = core.sequences.get(key), (*key, submit.attempt)
        if known is not None and known.attempt == submit.attempt:
            return
        self._resumed[attempt] = submit.resumed
        if not submit.resumed and core.rank.num_waiting >= core.config.max_waiting:
            self._no_room.add(attempt)
        else:
            self._no_room.discard(attempt)

    def _asked_back(self, asked: HandBack) -> None:
        for request_id, index, attempt in asked.sequences:
            known = self.core.sequences.get((request_id, index))
            if known is None or known.attempt != attempt or known.finish is not None:
                continue  # one that has just ended keeps its slot until its step is over
            if known.slot >= 0:
                self._begun.append(known)

    def said(self, message: Tokens) -> None:
        for item in self.handles.items(message):
            key = (item.request_id, item.index, item.attempt)
            end = item.offset + len(item.token_ids)
            self._sent[key] = max(end, self._sent.get(key, 0))
            if item.prompt_logprobs:
                assert not item.token_ids and item.finish_reason is None
            elif key in self._ends:
                last, reason = self._ends[key]
                assert end <= last, f"{key}: tokens after its end"
                assert item.finish_reason == reason, f"{key}: {item.finish_reason} after {reason}"
            elif key in self._aborted:
                # What was asked for before the abort, in the same batch, is answered before the final.
                last, reason = self._aborted[key]
                assert end <= last, f"{key}: tokens after its abort"
                if item.finish_reason is not None:
                    assert item.finish_reason == reason, (
                        f"{key}: {item.finish_reason}, not {reason}"
                    )
                    self._ends[key] = self._aborted.pop(key)
            elif item.finish_reason is not None:
                self._ends[key] = (end, item.finish_reason)

    def planned(self, plan: StepPlan) -> None:
        flight = self.core.flights[-1]
        writers = [self.core.table.by_row[row] for row in flight.decoders.rows.tolist()]
        writers += [chunk.sequence for chunk in flight.chunks]
        self._writing[plan.seq] = {block for sequence in writers for block in sequence.blocks}

    def done(self, seq: int) -> None:
        """The worker will write nothing more of this plan."""
        self._writing.pop(seq, None)

    def check(self) -> None:
        """After each step of the core."""
        core = self.core
        check(core)
        assert not self._aborted, f"no final after an abort: {list(self._aborted)}"
        for sequence in self._begun:
            assert sequence.finish != "abort", f"{sequence.key} had begun, and was given back"
        self._begun.clear()
        for seq, blocks in self._writing.items():
            # What the worker may still write belongs to a sequence of that step, or to a fenced one.
            free = [block for block in blocks if core.rank.pool.refs(block) == 0]
            assert not free, f"plan {seq} is in flight and its blocks {free} are free"
        for sequence in core.sequences.values():
            # A Submit that comes again is the same sequence, also after its end.
            attempt = (sequence.request_id, sequence.index, sequence.attempt)
            first = self._admitted.setdefault(attempt, sequence)
            assert first is sequence, f"{attempt} was started twice"
            sent = self._sent.get(attempt, 0)
            assert sequence.num_outputs >= sent, f"{attempt} forgot tokens that it has told"
            assert attempt not in self._no_room, f"{attempt} was taken into a full queue"
        self._no_room.clear()
        self._check_order()
        if core.accepting and core.live and not core.busy:
            held = core.store is not None and core.store.holders()
            asked = core.restorer is not None and core.restorer.due_ns is not None
            assert held or asked, f"seat {core.seat}: {core.live} sequences and nothing runs"

    def _check_order(self) -> None:
        """Those that were accepted or ran before wait ahead of arrivals, and nobody else does."""
        waiting = self.core.rank.waiting
        ahead = [sequence.ahead for sequence in waiting]
        assert ahead == sorted(ahead, reverse=True), "an arrival waits ahead of one that is resumed"
        preemptions = self.core.rank.t.preemptions
        for sequence in waiting:
            attempt = (sequence.request_id, sequence.index, sequence.attempt)
            ran = self._resumed[attempt] or preemptions[sequence.row] > 0
            assert sequence.ahead == ran, f"{attempt} waits in the wrong part of the queue"


def check_clean(core: Scheduler) -> None:
    """A core without sequences has everything back."""
    rank = core.rank
    assert rank.pool.free == rank.pool.total, "blocks did not come back"
    assert len(rank.free_slots) == rank.total_slots, "slots did not come back"
    assert rank.table.free == rank.table.columns.rows, "rows did not come back"
    assert core.restorer is None or core.restorer.whole, "regions did not come back"


def check(core: Scheduler) -> None:
    """Every invariant of the core; raises AssertionError. For tests: it looks at everything."""
    rank = core.rank
    fenced = [sequence for _, group in core._fences for sequence in group]
    holding = rank.prefilling + list(rank.decoding.values()) + list(rank.loading) + fenced
    kept = core.store.holders() if core.store is not None else []
    rank.pool.check([s.blocks for s in holding] + kept)
    slots = [s.slot for s in holding] + rank.free_slots
    assert sorted(slots) == list(range(rank.total_slots)), "a slot is lost or owned twice"
    rows = rank.waiting + list(rank.aside) + holding
    assert len(set(rows)) == len(rows), "a sequence is in two queues"
    assert set(rows) == set(core.table.by_row.values()), "a row without a queue"
    assert len(rows) + core.table.free == core.table.columns.rows, "a row is lost"
    unready = rank.waiting + list(rank.aside)
    assert all(not s.blocks and s.slot < 0 and s.finish is None for s in unready)
    if core.restorer is not None:
        core.restorer.check()
    assert all(s.finish is not None for s in fenced)
    assert rank.decode_rows.tolist() == list(rank.decoding), "rows of others are decoded"
    live = {s for s in core.sequences.values() if s.finish is None}
    assert live == set(rows).difference(fenced), "a live sequence is in no queue"
    counted = rank.t.blocks[[s.row for s in holding]].tolist()
    assert counted == [len(s.blocks) for s in holding], "the table counts other blocks"
    _check_flights(core)


def _check_flights(core: Scheduler) -> None:
    """What is under way is what the table says is under way."""
    t = core.rank.t
    rows: dict[int, int] = {}
    for flight in core.flights:
        decoders = flight.decoders
        places = zip(decoders.rows.tolist(), decoders.drafts.tolist(), strict=True)
        parts = [(row, drafts + 1) for row, drafts in places]
        parts += [(chunk.sequence.row, chunk.count) for chunk in flight.chunks]
        for row, count in parts:
            rows[row] = rows.get(row, 0) + count
    for row, sequence in core.table.by_row.items():
        assert t.planned[row] == t.committed[row] + rows.get(row, 0), (
            "rows under way are miscounted"
        )
        assert t.told[row] <= t.blocks[row]
        newest = [flight.seq for flight in core.flights if _contains(flight, row)]
        assert not newest or t.last_plan[row] == newest[-1], "the newest plan is not the last one"
        assert core.rank.under_way(sequence) == bool(newest), "a plan under way is not known"


def _contains(flight: Flight, row: int) -> bool:
    return row in flight.decoders.rows or any(c.sequence.row == row for c in flight.chunks)
