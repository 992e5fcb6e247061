"""An abort in every queue and phase: one final, zero new tokens, every block and the slot back."""

import msgspec
import pytest

from phalanx.protocol.messages import (
    AbortSequence,
    Done,
    FinalSeen,
    FinishReason,
    Refusal,
    Resend,
    Submit,
    Tokens,
    TokensItem,
)
from phalanx.protocol.queues import State
from sim.scheduler_checks import Onlooker
from sim.scheduler_story import MS, Story, request_id


def waiting(story: Story) -> None:
    story.submit(0, 100)
    for number in range(1, 4):
        story.submit(number, 100)
    assert len(story.core.rank.waiting) == 3


def test_abort_while_it_waits() -> None:
    story = Story(max_num_seqs=1)
    waiting(story)
    held = story.free
    story.abort(2)
    assert story.ends(2) == ["abort"] and story.outputs(2) == []
    assert story.free == held
    assert Done(902) in story.heard
    story.run()
    assert story.free == (19, 8) and story.outputs(3) == story.expected(3, 20)


def test_abort_between_two_chunks_gives_everything_back() -> None:
    """391 blocks and a slot, in the original."""
    story = Story(max_num_batched_tokens=50)
    story.submit(0, 400)
    story.step(3)
    assert story.free[0] < 19
    story.abort(0)
    assert story.ends(0) == ["abort"] and story.outputs(0) == []
    story.step()
    assert story.plan is None
    assert story.free == (19, 8)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_while_it_runs_discards_the_step_in_flight(steps: int) -> None:
    story = Story()
    story.submit(0, 100)
    story.step(steps)
    story.abort(0)
    assert story.ends(0) == ["abort"]
    assert len(story.outputs(0)) == steps
    assert story.items(0)[-1].token_ids == () and story.items(0)[-1].offset == steps
    story.step()
    assert len(story.outputs(0)) == steps and story.ends(0) == ["abort"]
    assert story.free == (19, 8)


def test_blocks_of_a_step_in_flight_come_back_with_its_result() -> None:
    story = Story()
    story.submit(0, 300)
    story.step(2)
    held = story.free
    story.abort(0)
    assert story.free == held  # the worker may still write them
    (row,) = story.core.table.by_row
    assert story.columns.state[row] == State.ENDING
    story.submit(1, 10)
    assert story.free == held
    story.step()
    assert story.columns.state[row] in (State.FREE, State.RUNNING)
    story.run()
    assert story.free == (19, 8)


def test_they_come_back_with_an_abandoned_step_too() -> None:
    story = Story()
    story.submit(0, 300)
    story.abort(0)
    story.finish(abandon=True)
    assert story.free == (19, 8) and story.ends(0) == ["abort"] and story.plan is None


def test_abort_of_a_preempted_one() -> None:
    story = Story(num_blocks=4, max_num_seqs=3)
    for number in range(3):
        story.submit(number, 125, max_tokens=60)
    while not story.core.rank.waiting:
        story.step()
    victim = int(story.core.rank.waiting[0].request_id, 16)
    count = len(story.outputs(victim))
    story.abort(victim)
    assert story.ends(victim) == ["abort"] and story.items(victim)[-1].offset == count
    story.run()
    assert story.free == (3, 8)


def test_abort_at_every_moment_of_a_run() -> None:
    """Whatever the step and the half of it: the stream is a prefix, the pool is whole."""
    for at in range(40):
        story = Story(max_num_batched_tokens=60)
        story.submit(0, 200, max_tokens=15)
        story.submit(1, 150, max_tokens=15)
        for _ in range(at // 2):
            if story.plan is not None:
                story.finish(abandon=at % 2 == 1 and story.plan.seq % 4 == 0)
        over = bool(story.ends(0))
        story.abort(0)
        story.run()
        assert story.ends(0) == (["length"] if over else ["abort"])
        outputs = story.outputs(0)
        assert outputs == story.expected(0, 15)[: len(outputs)]
        assert story.outputs(1) == story.expected(1, 15)
        assert story.free == (19, 8)


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_the_gateway_chooses_the_reason(reason: FinishReason) -> None:
    story = Story()
    story.submit(0)
    story.step()
    story.abort(0, reason=reason)
    assert story.ends(0) == [reason]


def test_repeated_and_unknown_aborts_are_done_and_say_nothing_more() -> None:
    story = Story()
    story.submit(0)
    for _ in range(3):
        story.abort(0)
    story.abort(5)
    assert len(story.of(Done)) == 4
    assert story.ends(0) == ["abort"] and len(story.of(Tokens)) == 1


def test_abort_after_the_end_changes_nothing() -> None:
    story = Story()
    story.submit(0)
    story.run()
    story.abort(0)
    assert story.ends(0) == ["length"] and story.outputs(0) == story.expected(0, 20)


def test_abort_of_another_attempt_is_not_for_this_one() -> None:
    story = Story()
    story.submit(0, attempt=3)
    story.abort(0, attempt=2)
    story.run()
    assert story.ends(0) == ["length"]


def test_an_abort_that_overtakes_its_submit_wins() -> None:
    story = Story()
    story.submit(0, attempt=1)
    story.abort(0, attempt=2)  # the older attempt goes too, in silence
    assert story.ends(0) == []
    story.submit(0, attempt=2)
    assert [r.call for r in story.of(Refusal)] == [0]
    story.run()
    assert story.outputs(0) == [] and story.free == (19, 8)


def test_an_id_can_be_used_again_while_its_abort_is_in_flight() -> None:
    story = Story()
    story.submit(0, 100)
    story.step(3)
    story.abort(0)
    story.submit(0, 100, attempt=1)
    story.run()
    last = [item for item in story.items(0) if item.attempt == 1]
    assert [t for item in last for t in item.token_ids] == story.expected(0, 20)
    assert [item.finish_reason for item in last if item.finish_reason] == ["length"]
    assert story.free == (19, 8)


def test_abort_all_frees_all() -> None:
    story = Story(max_num_seqs=3, max_num_batched_tokens=30)
    for number in range(8):
        story.submit(number, 40)
    story.step(4)
    for number in range(8):
        story.core.handle(AbortSequence(number, request_id(number), 0, 0), story.now_ns)
    story.event()
    story.run()
    assert story.free == (19, 8) and story.core.live == 0
    assert all(story.ends(number) == ["abort"] for number in range(8))


def test_an_acknowledged_end_is_forgotten_but_not_revived() -> None:
    story = Story()
    story.submit(0)
    story.abort(0)
    story.step()
    story.event(FinalSeen(((request_id(0), 0, 0),)))
    assert story.core.sequences == {}
    story.now_ns += 10_000 * MS
    late = Submit(77, request_id(0), 0, 0, b"\1\0\0\0", story.prompts[0][1])
    story.event(late)
    assert story.plan is None and story.of(Refusal)[-1].call == 77


def test_what_was_asked_before_the_abort_is_answered_before_the_final() -> None:
    """Both in one batch: two items of one message, and the simulator's onlooker takes that for right."""
    story = Story()
    story.submit(0, 10)
    story.step(5)
    seen = len(story.heard)
    onlooker = Onlooker(story.core)
    abort = AbortSequence(900, request_id(0), 0, 0, "abort")
    onlooker.takes(abort)
    story.event(Resend(request_id(0), 0, 0, 3), abort)
    (said,) = (message for message in story.heard[seen:] if isinstance(message, Tokens))
    sent = [(item.offset, len(item.token_ids), item.finish_reason) for item in said.items]
    assert sent == [(3, 2, None), (5, 0, "abort")]
    onlooker.said(said)
    onlooker.check()


@pytest.mark.parametrize("wrong", ["silence", "another reason", "after the final"])
def test_the_onlooker_sees_a_wrong_end(wrong: str) -> None:
    story = Story()
    story.submit(0, 10)
    story.step(5)
    onlooker = Onlooker(story.core)
    abort = AbortSequence(900, request_id(0), 0, 0, "abort")
    onlooker.takes(abort)
    story.event(abort)
    final = story.items(0)[-1]
    if wrong == "silence":
        with pytest.raises(AssertionError, match="no final after an abort"):
            onlooker.check()
    elif wrong == "another reason":
        with pytest.raises(AssertionError, match="stop, not abort"):
            onlooker.said(_tokens(msgspec.structs.replace(final, finish_reason="stop")))
    else:
        onlooker.said(_tokens(final))
        with pytest.raises(AssertionError, match="None after abort"):
            onlooker.said(_tokens(msgspec.structs.replace(final, finish_reason=None)))


def _tokens(item: TokensItem) -> Tokens:
    return Tokens(3, 7, 99, (item,))
