"""Policy `ballot`: prompt step or decode step? Decided by vote, the same on every rank. Pure.

Prompt rows make a step long, and every rank takes part in every step, so prompt steps are taken
together. `all` points come every `all_steps` decode steps: there a prompt step needs every rank to
want one. `any` points come every `any_steps`: one rank suffices, so that a lonely prompt waits for a
bounded time. A prompt step starts the count again, and a count of 0 is an `all` point. While nobody
decodes there is nothing to hold up: any wish passes at once.

A rank wants a prompt step before it has planned one. So a vote that passes is followed by a second
one, for which each rank that voted for it has tried to: did anybody find something to do? If not, the
step is a decode step after all, and the point is over.

However many prompts there are, at most `prompt_steps_max` prompt steps follow each other while
anybody decodes; the decode step then due only interrupts them, it does not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from phalanx.protocol.board import Vote


class Next(Enum):
    """What every rank does after a round of votes."""

    DECODE = auto()  # a step: whoever has a plan runs it, the others take it as a placeholder
    PROMPT = auto()  # the same with plans of prompt rows
    SECOND_VOTE = auto()  # no step: those who want a prompt step plan it, then all vote again
    NOTHING = auto()  # no step: nobody has anything to run


@dataclass(frozen=True)
class Rules:
    all_steps: int
    any_steps: int
    prompt_steps_max: int


@dataclass(frozen=True)
class Count:
    """What the ranks remember between rounds; a new epoch starts with `Count()`."""

    decode_steps: int = 0  # since the last prompt step
    prompt_steps: int = 0  # since the last decode step
    second: bool = False  # the next round is a second vote
    in_vain: bool = False  # a second vote failed since the last step


def decide(rules: Rules, count: Count, votes: Iterable[int]) -> tuple[Next, Count]:
    """What comes after a round, from the votes of all members in it (their order does not matter)."""
    some, every = 0, Vote.PLAN | Vote.WANTS_PROMPT | Vote.PROMPT_PLAN
    for vote in votes:
        some, every = some | vote, every & vote
    if count.second:
        if some & Vote.PROMPT_PLAN:
            return Next.PROMPT, Count(prompt_steps=count.prompt_steps + 1)
        count = replace(count, second=False, in_vain=True)
    elif _passes(rules, count, some, every):
        return Next.SECOND_VOTE, replace(count, second=True)
    if not some & Vote.PLAN:
        return Next.NOTHING, count
    interrupts = count.prompt_steps >= rules.prompt_steps_max
    return Next.DECODE, Count(decode_steps=count.decode_steps + (not interrupts))


def _passes(rules: Rules, count: Count, some: int, every: int) -> bool:
    """Whether the group would take a prompt step now."""
    if not some & Vote.WANTS_PROMPT:
        return False
    if not some & Vote.PLAN:
        return True
    if count.in_vain or count.prompt_steps >= rules.prompt_steps_max:
        return False
    if count.decode_steps % rules.all_steps == 0 and every & Vote.WANTS_PROMPT:
        return True
    return count.decode_steps > 0 and count.decode_steps % rules.any_steps == 0
