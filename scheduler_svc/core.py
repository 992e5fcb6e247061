"""The scheduler of one rank: events in, actions out. Pure: no socket, clock, thread or chance.

`handle` takes what arrived, `step` then decides: it plans the next step when none is under way and
gives everything that is to be sent. Policy `mixed`: decode rows and prefill rows share one step
under one budget of rows, so a long prompt never stalls running streams. Policy `ballot`: plans of
decode rows are made ahead, plans of prompt rows when the group gives prompts a turn.

A sequence ends exactly once: by its stop rules, by an error of its own, or by an abort, which is
legal in every state. If a step in flight may still write its blocks and slot, these come back with
that step's result.
"""

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import (
    AbortSequence,
    BusToGateway,
    ContainsReply,
    Done,
    FinalSeen,
    FinishReason,
    GetDone,
    HandBack,
    KVRequest,
    ListSequences,
    PutDone,
    Refusal,
    Resend,
    SeatLoad,
    Submit,
    Submitted,
    TokenRows,
    Tokens,
    TokensItem,
)
from phalanx.protocol.queues import QueueTable
from phalanx.protocol.steps import Offer, PromptTurn, StepPlan, StepResult, WorkerHello
from phalanx.scheduler_svc.admission import admit
from phalanx.scheduler_svc.commit import Commit, commit
from phalanx.scheduler_svc.cost import StepCost
from phalanx.scheduler_svc.decode import Decoders, take_decoders
from phalanx.scheduler_svc.events import (
    Actions,
    GatewayChanged,
    Membership,
    StoreArenas,
    StoreLost,
    WorkerLost,
)
from phalanx.scheduler_svc.finals import REPEAT_NS, Finals
from phalanx.scheduler_svc.listing import Listing
from phalanx.scheduler_svc.load import LoadReport, room, stuck
from phalanx.scheduler_svc.offload import Offload
from phalanx.scheduler_svc.plan import Flight, make_plan, retract
from phalanx.scheduler_svc.prefill import Prefill, take_chunks, wants_prompt
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.restore import Restorer
from phalanx.scheduler_svc.state import ENDING, Chunk, Ended, Fence, Key, Load, Sequence, Table
from phalanx.scheduler_svc.stops import finished_already

_NO_ROWS = TokenRows()
PROMPT_ROWS_MIN = 16
# A step with rows of moved sequences takes this long, or twice as long as usual if that is more, but not so much more
# than usual that streams of the ranks that live notice: there may be such rows at each of these ranks. Where steps are
# so slow that this would be next to nothing, they have a share of the time: who moved is not to wait for minutes.
MOVED_STEP_US, MOVED_LONGER_US = 50_000, 45_000
MOVED_SHARE = 4
SETTLING_NS = 10_000_000_000  # so long after a change of the group all prompts come in such steps
# That they get in their first step; as long as they use them up, twice as many in the next.
MOVED_ROWS = 128
RESENT_RECORDS = 8192  # of prompt log-probabilities in one message
RESENT_TOKENS = 8192  # with what was said before; 300 bytes each with 20 alternatives
FLIGHTS_MAX = 2  # plans under way at once: the next one is made while a step runs


class _Stored:
    """What the KV store means to a prefill, at a moment."""

    def __init__(self, store: Offload | None, restorer: Restorer | None, now_ns: int) -> None:
        self._store, self._restorer, self._now_ns = store, restorer, now_ns

    def cut_at(self, sequence: Sequence, start: int) -> int:
        return self._store.cut_at(sequence, start, self._now_ns) if self._store is not None else 0

    def must_wait(self, sequence: Sequence) -> bool:
        return self._restorer is not None and self._restorer.must_wait(sequence)

    def load(self, sequence: Sequence) -> None:
        assert self._restorer is not None
        self._restorer.load(sequence, self._now_ns)


class Scheduler:
    """The core. `columns` is the table in shared memory (or in any zeroed buffer). `compiled`: use the
    compiled passes, if there are any."""

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
        self.config, self.seat, self.incarnation = config, seat, incarnation
        self.table = Table(columns, compiled)
        self.rank = Rank(self.table)
        self.worker: WorkerHello | None = None
        self.sequences: dict[Key, Sequence] = {}  # live ones and ended ones not yet acknowledged
        self.flights: deque[Flight] = deque()
        self.store: Offload | None = None
        self.restorer: Restorer | None = None
        self._store_enabled = store_enabled
        self._store_calls = count(1)
        self._membership = Membership(0, False)
        self._fences: deque[Fence] = deque()  # one behind that of a later plan waits for it, too
        self._finals = Finals()
        self._flights_max = FLIGHTS_MAX if config.async_steps else 1
        # After an abandoned step no plan is made until all under way have come back: they are
        # abandoned, too, and so would be one that was made before that is known.
        self._draining = False
        # Policy `ballot`: the group waits for a plan of prompts, or for our declining.
        self._turn = 0
        self._offer = Offer()  # the newest that the worker has
        self._serial = 0
        self._plan_seq = 0
        self._tokens_seq = 0
        self._items: list[TokensItem] = []
        self._resent = 0  # tokens in these that were asked for again
        self._rows: TokenRows | None = None
        self._out: list[BusToGateway] = []
        self._load = LoadReport()
        self._listing = Listing(seat, incarnation)
        self._cost = StepCost()
        # That sequences which moved here get in the next step at most.
        self._moved_rows = MOVED_ROWS
        self._resumes = False  # the group stopped: the next step is the first one since
        self._first_plan = 0  # for running sequences since the group stopped, while it is under way
        self._settling_until_ns = 0
        self._columns = columns
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            Submit: self._submit,
            AbortSequence: self._abort,
            Resend: self._resend,
            FinalSeen: self._final_seen,
            HandBack: self._hand_back,
            ListSequences: self._list_sequences,
            WorkerHello: self._hello,
            StepResult: self._result,
            PromptTurn: self._prompt_turn,
            Membership: self._on_membership,
            WorkerLost: self._worker_lost,
            GatewayChanged: self._gateway_changed,
            StoreArenas: self._store_arenas,
            StoreLost: self._store_lost,
            PutDone: self._put_done,
            ContainsReply: self._looked_up,
            GetDone: self._get_done,
        }

    # ------------------------------------------------------------ events and time

    def handle(self, event: object, now_ns: int) -> None:
        """Take one event: a message of the gateway, worker or KV store, or one of this module's.

        Answers and tokens come out of the next `step`. Other messages are not for a scheduler and
        are ignored.
        """
        handler = self._handlers.get(type(event))
        if handler is not None:
            self.table.begin()
            handler(event, now_ns)
            self.table.end()

    def step(self, now_ns: int) -> Actions:
        """Decide, now that a batch of events is in: the next plan if it is time, and all messages."""
        actions = Actions()
        self.table.begin()
        if self.store is not None:
            self.store.expire(now_ns)
        if self.restorer is not None:
            self._go_on(*self.restorer.expire(now_ns))
        if self.config.policy == "mixed":
            if self._may_plan:
                actions.add(self._plan(now_ns))
            elif self._first_plan and self.rank.waiting:
                self._begin_loads(now_ns)
        else:
            self._take_turns(actions, now_ns)
        self._repeat_finals(now_ns)
        self._flush_items()
        if (piece := self._listing.piece(self.sequences)) is not None:
            self._say(piece)
        load = self._current_load()
        self._write_header(load)
        if self._load.update(load, now_ns):
            self._say(self._with_room(load))
        self.table.end()
        actions.gateway, self._out = self._out, []
        return actions

    def store_step(self, now_ns: int) -> list[KVRequest]:
        """Background work for the KV store, to be called while a step is under way or none is due."""
        asked = list[KVRequest](self.restorer.work()) if self.restorer is not None else []
        return asked + list(self.store.work(now_ns)) if self.store is not None else asked

    @property
    def accepting(self) -> bool:
        return self.worker is not None and self._membership.member

    @property
    def _may_plan(self) -> bool:
        # Sequences are moving here during the first step since a stop. A second one planned ahead
        # of its result would be without them, and they would wait for one step more.
        most = 1 if self._first_plan else self._flights_max
        return self.accepting and not self._draining and len(self.flights) < most

    @property
    def busy(self) -> bool:
        """A plan is under way: its result is the next thing to wait for."""
        return bool(self.flights)

    def rows_of(self, seq: int) -> tuple[int, int]:
        """(rows, those of prompts) of a plan under way."""
        for flight in self.flights:
            if flight.seq == seq:
                return flight.num_rows, sum([chunk.count for chunk in flight.chunks])
        return 0, 0

    @property
    def listens(self) -> bool:
        """The worker may say something at any moment."""
        return bool(self.flights) or self._offer.wants_prompt

    @property
    def live(self) -> int:
        """Sequences that have not ended."""
        return self.rank.num_waiting + self.rank.num_running

    def wait_ms(self, now_ns: int) -> float:
        """How long nothing is due, unless an event comes."""
        if self._listing.busy or (self.store is not None and self.store.busy):
            return 0.0
        if self.restorer is not None and self.restorer.busy:
            return 0.0
        due_ns = self._load.due_ns
        if (final_ns := self._finals.next_due_ns) is not None:
            due_ns = min(due_ns, final_ns)
        if self.restorer is not None and (load_ns := self.restorer.due_ns) is not None:
            due_ns = min(due_ns, load_ns)
        return max(0.0, (due_ns - now_ns) / 1e6)

    # ------------------------------------------------------------ the gateway

    def _submit(self, submit: Submit, now_ns: int) -> None:
        key = (submit.request_id, submit.index)
        known = self.sequences.get(key)
        if known is not None and known.attempt == submit.attempt:
            self._say(Submitted(submit.call, self.seat, self.incarnation))
            return
        newest = max(known.attempt if known else -1, self._finals.last_attempt(key))
        if submit.attempt <= newest:
            text = f"attempt {submit.attempt} is over, attempt {newest} was here since"
            self._say(Refusal(submit.call, Code.UNKNOWN_REQUEST, text))
            return
        self._serial += 1
        try:
            sequence = admit(submit, self.worker if self.accepting else None, self.rank,
                             self.config, self._serial, now_ns)  # fmt: skip
        except Refused as refused:
            self._say(Refusal(submit.call, refused.code, refused.text))
            return
        except Exception as error:  # noqa: BLE001  # a bug that this one meets; nothing has changed yet
            text = f"this rank cannot take it: {error!r}"
            self._say(Refusal(submit.call, Code.INTERNAL, text))
            return
        if known is not None:
            self._forget(known)
        assert self.worker is not None
        self.sequences[key] = sequence
        self.table.insert(sequence, self.worker.eos_token_id)
        self._say(Submitted(submit.call, self.seat, self.incarnation))
        self.rank.enqueue(sequence)
        self._look_up(sequence, now_ns)
        if submit.outputs and (ended := finished_already(sequence, self.worker.eos_token_id)):
            self._finish(sequence, ended, now_ns)
            self._items.append(sequence.item(sequence.num_outputs))

    def _abort(self, abort: AbortSequence, now_ns: int) -> None:
        key = (abort.request_id, abort.index)
        known = self.sequences.get(key)
        if known is not None and known.attempt == abort.attempt:
            if known.finish is None:
                self._finish(known, abort.reason, now_ns)
                self._items.append(known.item(known.num_outputs))
        elif known is None or known.attempt < abort.attempt:
            # Overtook its Submit: whatever was here is older, and what may still come has ended.
            if known is not None:
                self._forget(known)
            self._finals.remember(key, abort.attempt)
        self._say(Done(abort.call))

    def _resend(self, resend: Resend, now_ns: int) -> None:
        known = self.sequences.get((resend.request_id, resend.index))
        if known is not None and known.attempt == resend.attempt:
            first = max(resend.prompt_offset, known.scores.first)
            for at in range(first, known.scores.count, RESENT_RECORDS):
                self._items.append(
                    known.score_item(at, min(at + RESENT_RECORDS, known.scores.count))
                )
                self._flush_items()
            self._say_again(known, resend.offset)

    def _say_again(self, sequence: Sequence, offset: int) -> None:
        """Its tokens from there on: of many sequences that may be more than one message takes."""
        end = sequence.num_outputs
        while True:
            upto = min(offset + RESENT_TOKENS, end)
            if self._resent + upto - offset > RESENT_TOKENS:
                self._flush_items()
            self._resent += max(0, upto - offset)
            if upto == end:
                self._items.append(sequence.item(offset))
                return
            self._items.append(sequence.item(offset, upto))
            offset = upto

    def _final_seen(self, seen: FinalSeen, now_ns: int) -> None:
        for request_id, index, attempt in seen.sequences:
            known = self.sequences.get((request_id, index))
            if known is not None and known.attempt == attempt and known.finish is not None:
                self._forget(known)

    def _hand_back(self, asked: HandBack, now_ns: int) -> None:
        """Another rank has room for those that wait here. What has begun goes on."""
        for request_id, index, attempt in asked.sequences:
            known = self.sequences.get((request_id, index))
            if known is None or known.attempt != attempt or known.finish is not None:
                continue
            if known.slot < 0:
                self._finish(known, "abort", now_ns)
                self._items.append(known.item(known.num_outputs))

    def _list_sequences(self, asked: ListSequences, now_ns: int) -> None:
        self._listing.begin(asked.call, self.sequences.values(), outputs=asked.outputs)

    def _gateway_changed(self, changed: GatewayChanged, now_ns: int) -> None:
        self._load.forget()

    def _say(self, message: BusToGateway) -> None:
        self._out.append(message)

    def _flush_items(self) -> None:
        if self._items or self._rows is not None:
            self._tokens_seq += 1
            items, self._items, self._resent = tuple(self._items), [], 0
            rows, self._rows = self._rows or _NO_ROWS, None
            self._say(Tokens(self.seat, self.incarnation, self._tokens_seq, items, rows))

    # ------------------------------------------------------------ the worker

    def _hello(self, hello: WorkerHello, now_ns: int) -> None:
        self._drop_all()
        self.worker = hello
        self.rank.reset(hello.num_blocks, hello.num_slots)

    def _worker_lost(self, lost: WorkerLost, now_ns: int) -> None:
        self.worker = None
        self._drop_all()

    def _drop_all(self) -> None:
        """The gateway moves the sequences; ended ones stay until it has their finals."""
        self.rank.reset(0, 0)
        for sequence in [s for s in self.sequences.values() if s.finish is None]:
            del self.sequences[sequence.key]
        self.flights.clear()
        self._first_plan = 0
        self._fences.clear()
        self._draining, self.rank.seen = False, self._plan_seq
        self.store = self.restorer = None
        self._turn, self._offer = 0, Offer()

    def _on_membership(self, membership: Membership, now_ns: int) -> None:
        # What came back when the group stopped may be planned already when it is told who goes on.
        # And what is under way and does not come back was not stopped for it: nobody has waited.
        changed = membership.epoch != self._membership.epoch
        self._resumes |= changed and not self._first_plan and not self.flights
        if changed and self._membership.epoch:
            self._settling_until_ns = now_ns + SETTLING_NS
        self._membership = membership

    def _plan(
        self, now_ns: int, *, decode: bool = True, prompts: bool = True, turn: int = 0
    ) -> StepPlan | None:
        """A step of rows of one or both kinds; None when there is nothing for it."""
        decoders = self._take_decoders(now_ns) if decode else Decoders()
        if decoders is None:
            return None
        prefill = self._take_chunks(decoders, now_ns) if prompts else Prefill()
        if not len(decoders.rows) and not prefill.chunks:
            return None
        self._plan_seq += 1
        plan, flight = make_plan(
            self._plan_seq, self.rank.seen, self.rank, decoders, prefill, self.restorer, turn
        )
        if self.store is not None and len(decoders.rows):
            plan = self._mark_decoded(plan, flight, self.store, now_ns)
        self.flights.append(flight)
        if self._resumes and len(decoders.rows) and self.config.policy == "mixed":
            self._first_plan = plan.seq
        self._resumes = False
        return plan

    def _take_decoders(self, now_ns: int) -> Decoders | None:
        assert self.worker is not None
        return take_decoders(
            self.rank,
            budget=self.config.max_num_batched_tokens,
            max_drafts=self.worker.max_drafts,
            idle=not self.flights,
            evict=lambda victim: self._evict(victim, now_ns),
        )

    def _take_chunks(self, decoders: Decoders, now_ns: int) -> Prefill:
        if not self.rank.prefilling and not self.rank.waiting:
            self._moved_rows = MOVED_ROWS
            return Prefill()
        prefill = take_chunks(
            self.rank,
            self._prompt_rows(decoders, now_ns),
            max_num_seqs=self.config.max_num_seqs,
            watermark=self.config.prefill_watermark,
            stored=self._stored(now_ns),
        )
        if prefill.num_rows >= self._moved_rows:
            self._moved_rows *= 2
        if self.store is not None:
            for chunk in prefill.chunks:
                self.store.claim(chunk, now_ns)
        return prefill

    def _mark_decoded(
        self, plan: StepPlan, flight: Flight, store: Offload, now_ns: int
    ) -> StepPlan:
        """The plan with the states that are kept behind its decoded rows, where these end blocks."""
        t, rows = self.rank.t, flight.decoders.rows
        places = (t.planned.take(rows) % BLOCK_SIZE == 0).nonzero()[0]
        for place in places.tolist():
            row, count = rows.item(place), flight.asked.item(place)
            start = t.planned.item(row) - count
            chunk = Chunk(self.table.by_row[row], start, count, samples=True)
            if store.mark_decoded(chunk, now_ns):
                flight.kept.append(chunk)
        if not flight.kept:
            return plan
        more = tuple([(chunk.sequence.slot, chunk.region) for chunk in flight.kept])
        return msgspec.structs.replace(plan, snapshots=plan.snapshots + more)

    def _begin_loads(self, now_ns: int) -> None:
        """What is stored of those that wait is loaded while their rows have to wait."""
        take_chunks(
            self.rank,
            0,
            max_num_seqs=self.config.max_num_seqs,
            watermark=self.config.prefill_watermark,
            stored=self._stored(now_ns),
        )

    def _stored(self, now_ns: int) -> _Stored | None:
        return _Stored(self.store, self.restorer, now_ns) if self.store is not None else None

    # ------------------------------------------------------------ policy `ballot`

    def _take_turns(self, actions: Actions, now_ns: int) -> None:
        """Plan what it is the turn of, and say what we would do if it were ours.

        A turn of prompts begins with nothing else under way: what was planned ahead comes back
        aborted. And nothing is planned ahead of a prompt step's result.
        """
        declined = self._offer.declined
        if self._may_plan:
            turn = 0 if self.flights else self._turn
            if turn:
                self._turn = 0
                plan = self._plan(now_ns, decode=False, turn=turn)
                declined = declined if plan is not None else turn
                actions.add(plan)
            if not self._turn and not (self.flights and self.flights[-1].chunks):
                actions.add(self._plan(now_ns, prompts=False))
        wants = declined == self._offer.declined and wants_prompt(
            self.rank,
            max_num_seqs=self.config.max_num_seqs,
            watermark=self.config.prefill_watermark,
            stored=self._stored(now_ns),
        )
        offer = Offer(
            wants_prompt=wants,  # not what was just declined, until this is looked at again
            decodes=bool(self.flights and self.rank.decoding),
            declined=declined,
        )
        if offer != self._offer:
            self._offer = actions.offer = offer

    def _prompt_turn(self, turn: PromptTurn, now_ns: int) -> None:
        self._turn = turn.turn

    # ------------------------------------------------------------ making plans

    def _prompt_rows(self, decoders: Decoders, now_ns: int) -> int:
        """Rows that prompts may have beside the decoders, within the target for a step's time.

        A few they always have, so that every prompt gets done whatever the target. Sequences that moved here
        come in portions even without a target, and not in the first step of a group that had stopped: streams
        of all ranks wait for the slowest rank's step, and a fault shall not be seen in those that it did not
        touch. So it is with arrivals, too, until the group has settled: a large step of theirs would be in the
        way of those who run and of those who are on their way here.
        """
        rank, rows = self.rank, decoders.num_rows
        if self._resumes and rows:
            return 0  # who runs has waited long enough for the group
        most = self.config.max_num_batched_tokens - rows
        target_us = self.config.target_itl_ms * 1000 if rows else 0.0
        if not self._moved_are_due() and now_ns >= self._settling_until_ns:
            self._moved_rows = MOVED_ROWS
        elif not target_us:
            # From steps of a few rows each it is not known well what many rows cost.
            most = min(most, self._moved_rows)
            usual_us = self._cost.predict_us(max(rows, 1), decoders.context(rank))
            longer_us = usual_us + max(min(usual_us, MOVED_LONGER_US), usual_us / MOVED_SHARE)
            target_us = max(MOVED_STEP_US, longer_us) if self._cost.known else 0.0
        if not target_us:
            return most
        least = min(most, PROMPT_ROWS_MIN)
        if not self._cost.known:
            return least
        start = rank.t.planned.item(rank.prefilling[0].row) if rank.prefilling else 0
        within = self._cost.rows_within(target_us, rows, decoders.context(rank), start, most)
        return max(within, least)

    def _moved_are_due(self) -> bool:
        """Whether a sequence that is ahead of arrivals is in prefill, or is the next one."""
        rank = self.rank
        for sequence in rank.prefilling:
            if sequence.order[0] == 0:
                return True
        return bool(rank.waiting) and rank.waiting[0].ahead

    def _evict(self, victim: Sequence, now_ns: int) -> None:
        """No block is left for its next token."""
        if self.config.preempt == "recompute" or victim.row not in self.rank.decoding:
            self.rank.preempt(victim)
            self._look_up(victim, now_ns)
            return
        text = (
            f"the KV pool of {self.rank.pool.total} blocks is full; this sequence makes room, and the"
            " node is configured to end it (scheduler.preempt: stop)"
        )
        self._finish(victim, "length", now_ns, Code.KV_PRESSURE, text)
        self._items.append(victim.item(victim.num_outputs))

    def _result(self, result: StepResult, now_ns: int) -> None:
        if not self.flights or self.flights[0].seq != result.seq:
            self._columns.note_stale()
            return
        flight = self.flights.popleft()
        self.rank.seen = flight.seq
        if flight.seq == self._first_plan:
            self._first_plan = 0
        if result.aborted:
            retract(self.rank, flight)
            self._resumes = True
        else:
            self._cost.observe(flight.num_rows, flight.context, result.step_us)
            self._commit(commit(self.rank, flight, result), now_ns)
        self._draining = bool(self.flights) and (self._draining or result.aborted)
        self._keep_states(flight, result.aborted)
        self._end_loads(flight, result.aborted)
        if result.unrestored:
            self._give_up_loads(flight, now_ns)
        self._open_fences(flight.seq)

    def _commit(self, done: Commit, now_ns: int) -> None:
        if done.ended:
            self._finish_all(done.ended, now_ns)
        if done.rows is not None and (self._items or self._rows is not None):
            self._flush_items()  # a message has its rows first
        self._rows = done.rows or self._rows
        self._items += done.items
        for sequence in done.unsaid:
            self._items.append(sequence.item(sequence.num_outputs))

    def _keep_states(self, flight: Flight, aborted: bool) -> None:
        if self.store is None:
            return
        for chunk in flight.chunks:
            if chunk.region >= 0:
                whole = not aborted and chunk.sequence.finish is None
                (self.store.captured if whole else self.store.unclaim)(chunk)
        for chunk in flight.kept:
            sequence = chunk.sequence
            whole = not aborted and sequence.finish is None
            if whole and self.rank.t.committed.item(sequence.row) == chunk.end:
                self.store.captured(chunk)
            else:  # a draft was rejected: the block is not full
                self.store.unclaim(chunk)

    def _open_fences(self, seq: int) -> None:
        fences = self._fences
        over: list[Sequence] = []
        while fences and fences[0][0] <= seq:
            over += fences.popleft()[1]
        self._give_back([], over)

    # ------------------------------------------------------------ ends

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        code: Code | None = None,
        error: str = "",
    ) -> None:
        self._finish_all([(sequence, reason, code, error)], now_ns)

    def _finish_all(self, ended: list[Ended], now_ns: int) -> None:
        """The one way to end. The caller sends the finals."""
        finals = self._finals
        finished = self.rank.finish(ended, finals.kept, now_ns, now_ns + REPEAT_NS)
        if finished is None:
            for sequence, reason, code, error in ended:
                assert sequence.finish is None, "it has ended before"
                sequence.finish, sequence.code, sequence.error = reason, code, error
            sequences = [end[0] for end in ended]
            self._release(sequences)
            finals.keep(sequences, now_ns)
        else:
            if self.restorer is not None:
                for sequence, *_ in ended:
                    self._leave_store(sequence, self.restorer)
            self._give_back(*finished)
        for oldest in finals.too_many():
            self._forget(oldest)

    def _release(self, sequences: list[Sequence]) -> None:
        """Out of the queues; blocks and slots back, now or with the step in flight that uses them."""
        rank, last_plan, seen = self.rank, self.rank.t.last_plan, self.rank.seen
        fences: list[Fence] = []
        over: list[Sequence] = []
        for sequence in sequences:
            rank.leave(sequence)
            if self.restorer is not None:
                self._leave_store(sequence, self.restorer)
            last = last_plan.item(sequence.row)
            if last > seen:
                rank.t.state[sequence.row], rank.t.named[sequence.row] = ENDING, 0
                fences.append((last, [sequence]))
            else:
                over.append(sequence)
        self._give_back(fences, over)

    def _give_back(self, fences: list[Fence], over: list[Sequence]) -> None:
        self._fences += fences
        if over:
            self.rank.free(over)
            self.table.remove(over)

    def _leave_store(self, sequence: Sequence, restorer: Restorer) -> None:
        restorer.leave(sequence)
        load = sequence.load
        if load is not None and not any(load in flight.loads for flight in self.flights):
            restorer.release(load)

    def _forget(self, sequence: Sequence) -> None:
        """Without a word: its final is acknowledged, or a later attempt takes its place."""
        if sequence.finish is None:
            sequence.finish = "abort"
            self._release([sequence])
        self._finals.drop(sequence)
        del self.sequences[sequence.key]

    def _repeat_finals(self, now_ns: int) -> None:
        due_ns = self._finals.next_due_ns
        if due_ns is None or due_ns > now_ns:
            return
        again, over = self._finals.due(now_ns)
        self._items += [sequence.item(sequence.num_outputs) for sequence in again]
        for sequence in over:
            self._forget(sequence)

    # ------------------------------------------------------------ the KV store

    def _store_arenas(self, arenas: StoreArenas, now_ns: int) -> None:
        if self.worker is not None and self._store_enabled:
            generations = arenas.blocks, arenas.snapshots
            self.store = Offload(
                self.worker,
                self.rank.pool,
                generations,
                self._store_calls,
                self.config.checkpoint_tokens // BLOCK_SIZE * BLOCK_SIZE,
            )
            if arenas.staging is not None:
                self.restorer = Restorer(self.worker, arenas.staging, self._store_calls)

    @property
    def has_put(self) -> bool:
        """Whether the KV store was given something since `store_stands`."""
        return self.store is not None and self.store.has_put

    def store_stands(self) -> None:
        """The connection to the KV store has not ended: what `store_step` gave until now went there."""
        if self.store is not None:
            self.store.stands()

    def _store_lost(self, lost: StoreLost, now_ns: int) -> None:
        if self.store is not None:
            self.store.lost()
        if self.restorer is not None:
            self._go_on(*self.restorer.lost())

    def _put_done(self, answer: PutDone, now_ns: int) -> None:
        if self.store is not None:
            self.store.done(answer)

    def _look_up(self, sequence: Sequence, now_ns: int) -> None:
        """A waiting sequence waits aside until it is known what the store has of it."""
        if self.restorer is None or not self.restorer.wants(sequence, now_ns):
            return
        leader = self.rank.leader_of(sequence)
        if leader is not None:  # it is forked from what that one has
            leader.leads = True
            return
        self.rank.set_aside(sequence)
        sequence.leads = bool(self.rank.followers(sequence))
        self.restorer.ask(sequence, now_ns)

    def _looked_up(self, reply: ContainsReply, now_ns: int) -> None:
        if self.restorer is None or (sequence := self.restorer.answered(reply)) is None:
            return
        sequence.common = reply.prefix if reply.prefix > reply.state else 0
        if self.store is not None:
            asked = sequence.keys[: self.restorer.blocks_wanted(sequence)]
            self.store.found(asked, reply.prefix, reply.state)
        self.rank.take_back(sequence)

    def _get_done(self, answer: GetDone, now_ns: int) -> None:
        if self.restorer is not None and (load := self.restorer.done(answer)) is not None:
            self._go_on([], [load])

    def _go_on(self, sequences: list[Sequence], loads: list[Load]) -> None:
        """These need not wait for the store any more: it has answered, or is late, or is dead."""
        for sequence in sequences:
            self.rank.take_back(sequence)
        for load in loads:
            sequence, found = load.sequence, load.num_tokens if load.wanted else 0
            self.rank.loaded(sequence, found)
            if sequence.num_outputs == 0:
                sequence.cached = found

    def _end_loads(self, flight: Flight, aborted: bool) -> None:
        """The worker has read the regions; after an abandoned step it reads them again."""
        if self.restorer is None:
            return
        for load in flight.loads:
            if load.wanted and (not aborted or load.sequence.finish is not None):
                self.restorer.release(load)

    def _give_up_loads(self, flight: Flight, now_ns: int) -> None:
        """The worker could not read the regions: these sequences begin anew, without what is stored
        (`Rank.lost_fork`), and are not loaded again."""
        if self.restorer is None:
            return
        for load in flight.loads:
            if load.wanted:
                self.restorer.unread(load, now_ns)
                if load.sequence.num_outputs == 0:
                    load.sequence.cached = 0

    # ------------------------------------------------------------ what others see

    def _current_load(self) -> SeatLoad:
        rank = self.rank
        unused = self.store.unused() if self.store is not None else 0
        return SeatLoad(
            self.seat,
            self.incarnation,
            self.accepting,
            rank.num_waiting,
            rank.num_running,
            rank.pool.free + unused,
            rank.pool.total,
            len(rank.free_slots),
            rank.total_slots,
            self.worker.worker_incarnation if self.worker is not None else 0,
        )

    def _with_room(self, load: SeatLoad) -> SeatLoad:
        rank, most, watermark = self.rank, self.config.max_num_seqs, self.config.prefill_watermark
        blocks, sequences, spare = room(rank, most, watermark)
        waiting = tuple([(*one.key, one.attempt) for one in stuck(rank, most, watermark)])
        return msgspec.structs.replace(
            load,
            room_blocks=blocks,
            room_sequences=sequences,
            spare_blocks=spare,
            stuck=waiting,
        )

    def _write_header(self, load: SeatLoad) -> None:
        self._columns.describe(
            self._membership.epoch,
            load.waiting,
            load.running,
            load.free_blocks,
            load.total_blocks,
            load.free_slots,
            load.total_slots,
        )
