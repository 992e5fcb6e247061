"""When memory runs out: what came from elsewhere makes room, else the longest output; it is recomputed, the
same tokens come out, and something always runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.errors import Code
from phalanx.protocol.queues import Phase, State
from phalanx.scheduler_svc.plan import retract
from sim.scheduler_story import Story


def preemptions(story: Story) -> int:
    return int(story.columns.preemptions.sum())


def test_the_longest_output_makes_room_and_loses_no_token() -> None:
    story = Story(num_blocks=5)
    story.submit(0, 120, max_tokens=100)
    story.step(4)
    story.submit(1, 126, max_tokens=30)
    story.submit(2, 127, max_tokens=30)
    story.submit(3, 20, max_tokens=50)
    assert story.columns.preemptions.max() == 0
    while preemptions(story) == 0:
        story.step()
    (victim,) = story.core.rank.waiting
    assert victim.request_id == f"{0:032x}"
    assert story.columns.state[victim.row] == State.WAITING
    assert story.columns.phase[victim.row] == Phase.PREEMPTED
    assert story.columns.output_tokens[victim.row] == victim.num_outputs > 0
    story.run()
    for number, count in ((0, 100), (1, 30), (2, 30), (3, 50)):
        assert story.outputs(number) == story.expected(number, count)
        assert story.ends(number) == ["length"]
    assert story.free == (4, 8)


def test_what_came_from_another_rank_makes_room_before_those_who_ran_here() -> None:
    """A fault elsewhere pushes nobody out. Of several that came, the last one goes."""
    story = Story(num_blocks=7, prefill_watermark=1.0)
    story.submit(0, 120, max_tokens=100)  # the longest output, when memory runs out
    story.submit(1, 120, max_tokens=100)
    story.step(4)
    for number in (2, 3):
        story.submit(number, 120, max_tokens=100, resumed=True)
        story.step()
    while preemptions(story) == 0:
        story.step()
    (victim,) = story.core.rank.waiting
    assert victim.request_id == f"{3:032x}"
    story.run()
    for number in range(4):
        assert story.outputs(number) == story.expected(number, 100)


def test_what_came_from_another_rank_leaves_room_to_grow() -> None:
    """An arrival may fill the pool; one that moves here waits rather, unless it is alone."""
    for resumed, starts in ((True, False), (False, True)):
        story = Story(num_blocks=11)
        story.submit(0, 580, max_tokens=100)
        story.step(2)
        story.submit(1, 580, max_tokens=20, resumed=resumed)
        story.step(2)
        assert (story.core.rank.num_running == 2) == starts
        story.run()
        assert story.outputs(0) == story.expected(0, 100)
        assert story.outputs(1) == story.expected(1, 20)
    story = Story(num_blocks=6)
    story.submit(0, 580, max_tokens=20, resumed=True)
    story.run()
    assert story.ends(0) == ["length"]


@pytest.mark.parametrize("outputs", [61, 62])
def test_a_pool_may_be_filled_where_all_have_room_to_their_ends(outputs: int) -> None:
    """Beyond the watermark: what cannot grow pushes nobody out. With one token more it might."""
    story = Story(num_blocks=11)
    story.submit(0, 576, max_tokens=65)  # 5 blocks, to its end
    story.step(2)
    story.submit(1, 580, max_tokens=outputs, resumed=True)
    story.step(2)
    assert story.core.rank.num_running == (2 if outputs == 61 else 1)
    story.run()
    assert preemptions(story) == 0
    assert story.outputs(0) == story.expected(0, 65)
    assert story.outputs(1) == story.expected(1, outputs)


def test_what_is_moving_here_makes_room_before_its_first_token() -> None:
    """Else those who run would be pushed out by a prompt that is computed for another rank's loss."""
    story = Story(num_blocks=16, max_num_batched_tokens=9)
    for number in range(5):
        story.submit(number, 120, max_tokens=200)  # in the end they hold all blocks
    while len(story.core.rank.decoding) < 5:
        story.step()
    story.submit(5, 500, max_tokens=4, resumed=True)
    story.step()
    (moving,) = story.core.rank.prefilling
    pushed_out = set[int]()
    while story.plan is not None:
        story.step()
        waiting = story.core.rank.waiting
        pushed_out |= {int(one.request_id, 16) for one in waiting if one.handle != moving.handle}
        if moving in waiting:
            assert story.columns.phase[moving.row] == Phase.PREEMPTED
    assert not pushed_out
    for number in range(6):
        assert story.outputs(number) == story.expected(number, 4 if number == 5 else 200)


def test_a_preempted_one_goes_ahead_of_arrivals() -> None:
    story = Story(num_blocks=4, max_num_seqs=3)
    for number in range(3):
        story.submit(number, 125, max_tokens=30 + number)
    story.submit(3, 10)
    while preemptions(story) == 0:
        story.step()
    assert story.core.rank.waiting[-1].request_id == f"{3:032x}"
    story.run()
    assert all(story.outputs(n) == story.expected(n, 30 + n) for n in range(3))


def test_preemption_at_every_step_gives_the_same_tokens() -> None:
    """Position-keyed noise: recomputing restarts nothing."""
    for at in range(1, 24):
        story = Story()
        story.submit(0, 120, max_tokens=25, logprobs=0)
        story.step(at)
        plan, story.plan = story.plan, None  # not sent: the worker never sees it
        assert plan is not None
        flight = story.core.flights.pop()
        retract(story.core.rank, flight)
        story.core.rank.seen = flight.seq
        story.core.rank.preempt(next(iter(story.core.rank.decoding.values())))
        story.event()
        story.run()
        assert story.outputs(0) == story.expected(0, 25)
        assert [lp.logprob for item in story.items(0) for lp in item.logprobs] == [
            -float(token) for token in story.outputs(0)
        ]


def test_the_last_one_is_not_its_own_victim() -> None:
    """A prompt in prefill holds the rest of the pool: the only decoder waits, and goes on after it."""
    story = Story(num_blocks=5, max_num_batched_tokens=40, prefill_watermark=1.0)
    story.submit(0, 126, max_tokens=40)
    story.step(4)
    story.submit(1, 380, max_tokens=2)
    for _ in range(6):
        story.step()
    assert len(story.core.rank.decoding) == 1 and preemptions(story) == 0
    assert len(story.rows()) == 1  # the prompt alone
    story.run()
    assert story.outputs(0) == story.expected(0, 40)
    assert story.outputs(1) == story.expected(1, 2)


@given(
    num_blocks=st.integers(3, 9),
    budget=st.sampled_from([8, 33, 200]),
    watermark=st.sampled_from([0.3, 0.9, 1.0]),
    lengths=st.lists(st.tuples(st.integers(1, 260), st.integers(1, 70)), min_size=1, max_size=6),
)
def test_something_always_runs(
    num_blocks: int, budget: int, watermark: float, lengths: list[tuple[int, int]]
) -> None:
    story = Story(num_blocks=num_blocks, max_num_batched_tokens=budget, prefill_watermark=watermark)
    for number, (prompt, outputs) in enumerate(lengths):
        story.submit(number, prompt, max_tokens=outputs)
        assert story.plan is not None or not story.core.live
    story.run(steps_max=6000)
    assert story.core.live == 0
    assert story.free == (num_blocks - 1, 8)
    for number, (prompt, outputs) in enumerate(lengths):
        fits = -(-(prompt + outputs - 1) // 128) <= num_blocks - 1
        assert story.outputs(number) == (story.expected(number, outputs) if fits else [])


@pytest.mark.parametrize("length", [127, 128, 129])
def test_block_borders(length: int) -> None:
    story = Story(num_blocks=4)
    story.submit(0, length, max_tokens=130)
    story.run()
    assert story.outputs(0) == story.expected(0, 130)


def test_stop_instead_of_recompute_ends_the_longest_with_a_reason() -> None:
    story = Story(num_blocks=4, max_num_seqs=3, preempt="stop")
    for number in range(3):
        story.submit(number, 125, max_tokens=60)
    story.run()
    ends = {n: story.items(n)[-1] for n in range(3)}
    stopped = [n for n, item in ends.items() if item.code == Code.KV_PRESSURE]
    assert stopped and all(item.finish_reason == "length" for item in ends.values())
    for number in range(3):
        outputs = story.outputs(number)
        assert outputs == story.expected(number, 60)[: len(outputs)]
        assert (len(outputs) < 60) == (number in stopped)
    assert "scheduler.preempt" in ends[stopped[0]].error and preemptions(story) == 0
    assert story.free == (3, 8)
