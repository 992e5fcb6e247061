"""What a rank says and waits for, as its scheduler's messages come, come late, or do not come."""

from phalanx.protocol.board import Vote
from phalanx.protocol.steps import Offer, PromptTurn, StepPlan, StepResult
from phalanx.worker_svc.hand import PATIENCE_NS, Hand


def plan(seq: int, seen: int = 0, turn: int = 0) -> StepPlan:
    return StepPlan(seq, seen, (), b"", b"", b"", b"", b"", b"", b"", b"", b"", turn=turn)


def aborted(seq: int) -> StepResult:
    return StepResult(seq, aborted=True)


def test_a_plan_is_voted_for_until_it_is_done() -> None:
    hand = Hand()
    assert not hand.has_news and hand.may_vote(0) and hand.vote() == 0
    assert hand.take(plan(1), 0) is None
    for _ in range(2):  # a prompt step of others comes between
        assert hand.has_news and hand.vote() == Vote.PLAN
    hand.done(prompt=False, now_ns=0)
    assert not hand.has_news and hand.plan is None


def test_an_offer_is_news_once() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True), 0)
    assert hand.has_news and hand.vote() == Vote.WANTS_PROMPT
    assert not hand.has_news
    hand.take(Offer(wants_prompt=True, declined=3), 0)
    assert not hand.has_news, "it says the same"


def test_a_wish_is_news_again_after_a_prompt_step_and_in_a_new_epoch() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True), 0)
    for begin in (lambda: hand.done(prompt=True, now_ns=0), lambda: hand.begin_epoch(0)):
        hand.vote()
        begin()
        assert hand.has_news


def test_a_turn_takes_back_what_was_planned_ahead() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True, decodes=True), 0)
    hand.take(plan(4), 0)
    assert hand.call(0) == [aborted(4), PromptTurn(1)]
    assert not hand.may_vote(0)
    assert hand.take(plan(5, seen=3), 0) == aborted(5), "sent before the scheduler knew"
    assert hand.take(plan(6, seen=5, turn=1), 0) is None
    assert hand.may_vote(0) and hand.vote() == Vote.PROMPT_PLAN | Vote.WANTS_PROMPT


def test_a_rank_without_a_wish_keeps_its_plan() -> None:
    hand = Hand()
    hand.take(Offer(decodes=True), 0)
    hand.take(plan(4), 0)
    assert hand.call(0) == [] and hand.vote() == Vote.PLAN


def test_a_declined_turn_leaves_the_plan_that_comes_instead() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True, decodes=True), 0)
    hand.call(0)
    hand.take(Offer(decodes=True, declined=1), 0)
    assert not hand.may_vote(0), "a plan is on its way"
    assert hand.take(plan(1), 0) is None
    assert hand.may_vote(0) and hand.vote() == Vote.PLAN


def test_a_silent_scheduler_is_not_waited_for_until_it_is_heard_again() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True, decodes=True), 0)
    assert not hand.may_vote(PATIENCE_NS - 1)
    assert hand.may_vote(PATIENCE_NS)
    assert hand.has_news, "peers may wait for nothing but us"
    assert hand.vote() == 0, "no work, no wish"
    assert hand.call(PATIENCE_NS) == [] and hand.may_vote(2 * PATIENCE_NS)
    hand.take(plan(1), 3 * PATIENCE_NS)
    assert hand.has_news and hand.vote() == Vote.PLAN | Vote.WANTS_PROMPT


def test_an_answer_that_comes_too_late_is_not_run() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True), 0)
    assert hand.call(0) == [PromptTurn(1)]
    assert hand.may_vote(PATIENCE_NS) and hand.vote() == 0
    assert hand.take(plan(1, turn=1), 2 * PATIENCE_NS) == aborted(1)
    assert hand.vote() == Vote.WANTS_PROMPT
    # A slow one is given more time at the next turn, a quick one is not.
    assert hand.call(0) == [PromptTurn(2)]
    assert not hand.may_vote(2 * PATIENCE_NS - 1)
    hand.take(plan(2, seen=1, turn=2), 2 * PATIENCE_NS - 1)
    hand.done(prompt=True, now_ns=0)
    hand.take(Offer(wants_prompt=True), 0)
    assert hand.call(0) == [PromptTurn(3)] and hand.may_vote(PATIENCE_NS)


def test_turns_count_on_over_links() -> None:
    """An answer to another scheduler's turn must not fit."""
    hand = Hand()
    hand.take(Offer(wants_prompt=True), 0)
    hand.call(0)
    hand.reset(0)
    hand.take(Offer(wants_prompt=True), 0)
    assert hand.call(0) == [PromptTurn(2)]


def test_a_moved_epoch_gives_all_plans_back() -> None:
    hand = Hand()
    hand.take(Offer(wants_prompt=True), 0)
    hand.call(0)
    hand.take(plan(7, turn=1), 0)
    assert hand.abandon() == [aborted(7)]
    assert hand.take(plan(8, seen=6), 0) == aborted(8), "it did not know of that"
    assert hand.take(plan(9, seen=8), 0) is None


def test_the_next_epoch_waits_for_what_is_planned_anew() -> None:
    """Else the rank would take its first step as a placeholder, and its streams miss it."""
    hand = Hand()
    hand.take(plan(7), 0)
    hand.abandon()
    hand.begin_epoch(5)
    assert hand.take(plan(8, seen=6), 5) == aborted(8)
    assert not hand.may_vote(5) and hand.waits, "that one is planned anew, too"
    hand.take(plan(9, seen=8), 6)
    assert hand.may_vote(6) and hand.vote() == Vote.PLAN


def test_a_second_stop_does_not_forget_what_is_planned_anew() -> None:
    hand = Hand()
    hand.take(plan(7), 0)
    hand.abandon()
    hand.begin_epoch(5)
    assert hand.abandon() == []
    hand.begin_epoch(6)
    assert not hand.may_vote(6)


def test_the_step_after_an_epochs_first_waits_for_its_plan() -> None:
    hand = Hand()
    hand.begin_epoch(0)
    hand.done(prompt=False, now_ns=1)
    assert hand.may_vote(1), "that was a placeholder"
    hand.take(plan(1), 1)
    hand.done(prompt=False, now_ns=2)
    assert not hand.may_vote(2)
    hand.take(plan(2), 3)
    hand.done(prompt=False, now_ns=4)
    assert hand.may_vote(4), "from then on plans are made ahead"


def test_who_offers_nothing_owes_nothing() -> None:
    hand = Hand()
    hand.take(Offer(decodes=True), 0)
    hand.take(plan(7), 0)
    hand.abandon()
    hand.begin_epoch(5)
    assert not hand.may_vote(5)
    hand.take(Offer(), 6)
    assert hand.may_vote(6), "its sequences have ended meanwhile"


def test_a_plan_that_never_comes_is_no_reason_for_a_step() -> None:
    """All its sequences have ended meanwhile."""
    hand = Hand()
    hand.take(plan(7), 0)
    hand.abandon()
    hand.begin_epoch(5)
    assert not hand.may_vote(PATIENCE_NS + 4)
    assert hand.may_vote(PATIENCE_NS + 5) and not hand.has_news and not hand.waits


def test_a_new_link_is_news_if_there_was_work() -> None:
    """The wish of a peer may wait for nothing but our outputs, which went with our scheduler."""
    hand = Hand()
    hand.reset(0)
    assert not hand.has_news
    hand.take(Offer(decodes=True), 0)
    hand.vote()
    hand.reset(0)
    assert hand.has_news and hand.vote() == 0
