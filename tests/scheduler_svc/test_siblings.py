"""Sequences of one request that come from another rank with outputs need the blocks of their prompt once, as they did
there; and no token is another one for it."""

import numpy as np
import pytest
from scheduler_svc.test_restore import PROMPT, Shop

from phalanx.protocol.messages import Get, SeatLoad, Submit
from phalanx.scheduler_svc.load import REPEAT_NS
from sim.hash_worker import fault_free
from sim.scheduler_story import MS, Story, request_id

LONG = [(7 * at + 2) % 50 for at in range(500)]  # 4 blocks, 3 of them full before its last token
MOST = 40


def move(story: Story, prompt: list[int], *had: int) -> list[Submit]:
    """Sequences of one request, each with so many outputs."""
    ids = np.array(prompt, np.int32).tobytes()
    story.submit(0, prompt, seed=0, max_tokens=MOST, outputs=right(prompt, 0, had[0]), resumed=True)
    sampling = story.prompts[0][1]
    others = [
        Submit(
            7 + index,
            request_id(0),
            index,
            0,
            ids,
            type(sampling)(seed=index, max_tokens=MOST, ignore_eos=True),
            np.array(right(prompt, index, count), np.int32).tobytes(),
            resumed=True,
        )
        for index, count in enumerate(had[1:], 1)
    ]
    story.event(*others)
    return others


def right(prompt: list[int], index: int, count: int) -> list[int]:
    return fault_free(prompt, index, count)


def check_outputs(story: Story, prompt: list[int], *had: int) -> None:
    for index, count in enumerate(had):
        items = [item for item in story.items(0) if item.index == index]
        tokens = right(prompt, index, count)
        for item in items:
            assert item.offset <= len(tokens), "a gap"
            tokens[item.offset :] = item.token_ids
        assert tokens == right(prompt, index, MOST)
        assert [i.finish_reason for i in items if i.finish_reason] == ["length"]


@pytest.mark.parametrize("had", [(5, 9, 0), (0, 3), (20, 1), (25, 24)])
def test_they_start_together_where_each_alone_would_not_fit(had: tuple[int, ...]) -> None:
    story = Story(num_blocks=9, max_num_batched_tokens=200)
    move(story, LONG, *had)
    story.step(3 + len(had))
    rank = story.core.rank
    assert rank.num_running == len(had) and not rank.waiting
    blocks = [one.blocks[:3] for one in story.core.sequences.values()]
    assert all(found == blocks[0] for found in blocks)
    story.run()
    check_outputs(story, LONG, *had)
    assert story.free == (8, 8)


@pytest.mark.parametrize("abandoned", range(1, 8))
def test_an_abandoned_step_of_theirs_is_done_again(abandoned: int) -> None:
    story = Story(num_blocks=9, max_num_batched_tokens=120)
    move(story, LONG, 20, 9)
    story.step(abandoned - 1)
    story.finish(abandon=True)
    story.run()
    check_outputs(story, LONG, 20, 9)
    assert story.free == (8, 8)


def test_one_that_is_forked_was_begun_with_the_first() -> None:
    """The store refuses blocks of before it was cleared: those that it shares, too."""
    story = Story(num_blocks=20, max_num_batched_tokens=200)
    story.submit(0, LONG, seed=0)
    came_ns = story.now_ns
    story.later(1_000)
    ids = np.array(LONG, np.int32).tobytes()
    story.event(Submit(7, request_id(0), 1, 0, ids, story.prompts[0][1]))
    story.step(3)
    first, second = story.core.sequences.values()
    assert second.blocks[:3] == first.blocks[:3] and second.arrival_ns > came_ns
    assert first.begun_ns == second.begun_ns == came_ns


def test_one_that_comes_too_late_computes_it_itself() -> None:
    story = Story(num_blocks=20)
    (late,) = move(Story(num_blocks=20), LONG, 5, 9)
    story.submit(0, LONG, seed=0, max_tokens=MOST, outputs=right(LONG, 0, 5), resumed=True)
    story.step(3)
    story.event(late)
    story.step()
    assert [len(one.blocks) for one in story.core.sequences.values()] == [4, 4]
    assert story.core.rank.pool.used == 8
    story.run()
    check_outputs(story, LONG, 5, 9)


def test_of_a_prompt_below_a_block_nothing_is_shared() -> None:
    story = Story()
    move(story, LONG[:100], 5, 9)
    assert [rows for _, rows in story.rows()] == [105]
    story.finish()
    assert [rows for _, rows in story.rows()] == [1, 109]
    story.run()
    check_outputs(story, LONG[:100], 5, 9)


def test_no_more_than_their_prompt_is_loaded() -> None:
    """What is stored of the first one's outputs is behind the place where the second one begins."""
    shop = Shop(num_slots=8, checkpoint_tokens=128)
    story = shop.story
    story.submit(5, PROMPT[:250], seed=0, max_tokens=MOST)
    shop.serve()
    move(story, PROMPT[:250], 20, 9)
    assert len(right(PROMPT[:250], 0, 20)) + 250 > 256
    shop.contains()
    shop.contains()
    assert len([get for get in story.puts if isinstance(get, Get)]) == 2, "a block and a state"
    shop.serve()
    check_outputs(story, PROMPT[:250], 20, 9)
    shop.assert_whole()


def test_those_that_wait_want_the_blocks_of_their_prompt_once() -> None:
    story = Story(num_blocks=31, prefill_watermark=1.0, max_num_seqs=2)
    for number in (1, 2):
        story.submit(number, 20, max_tokens=60)
    story.step()
    move(story, LONG, 5, 9)
    story.now_ns += REPEAT_NS - MS
    story.later(1)
    said = story.of(SeatLoad)[-1]
    assert said.waiting == 2 and said.room_sequences == 0
    story = Story(num_blocks=31, prefill_watermark=1.0, max_num_batched_tokens=8)
    story.submit(1, 20, max_tokens=60)
    move(story, LONG, 5, 9)
    said = load(story)
    assert said.waiting == 2 and said.room_blocks == 30 - 1 - 1 - 4 - 1


def load(story: Story) -> SeatLoad:
    story.now_ns += REPEAT_NS
    story.later(0)
    return story.of(SeatLoad)[-1]
