"""What can never be served is refused at once, with the numbers; what has no room now, as overloaded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import Refusal, Sampling, Submit, Submitted
from phalanx.protocol.steps import WorkerHello
from phalanx.scheduler_svc import admission
from phalanx.scheduler_svc.events import Membership, WorkerLost
from sim.hash_worker import MAX_MODEL_LEN, VOCAB
from sim.scheduler_story import Story, request_id


def refusal(story: Story) -> Refusal:
    (refused,) = story.of(Refusal)
    assert not story.of(Submitted) and story.plan is None
    return refused


def test_larger_than_the_pool() -> None:
    story = Story(num_blocks=4)
    story.submit(0, 300, max_tokens=86)
    refused = refusal(story)
    assert refused.code == Code.BAD_REQUEST
    assert "need 4 KV blocks" in refused.message and "the pool has 3" in refused.message


def test_a_bug_that_one_request_meets_ends_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it raised, every rank that the request comes to would fall, and its streams would move on."""
    right = admission._room

    def room(submit: Submit, worker: WorkerHello, total_blocks: int) -> int:
        return right(submit, worker, total_blocks) // (len(submit.prompt) - 4 * 13)

    monkeypatch.setattr(admission, "_room", room)
    story = Story()
    story.submit(0, 14, max_tokens=40)
    story.submit(1, 13, max_tokens=4)
    (refused,) = story.of(Refusal)
    assert refused.code == Code.INTERNAL and "ZeroDivisionError" in refused.message
    story.run()
    assert story.outputs(0) == story.expected(0, 10) and story.free == (19, 8)


def test_exactly_the_pool_is_served() -> None:
    story = Story(num_blocks=4)
    story.submit(0, 300, max_tokens=85)  # 384 positions: the last output is never fed back
    story.run()
    assert story.outputs(0) == story.expected(0, 85)


def test_longer_than_the_model() -> None:
    story = Story()
    story.submit(0, MAX_MODEL_LEN)
    assert str(MAX_MODEL_LEN) in refusal(story).message


def test_no_output_wanted() -> None:
    story = Story()
    story.submit(0, max_tokens=0)
    assert "max_tokens is 0" in refusal(story).message


def test_larger_than_a_plan() -> None:
    story = Story(accepting=False)
    hello = WorkerHello(1, 9999, 4, 1 << 21, VOCAB, 1, 1, 1, "ph-a", "ph-b", 0, 5, "f")
    story.event(hello, Membership(2, True))
    story.submit(0, 530_000)
    assert "2097152" in refusal(story).message


@pytest.mark.parametrize("where", ["prompt", "outputs", "logit_bias"])
@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31 - 1])
def test_ids_outside_the_vocabulary(where: str, wrong: int) -> None:
    story = Story()
    prompt, outputs = [1, 2], [3]
    bias = {1: 0.5}
    if where == "logit_bias":
        bias[wrong] = 1.0
    else:
        {"prompt": prompt, "outputs": outputs}[where].append(wrong)
    story.submit(0, prompt, outputs=outputs, logit_bias=bias)
    assert str(wrong) in refusal(story).message and str(VOCAB) in refusal(story).message


@pytest.mark.parametrize("prompt", [b"", b"\1\0\0"])
def test_a_prompt_is_ids(prompt: bytes) -> None:
    story = Story()
    story.event(Submit(1, request_id(1), 0, 0, prompt, Sampling(max_tokens=1)))
    assert refusal(story).code == Code.BAD_REQUEST


@pytest.mark.parametrize("name", ["", "abc", "g" * 32, "0" * 34])
def test_a_request_id_is_128_bits(name: str) -> None:
    story = Story()
    story.event(Submit(1, name, 0, 0, b"\1\0\0\0", Sampling(max_tokens=1)))
    assert refusal(story).code == Code.BAD_REQUEST


def test_the_queue_is_bounded_but_not_for_resumed_ones() -> None:
    story = Story(max_num_seqs=1, max_waiting=2)
    for number in range(5):
        story.submit(number)
    assert [(r.call, r.code) for r in story.of(Refusal)] == [
        (3, Code.OVERLOADED),
        (4, Code.OVERLOADED),
    ]
    story.submit(5, outputs=[4])
    story.submit(6, resumed=True)  # before its first output was heard of
    assert len(story.of(Refusal)) == 2
    story.submit(7, resumed=True)  # the table itself is full
    assert [r.call for r in story.of(Refusal)] == [3, 4, 7]
    story.run()
    story.submit(3)
    story.run()
    assert story.outputs(3) == story.expected(3, 20)


def test_a_first_attempt_is_an_arrival_whatever_its_number() -> None:
    """A gateway counts its attempts from its incarnation times a large number."""
    story = Story(max_num_seqs=1, max_waiting=2)
    for number in range(4):
        story.submit(number, attempt=(1 << 20) + number)
    assert [(r.call, r.code) for r in story.of(Refusal)] == [(3, Code.OVERLOADED)]


def test_resumed_ones_go_ahead_of_arrivals_and_among_themselves_by_age() -> None:
    story = Story(max_num_seqs=1, max_waiting=8, priority_step_ms=1000)
    story.submit(0)
    story.submit(1)
    story.submit(2, priority=5)  # among arrivals
    story.now_ns += 60_000_000_000  # however long these have waited
    story.submit(3, resumed=True, priority=-1)
    story.submit(4, resumed=True)
    story.submit(5, resumed=True)
    waiting = [int(sequence.request_id, 16) for sequence in story.core.rank.waiting]
    assert waiting == [4, 5, 3, 2, 1]
    story.run()
    for number in range(6):
        assert story.outputs(number) == story.expected(number, 20)


def test_a_preempted_one_is_ahead_of_arrivals_as_well() -> None:
    story = Story(num_blocks=4, max_waiting=8)
    story.submit(0, 100, max_tokens=200)
    story.submit(1, 120, max_tokens=200)
    story.submit(2, 250)
    while not any(story.core.rank.t.preemptions):
        story.step()
    preempted, arrival = story.core.rank.waiting
    assert preempted.ahead and not arrival.ahead and arrival.request_id == request_id(2)
    story.run()
    assert story.outputs(2) == story.expected(2, 20)


def test_a_prompt_node_gives_one_output() -> None:
    story = Story(role="prompt", max_num_batched_tokens=64)
    story.submit(0, 300)
    story.submit(1, 10)
    story.run()
    for number in (0, 1):
        assert story.outputs(number) == story.expected(number, 1)
        assert story.ends(number) == ["length"]
    story.submit(2, 10, outputs=[4, 5], attempt=1)
    story.run()
    assert [len(item.token_ids) for item in story.items(2)] == [1]
    assert story.ends(2) == ["length"] and story.free == (19, 8)


def test_a_completion_node_takes_what_has_begun() -> None:
    begun = Story()
    begun.submit(0, 100)
    begun.run()
    first = begun.outputs(0)[:1]
    story = Story(role="completion")
    story.submit(1, 100)
    assert "role: completion" in refusal(story).message
    story.submit(0, 100, outputs=first, attempt=1)
    story.run()
    assert first + [t for i in story.items(0) for t in i.token_ids] == begun.outputs(0)


@pytest.mark.parametrize("gone", [Membership(4, False), WorkerLost()])
def test_without_a_worker_in_the_group(gone: object) -> None:
    story = Story()
    story.event(gone)
    story.submit(0)
    assert refusal(story).code == Code.NOT_READY


def test_a_refusal_leaves_the_older_attempt_alone() -> None:
    story = Story()
    story.submit(0)
    story.submit(0, MAX_MODEL_LEN, attempt=1)
    assert len(story.of(Refusal)) == 1
    story.prompts[0] = ([3 * at % 50 for at in range(10)], story.prompts[0][1])
    story.run()
    assert story.outputs(0) == story.expected(0, 20)


@given(
    st.binary(max_size=24),
    st.binary(max_size=12),
    st.one_of(st.integers(-2, 5), st.integers(-(2**63), 2**64 - 1)),
    st.one_of(st.integers(-2, 5), st.integers(-(2**63), 2**64 - 1)),
    st.one_of(st.none(), st.integers(-5, 2**70)),
)
def test_any_submit_is_answered_once_and_harms_nobody(
    prompt: bytes, outputs: bytes, index: int, attempt: int, max_tokens: int | None
) -> None:
    story = Story()
    story.submit(0)
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    story.event(Submit(50, request_id(9), index, attempt, prompt, sampling, outputs))
    answers = [m for m in story.heard if isinstance(m, Submitted | Refusal) and m.call == 50]
    assert len(answers) == 1
    ids = np.frombuffer(prompt + outputs, np.int32) if len(prompt + outputs) % 4 == 0 else None
    if isinstance(answers[0], Submitted):
        assert ids is not None and ((ids >= 0) & (ids < VOCAB)).all() and attempt >= 0
    story.run()
    assert story.outputs(0) == story.expected(0, 20)
