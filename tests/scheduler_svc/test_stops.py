"""Stop rules: the end token, stop ids, min_tokens, max_tokens, the model's length, the sampler's errors."""

import pytest

from phalanx.protocol.errors import Code
from sim.hash_worker import EOS, MAX_MODEL_LEN
from sim.scheduler_story import Story


def forced(story: Story, *tokens: int) -> None:
    for token in tokens:
        story.finish(forced=token)


def test_end_token_ends_with_stop_and_is_the_last_output() -> None:
    story = Story()
    story.submit(0, ignore_eos=False)
    forced(story, 7, 8, EOS)
    assert story.outputs(0) == [7, 8, EOS] and story.ends(0) == ["stop"]
    assert story.plan is None and story.free == (19, 8)


def test_end_token_is_a_token_when_ignored() -> None:
    story = Story()
    story.submit(0, max_tokens=3)
    forced(story, EOS, EOS, EOS)
    assert story.ends(0) == ["length"] and story.outputs(0) == [EOS] * 3


def test_stop_ids() -> None:
    story = Story()
    story.submit(0, stop_token_ids=[40, 41])
    forced(story, 39, 41)
    assert story.ends(0) == ["stop"] and story.outputs(0) == [39, 41]


@pytest.mark.parametrize("stops", [{"ignore_eos": False}, {"stop_token_ids": [EOS]}])
def test_no_stop_counts_before_min_tokens(stops: dict[str, object]) -> None:
    story = Story()
    story.submit(0, min_tokens=3, **stops)
    forced(story, EOS, EOS)
    assert story.ends(0) == []
    forced(story, EOS)
    assert story.ends(0) == ["stop"] and len(story.outputs(0)) == 3


def test_min_tokens_counts_outputs_made_elsewhere() -> None:
    story = Story()
    story.submit(0, min_tokens=3, ignore_eos=False, outputs=[EOS, EOS], attempt=1)
    forced(story, EOS)
    assert story.ends(0) == ["stop"]


def test_stop_on_the_last_output_is_a_stop() -> None:
    story = Story()
    story.submit(0, max_tokens=2, ignore_eos=False)
    forced(story, 7, EOS)
    assert story.ends(0) == ["stop"]


def test_min_tokens_beyond_max_tokens_ends_with_length() -> None:
    story = Story()
    story.submit(0, max_tokens=2, min_tokens=9, ignore_eos=False)
    forced(story, EOS, EOS)
    assert story.ends(0) == ["length"]


@pytest.mark.parametrize("max_tokens", [50, None])
def test_the_model_length_ends_it(max_tokens: int | None) -> None:
    story = Story()
    story.submit(0, MAX_MODEL_LEN - 4, max_tokens=max_tokens)
    story.run()
    assert story.ends(0) == ["length"] and story.outputs(0) == story.expected(0, 4)


@pytest.mark.parametrize(
    ("outputs", "sampling", "reason"),
    [
        ([7, EOS], {"ignore_eos": False}, "stop"),
        ([7, 9], {"stop_token_ids": [9]}, "stop"),
        ([7, 9], {"max_tokens": 2}, "length"),
    ],
)
def test_a_resumed_one_that_had_ended_gets_its_end_and_no_token(
    outputs: list[int], sampling: dict[str, object], reason: str
) -> None:
    """Its last token arrived, the word that it was the last did not."""
    story = Story()
    story.submit(0, outputs=outputs, attempt=1, **sampling)
    assert story.plan is None
    (item,) = story.items(0)
    assert (item.offset, item.token_ids, item.finish_reason) == (2, (), reason)


def test_a_resumed_one_that_had_not_ended_goes_on() -> None:
    story = Story()
    story.submit(0, outputs=[EOS, 9], attempt=1, min_tokens=5, stop_token_ids=[9])
    assert story.plan is not None


@pytest.mark.parametrize(
    ("status", "code"), [(1, Code.ALL_BLOCKED), (2, Code.NAN_LOGITS), (9, Code.INTERNAL)]
)
def test_a_sampling_error_ends_that_sequence_alone(status: int, code: Code) -> None:
    story = Story()
    for number in range(3):
        story.submit(number)
    story.step(3)
    before = len(story.outputs(1))
    story.finish(status={1: status})
    last = story.items(1)[-1]
    assert (last.finish_reason, last.code, last.token_ids) == ("error", code, ())
    assert last.error and last.offset == before == len(story.outputs(1))
    story.run()
    assert story.ends(1) == ["error"]
    for number in (0, 2):
        assert story.outputs(number) == story.expected(number, 20)
    assert story.free == (19, 8)


def test_an_error_at_the_first_token() -> None:
    story = Story()
    story.submit(0)
    story.submit(1)
    story.step()
    story.finish(status={0: 2, 1: 2})
    assert story.ends(0) == ["error"] and story.ends(1) == ["error"]
    assert story.outputs(1) == [] and story.free == (19, 8) and story.plan is None


def test_an_error_after_the_abort_is_not_heard() -> None:
    story = Story()
    story.submit(0)
    story.step(2)
    story.abort(0)
    story.finish(status={0: 2})
    assert story.ends(0) == ["abort"]
