"""Log-probabilities of prompts through the scheduler: whole, once, in order, whatever the steps were."""

import msgspec
import numpy as np
import pytest

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import Refusal, Resend, Sampling, Submit, Tokens
from phalanx.protocol.prompt_logprobs import entries, record_bytes
from phalanx.scheduler_svc import core as core_module
from phalanx.scheduler_svc import prefill as prefill_module
from sim.hash_worker import MAX_MODEL_LEN, fault_free_scores
from sim.scheduler_story import Story, request_id


def scores(story: Story, number: int, num_top: int) -> list[object]:
    """As a gateway puts them together; every piece fits behind the last one."""
    records = b""
    for item in story.items(number):
        if item.prompt_logprobs:
            assert item.prompt_offset * record_bytes(num_top) == len(records)
            records += item.prompt_logprobs
    return list(entries(records, num_top))


@pytest.mark.parametrize("budget", [8, 33, 1024])
def test_they_are_the_same_in_any_portions(budget: int) -> None:
    story = Story(max_num_batched_tokens=budget)
    story.submit(1, 100, max_tokens=3, prompt_logprobs=2)
    story.submit(2, 40, max_tokens=9)  # company
    story.run()
    prompt, _ = story.prompts[1]
    assert scores(story, 1, 2) == fault_free_scores(prompt, 2)
    assert story.outputs(1) == story.expected(1, 3)
    assert not any(item.prompt_logprobs for item in story.items(2))


def test_they_come_before_the_first_token() -> None:
    story = Story(max_num_batched_tokens=16)
    story.submit(1, 60, max_tokens=5, prompt_logprobs=0)
    story.run()
    told = [bool(item.prompt_logprobs) for item in story.items(1)]
    assert told == sorted(told, reverse=True) and sum(told) == 4
    assert story.ends(1) == ["length"]


def test_an_abandoned_step_tells_nothing() -> None:
    story = Story(max_num_batched_tokens=16)
    story.submit(1, 60, max_tokens=2, prompt_logprobs=1)
    story.step()
    story.finish(abandon=True)
    assert len(scores(story, 1, 1)) == 16
    story.run()
    prompt, _ = story.prompts[1]
    assert scores(story, 1, 1) == fault_free_scores(prompt, 1)


def test_a_preempted_sequence_does_not_say_them_again() -> None:
    story = Story(num_blocks=4, max_num_batched_tokens=64)
    story.submit(1, 120, max_tokens=60, prompt_logprobs=0)
    story.submit(2, 120, max_tokens=60, prompt_logprobs=0)
    preempted = 0
    while story.plan is not None:
        story.finish()
        preempted = max(preempted, int(story.columns.preemptions.max()))
    assert preempted > 0
    for number in (1, 2):
        prompt, _ = story.prompts[number]
        assert scores(story, number, 0) == fault_free_scores(prompt, 0)
        assert story.outputs(number) == story.expected(number, 60)


@pytest.mark.parametrize("length", [1, 2, 50, 128, 129])
def test_without_outputs_the_prompt_is_scored_and_that_is_all(length: int) -> None:
    story = Story(max_num_batched_tokens=40)
    story.submit(1, length, max_tokens=0, prompt_logprobs=1)
    story.run()
    prompt, _ = story.prompts[1]
    assert scores(story, 1, 1) == fault_free_scores(prompt, 1)
    assert (story.outputs(1), story.ends(1)) == ([], ["length"])
    assert story.free == (19, 8)


def test_the_longest_prompt_may_be_scored_without_outputs() -> None:
    story = Story(num_blocks=20)
    story.submit(1, MAX_MODEL_LEN, max_tokens=0, prompt_logprobs=0)
    story.submit(2, MAX_MODEL_LEN + 1, max_tokens=0, prompt_logprobs=0)
    story.submit(3, 10, max_tokens=0)
    refused = story.of(Refusal)
    assert [r.call for r in refused] == [2, 3] and {r.code for r in refused} == {Code.BAD_REQUEST}
    story.run()
    assert len(scores(story, 1, 0)) == MAX_MODEL_LEN - 1


def test_one_that_wants_them_computes_its_own_prompt() -> None:
    """Its siblings may share it, it shares nobody's: each token's logprob comes from a row."""
    story = Story(max_num_batched_tokens=30)
    prompt = list(range(2, 52))
    for index, wanted in ((1, None), (0, 1), (2, None)):
        sampling = Sampling(seed=index, max_tokens=2, ignore_eos=True, prompt_logprobs=wanted)
        ids = np.array(prompt, np.int32).tobytes()
        story.event(Submit(10 + index, request_id(1), index, 0, ids, sampling))
    story.run()
    records = b"".join(
        item.prompt_logprobs for item in story.items(1) if item.index == 0 and item.prompt_logprobs
    )
    assert list(entries(records, 1)) == fault_free_scores(prompt, 1)
    ends = {item.index: item.finish_reason for item in story.items(1) if item.finish_reason}
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_a_step_tells_no_more_than_its_result_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "STEP_BYTES_MAX", 20 * record_bytes(2) + 7)
    story = Story(max_num_batched_tokens=1024)
    story.submit(1, 90, max_tokens=2, prompt_logprobs=2)
    story.submit(2, 90, max_tokens=2, prompt_logprobs=2)
    story.submit(3, 90, max_tokens=2)
    story.finish()
    assert sorted(count for _, count in story.rows()) == [20, 90]
    while story.plan is not None:
        before = len(story.of(Tokens))
        story.finish()
        told = [i for m in story.of(Tokens)[before:] for i in m.items if i.prompt_logprobs]
        assert sum(len(i.prompt_logprobs) for i in told) <= 20 * record_bytes(2)
    for number in (1, 2):
        prompt, _ = story.prompts[number]
        assert scores(story, number, 2) == fault_free_scores(prompt, 2)
    assert story.outputs(3) == story.expected(3, 2)


def test_who_missed_them_gets_them_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "RESENT_RECORDS", 16)
    story = Story()
    story.submit(1, 60, max_tokens=3, prompt_logprobs=1)
    story.run()
    story.heard.clear()
    story.event(Resend(request_id(1), 0, 0, 1, 5))
    messages = [list(message.items) for message in story.of(Tokens)]
    assert all(len(items) == 1 for items in messages)
    *pieces, last = [items[0] for items in messages]
    assert [piece.prompt_offset for piece in pieces] == [5, 21, 37, 53]
    prompt, _ = story.prompts[1]
    found = [one for piece in pieces for one in entries(piece.prompt_logprobs, 1)]
    assert found == fault_free_scores(prompt, 1)[5:]
    assert (last.offset, last.finish_reason) == (1, "length")


def test_broken_numbers_end_the_sequence_alone() -> None:
    story = Story(max_num_batched_tokens=32)
    story.submit(1, 60, max_tokens=3, prompt_logprobs=1)
    story.submit(2, 4, max_tokens=3, prompt_logprobs=1)
    assert story.plan is not None
    result = story.worker.run(story.plan)
    story.plan = None
    spoilt = bytearray(result.prompt_logprobs[0])
    spoilt[32:36] = np.float32(np.nan).tobytes()
    given = (bytes(spoilt), *result.prompt_logprobs[1:])
    story.event(msgspec.structs.replace(result, prompt_logprobs=given))
    story.run()
    final = story.items(1)[-1]
    assert (final.finish_reason, final.code, final.token_ids) == ("error", Code.NAN_LOGITS, ())
    assert story.outputs(2) == story.expected(2, 3)
    assert story.free == (19, 8)
