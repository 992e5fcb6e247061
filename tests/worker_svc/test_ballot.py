"""When the group takes a prompt step: points, second votes, and who may not be kept waiting."""

from collections.abc import Callable, Iterable

from phalanx.protocol.board import Vote
from phalanx.worker_svc.ballot import Count, Next, Rules, decide

RULES = Rules(all_steps=70, any_steps=100, prompt_steps_max=3)
NONE, PLAN, WANTS, READY = 0, Vote.PLAN, Vote.WANTS_PROMPT, Vote.PROMPT_PLAN
BOTH = PLAN | WANTS


def steps(
    first: Callable[[int], list[int]], second: list[int], number: int, count: Count | None = None
) -> list[Next]:
    """The kinds of the first `number` steps, when step n's first vote is `first(n)`."""
    count, kinds = count or Count(), list[Next]()
    while len(kinds) < number:
        next_, count = decide(RULES, count, first(len(kinds)))
        if next_ is Next.SECOND_VOTE:
            next_, count = decide(RULES, count, second)
        kinds.append(next_)
    return kinds


def prompts(kinds: Iterable[Next]) -> list[int]:
    return [at for at, kind in enumerate(kinds) if kind is Next.PROMPT]


def test_an_idle_group_takes_a_prompt_step_at_once() -> None:
    next_, count = decide(RULES, Count(), [NONE, WANTS, NONE])
    assert next_ is Next.SECOND_VOTE
    next_, count = decide(RULES, count, [NONE, READY, NONE])
    assert (next_, count) == (Next.PROMPT, Count(prompt_steps=1))


def test_without_work_and_wishes_there_is_no_step() -> None:
    assert decide(RULES, Count(), [NONE, NONE]) == (Next.NOTHING, Count())


def test_all_points_need_every_rank() -> None:
    """From the 7th decode step on both ranks wish: the step after 70 decode steps is one of prompts."""
    kinds = steps(lambda n: [BOTH, BOTH if n >= 7 else PLAN], [READY, NONE], 72)
    assert prompts(kinds) == [70, 71]  # after a prompt step the count is 0: an `all` point


def test_any_points_need_one_rank() -> None:
    """One rank wishes always, the other never: after 100 decode steps, and again after 100 more."""
    kinds = steps(lambda n: [PLAN, BOTH], [PLAN, READY], 250)
    assert prompts(kinds) == [100, 201]


def test_a_wish_too_late_for_its_point_waits_for_the_next() -> None:
    late = steps(lambda n: [BOTH, PLAN if n <= 100 else BOTH], [PLAN, NONE], 300)
    assert prompts(late) == []  # nobody has anything to do at the second vote
    kinds = steps(lambda n: [BOTH if n > 100 else PLAN, PLAN], [READY, PLAN], 300)
    assert prompts(kinds) == [200]


def test_a_second_vote_in_vain_makes_it_a_decode_step() -> None:
    """And the count goes on: nobody votes again before the next point."""
    count = Count(decode_steps=70)
    next_, count = decide(RULES, count, [BOTH, BOTH])
    assert next_ is Next.SECOND_VOTE
    next_, count = decide(RULES, count, [PLAN, BOTH])
    assert (next_, count) == (Next.DECODE, Count(decode_steps=71))
    assert decide(RULES, count, [BOTH, BOTH])[0] is Next.DECODE


def test_a_point_in_vain_is_over_even_if_no_plan_is_there_yet() -> None:
    """Else a scheduler that answers late would be asked again and again, and never decode."""
    count = Count(decode_steps=70, second=True)
    next_, count = decide(RULES, count, [NONE, NONE])
    assert next_ is Next.NOTHING
    next_, count = decide(RULES, count, [BOTH, BOTH])
    assert (next_, count) == (Next.DECODE, Count(decode_steps=71))


def test_an_idle_group_asks_again_after_a_vote_in_vain() -> None:
    """No decode step will come, so nothing else would ever make it a point."""
    _, count = decide(RULES, Count(second=True), [NONE, NONE])
    assert decide(RULES, count, [WANTS, NONE])[0] is Next.SECOND_VOTE


def test_prompts_without_end_leave_a_decode_step_in_every_four() -> None:
    """Prompts saturated on all ranks: at most `prompt_steps_max` in a row, and then on at once."""
    kinds = steps(lambda n: [BOTH, BOTH], [READY, READY], 400)
    assert prompts(kinds) == [n for n in range(400) if n % 4 != 3]


def test_while_nobody_decodes_prompt_steps_follow_each_other() -> None:
    kinds = steps(lambda n: [WANTS, NONE], [READY, NONE], 20)
    assert prompts(kinds) == list(range(20))
    _, count = decide(RULES, Count(prompt_steps=20), [BOTH, WANTS])
    assert count == Count(decode_steps=0), "now somebody decodes, and is served first"


def test_the_order_of_votes_does_not_matter() -> None:
    votes = [PLAN, BOTH, NONE, WANTS]
    for count in (Count(), Count(70), Count(100), Count(5, second=True), Count(0, 3)):
        found = {decide(RULES, count, votes[at:] + votes[:at]) for at in range(4)}
        assert len(found) == 1
