"""The simulator finds planted bugs, each within a stated number of seeds: else it would not be testing."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import Get, GetDone, HandBack, Submit, Submitted
from phalanx.protocol.queues import Phase
from phalanx.protocol.steps import Restore, StepResult
from phalanx.scheduler_svc import commit as commit_module
from phalanx.scheduler_svc import core as core_module
from phalanx.scheduler_svc import decode as decode_module
from phalanx.scheduler_svc import plan as plan_module
from phalanx.scheduler_svc import prefill as prefill_module
from phalanx.scheduler_svc import state as state_module
from phalanx.scheduler_svc.blocks import BlockPool
from phalanx.scheduler_svc.commit import Commit
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.decode import Decoders
from phalanx.scheduler_svc.finals import Finals
from phalanx.scheduler_svc.offload import Offload
from phalanx.scheduler_svc.plan import Flight
from phalanx.scheduler_svc.rank import Fork, Rank
from phalanx.scheduler_svc.restore import Restorer
from phalanx.scheduler_svc.state import Chunk, Load, Sequence
from phalanx.worker_svc.slots import Slots
from sim import hash_worker
from sim.scheduler_checks import Onlooker
from sim.scheduler_world import Options, World

Patch = pytest.MonkeyPatch
Planter = Callable[[Patch], None]


def no_fence(patch: Patch) -> None:
    """Blocks of an ended sequence come back while its step is in flight."""

    def release(self: Scheduler, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.rank.leave(sequence)
        self.rank.free(sequences)
        self.table.remove(sequences)

    patch.setattr(Scheduler, "_release", release)


def fence_never_opens(patch: Patch) -> None:
    patch.setattr(Scheduler, "_open_fences", lambda self, seq: None)


def ring_of_128(patch: Patch) -> None:
    """No spare entries: rows that an abandoned step wrote ahead destroy the window."""
    init = hash_worker.HashWorker.__init__

    def small(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "ring": hash_worker.WINDOW})

    patch.setattr(hash_worker.HashWorker, "__init__", small)


def copy_without_holding(patch: Patch) -> None:
    """Blocks on their way into the store are not held."""
    patch.setattr(BlockPool, "retain", lambda self, blocks: None)
    patch.setattr(Offload, "_let_go", lambda self, block: None)
    patch.setattr(Offload, "holders", lambda self: [])


def pin_never_ends(patch: Patch) -> None:
    patch.setattr(Offload, "done", lambda self, answer: None)
    patch.setattr(Offload, "expire", lambda self, now_ns: None)


def region_given_back_early(patch: Patch) -> None:
    """A snapshot region is free for the next prompt as soon as its step is done."""
    captured = Offload.captured

    def early(self: Offload, chunk: Chunk) -> None:
        captured(self, chunk)
        if chunk.region >= 0:
            self._regions.append(chunk.region)

    patch.setattr(Offload, "captured", early)


def stale_result_accepted(patch: Patch) -> None:
    result = Scheduler._result

    def gullible(self: Scheduler, answer: StepResult, now_ns: int) -> None:
        if self.flights:
            flight = self.flights[0]
            decoders = len(flight.decoders.rows)
            wanted = decoders + sum(chunk.samples for chunk in flight.chunks)
            if answer.aborted or len(answer.counts) == wanted:
                answer = msgspec.structs.replace(answer, seq=flight.seq)
        result(self, answer, now_ns)

    patch.setattr(Scheduler, "_result", gullible)


def abort_in_prefill_leaks(patch: Patch) -> None:
    """A bug of DeepInfer's: a prompt aborted between its chunks keeps blocks and slot."""
    free = Rank.free

    def leaky(self: Rank, sequences: list[Sequence]) -> None:
        phases = self.t.phase[[sequence.row for sequence in sequences]].tolist()
        pairs = zip(sequences, phases, strict=True)
        free(self, [s for s, phase in pairs if s.finish != "abort" or phase != Phase.PREFILL])

    patch.setattr(Rank, "free", leaky)


def abort_says_nothing(patch: Patch) -> None:
    abort = Scheduler._abort

    def mute(self: Scheduler, message: Any, now_ns: int) -> None:
        before = len(self._items)
        abort(self, message, now_ns)
        del self._items[before:]
        self._finals.kept.clear()
        self._out.pop()

    patch.setattr(Scheduler, "_abort", mute)


def abort_lets_the_step_count(patch: Patch) -> None:
    """Tokens of the step in flight are sent after the abort's final."""
    monkey = Rank.leave

    def forgetful(self: Rank, sequence: Sequence) -> None:
        monkey(self, sequence)
        sequence.finish = None if sequence.finish == "abort" else sequence.finish

    patch.setattr(Rank, "leave", forgetful)


def preempt_forgets_outputs(patch: Patch) -> None:
    preempt = Rank.preempt

    def amnesia(self: Rank, sequence: Sequence) -> None:
        self.t.output_tokens[sequence.row] = 0
        preempt(self, sequence)

    patch.setattr(Rank, "preempt", amnesia)


def preempt_keeps_the_slot_known(patch: Patch) -> None:
    """The worker is not told that the sequence is new again."""
    preempt = Rank.preempt

    def keeps(self: Rank, sequence: Sequence) -> None:
        preempt(self, sequence)
        sequence.known = True

    patch.setattr(Rank, "preempt", keeps)


def preempt_keeps_committed(patch: Patch) -> None:
    preempt = Rank.preempt

    def keeps(self: Rank, sequence: Sequence) -> None:
        committed = self.t.committed[sequence.row]
        preempt(self, sequence)
        self.t.committed[sequence.row] = self.t.planned[sequence.row] = committed

    patch.setattr(Rank, "preempt", keeps)


def abandoned_chunk_counts(patch: Patch) -> None:
    """A chunk of an abandoned step is taken for computed."""

    def hasty(rank: Rank, flight: Flight) -> None:
        retract(rank, flight)
        for chunk in flight.chunks:
            if not chunk.samples and chunk.sequence.finish is None:
                rank.t.committed[chunk.sequence.row] += chunk.count
                rank.t.planned[chunk.sequence.row] += chunk.count

    retract = plan_module.retract
    patch.setattr(core_module, "retract", hasty)


def abandoned_blocks_untold(patch: Patch) -> None:
    """Blocks of an abandoned step are not told again."""

    def tells_once(rank: Rank, flight: Flight) -> None:
        retract(rank, flight)
        rank.t.told[flight.rows] += flight.added

    retract = plan_module.retract
    patch.setattr(core_module, "retract", tells_once)


def no_block_at_the_border(patch: Patch) -> None:
    """A decoding sequence gets its next block one position late."""

    def late(rank: Rank, found: Decoders) -> Any:
        rank.t.planned[found.rows] -= 1
        try:
            return missing(rank, found)
        finally:
            rank.t.planned[found.rows] += 1

    missing = decode_module._missing_blocks
    patch.setattr(decode_module, "_missing_blocks", late)


def no_block_for_drafts(patch: Patch) -> None:
    """Blocks are taken for the first row alone."""

    def short(rank: Rank, found: Decoders) -> Any:
        drafts, found.drafts = found.drafts, np.zeros_like(found.drafts)
        try:
            return missing(rank, found)
        finally:
            found.drafts = drafts

    missing = decode_module._missing_blocks
    patch.setattr(decode_module, "_missing_blocks", short)


def drafts_pass_unseen(patch: Patch) -> None:
    """Every draft is taken for right."""
    patch.setattr(Slots, "_passed", lambda self, rows, tokens, status: np.ones(len(tokens), bool))


def rejected_drafts_stay_counted(patch: Patch) -> None:
    """The scheduler believes in rows that the worker took back."""

    def gullible(rank: Rank, flight: Flight, result: StepResult) -> Commit:
        rows = flight.decoders.rows
        planned = rank.t.planned[rows]
        done = commit(rank, flight, result)
        rank.t.planned[rows] = planned
        return done

    commit = commit_module.commit
    patch.setattr(core_module, "commit", gullible)


def plans_claim_to_know_everything(patch: Patch) -> None:
    """A plan made before an abandoned step was known runs all the same."""

    def boastful(seq: int, seen: int, *rest: Any) -> Any:
        return make(seq, 1 << 40, *rest)

    make = plan_module.make_plan
    patch.setattr(core_module, "make_plan", boastful)


def fence_opens_one_step_early(patch: Patch) -> None:
    """Of two steps under way, the first gives the blocks back."""

    def eager(self: Scheduler, seq: int) -> None:
        opens(self, seq + 1)

    opens = Scheduler._open_fences
    patch.setattr(Scheduler, "_open_fences", eager)


def preempts_under_a_step(patch: Patch) -> None:
    """Blocks are taken from a sequence that a step under way still writes."""

    def ruthless(rank: Rank, **options: Any) -> Any:
        return take(rank, **{**options, "idle": True})

    take = decode_module.take_decoders
    patch.setattr(core_module, "take_decoders", ruthless)


def same_submit_starts_again(patch: Patch) -> None:
    submit = Scheduler._submit

    def naive(self: Scheduler, message: Submit, now_ns: int) -> None:
        known = self.sequences.get((message.request_id, message.index))
        if known is not None and known.attempt == message.attempt:
            self._forget(known)
            self._finals._ended.clear()
        submit(self, message, now_ns)

    patch.setattr(Scheduler, "_submit", naive)


def late_submit_revives(patch: Patch) -> None:
    """Nothing remembers that a sequence has ended and was acknowledged."""
    patch.setattr(Finals, "remember", lambda self, key, attempt: None)


def old_attempt_stays(patch: Patch) -> None:
    """A new attempt is taken for a repetition of the one that is here."""
    submit = Scheduler._submit

    def stubborn(self: Scheduler, message: Submit, now_ns: int) -> None:
        if (message.request_id, message.index) in self.sequences:
            self._say(Submitted(message.call, self.seat, self.incarnation))
        else:
            submit(self, message, now_ns)

    patch.setattr(Scheduler, "_submit", stubborn)


def final_said_once(patch: Patch) -> None:
    """A final that gets lost is never said again."""
    patch.setattr(Scheduler, "_repeat_finals", lambda self, now_ns: None)


def too_large_is_queued(patch: Patch) -> None:
    """What can never fit waits at the head of the queue for ever."""
    patch.setattr("phalanx.scheduler_svc.admission.blocks_for", lambda num_tokens: 0)


def attempts_tell_what_is_resumed(patch: Patch) -> None:
    """The first attempt of a gateway has a large number: so everything counts as resumed."""

    def by_number(submit: Submit, *rest: Any) -> Sequence:
        return admit(msgspec.structs.replace(submit, resumed=submit.attempt > 0), *rest)

    admit = core_module.admit
    patch.setattr(core_module, "admit", by_number)


def queue_without_a_bound(patch: Patch) -> None:
    def generous(
        submit: Submit, worker: Any, rank: Rank, config: SchedulerConfig, *rest: Any
    ) -> Sequence:
        return admit(submit, worker, rank, msgspec.structs.replace(config, max_waiting=999), *rest)

    admit = core_module.admit
    patch.setattr(core_module, "admit", generous)


def lost_worker_keeps_sequences(patch: Patch) -> None:
    def keeps(self: Scheduler, *ignored: Any) -> None:
        self.flights.clear()

    patch.setattr(Scheduler, "_worker_lost", keeps)
    patch.setattr(Scheduler, "_drop_all", keeps)


def fork_shares_the_last_block(patch: Patch) -> None:
    """Leader and follower both write the block that is not full."""
    fork = Rank.fork

    def shares(self: Rank, leader: Sequence, follower: Sequence) -> Fork:
        made = fork(self, leader, follower)
        shared = self.shared_blocks(leader)
        if made.leader_block:
            self.pool.release([follower.blocks[shared]])
            self.pool.retain([leader.blocks[shared]])
            follower.blocks[shared] = leader.blocks[shared]
        return made

    patch.setattr(Rank, "fork", shares)


def fork_leaves_the_slot(patch: Patch) -> None:
    """The block is copied, the window is not."""
    fork = Rank.fork

    def half(self: Rank, leader: Sequence, follower: Sequence) -> Fork:
        return fork(self, leader, follower)._replace(leader_slot=follower.slot)

    patch.setattr(Rank, "fork", half)


def fork_holds_nothing(patch: Patch) -> None:
    """Shared blocks have one holder: the first to end gives them away."""
    fork = Rank.fork

    def careless(self: Rank, leader: Sequence, follower: Sequence) -> Fork:
        made = fork(self, leader, follower)
        for block in leader.blocks[: self.shared_blocks(leader)]:
            self.pool._refs[block] -= 1
        return made

    patch.setattr(Rank, "fork", careless)


def lost_fork_goes_on(patch: Patch) -> None:
    """The step with the copy was abandoned, and nobody minds."""
    patch.setattr(Rank, "lost_fork", lambda self, sequence: False)


def leader_is_not_cut(patch: Patch) -> None:
    """Followers take over what stands one token further than they believe."""
    planned = prefill_module._Taking._planned

    def fork(self: Any, sequence: Sequence, most: int) -> None:
        give(self, sequence, most)
        if planned(self, sequence) == sequence.num_tokens and self._left:
            self._fork(sequence)

    give = prefill_module._Taking._give
    patch.setattr(prefill_module._Taking, "_give", fork)
    patch.setattr(prefill_module._Taking, "_end", lambda self, sequence: sequence.num_tokens)


def region_without_a_generation(patch: Patch) -> None:
    """A late copy finds its region as it was, though that is another load's now."""
    ask_for = Restorer._ask_for

    def timeless(self: Restorer, *wanted: Any) -> Get:
        get = ask_for(self, *wanted)
        return msgspec.structs.replace(
            get, handle=msgspec.structs.replace(get.handle, generation=0)
        )

    patch.setattr(Restorer, "_ask_for", timeless)


def restored_into_wrong_blocks(patch: Patch) -> None:
    restores = Restorer.restores

    def shifted(self: Restorer, load: Load) -> Restore:
        made = restores(self, load)
        blocks = np.roll(np.frombuffer(made.blocks, np.int32), 1)
        return msgspec.structs.replace(made, blocks=blocks.tobytes())

    patch.setattr(Restorer, "restores", shifted)


def state_not_restored(patch: Patch) -> None:
    """The blocks alone: the window is what the slot held before."""
    get = Restorer._get

    def half(self: Restorer, load: Load) -> list[Get]:
        *blocks, state = get(self, load)
        load.calls.remove(state.call)
        del self._gets[state.call]
        return blocks

    patch.setattr(Restorer, "_get", half)


def restored_too_far(patch: Patch) -> None:
    loaded = Rank.loaded

    def further(self: Rank, sequence: Sequence, num_tokens: int) -> None:
        loaded(
            self, sequence, num_tokens + (num_tokens > 0 and num_tokens + 1 < sequence.num_tokens)
        )

    patch.setattr(Rank, "loaded", further)


def failed_load_counts(patch: Patch) -> None:
    done = Restorer.done

    def gullible(self: Restorer, answer: GetDone) -> Load | None:
        _, nbytes = self._gets.get(answer.call, (None, 0))
        return done(self, msgspec.structs.replace(answer, found=True, nbytes=nbytes))

    patch.setattr(Restorer, "done", gullible)


def load_never_ends(patch: Patch) -> None:
    """A store that is late holds its sequence for as long as it likes."""
    patch.setattr(Restorer, "expire", lambda self, now_ns: ([], []))


def abandoned_restore_counts(patch: Patch) -> None:
    """The step that copies was abandoned, perhaps before it began, and is not told to copy again."""

    def once(self: Scheduler, flight: Flight, aborted: bool) -> None:
        end(self, flight, aborted=False)

    end = Scheduler._end_loads
    patch.setattr(Scheduler, "_end_loads", once)
    patch.setattr(Rank, "lost_fork", lambda self, sequence: False)


def gives_back_what_runs(patch: Patch) -> None:
    def hand_back(self: Scheduler, asked: HandBack, now_ns: int) -> None:
        for request_id, index, attempt in asked.sequences:
            known = self.sequences.get((request_id, index))
            if known is not None and known.attempt == attempt and known.finish is None:
                self._finish(known, "abort", now_ns)
                self._items.append(known.item(known.num_outputs))

    patch.setattr(Scheduler, "_hand_back", hand_back)


def gives_back_without_a_word(patch: Patch) -> None:
    """It is dropped, as the loss of a worker drops everything; but nobody knows."""

    def hand_back(self: Scheduler, asked: HandBack, now_ns: int) -> None:
        for request_id, index, attempt in asked.sequences:
            known = self.sequences.get((request_id, index))
            waits = known is not None and known.attempt == attempt and known.slot < 0
            if known is not None and waits and known.finish is None:
                self._forget(known)

    patch.setattr(Scheduler, "_hand_back", hand_back)


# Seeds within which each is found: several times what it took when it was planted first.
PLANTED: list[tuple[Planter, int]] = [
    (no_fence, 20),
    (fence_never_opens, 20),
    (ring_of_128, 20),
    (copy_without_holding, 40),
    (pin_never_ends, 60),
    (region_given_back_early, 60),
    (stale_result_accepted, 20),
    (abort_in_prefill_leaks, 80),
    (abort_says_nothing, 20),
    (abort_lets_the_step_count, 20),
    (preempt_forgets_outputs, 40),
    (preempt_keeps_the_slot_known, 100),
    (preempt_keeps_committed, 100),
    (no_block_for_drafts, 60),
    (drafts_pass_unseen, 20),
    (rejected_drafts_stay_counted, 20),
    (plans_claim_to_know_everything, 60),
    (fence_opens_one_step_early, 60),
    (preempts_under_a_step, 60),
    (abandoned_chunk_counts, 20),
    (abandoned_blocks_untold, 40),
    (no_block_at_the_border, 10),
    (same_submit_starts_again, 20),
    (late_submit_revives, 250),
    (old_attempt_stays, 120),
    (final_said_once, 20),
    (too_large_is_queued, 30),
    (attempts_tell_what_is_resumed, 20),
    (queue_without_a_bound, 60),
    (lost_worker_keeps_sequences, 20),
    (fork_shares_the_last_block, 60),
    (fork_leaves_the_slot, 60),
    (fork_holds_nothing, 60),
    (lost_fork_goes_on, 200),
    (leader_is_not_cut, 60),
    (gives_back_what_runs, 20),
    (gives_back_without_a_word, 40),
]


# The same, for what happens to prompts that come again.
PLANTED_STORED: list[tuple[Planter, int]] = [
    (restored_into_wrong_blocks, 60),
    (state_not_restored, 20),
    (restored_too_far, 20),
    (failed_load_counts, 100),
    (load_never_ends, 100),
    (abandoned_restore_counts, 100),
]


# Where rare ones were found when last looked for: it spares every run the search.
FIRST: dict[Planter, int] = {
    abort_in_prefill_leaks: 14,
    late_submit_revives: 25,
    old_attempt_stays: 25,
    final_said_once: 10,
    preempts_under_a_step: 7,
    lost_worker_keeps_sequences: 7,
    lost_fork_goes_on: 24,
    gives_back_without_a_word: 8,
    restored_into_wrong_blocks: 24,
    failed_load_counts: 6,
    abandoned_restore_counts: 4,
}


@pytest.mark.parametrize(("plant", "seeds"), PLANTED, ids=[p.__name__ for p, _ in PLANTED])
def test_planted_bug_is_found(
    plant: Planter, seeds: int, monkeypatch: Patch, record_property: Callable[[str, object], None]
) -> None:
    search(plant, seeds, Options.of, monkeypatch, record_property)


@pytest.mark.parametrize(
    ("plant", "seeds"), PLANTED_STORED, ids=[p.__name__ for p, _ in PLANTED_STORED]
)
def test_planted_bug_with_stored_prompts_is_found(
    plant: Planter, seeds: int, monkeypatch: Patch, record_property: Callable[[str, object], None]
) -> None:
    search(plant, seeds, Options.stored, monkeypatch, record_property)


def test_a_region_without_a_generation_is_found(
    monkeypatch: Patch, record_property: Callable[[str, object], None]
) -> None:
    search(region_without_a_generation, 40, one_state, monkeypatch, record_property)


def test_a_step_that_writes_what_is_free_is_found_by_that(monkeypatch: Patch) -> None:
    """Not only by a wrong token, once somebody else has the block; nor by who looks at the scheduler's books."""
    no_fence(monkeypatch)
    monkeypatch.setattr(Onlooker, "check", lambda self: None)
    found: list[str] = []
    for seed in range(12):
        try:
            World(seed).run()
        except (AssertionError, KeyError) as error:
            found.append(str(error))
            if "were written" in found[-1]:
                return
    raise AssertionError(found)


def one_state(rng: Random) -> Options:
    """Many loads follow each other through the one place for a state in the staging arena."""
    options = Options.stored(rng)
    config = msgspec.structs.replace(options.config, checkpoint_tokens=0)
    return msgspec.structs.replace(options, config=config, staged=(2, 1), requests=24)


def search(
    plant: Planter,
    seeds: int,
    options: Callable[[Random], Options],
    patch: Patch,
    record_property: Callable[[str, object], None],
) -> None:
    patch.setattr(state_module, "ROWS", None)  # the bugs are planted in the passes in Python
    plant(patch)
    first = FIRST.get(plant, 0)
    for seed in range(first, first + seeds):
        try:
            World(seed, options=options).run()
        except (AssertionError, IndexError, KeyError) as found:
            record_property("seed", seed)
            print(f"seed {seed}: {found}")
            return
    pytest.fail(f"{plant.__name__} was not found within {seeds} seeds")
