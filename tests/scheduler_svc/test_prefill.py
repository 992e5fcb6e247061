"""Which prompts enter a step: chunks under the budget, all blocks at the first one, nobody overtaken."""

import msgspec
import numpy as np
import pytest

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import PLAN_BYTES_MAX
from phalanx.protocol.messages import Refusal, Sampling, Submit, Submitted
from phalanx.protocol.queues import State
from phalanx.scheduler_svc import prefill
from phalanx.scheduler_svc.events import Membership, StoreArenas
from sim.scheduler_story import Story, request_id


def test_whole_prompts_then_a_cut_one_and_the_rest_waits() -> None:
    """The kitchen of the walkthrough: 6, 5 and 4 tokens with 8 to a step."""
    story = Story(max_num_batched_tokens=8)
    story.submit(0, 6)
    assert [rows for _, rows in story.rows()] == [6]
    story.submit(1, 5)
    story.submit(2, 4)
    story.step()  # sequence 0 decodes: one row; 5 of the 7 left go to sequence 1, 2 to sequence 2
    assert [rows for _, rows in story.rows()] == [1, 5, 2]
    story.step()
    assert [rows for _, rows in story.rows()] == [1, 1, 2]  # the cut prompt goes on
    story.step()
    assert [rows for _, rows in story.rows()] == [1, 1, 1]
    story.run()
    for number in range(3):
        assert story.outputs(number) == story.expected(number, 20)


def test_decode_goes_on_beside_a_long_prompt() -> None:
    """Every running stream gets a token in every step while a long prompt is computed."""
    story = Story(max_num_batched_tokens=64)
    story.submit(0, 10, max_tokens=60)
    story.step()
    story.submit(1, 640, max_tokens=5)
    before = len(story.outputs(0))
    story.step(12)
    assert len(story.outputs(0)) == before + 12
    assert len(story.outputs(1)) == 1  # 640 rows at 63 a step: eleven steps after the one under way
    story.run()
    assert story.outputs(1) == story.expected(1, 5)


def test_all_blocks_at_the_first_chunk() -> None:
    story = Story(max_num_batched_tokens=50, num_blocks=10)
    story.submit(0, 300)
    assert story.free == (6, 7)  # 3 of 9 blocks, though 50 tokens fill one
    story.step(2)
    assert story.free == (6, 7)


def test_prefill_starts_only_below_the_watermark() -> None:
    story = Story(num_blocks=11, prefill_watermark=0.5)
    story.submit(0, 600, max_tokens=30)  # 5 of 10 blocks: half is not above half
    story.submit(1, 10, max_tokens=30)
    story.step()
    assert len(story.rows()) == 2
    story.submit(2, 10)  # 6 of 10 now
    story.step(3)
    assert len(story.rows()) == 2 and len(story.core.rank.waiting) == 1
    story.run()
    assert story.outputs(2) == story.expected(2, 20)


def test_a_long_prompt_is_not_overtaken() -> None:
    """The head does not fit: nothing behind it starts, else it would starve behind short ones."""
    story = Story(num_blocks=6)
    story.submit(0, 250, max_tokens=30)
    story.submit(1, 500)
    story.submit(2, 5)
    story.step(3)
    assert len(story.rows()) == 1
    story.run()
    ended = [item.request_id for m in story.heard if hasattr(m, "items") for item in m.items
             if item.finish_reason]  # fmt: skip
    assert ended == [f"{n:032x}" for n in (0, 1, 2)]


@pytest.mark.parametrize(("seqs", "slots", "running"), [(3, 8, 3), (8, 2, 2)])
def test_running_sequences_are_bounded(seqs: int, slots: int, running: int) -> None:
    story = Story(max_num_seqs=seqs, num_slots=slots)
    for number in range(6):
        story.submit(number)
    story.step(2)
    assert len(story.rows()) == running
    story.run()
    assert all(story.outputs(n) == story.expected(n, 20) for n in range(6))


def test_resumed_ones_and_higher_priority_go_ahead_of_arrivals() -> None:
    story = Story(max_num_seqs=1)
    story.submit(0)
    story.submit(1)
    story.submit(2, priority=1)
    story.submit(3, outputs=[9, 9], attempt=1)
    story.submit(4, outputs=[9], attempt=1, priority=2)
    order = [int(w.request_id, 16) for w in story.core.rank.waiting]
    assert order == [4, 3, 2, 1]


def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    story = Story()
    story.submit(0, 100)
    story.run()
    whole = story.outputs(0)
    other = Story()
    other.submit(0, 100, outputs=whole[:7], attempt=1)
    other.run()
    first = other.items(0)[0]
    assert (first.offset, first.attempt) == (7, 1)  # nothing is sent twice
    assert whole[:7] + [t for item in other.items(0) for t in item.token_ids] == whole


def test_new_sequences_of_one_plan_fit_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PLAN_NEW_BYTES_MAX", 4 * 250)
    story = Story()
    story.submit(0, 10)
    for number in (1, 2, 3):
        story.submit(number, 100)
    story.step()
    assert story.plan is not None
    assert [len(new.tokens) // 4 for new in story.plan.new] == [100, 100]
    story.step()
    assert [len(new.tokens) // 4 for new in story.plan.new] == [100]


def test_an_abandoned_step_is_planned_again() -> None:
    story = Story(max_num_batched_tokens=150)
    story.submit(0, 200, max_tokens=100)
    before = story.plan
    story.finish(abandon=True)
    assert story.plan is not None and before is not None
    assert story.plan.new == before.new and story.plan.block_ids == before.block_ids
    assert story.plan.seq == before.seq + 1
    for _ in range(20):
        story.finish()
        if story.plan is not None:
            story.finish(abandon=True)
    story.run()
    assert story.outputs(0) == story.expected(0, 100)


def test_between_two_chunks_it_runs_in_the_table() -> None:
    story = Story(max_num_batched_tokens=50)
    story.submit(0, 120)
    story.step()
    assert story.columns.state[story.core.rank.prefilling[0].row] == State.RUNNING
    assert story.columns.committed[story.core.rank.prefilling[0].row] == 50


def long_story(**settings: int) -> Story:
    """Its model takes very long sequences."""
    story = Story(accepting=False, **settings)
    story.worker.max_model_len = 1 << 20
    story.event(story.worker.hello(), StoreArenas(0, 0), Membership(2, True))
    return story


@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("outputs", [0, 5])
def test_settings_of_new_sequences_fit_the_ring_too(siblings: bool, outputs: int) -> None:
    """Drafts, biases and bans of all that begin with one step may take more than their tokens."""
    limits = {"max_num_seqs": 64, "max_waiting": 64}
    story = long_story(num_blocks=1_000, num_slots=64, **limits)
    story.submit(99, 10, max_tokens=1)  # under way while the others come
    forced = tuple([49] * 60_000)
    sampling = Sampling(seed=1, max_tokens=60_000, forced_token_ids=forced, ignore_eos=True)
    ids = np.array([1, 2, 3], np.int32).tobytes()
    came = np.array([49] * outputs, np.int32).tobytes()
    for at in range(64):
        name, index = (request_id(0), at) if siblings else (request_id(at), 0)
        story.event(Submit(at, name, index, 1, ids, sampling, came, resumed=outputs > 0))
    begun = 0
    for _ in range(12):
        story.step()
        assert story.plan is not None
        begun += len(story.plan.new)
        assert len(msgspec.msgpack.encode(story.plan)) <= PLAN_BYTES_MAX
    assert begun == 64


def test_settings_that_no_plan_has_room_for_are_refused() -> None:
    story = long_story(num_blocks=4_000)
    story.submit(0, 10, max_tokens=200_000, forced_token_ids=(40,) * 200_000)
    story.submit(1, 10, max_tokens=450_000, forced_token_ids=(40,) * 450_000)
    assert len(story.of(Submitted)) == 1
    (refusal,) = story.of(Refusal)
    assert refusal.code is Code.BAD_REQUEST and "forced_token_ids" in refusal.message
