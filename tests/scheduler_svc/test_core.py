"""Commands, tokens and their order: repeated ones are the same, lost ones come again, old ones are over."""

import numpy as np
import pytest

from phalanx.protocol.messages import (
    FinalSeen,
    ListSequences,
    Refusal,
    Resend,
    Sampling,
    SeatLoad,
    SequenceList,
    Submit,
    Submitted,
    Tokens,
    Welcome,
)
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.scheduler_svc import core as core_module
from phalanx.scheduler_svc import finals
from phalanx.scheduler_svc.events import GatewayChanged, Membership, WorkerLost
from phalanx.scheduler_svc.finals import KEPT_TTL_NS, REPEAT_NS
from phalanx.scheduler_svc.state import copy_key, sequence_of
from sim.hash_worker import HashWorker
from sim.scheduler_checks import check
from sim.scheduler_story import MS, Story, request_id, result_of


def test_one_tokens_message_a_step_numbered_from_one() -> None:
    story = Story()
    for number in range(3):
        story.submit(number)
    story.run()
    messages = story.of(Tokens)
    assert [m.seq for m in messages] == list(range(1, len(messages) + 1))
    assert {(m.seat, m.incarnation) for m in messages} == {(3, 7)}
    assert max(len(m.rows.counts) + len(m.items) for m in messages) == 3
    for number in range(3):
        assert story.outputs(number) == story.expected(number, 20)


def test_the_same_submit_is_the_same_sequence() -> None:
    story = Story()
    for _ in range(3):
        story.submit(0)
    assert story.of(Submitted) == [Submitted(0, 3, 7)] * 3
    story.run()
    story.submit(0)  # also when it has ended, until the gateway has seen that
    assert len(story.of(Submitted)) == 4 and story.plan is None
    assert story.ends(0) == ["length"]


def test_a_later_attempt_replaces_an_earlier_one_in_silence() -> None:
    story = Story()
    story.submit(0, 200)
    story.step(4)
    got = story.outputs(0)
    story.submit(0, 200, attempt=2, outputs=got)
    story.run()
    assert {item.attempt for item in story.items(0) if item.finish_reason} == {2}
    assert story.outputs(0) == story.expected(0, 20)
    assert story.free == (19, 8)


def test_an_earlier_attempt_is_refused() -> None:
    story = Story()
    story.submit(0, attempt=2)
    story.submit(0, attempt=1)
    assert [refusal.call for refusal in story.of(Refusal)] == [0]
    assert len(story.of(Submitted)) == 1


@pytest.mark.parametrize("offset", [0, 3, 20, 99])
def test_resend_of_a_finished_one(offset: int) -> None:
    story = Story()
    story.submit(0, logprobs=0)
    story.run()
    whole = story.outputs(0)
    story.event(Resend(request_id(0), 0, 0, offset))
    item = story.items(0)[-1]
    assert item.offset == min(offset, 20)
    assert list(item.token_ids) == whole[offset:]
    assert [lp.logprob for lp in item.logprobs] == [-float(t) for t in whole[offset:]]
    assert item.finish_reason == "length"


def test_resend_of_a_running_one_and_of_strangers() -> None:
    story = Story()
    story.submit(0, attempt=1)
    story.step(4)
    story.event(Resend(request_id(0), 0, 1, 1))
    item = story.items(0)[-1]
    assert (item.offset, len(item.token_ids), item.finish_reason) == (1, 3, None)
    before = len(story.of(Tokens))
    story.event(Resend(request_id(0), 0, 0, 0), Resend(request_id(8), 0, 0, 0))
    assert len(story.of(Tokens)) == before


@pytest.mark.parametrize("steps", [38, 60])
def test_what_many_missed_is_told_in_bounded_messages(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway without a token log asks for all outputs of all: one message of them ended its connection."""
    monkeypatch.setattr(core_module, "RESENT_TOKENS", 16)
    story = Story()
    for number in range(8):
        story.submit(number, max_tokens=40, logprobs=0)
    for _ in range(steps):
        if story.plan is not None:
            story.step()
    whole = {number: story.outputs(number) for number in range(8)}
    story.heard.clear()
    asked = [Resend(request_id(number), 0, 0, 38 - 5 * number) for number in range(8)]
    story.event(*asked)
    for message in story.of(Tokens):
        assert sum(len(item.token_ids) for item in message.items) <= 16
    for number, resend in enumerate(asked):
        items = story.items(number)
        found = [token for item in items for token in item.token_ids]
        assert found == whole[number][resend.offset :]
        assert [lp.logprob for i in items for lp in i.logprobs] == [-float(t) for t in found]
        ends = [item.finish_reason for item in items]
        assert ends == [None] * (len(items) - 1) + ["length" if len(whole[number]) == 40 else None]


def test_a_final_is_repeated_until_it_is_seen() -> None:
    story = Story()
    story.submit(0)
    story.run()
    count = len(story.items(0))
    story.later(REPEAT_NS // MS - 2)
    assert len(story.items(0)) == count
    for again in (1, 2):
        story.later(REPEAT_NS // MS)
        assert len(story.items(0)) == count + again
        last = story.items(0)[-1]
        assert (last.offset, last.token_ids, last.finish_reason) == (20, (), "length")
    story.event(FinalSeen(((request_id(0), 0, 0), (request_id(4), 0, 0))))
    story.later(5_000)
    assert len(story.items(0)) == count + 2 and story.core.sequences == {}


def test_final_seen_of_another_attempt_or_of_a_running_one_is_nothing() -> None:
    story = Story()
    story.submit(0, attempt=1)
    story.step(2)
    story.event(FinalSeen(((request_id(0), 0, 1),)))
    story.run()
    story.event(FinalSeen(((request_id(0), 0, 0),)))
    assert len(story.core.sequences) == 1 and story.outputs(0) == story.expected(0, 20)


def test_unseen_finals_are_bounded_in_time() -> None:
    story = Story()
    story.submit(0)
    story.run()
    story.later(KEPT_TTL_NS // MS - 10_000)
    assert len(story.core.sequences) == 1
    story.later(20_000)
    story.later(20_000)
    assert story.core.sequences == {}


def test_unseen_finals_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals, "KEPT_MAX", 3)
    story = Story()
    for number in range(6):
        story.submit(number, max_tokens=1)
        story.run()
    assert [int(key[0], 16) for key in story.core.sequences] == [3, 4, 5]


def test_a_new_gateway_learns_everything() -> None:
    story = Story(max_num_seqs=2)
    story.submit(0, max_tokens=2)
    story.run()
    story.submit(1, attempt=4)
    story.submit(2)
    story.submit(3)
    story.step(3)
    loads = len(story.of(SeatLoad))
    story.event(GatewayChanged(), ListSequences(99), Welcome(2))
    assert len(story.of(SeatLoad)) == loads + 1
    (listed,) = story.of(SequenceList)
    assert (listed.call, listed.seat, listed.incarnation) == (99, 3, 7)
    infos = {int(info.request_id, 16): info for info in listed.items}
    assert sorted(infos) == [0, 1, 2, 3]
    assert (infos[0].finish_reason, infos[1].attempt) == ("length", 4)
    for number, info in infos.items():
        assert np.frombuffer(info.outputs, np.int32).tolist() == story.outputs(number)


def test_results_of_other_plans_are_dropped() -> None:
    story = Story()
    story.submit(0)
    first = story.plan
    story.step(3)
    assert first is not None and story.plan is not None
    story.core.handle(result_of(first), story.now_ns)
    story.core.handle(StepResult(story.plan.seq + 1, aborted=True), story.now_ns)
    assert story.columns.header[0]["stale_results"] == 2
    story.run()
    assert story.outputs(0) == story.expected(0, 20)
    story.core.handle(result_of(first), story.now_ns)
    assert story.columns.header[0]["stale_results"] == 3


def test_a_lost_worker_takes_its_sequences_along_but_not_the_ended_ones() -> None:
    story = Story(max_num_seqs=3)
    story.submit(0, max_tokens=1)
    story.run()
    for number in (1, 2, 3, 4):
        story.submit(number, 150)
    story.step(2)
    heard = len(story.of(Tokens))
    story.event(WorkerLost())
    assert len(story.of(Tokens)) == heard  # in silence: the gateway moves them
    assert list(story.core.sequences) == [(request_id(0), 0)]
    assert story.of(SeatLoad)[-1].accepting is False
    assert story.free == (0, 0)

    story.worker, story.plan = HashWorker(2, 20, 8), None
    story.event(story.worker.hello())
    load = story.of(SeatLoad)[-1]
    assert load.accepting and load.worker_incarnation == 2 and load.free_blocks == 19
    story.submit(1, 150, attempt=1)
    story.run()
    assert story.outputs(1) == story.expected(1, 20)
    story.event(Resend(request_id(0), 0, 0, 0))
    assert story.items(0)[-1].finish_reason == "length"


def test_nothing_is_planned_outside_the_group() -> None:
    story = Story(accepting=False)
    story.event(story.worker.hello())
    assert not story.core.accepting
    story.event(Membership(2, True))
    story.submit(0)
    story.event(Membership(4, False))
    story.finish(abandon=True)
    assert story.plan is None
    story.event(Membership(6, True))
    story.run()
    assert story.outputs(0) == story.expected(0, 20)


def test_loads_are_rare_but_never_missing() -> None:
    story = Story()
    story.submit(0, max_tokens=100)
    loads = len(story.of(SeatLoad))
    story.step(100)  # 100 ms
    assert loads + 1 <= len(story.of(SeatLoad)) <= loads + 3
    story.later(60)
    last = story.of(SeatLoad)[-1]
    assert (last.running, last.waiting, last.free_slots) == (0, 0, 8)
    count = len(story.of(SeatLoad))
    story.later(500)
    assert len(story.of(SeatLoad)) == count
    story.later(600)
    assert len(story.of(SeatLoad)) == count + 1


def test_it_says_when_it_wants_to_be_called() -> None:
    story = Story()
    story.later(60)
    assert 900 < story.core.wait_ms(story.now_ns) <= 1000
    story.submit(0, max_tokens=1)
    story.run()
    story.later(60)
    assert 0 < story.core.wait_ms(story.now_ns) <= 1000


def test_messages_for_others_are_ignored() -> None:
    story = Story()
    story.submit(0)
    story.event(Welcome(3), object(), None)
    story.run()
    assert story.outputs(0) == story.expected(0, 20)


def test_indexes_of_one_request_are_sequences_of_their_own() -> None:
    story = Story()
    story.submit(0)
    first = story.core.sequences[request_id(0), 0]
    plan = story.plan
    assert plan is not None
    key = plan.new[0].copy_key
    other = Story()
    other.submit(0)
    assert other.plan is not None and other.plan.new[0].copy_key == key < 2**63
    assert copy_key(first.request_id, 1) != key
    ids = np.array([5], np.int32).tobytes()
    probe = Submit(1, request_id(1), 0, 0, ids, Sampling(max_tokens=1), copies_as=request_id(0))
    assert sequence_of(probe, 1, (0, 0, 0), 0).copy_key == key


def test_the_first_step_after_a_stop_is_of_those_who_ran() -> None:
    """Sequences that moved here come with the second: a survivor shall not wait for their prompts, too."""
    story = Story()
    story.submit(1, 10, max_tokens=30)
    story.step(3)
    story.event(Membership(4, True))  # a peer fell
    story.submit(3, 10, max_tokens=5)  # nor for those of arrivals
    story.submit(2, 100, resumed=True, max_tokens=5)
    story.finish(abandon=True)
    assert [rows for _, rows in story.rows()] == [1]
    story.finish()
    assert [rows for _, rows in story.rows()] == [1, 100, 10]
    story.run()
    for number, count in ((1, 30), (2, 5), (3, 5)):
        assert story.outputs(number) == story.expected(number, count)


def test_the_plan_made_in_a_stop_is_the_first_step_of_the_next_group() -> None:
    """It is told who goes on only afterwards: that must not keep moved ones from the second step, too."""
    story = Story()
    story.submit(1, 10, max_tokens=30)
    story.step(3)
    story.finish(abandon=True)
    assert [rows for _, rows in story.rows()] == [1]
    story.event(Membership(4, True))
    story.submit(2, 100, resumed=True, max_tokens=5)
    story.finish()
    assert [rows for _, rows in story.rows()] == [1, 100]


class Ahead(Story):
    """The next plan is made while a step is under way."""

    def __init__(self) -> None:
        self.ahead: list[StepPlan] = []
        super().__init__(async_steps=True)

    def _decide(self) -> None:
        while plans := self.core.step(self.now_ns).plans:
            self.ahead += plans
        check(self.core)
        if self.plan is None and self.ahead:
            self.plan = self.ahead.pop(0)


def test_the_second_step_after_a_stop_is_not_planned_ahead() -> None:
    """So that those who move here during the first one are in it."""
    story = Ahead()
    story.submit(1, 10, max_tokens=30)
    story.step(3)
    assert len(story.core.flights) == 2
    story.finish(abandon=True)
    story.finish(abandon=True)
    story.event(Membership(4, True))
    assert [flight.num_rows for flight in story.core.flights] == [1]
    story.submit(2, 100, resumed=True, max_tokens=5)
    assert [flight.num_rows for flight in story.core.flights] == [1]
    story.finish()
    assert [flight.num_rows for flight in story.core.flights] == [101, 2], "ahead again"


def test_a_change_that_ends_no_step_changes_no_plan() -> None:
    """A rank joined. What is planned ahead is run, and so is what follows."""
    story = Ahead()
    story.submit(1, 10, max_tokens=30)
    story.step(3)
    story.event(Membership(4, True))
    story.submit(2, 100, resumed=True, max_tokens=5)
    assert [flight.num_rows for flight in story.core.flights] == [1, 1]
    story.finish()
    assert [flight.num_rows for flight in story.core.flights] == [1, 101]
    story.finish()
    assert [flight.num_rows for flight in story.core.flights] == [101, 2]


def test_after_a_stop_nobody_waits_where_nobody_runs() -> None:
    story = Story()
    story.event(Membership(4, True))
    story.submit(2, 100, resumed=True, max_tokens=5)
    assert [rows for _, rows in story.rows()] == [100]


def test_a_prompt_is_not_started_anew_while_its_next_chunk_is_under_way() -> None:
    """Loads of others begin meanwhile: its first chunk was abandoned, the next one has no result yet."""
    story = Story(store=True, max_num_batched_tokens=40)
    story.submit(9)
    story.submit(0, prompt=100)
    story.step()
    first, story.plan = story.plan, None
    assert first is not None and len(first.new) == 1  # its first chunk, beside a token of the other
    story.core._flights_max = 2
    story.core.handle(Membership(4, True), story.now_ns)
    (second,) = story.core.step(story.now_ns).plans
    story.submit(1)
    story.event(StepResult(first.seq, aborted=True))
    story.event(StepResult(second.seq, aborted=True))
    story.run()
    assert story.outputs(0) == story.expected(0, 20)
