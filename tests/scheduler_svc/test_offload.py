"""Write-behind into the KV store: what is put is what the key says, all is bounded, nothing waits for it."""

import pytest

from phalanx.protocol.kvkeys import block_keys, state_key
from phalanx.protocol.messages import AbortSequence, Put, PutDone
from phalanx.scheduler_svc import offload
from phalanx.scheduler_svc.events import StoreLost, WorkerLost
from sim.scheduler_story import MS, Story, request_id


def puts(story: Story) -> list[Put]:
    return [put for put in story.puts if isinstance(put, Put)]


def answer(story: Story, *, stored: bool = True) -> None:
    made, story.puts = puts(story), []
    story.event(*(PutDone(put.call, stored, False) for put in made))


def test_a_prompt_is_put_with_the_state_at_its_last_full_block() -> None:
    story = Story(store=True)
    story.submit(0, 300, max_tokens=4)
    assert [rows for _, rows in story.rows()] == [256]  # ends where the state is kept
    assert story.plan is not None and story.plan.snapshots == ((0, 0),)
    story.step()
    keys = block_keys(b"hash", b"", story.prompts[0][0])
    made = puts(story)
    assert [(p.key, p.kind) for p in made] == [
        (keys[0], "block"),
        (keys[1], "block"),
        (state_key(keys[1]), "state"),
    ]
    worker = story.worker
    size, slot = worker.blocks[0].nbytes, worker.rings[0].nbytes
    assert [p.handle.offset for p in made] == [1 * size, 2 * size, 0]
    assert [p.handle.nbytes for p in made] == [size, size, slot]
    assert {p.deadline_ns for p in made} == {story.now_ns + 5_000 * MS}
    story.run()
    assert story.outputs(0) == story.expected(0, 4)


def test_puts_tell_when_their_sequence_came() -> None:
    """The store refuses those of before it was cleared."""
    story = Story(store=True)
    came_ns = story.now_ns
    story.submit(0, 300, max_tokens=4)
    story.later(1_000)
    story.run()
    assert {put.begun_ns for put in puts(story)} == {came_ns}


@pytest.mark.parametrize("length", [127, 128, 129, 256])
def test_borders(length: int) -> None:
    story = Story(store=True, checkpoint_tokens=0)
    story.submit(0, length)
    story.run()
    assert len(puts(story)) == (length // 128 + 1 if length >= 128 else 0)
    assert story.outputs(0) == story.expected(0, 20)


def test_blocks_under_copy_stay_until_the_answer() -> None:
    story = Story(store=True)
    story.submit(0, 300, max_tokens=2)
    story.run()
    assert story.free == (17, 8)  # of 19: two are still read
    assert story.core.wait_ms(story.now_ns) > 0
    assert story.columns.header[0]["free_blocks"] == 19  # nobody uses them
    answer(story)
    assert story.free == (19, 8)


def test_they_come_back_at_the_deadline_and_the_store_has_a_rest() -> None:
    story = Story(store=True)
    story.submit(0, 300, max_tokens=2)
    story.run()
    late, story.puts = puts(story), []
    story.later(offload.PUT_DEADLINE_MS + 1)
    assert story.free == (19, 8)
    story.submit(1, 300, max_tokens=2)
    story.run()
    assert not puts(story) and story.free == (19, 8)
    story.event(*(PutDone(put.call, True, False) for put in late))  # too late: nothing
    assert story.free == (19, 8)
    story.later(offload.QUIET_MS + 1)
    story.submit(2, 300, max_tokens=2)
    story.run()
    assert len(puts(story)) == 3


def test_the_death_of_the_worker_ends_the_wait() -> None:
    story = Story(store=True)
    story.submit(0, 300, max_tokens=2)
    story.run()
    late, story.puts = puts(story), []
    story.event(WorkerLost())
    story.event(story.worker.hello())
    assert story.free == (19, 8)
    story.event(*(PutDone(put.call, True, False) for put in late))
    assert story.free == (19, 8)


def test_the_death_of_the_store_ends_the_wait() -> None:
    story = Story(store=True)
    story.submit(0, 300, max_tokens=2)
    story.run()
    late, story.puts = puts(story), []
    assert story.core.has_put
    story.core.store_stands()
    assert not story.core.has_put
    story.event(StoreLost())
    assert story.free == (19, 8)
    story.event(*(PutDone(put.call, True, False) for put in late))
    assert story.free == (19, 8)


def test_the_next_store_may_have_them_when_the_death_of_the_last_one_is_heard() -> None:
    story = Story(store=True)
    for number in range(2):
        story.submit(number, 300, max_tokens=2)
        story.run()
        late, story.puts = puts(story), []
        story.event(StoreLost())
        assert len(late) == 3 and story.free == (17, 8)
        if number == 0:
            story.event(*(PutDone(put.call, True, False) for put in late))
        else:
            story.later(offload.PUT_DEADLINE_MS + 1)
        assert story.free == (19, 8)
    story.submit(2, 300, max_tokens=2)  # no rest: the next store is not to blame
    story.run()
    assert len(puts(story)) == 3


def test_a_common_prefix_is_put_once() -> None:
    story = Story(store=True, num_blocks=40)
    prompt = [at % 50 for at in range(300)]
    story.submit(0, prompt, max_tokens=2)
    story.run()
    answer(story)
    story.submit(1, [*prompt[:290], 7, 8], max_tokens=2)
    story.run()
    assert puts(story) == [] and story.free == (39, 8)
    story.submit(2, [*prompt[:200], *[7] * 100], max_tokens=2)
    story.run()
    assert [put.kind for put in puts(story)] == ["block", "state"]


def test_a_refused_put_may_be_tried_again() -> None:
    story = Story(store=True)
    prompt = [at % 50 for at in range(200)]
    for number in range(2):
        story.submit(number, prompt, max_tokens=2)
        story.run()
        assert len(puts(story)) == 2
        answer(story, stored=False)
    assert story.free == (19, 8)


def test_without_a_region_the_prompt_runs_uncut() -> None:
    story = Story(store=True, num_snapshots=1)
    story.submit(0, 300, max_tokens=2)
    story.run()
    story.submit(1, 290, max_tokens=2)
    assert [rows for _, rows in story.rows()] == [290]
    story.run()
    assert len(puts(story)) == 3  # those of the first alone
    answer(story)
    story.submit(2, 280, max_tokens=2)
    assert [rows for _, rows in story.rows()] == [256]


def test_at_most_a_quarter_of_the_pool_is_under_copy() -> None:
    story = Story(store=True, num_blocks=13, num_snapshots=8)
    for number in range(4):
        story.submit(number, 260 - number, max_tokens=2)
        story.run()
    assert sum(put.kind == "block" for put in puts(story)) == 2
    assert story.free[0] == 10


def test_an_abandoned_step_keeps_no_state() -> None:
    story = Story(store=True, num_snapshots=1)
    story.submit(0, 300, max_tokens=2)
    story.finish(abandon=True)
    assert story.plan is not None and story.plan.snapshots == ((0, 0),)
    story.run()
    assert len(puts(story)) == 3
    answer(story)
    assert story.free == (19, 8)


def test_an_abort_during_that_step_gives_the_region_back_after_it() -> None:
    story = Story(store=True, num_snapshots=1)
    story.submit(0, 300)
    story.abort(0)
    story.submit(1, 300, max_tokens=2)
    story.step()
    assert puts(story) == [] and story.plan is not None
    assert story.plan.snapshots != ()
    story.run()
    assert len(puts(story)) == 3


def test_of_a_resumed_one_outputs_are_put_too() -> None:
    story = Story(store=True)
    story.submit(0, 250, outputs=[4] * 140, attempt=1, max_tokens=150)
    assert [rows for _, rows in story.rows()] == [128]
    story.run()
    keys = block_keys(b"hash", b"", [*story.prompts[0][0], *[4] * 140])
    assert {put.key for put in puts(story)} == {*keys, state_key(keys[0]), state_key(keys[2])}


def test_outputs_are_put_as_they_fill_blocks() -> None:
    """A state each time the sequence has doubled, then every so many tokens; and each block once."""
    story = Story(store=True, checkpoint_tokens=384)
    story.submit(0, 100, max_tokens=600)
    made: list[Put] = []
    while story.plan is not None:
        story.step()
        made += puts(story)
        answer(story)
    assert story.outputs(0) == story.expected(0, 600)
    keys = block_keys(b"hash", b"", [*story.prompts[0][0], *story.outputs(0)])
    states = [n + 1 for n, key in enumerate(keys) if state_key(key) in {put.key for put in made}]
    assert states == [1, 2, 3]
    assert [put.key for put in made if put.kind == "block"] == keys[:3]
    assert story.free == (19, 8)


def test_a_state_behind_rejected_drafts_is_not_kept() -> None:
    """The step was to end where a block does, and did not."""
    story = Story(store=True)
    story.submit(0, 100, max_tokens=60, predicted_token_ids=[7] * 60)
    planned = 0
    while story.plan is not None:
        planned += len(story.plan.snapshots)
        story.step()
    assert planned > 0 and not puts(story)
    story.submit(1, 300, max_tokens=2)  # its region is there
    story.run()
    assert len(puts(story)) == 3
    assert story.outputs(0) == story.expected(0, 60)


def test_no_state_is_kept_of_outputs_where_prompts_need_the_room() -> None:
    story = Story(store=True, num_snapshots=offload.PROMPT_REGIONS)
    story.submit(0, 100, max_tokens=60)
    story.run()
    assert not puts(story)


def test_keys_are_computed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "KEYS_PER_TURN", 1)
    story = Story(store=True, num_blocks=40)
    story.submit(9)
    for number in range(2):
        story.submit(number, 290 + number, max_tokens=2)
    story.step(2)
    first = len(puts(story))
    assert story.core.wait_ms(story.now_ns) == 0  # more to do
    story.event()
    assert (first, len(puts(story))) == (3, 6)


def test_off_when_it_is_off() -> None:
    story = Story(store=False)
    story.submit(0, 300, max_tokens=2)
    assert [rows for _, rows in story.rows()] == [300]
    story.run()
    assert story.puts == []


@pytest.mark.parametrize("order", ["abort first", "answer first", "both at once"])
def test_an_abort_and_the_end_of_a_copy_meet(order: str) -> None:
    """Whichever comes first: one final, the blocks stay as long as they are read, and all come back once."""
    story = Story(store=True)
    story.submit(0, 300, max_tokens=40)
    story.step(3)
    done = [PutDone(put.call, True, False) for put in puts(story)]
    assert done
    abort = AbortSequence(900, request_id(0), 0, 0)
    if order == "abort first":
        story.event(abort)
        story.step()
        assert story.free == (17, 8), "two are still read"
        story.event(*done)
    elif order == "answer first":
        story.event(*done)
        story.event(abort)
        story.step()
    else:
        story.event(*done, abort, *done)
        story.step()
    assert story.free == (19, 8) and story.ends(0) == ["abort"]
    assert story.outputs(0) == story.expected(0, 40)[:2]
    story.submit(1, 300, max_tokens=4)
    story.run()
    assert story.outputs(1) == story.expected(1, 4)
