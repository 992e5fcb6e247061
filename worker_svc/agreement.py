"""Rounds of votes until the group knows its next step: one under `mixed`, at most two under `ballot`.

Written as a generator that yields what it waits for, so that a simulation can run many ranks in one
thread, in any order.
"""

from collections.abc import Callable, Generator

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.steps import ToScheduler
from phalanx.worker_svc.ballot import Count, Next, Rules, decide
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.hand import Hand

Waits = Generator[Callable[[], bool], None, Next]  # yields conditions, each to be waited for


class Agreement:
    """This rank's part in the votes of one epoch.

    Args:
        read: Takes what the scheduler has sent into the hand; returns the time in ns.
        say: Sends something to the scheduler.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        group: Group,
        hand: Hand,
        read: Callable[[], int],
        say: Callable[[ToScheduler], None],
    ) -> None:
        self.group = group
        self.count = Count()
        self._rules = rules_of(config)
        self._hand, self._read, self._say = hand, read, say

    def due(self) -> bool:
        """Whether to vote now: we have something to say or a peer waits for us."""
        may = self._hand.may_vote(self._read())
        return may and (self._hand.has_news or self.group.peer_waits())

    def reach(self) -> Waits:
        """Vote, perhaps twice. Ends with what comes next."""
        group, hand = self.group, self._hand
        group.post(hand.vote())
        yield group.complete
        votes = group.votes()
        if self._rules is None:
            return Next.DECODE  # whoever opened the round has a plan
        next_, self.count = decide(self._rules, self.count, votes)
        if next_ is not Next.SECOND_VOTE:
            return next_
        for message in hand.call(self._read()):
            self._say(message)
        yield self._answered
        group.post(hand.vote())
        yield group.complete
        next_, self.count = decide(self._rules, self.count, group.votes())
        return next_

    def _answered(self) -> bool:
        return self._hand.may_vote(self._read())


def rules_of(config: SchedulerConfig) -> Rules | None:
    """None: under `mixed` every step is of one kind."""
    if config.policy == "mixed":
        return None
    return Rules(config.prompt_all_steps, config.prompt_any_steps, config.prompt_steps_max)
