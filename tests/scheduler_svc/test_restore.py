"""The way back from the KV store: what is stored is not computed again, whatever goes wrong costs time and never
a token, and the store writes only where nobody else reads."""

from collections.abc import Callable

import numpy as np
import pytest

from phalanx.protocol.kvkeys import block_keys, state_key
from phalanx.protocol.messages import (
    Contains,
    ContainsReply,
    Get,
    GetDone,
    Put,
    PutDone,
    Resend,
    Sampling,
    Submit,
)
from phalanx.protocol.prompt_logprobs import entries
from phalanx.protocol.queues import Phase
from phalanx.scheduler_svc import restore
from phalanx.scheduler_svc.events import Membership, Staging, StoreLost, WorkerLost
from sim.hash_worker import Ints, Staged, fault_free_scores
from sim.scheduler_story import Story, request_id

PROMPT = [(3 * at + 1) % 50 for at in range(300)]


class Shop:
    """A story whose store answers when it is told to."""

    def __init__(
        self, blocks: int = 8, states: int = 2, generation: int = 0, **options: object
    ) -> None:
        self.staged = Staged(blocks, states, 134)
        staging = Staging("ph-sim-staging", generation, blocks, states)
        self.story = Story(store=True, staging=staging, num_blocks=40, **options)  # type: ignore[arg-type]
        self.story.worker.staging["ph-sim-staging"] = self.staged
        self.kept: dict[bytes, Ints] = {}
        self.newest: dict[int, int] = {}  # region -> generation

    def asked(self, kind: type) -> list[object]:
        """Take what was asked of the store, of one kind."""
        for r in self.story.puts:
            if isinstance(r, Get):
                self.newest[r.handle.region] = r.handle.generation
        found = [r for r in self.story.puts if isinstance(r, kind)]
        self.story.puts = [r for r in self.story.puts if not isinstance(r, kind)]
        return found

    def put(self) -> None:
        worker = self.story.worker
        for put in self.asked(Put):
            assert isinstance(put, Put)
            pool = worker.blocks if put.kind == "block" else worker.snapshots
            self.kept[put.key] = pool[put.handle.offset // put.handle.nbytes].copy()
            self.story.event(PutDone(put.call, True, False))

    def contains(self) -> None:
        for asked in self.asked(Contains):
            assert isinstance(asked, Contains)
            keys = asked.keys
            stored = next((i for i, key in enumerate(keys) if key not in self.kept), len(keys))
            ends = [i + 1 for i in range(stored) if state_key(keys[i]) in self.kept]
            self.story.event(ContainsReply(asked.call, stored, max(ends, default=0)))

    def copy(self, get: object) -> GetDone:
        assert isinstance(get, Get)
        region = self.staged.record(get.handle.offset)
        if self.newest.get(get.handle.region) != get.handle.generation:
            return GetDone(get.call, False, reason="stale handle")
        region[:] = self.kept[get.key]
        return GetDone(get.call, True, region.nbytes)

    def get(self) -> None:
        self.story.event(*map(self.copy, self.asked(Get)))

    def serve(self) -> None:
        """Everything to its end."""
        for _ in range(2000):
            if self.story.plan is None and not self.story.puts:
                return
            self.put()
            self.contains()
            self.get()
            if self.story.plan is not None:
                self.story.step()
        raise AssertionError("it never ends")

    def warm(self, prompt: list[int] = PROMPT) -> "Shop":
        self.story.submit(90, prompt, max_tokens=1)
        self.serve()
        return self

    def assert_whole(self) -> None:
        assert self.story.core.restorer is not None and self.story.core.restorer.whole
        assert self.story.free == (39, 8)


def cached(story: Story, number: int) -> int:
    return max(item.cached_tokens for item in story.items(number))


def test_a_stored_prefix_is_not_computed() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    assert story.plan is None  # what the store has comes first
    shop.contains()
    assert [get.key for get in story.puts if isinstance(get, Get)] == [
        *(keys := block_keys(b"hash", b"", PROMPT)),
        state_key(keys[1]),
    ]
    assert story.columns.phase[story.columns.state > 0].tolist() == [Phase.LOADING]
    shop.get()
    assert [rows for _, rows in story.rows()] == [44]
    assert story.plan is not None and len(story.plan.restores) == 1
    shop.serve()
    assert story.outputs(0) == story.expected(0, 4)
    assert (cached(story, 0), cached(story, 90)) == (256, 0)
    shop.assert_whole()


def falls(shop: Shop) -> None:
    """It comes again with nothing."""
    shop.kept.clear()
    shop.story.event(StoreLost())


def evicts(shop: Shop) -> None:
    shop.kept.clear()


def evicts_states(shop: Shop) -> None:
    """Those alone, as each has its own key."""
    keys = [key for key in shop.kept if shop.kept[key].size != shop.story.worker.blocks[0].size]
    assert keys
    for key in keys:
        del shop.kept[key]


@pytest.mark.parametrize("forgets", [falls, evicts, evicts_states])
def test_what_the_store_has_no_more_is_put_again(forgets: Callable[[Shop], None]) -> None:
    shop = Shop().warm()
    kept = len(shop.kept)
    forgets(shop)
    shop.story.submit(1, PROMPT, max_tokens=1)
    shop.serve()
    assert cached(shop.story, 1) == 0 and len(shop.kept) == kept
    shop.story.submit(2, PROMPT, max_tokens=1)
    shop.serve()
    assert cached(shop.story, 2) == 256
    assert shop.story.outputs(2) == shop.story.expected(2, 1)


def test_what_is_run_to_check_is_computed_whole_and_not_stored() -> None:
    """A replay that read the blocks that a bad device wrote found everything equal."""
    shop = Shop().warm()
    kept = len(shop.kept)
    shop.story.submit(1, PROMPT, max_tokens=1, afresh=True)
    shop.serve()
    shop.story.submit(2, [*PROMPT[::-1]], max_tokens=1, afresh=True)
    shop.serve()
    assert (cached(shop.story, 1), cached(shop.story, 2)) == (0, 0) and len(shop.kept) == kept
    assert shop.story.outputs(1) == shop.story.expected(1, 1)


def test_what_can_be_loaded_soon_is_not_computed_now() -> None:
    """Not even where the whole prompt would fit into the step, and no state can be kept of it."""
    shop = Shop(states=1).warm()
    story = shop.story
    for number in (1, 2):
        story.submit(number, [number] * 130, max_tokens=1)
    while story.plan is not None or shop.story.core.rank.aside:
        shop.contains()
        story.step()  # and nothing is put: both of the worker's regions for states are taken
    story.submit(3, PROMPT, max_tokens=4)
    story.submit(4, PROMPT, max_tokens=4)
    shop.contains()
    assert story.plan is None  # 3 is loaded, 4 waits for the one staged state
    shop.serve()
    assert [cached(story, number) for number in (3, 4)] == [256, 256]
    assert [story.outputs(number) == story.expected(number, 4) for number in (3, 4)] == [True] * 2
    shop.assert_whole()


@pytest.mark.parametrize("length", [128, 129, 256, 257])
def test_one_token_is_always_computed(length: int) -> None:
    shop = Shop().warm(PROMPT[:length])
    shop.story.submit(0, PROMPT[:length], max_tokens=4)
    shop.serve()
    assert shop.story.outputs(0) == shop.story.expected(0, 4)
    # Of 256 tokens the first 128 would do, but their state was not kept.
    assert cached(shop.story, 0) == {128: 0, 129: 128, 256: 0, 257: 256}[length]
    shop.assert_whole()


def test_a_moved_sequence_takes_up_its_prompt() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(1, PROMPT, max_tokens=60)
    shop.serve()
    outputs = story.outputs(1)
    story.submit(2, PROMPT, outputs=outputs[:50], attempt=1, max_tokens=60, seed=1)
    shop.contains()
    shop.get()
    assert [rows for _, rows in story.rows()] == [94]
    shop.serve()
    assert story.items(2)[-1].offset + len(story.items(2)[-1].token_ids) == 60
    ends = [item for item in story.items(2) if item.finish_reason]
    assert len(ends) == 1 and story.outputs(1) == story.expected(1, 60)
    shop.assert_whole()


def test_a_moved_sequence_goes_on_behind_its_last_stored_output() -> None:
    shop = Shop()
    story = shop.story
    story.submit(0, PROMPT[:100], max_tokens=60)
    shop.serve()
    outputs = story.outputs(0)
    story.submit(2, PROMPT[:100], outputs=outputs[:40], attempt=1, max_tokens=60, seed=0)
    shop.contains()
    shop.get()
    assert [rows for _, rows in story.rows()] == [100 + 40 - 128]
    shop.serve()
    assert story.items(2)[0].offset == 40
    assert outputs[:40] + [t for item in story.items(2) for t in item.token_ids] == outputs
    shop.assert_whole()


def test_a_moved_sequence_loads_during_the_step_that_it_waits() -> None:
    """The first one after a stop of the group, which is of those who ran there."""
    shop = Shop().warm()
    story = shop.story
    story.submit(1, [7] * 20, max_tokens=60)
    story.step(3)
    story.event(Membership(4, True))
    story.submit(2, PROMPT, attempt=1, max_tokens=4)
    shop.contains()
    story.finish(abandon=True)
    assert [rows for _, rows in story.rows()] == [1]
    shop.get()
    story.finish()
    assert [rows for _, rows in story.rows()] == [1, 44]
    shop.serve()
    assert story.outputs(2) == story.expected(2, 4)
    shop.assert_whole()


def test_one_that_comes_during_that_step_loads_during_it_too() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(1, [7] * 20, max_tokens=60)
    story.step(3)
    story.finish(abandon=True)
    story.event(Membership(4, True))
    story.submit(2, PROMPT, attempt=1, max_tokens=4)
    shop.contains()
    shop.get()
    story.finish()
    assert [rows for _, rows in story.rows()] == [1, 44]
    shop.serve()
    assert story.outputs(2) == story.expected(2, 4)
    shop.assert_whole()


def miss(shop: Shop) -> None:
    """One of three is gone or does not verify."""
    first, *rest = shop.asked(Get)
    shop.story.event(*map(shop.copy, rest))
    assert isinstance(first, Get)
    shop.story.event(GetDone(first.call, False, reason="checksum"))


def short(shop: Shop) -> None:
    for get in shop.asked(Get):
        assert isinstance(get, Get)
        shop.story.event(GetDone(get.call, True, get.handle.nbytes - 8))


def silence(shop: Shop) -> None:
    shop.story.later(restore.LOAD_DEADLINE_MS + 1)


def death(shop: Shop) -> None:
    shop.story.event(StoreLost())


@pytest.mark.parametrize("fails", [miss, short, silence, death])
def test_a_load_that_fails_is_computed(fails: Callable[[Shop], None]) -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    shop.contains()
    fails(shop)
    assert [rows for _, rows in story.rows()] == [256]
    story.run()
    assert story.outputs(0) == story.expected(0, 4) and cached(story, 0) == 0
    shop.serve()
    shop.assert_whole()


@pytest.mark.parametrize("fails", [silence, death])
def test_a_question_without_an_answer(fails: Callable[[Shop], None]) -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    assert story.plan is None and story.core.wait_ms(story.now_ns) <= restore.ASK_DEADLINE_MS
    late = shop.asked(Contains)
    fails(shop)
    assert story.plan is not None
    story.event(*(ContainsReply(ask.call, 2, 2) for ask in late if isinstance(ask, Contains)))
    story.run()
    assert story.outputs(0) == story.expected(0, 4)
    if fails is silence:  # it gets a rest
        story.submit(1, PROMPT, max_tokens=2)
        assert story.plan is not None and not shop.asked(Contains)
        story.run()
        story.later(restore.QUIET_MS + 1)
    story.submit(2, PROMPT, max_tokens=2)
    shop.serve()
    assert cached(story, 2) == 256
    shop.assert_whole()


def test_others_go_first_meanwhile() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=2)
    story.submit(1, 5, max_tokens=2)
    assert [rows for _, rows in story.rows()] == [5]
    shop.contains()
    story.submit(2, 6, max_tokens=2)
    story.step()
    assert sorted(rows for _, rows in story.rows()) == [1, 6]
    assert story.columns.header[0]["running"] == 3
    shop.serve()
    assert all(story.outputs(n) == story.expected(n, 2) for n in range(3))


def test_blocks_of_an_aborted_load_are_free_at_once_and_no_late_copy_reaches_them() -> None:
    shop = Shop(blocks=2, states=1).warm()
    story = shop.story
    story.submit(0, PROMPT)
    shop.contains()
    late = shop.asked(Get)
    story.abort(0)
    assert story.ends(0) == ["abort"] and story.free == (39, 8)
    story.submit(1, PROMPT, max_tokens=4)
    shop.contains()
    places = [get.handle.offset for get in late if isinstance(get, Get)]
    again = shop.asked(Get)
    assert sorted(get.handle.offset for get in again if isinstance(get, Get)) == places
    answers = [shop.copy(get) for get in again]
    assert [shop.copy(get).found for get in late] == [False] * 3  # these regions are another's
    story.event(*answers)
    shop.serve()
    assert cached(story, 1) == 256 and story.outputs(1) == story.expected(1, 4)
    shop.assert_whole()


def test_generations_count_as_the_arena_does() -> None:
    """It has 32 bits for them, and whoever asks the store brings the region to the handle's one first."""
    shop = Shop(generation=2**32 - 2).warm()
    asked = set()
    for number in range(3):
        shop.story.submit(number, PROMPT, max_tokens=1)
        shop.contains()
        gets = shop.asked(Get)
        asked |= {get.handle.generation for get in gets if isinstance(get, Get)}
        shop.story.event(*map(shop.copy, gets))
        shop.serve()
    assert asked == {2**32 - 1, 0, 1}


def test_regions_stay_until_the_step_that_reads_them() -> None:
    shop = Shop(blocks=2, states=1).warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    story.submit(1, PROMPT, max_tokens=4)
    shop.contains()
    assert len(shop.story.puts) == 3  # the second load waits for the first
    shop.get()
    assert story.plan is not None and not story.puts
    story.abort(0)
    assert not story.puts
    story.step()
    assert len(story.puts) == 3
    shop.serve()
    assert cached(story, 1) == 256 and story.outputs(1) == story.expected(1, 4)
    shop.assert_whole()


def test_an_abandoned_step_restores_again() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    shop.contains()
    shop.get()
    for _ in range(2):
        assert story.plan is not None and len(story.plan.restores) == 1
        story.finish(abandon=True)
    shop.serve()
    assert story.outputs(0) == story.expected(0, 4)
    shop.assert_whole()


def test_what_the_worker_cannot_read_is_computed() -> None:
    """Its staging arena was removed, or it may open no more files. Were such a plan only made again, the rank
    would stand still for ever, and look well."""
    shop = Shop().warm()
    story = shop.story
    story.submit(1, 5, max_tokens=40)
    story.submit(0, PROMPT, max_tokens=4)
    story.submit(2, PROMPT[:200], max_tokens=4)
    shop.contains()
    shop.get()
    story.worker.unread.add("ph-sim-staging")
    shop.serve()
    for number in range(3):
        most = 40 if number == 1 else 4
        assert story.outputs(number) == story.expected(number, most)
        assert cached(story, number) == 0, "what was computed is not said to be cached"
    shop.assert_whole()
    story.submit(3, PROMPT, max_tokens=2)
    assert not shop.asked(Contains), "the next one does not try at once"
    story.run()
    assert story.outputs(3) == story.expected(3, 2)

    story.worker.unread.clear()
    story.later(restore.UNREAD_QUIET_MS)
    story.submit(4, PROMPT, max_tokens=2)
    shop.serve()
    assert cached(story, 4) == 256 and story.outputs(4) == story.expected(4, 2)
    shop.assert_whole()


def test_a_lost_worker_takes_its_loads_with_it() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    shop.contains()
    late = shop.asked(Get)
    story.event(WorkerLost())
    story.event(*map(shop.copy, late))
    assert story.core.restorer is None and story.core.live == 0


def test_sequences_of_one_request_load_once() -> None:
    shop = Shop().warm()
    story = shop.story
    story.submit(0, PROMPT, max_tokens=4)
    ids = np.array(PROMPT, np.int32).tobytes()
    sampling = story.prompts[0][1]
    story.event(Submit(7, request_id(0), 1, 0, ids, sampling))
    shop.contains()
    assert len(story.puts) == 3
    shop.get()
    shop.serve()
    found = [i for i in story.items(0) if i.index == 1]
    assert [t for i in found for t in i.token_ids] == story.expected(0, 4)
    assert max(i.cached_tokens for i in found) == 256
    shop.assert_whole()


def test_the_state_is_kept_where_prompts_part() -> None:
    """The second of those that share a beginning says where it ends, the third finds it."""
    shop = Shop().warm()
    story = shop.story
    for number in (1, 2):
        story.submit(number, [*PROMPT[:200], *[number] * 190], max_tokens=4)
        shop.serve()
        assert cached(story, number) == (128 if number == 2 else 0)
        assert story.outputs(number) == story.expected(number, 4)
    shop.assert_whole()


def test_states_within_a_long_prompt() -> None:
    shop = Shop(checkpoint_tokens=256)
    story = shop.story
    prompt = [*PROMPT, *PROMPT]
    story.submit(0, prompt, max_tokens=1)
    shop.contains()
    assert [rows for _, rows in story.rows()] == [256]
    shop.serve()
    keys = block_keys(b"hash", b"", prompt)
    assert [n for n, key in enumerate(keys) if state_key(key) in shop.kept] == [1, 3]
    assert story.outputs(0) == story.expected(0, 1)


@pytest.mark.parametrize(
    ("num_scores", "wanted", "loaded"),
    [(0, 1, 0), (255, 1, 0), (256, 1, 256), (298, 1, 256), (299, None, 256)],
)
def test_rows_whose_scores_the_gateway_has_are_loaded(
    num_scores: int, wanted: int | None, loaded: int
) -> None:
    """Of a moved sequence: only what tells a log-probability that is still missing must be computed."""
    shop = Shop().warm()
    story, sampling = shop.story, Sampling(max_tokens=4, prompt_logprobs=wanted, ignore_eos=True)
    ids = np.array(PROMPT, np.int32).tobytes()
    story.event(Submit(7, request_id(0), 0, 1, ids, sampling, num_scores=num_scores, resumed=True))
    shop.serve()
    said = story.items(0)
    assert max(item.cached_tokens for item in said) == loaded
    told = [item for item in said if item.prompt_logprobs]
    if wanted is not None:
        assert told[0].prompt_offset == num_scores
        records = b"".join(item.prompt_logprobs for item in told)
        assert list(entries(records, wanted)) == fault_free_scores(PROMPT, wanted)[num_scores:]
    assert bool(told) == (wanted is not None)
    # Asked for again it says what it has, and where that begins.
    story.event(Resend(request_id(0), 0, 1, 0, 0))
    assert all(item.prompt_offset == num_scores for item in story.items(0)[len(said) :][:1] if told)
    shop.assert_whole()
