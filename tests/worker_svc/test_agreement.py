"""Ranks under policy `ballot` in a simulated group: they never diverge, and planted bugs are found."""

from collections.abc import Callable

import pytest

import phalanx.worker_svc.agreement as agreement_module
import phalanx.worker_svc.ballot as ballot_module
from phalanx.protocol.board import SeatRow, Vote
from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.steps import PromptTurn, ToWorker
from phalanx.scheduler_svc.core import Scheduler
from phalanx.worker_svc.agreement import Agreement
from phalanx.worker_svc.ballot import Count, Next, Rules
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.hand import Hand
from sim.ballot_world import Options, World

Patch = pytest.MonkeyPatch
SEEDS = 12


@pytest.mark.parametrize("seed", range(SEEDS))
def test_ranks_agree_and_streams_are_exact(seed: int) -> None:
    World(seed).run().check_streams()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_go_on_while_schedulers_fall(seed: int) -> None:
    World(seed, dying(seed)).run().check_streams()


@pytest.mark.soak
def test_ten_thousand_steps_never_diverge() -> None:
    """With the intervals of a real node, arrivals all the time, and schedulers and workers that fall."""
    config = SchedulerConfig(policy="ballot", max_num_seqs=4, max_num_batched_tokens=150)
    options = Options(
        ranks=3, config=config, requests=1500, every_us=1500, outputs=(1, 5, 30, 120), open_max=12,
        scheduler_faults=20, worker_faults=8,
    )  # fmt: skip
    world = World(1, options).run(steps_max=10_000)
    assert world.steps == 10_000
    assert 50 < world.prompt_steps < 5_000
    assert len(world.decisions) > 8, "epochs"


def test_an_idle_engine_begins_with_a_prompt_step() -> None:
    """However the first prompt comes, no step is taken before it."""
    for seed in range(20):
        config = SchedulerConfig(policy="ballot")
        world = World(seed, Options(ranks=3, config=config, requests=1, outputs=(5,))).run()
        kinds = [d.next_ for d in world.decisions[2] if d.next_ is not Next.NOTHING]
        assert kinds[0] is Next.PROMPT
        assert kinds.count(Next.PROMPT) == 1


@pytest.mark.parametrize("prompt_steps_max", [1, 3])
def test_saturated_prompts_leave_decode_steps(prompt_steps_max: int) -> None:
    """Prompts come faster than they can be computed, on every rank; streams run on all the same."""
    config = SchedulerConfig(
        policy="ballot", prompt_steps_max=prompt_steps_max, max_num_seqs=6,
        max_num_batched_tokens=32,
    )  # fmt: skip
    options = Options(ranks=2, config=config, requests=60, every_us=1, outputs=(10,))
    world = World(3, options).run()
    world.check_streams()
    runs, row = list[int](), 0
    for decision in world.decisions[2]:
        if decision.next_ is Next.PROMPT:
            held_up = any(vote & Vote.PLAN for vote in decision.first_votes.values())
            row = row + 1 if held_up else 0
            runs.append(row)
        elif decision.next_ is Next.DECODE:
            row = 0
    assert max(runs) == prompt_steps_max


@pytest.mark.parametrize("role", ["prompt", "completion"])
def test_other_roles_work_with_it(role: str) -> None:
    """A prompt node only takes prompt steps. A completion node computes what it took over in prompt steps."""
    config = SchedulerConfig(policy="ballot", role=role, max_num_batched_tokens=64)  # type: ignore[arg-type]
    options = Options(ranks=2, config=config, requests=20, outputs=(1,))
    world = World(5, options)
    if role == "completion":
        for _, request in world._due:  # what another node began
            request.max_tokens = 20
            request.outputs = world.expected(request)[:7]
    world.run().check_streams()
    kinds = {decision.next_ for decision in world.decisions[2]}
    assert (Next.DECODE in kinds) == (role == "completion")
    assert Next.PROMPT in kinds


# ------------------------------------------------------------ planted bugs


def one_vote_word(patch: Patch) -> None:
    """A quick rank overwrites what a slow one has not read."""
    post, vote = SeatRow.post, SeatRow.vote

    def single(self: SeatRow, epoch: int, number: int, flags: int, version: int) -> None:
        post(self, epoch, number, flags, version)
        self._u64[self._at64 + 9] = self._u64[self._at64 + 10] = version << 8 | flags

    patch.setattr(SeatRow, "post", single)
    patch.setattr(SeatRow, "vote", lambda self, number: vote(self, 0))


def count_goes_on_over_epochs(patch: Patch) -> None:
    """Survivors go on counting, a rank that joins starts at 0."""
    counts = dict[int, Count]()
    init, reach = Agreement.__init__, Agreement.reach

    def remember(self: Agreement, config: object, group: Group, *rest: object) -> None:
        init(self, config, group, *rest)  # type: ignore[arg-type]
        self.count = counts.get(id(rest[0]), self.count)

    def store(self: Agreement) -> object:
        next_ = yield from reach(self)
        counts[id(self._hand)] = self.count
        return next_

    patch.setattr(Agreement, "__init__", remember)
    patch.setattr(Agreement, "reach", store)


def no_second_vote(patch: Patch) -> None:
    """What passes is a prompt step, whether or not there is anything for it."""
    decide = ballot_module.decide

    def hasty(rules: Rules, count: Count, votes: list[int]) -> tuple[Next, Count]:
        return decide(rules, count, [Vote.PROMPT_PLAN] if count.second else votes)

    patch.setattr(agreement_module, "decide", hasty)


def second_vote_of_oneself(patch: Patch) -> None:
    """Who has no plan of prompts takes it that nobody has."""
    decide = ballot_module.decide
    votes = Group.votes

    def own(self: Group) -> list[int]:
        found = votes(self)
        mine = self.board.seats[self.seat].vote(self.round - 1)[0]
        return [mine] if mine & Vote.PLAN else found

    patch.setattr(Group, "votes", own)
    patch.setattr(agreement_module, "decide", decide)


def count_of_own_steps(patch: Patch) -> None:
    """A prompt step resets the count only where it had rows."""
    decide = ballot_module.decide

    def reach(self: Agreement) -> object:
        before = self.count
        next_ = yield from original(self)
        if next_ is Next.PROMPT and self._hand.prompt is None:
            self.count = Count(before.decode_steps + 1)
        return next_

    original = Agreement.reach
    patch.setattr(Agreement, "reach", reach)
    patch.setattr(agreement_module, "decide", decide)


def prompts_without_end(patch: Patch) -> None:
    config = agreement_module.rules_of

    def endless(settings: SchedulerConfig) -> Rules | None:
        rules = config(settings)
        return rules and Rules(rules.all_steps, rules.any_steps, 1 << 30)

    patch.setattr(agreement_module, "rules_of", endless)


def dead_schedulers_are_waited_for(patch: Patch) -> None:
    patch.setattr(Hand, "may_vote", lambda self, now_ns: not self.waits)


def dead_schedulers_keep_their_wish(patch: Patch) -> None:
    """The rank goes on without it, and votes as if it were there: asked again and again."""
    patch.setattr(Hand, "_wants_prompt", property(lambda self: self._offer.wants_prompt))


def late_answers_are_run(patch: Patch) -> None:
    """The group went on; the plan of prompts becomes the plan in hand."""
    take = Hand.take

    def eager(self: Hand, message: ToWorker, now_ns: int) -> object:
        late = (
            not isinstance(message, PromptTurn) and getattr(message, "turn", 0) and not self._called
        )
        if late:
            self.plan = message  # type: ignore[assignment]
            return None
        return take(self, message, now_ns)

    patch.setattr(Hand, "take", eager)


def a_wish_is_said_once(patch: Patch) -> None:
    """Not again when the count starts again."""
    done = Hand.done

    def mute(self: Hand, prompt: bool, now_ns: int) -> None:
        news = self._news
        done(self, prompt, now_ns)
        self._news = news

    patch.setattr(Hand, "done", mute)
    patch.setattr(Hand, "begin_epoch", lambda self, now_ns: None)


def plans_ahead_are_kept(patch: Patch) -> None:
    """What was planned before the turn is not taken back."""

    def call(self: Hand, now_ns: int) -> list[object]:
        if not self._wants_prompt:
            return []
        self._turn += 1
        self._called, self._heard_ns = True, now_ns
        return [PromptTurn(self._turn)]

    patch.setattr(Hand, "call", call)


def turn_is_forgotten(patch: Patch) -> None:
    """The scheduler plans decode rows when prompts have their turn."""
    patch.setattr(Scheduler, "_prompt_turn", lambda self, turn, now_ns: None)


def dying(seed: int) -> Options:
    """Schedulers fall silent all the time."""
    options = Options.of(seed)
    options.ranks, options.every_us, options.scheduler_faults = 3, 3000, 15
    return options


# Seeds within which each is found: several times what it took when it was planted first.
PLANTED: list[tuple[Callable[[Patch], None], Callable[[int], Options], int]] = [
    (one_vote_word, Options.of, 10),
    (count_goes_on_over_epochs, Options.of, 20),
    (no_second_vote, dying, 20),
    (second_vote_of_oneself, Options.of, 10),
    (count_of_own_steps, Options.of, 10),
    (prompts_without_end, Options.of, 10),
    (dead_schedulers_are_waited_for, dying, 20),
    (dead_schedulers_keep_their_wish, dying, 20),
    (late_answers_are_run, Options.of, 20),
    (a_wish_is_said_once, Options.of, 10),
    (plans_ahead_are_kept, Options.of, 10),
    (turn_is_forgotten, Options.of, 10),
]


@pytest.mark.parametrize(
    ("plant", "options", "seeds"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED]
)
def test_planted_bug_is_found(
    plant: Callable[[Patch], None],
    options: Callable[[int], Options],
    seeds: int,
    monkeypatch: Patch,
) -> None:
    plant(monkeypatch)
    for seed in range(seeds):
        try:
            World(seed, options(seed)).run().check_streams()
        except (AssertionError, IndexError, KeyError, PhalanxError) as found:
            print(f"seed {seed}: {found}")
            return
    pytest.fail(f"{plant.__name__} was not found within {seeds} seeds")
