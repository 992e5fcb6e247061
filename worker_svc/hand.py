"""What this rank's scheduler has handed over, what became of it, and how the rank votes with it. Pure.

The scheduler sends plans and, under policy `ballot`, offers: what it would do if it were its turn. A
rank votes when it has something to say that it has not said yet, or when a peer does. It first knows
what it has: while a plan or an answer is on its way it waits, but not for long: a scheduler that keeps
silent may be dead, and its rank then votes like one that has no work, until it is heard again.
"""

from phalanx.protocol.board import Vote
from phalanx.protocol.steps import Offer, PromptTurn, StepPlan, StepResult, ToScheduler, ToWorker

# How long a plan or an answer may be on its way. A scheduler that was merely slow (no CPU) is given
# twice as much the next time; the supervisor restarts one that hangs.
PATIENCE_NS = 50_000_000
PATIENCE_NS_MAX = 800_000_000


class Hand:
    """Of one link: `reset` when the scheduler has made a new one."""

    def __init__(self) -> None:
        # The newest; never goes back, so that an old answer is never taken for a new one.
        self._turn = 0
        self._patience_ns = PATIENCE_NS
        self._offer = Offer()
        self.reset(0)

    def reset(self, now_ns: int) -> None:
        self.plan: StepPlan | None = None  # for the next decode step, under `mixed` for any step
        self.prompt: StepPlan | None = None  # for the prompt step that the group is about to take
        self._called = False  # the scheduler was told of `_turn` and has not answered
        self._owed = False  # it plans anew what came back, or the step after an epoch's first one
        self._first = False  # the next plan done is the epoch's first
        self._silent = False
        # Something that no vote has said yet: if we had work, that it is gone. A peer's wish may wait
        # for nothing else.
        self._news = self._offer != Offer()
        self._offer = Offer()
        self._aborted = 0  # seq of the newest plan that was not run
        self._heard_ns = now_ns  # since when something is on its way, if it is

    def take(self, message: ToWorker, now_ns: int) -> StepResult | None:
        """The next message of the scheduler, in order. Returns what to answer at once: not run."""
        self._heard_ns = now_ns
        if self._silent:
            self._silent, self._news = False, True
        else:
            self._patience_ns = PATIENCE_NS
        if isinstance(message, Offer):
            before, self._offer = self._offer, message
            self._owed = False  # it tells whether a plan follows
            said = (before.wants_prompt, before.decodes)
            self._news |= said != (message.wants_prompt, message.decodes)
            if message.declined == self._turn:
                self._called = False
            return None
        if message.seen < self._aborted:  # made without knowing of one that was not run
            return self._not_run(message)
        self._owed = False
        if message.turn:
            if not self._called or message.turn != self._turn:
                return self._not_run(message)  # too late: the group went on without it
            self._called, self.prompt = False, message
        elif self._called:
            return self._not_run(message)
        else:
            self.plan = message
        return None

    def _not_run(self, plan: StepPlan) -> StepResult:
        self._aborted = plan.seq
        return StepResult(plan.seq, aborted=True)

    # ------------------------------------------------------------ votes

    @property
    def waits(self) -> bool:
        """A plan or an answer is on its way."""
        if self._silent or self.plan is not None or self.prompt is not None:
            return False
        return self._called or self._owed or self._offer.decodes

    def may_vote(self, now_ns: int) -> bool:
        """Whether we know what we have; a silent scheduler has nothing."""
        if not self.waits:
            return True
        if now_ns - self._heard_ns < self._patience_ns:
            return False
        if self._called or self._offer.decodes:
            self._patience_ns = min(2 * self._patience_ns, PATIENCE_NS_MAX)
            self._silent, self._news = True, True
        self._called = self._owed = False
        return True

    @property
    def has_news(self) -> bool:
        """Whether there is something to vote for that no vote has said yet."""
        return self.plan is not None or self._news

    def vote(self) -> int:
        self._news = False
        vote = Vote.PLAN if self.plan is not None else 0
        if self.prompt is not None:
            vote |= Vote.PROMPT_PLAN
        if self._wants_prompt:
            vote |= Vote.WANTS_PROMPT
        return vote

    @property
    def _wants_prompt(self) -> bool:
        return self._offer.wants_prompt and not self._silent

    def call(self, now_ns: int) -> list[ToScheduler]:
        """The vote for a prompt step passed: what to tell the scheduler, if we were for it.

        It plans with nothing else under way: the plan in hand comes back.
        """
        if not self._wants_prompt:
            return []
        answers: list[ToScheduler] = []
        if self.plan is not None:
            answers.append(self._not_run(self.plan))
            self.plan = None
        self._turn += 1
        self._called, self._heard_ns = True, now_ns
        return [*answers, PromptTurn(self._turn)]

    # ------------------------------------------------------------ steps

    def done(self, prompt: bool, now_ns: int) -> None:
        """A step is over, with our plan of its kind if there was one."""
        self._heard_ns = now_ns
        if self._first and self.plan is not None:
            self._first, self._owed = False, True  # nothing was planned ahead of that one's result
        if prompt:
            self.prompt = None
            self._news |= (
                self._offer.wants_prompt
            )  # the count starts again: it may be our turn at once
        else:
            self.plan = None

    def abandon(self) -> list[StepResult]:
        """The epoch moved: what to answer for the plans in hand.

        They are planned anew, and the next epoch's first round waits for that: else these sequences would
        miss a whole step that their peers take.
        """
        plans, self.plan, self.prompt = (self.plan, self.prompt), None, None
        self._called = False
        answers = [self._not_run(plan) for plan in plans if plan is not None]
        self._owed |= bool(answers)
        return answers

    def begin_epoch(self, now_ns: int) -> None:
        """Votes of another epoch do not count any more."""
        self._heard_ns = now_ns
        self._first = True
        self._news |= self._offer.wants_prompt
