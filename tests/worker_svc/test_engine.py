"""A request's tokens and logprobs depend on the request alone: not on company, portions, order, drafts,
or on being preempted and computed again, with every sampling setting; and one that breaks ends alone."""

import math
import random
from functools import cache

import pytest
from engine_world import EngineWorld, Request
from forward_world import weights_of
from msgspec.structs import replace

from phalanx.kernels.reference.sample import SampleStatus
from phalanx.protocol.arena import Arena
from phalanx.protocol.config import WorkerConfig
from phalanx.protocol.errors import StaleHandle
from phalanx.protocol.messages import Sampling
from phalanx.worker_svc import scoring
from phalanx.worker_svc.model.reader import Reader

SHAPES = ("tiny-a", "short")
OUTPUTS = 14
SETTINGS = {
    "greedy": Sampling(temperature=0.0, seed=1),
    "cool": Sampling(temperature=0.8, seed=2, logprobs=2),
    "plain": Sampling(temperature=1.0, seed=3),
    "top-k and top-p": Sampling(temperature=1.0, seed=4, top_k=40, top_p=0.9, logprobs=3),
    "min-p": Sampling(temperature=0.8, seed=5, min_p=0.02),
    "penalties": Sampling(
        temperature=1.0,
        seed=6,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logprobs=0,
    ),
    "greedy with penalties": Sampling(temperature=0.0, seed=7, frequency_penalty=1.5, logprobs=1),
    "bias": Sampling(temperature=1.0, seed=8, logit_bias={17: 9.0, 30: 8.5, 40: -100.0}),
    "late end": Sampling(
        temperature=1.0,
        seed=9,
        min_tokens=OUTPUTS // 2,
        first_n_token_no_eos=3,
        stop_token_ids=(17, 18),
        logit_bias={1: 9.0, 17: 9.0, 33: 9.0},
    ),
    "nearly cold": Sampling(temperature=1e-4, seed=10, logprobs=2),
    "prompt": Sampling(temperature=0.7, seed=11, top_k=9, prompt_logprobs=2, logprobs=1),
    "prompt alone": Sampling(temperature=1.4, seed=12, prompt_logprobs=0),
}


def requests(shape: str) -> list[Request]:
    """One for each setting. The drafter's guesses are right at first, then wrong, then right again."""
    choose = random.Random(1)
    vocab = weights_of(shape).config.vocab_size
    lengths = [1, 2, 37, 5, 16, 71, 17, 33, 6, 40, 131, 29]
    found = []
    for sampling, length in zip(SETTINGS.values(), lengths, strict=True):
        prompt = [choose.randrange(3, vocab) for _ in range(length)]
        found.append(Request(prompt, sampling, OUTPUTS))
    return found


@cache
def alone_of(shape: str) -> list[Request]:
    return expected(shape, requests(shape))


def expected(shape: str, wanted: list[Request]) -> list[Request]:
    """Each alone, its prompt in one step, one token after the other."""
    with EngineWorld(shape, num_slots=1, seed=9) as world:
        return [world.finish(request.again()) for request in wanted]


def assert_same(got: Request, alone: Request) -> None:
    assert (got.outputs, got.status) == (alone.outputs, alone.status)
    assert got.logprobs == alone.logprobs
    assert got.scores == alone.scores


def with_guesses(request: Request, outputs: list[int]) -> Request:
    guesses = list(outputs)
    guesses[5] = guesses[5] % 7 + 3
    guessing = replace(request.sampling, predicted_token_ids=tuple(guesses))
    return Request(request.prompt, guessing, request.max_outputs)


def run_together(world: EngineWorld, running: list[Request], *, preempt: float) -> int:
    """Random company and portions; returns how often a request lost its slot and blocks."""
    preempted = 0
    while open_ones := [request for request in running if not request.done]:
        for request in open_ones:
            if request.slot >= 0 and world.random.random() < preempt:
                world.drop(request)
                preempted += 1
        placed = [request for request in open_ones if request.slot >= 0]
        waiting = [request for request in open_ones if request.slot < 0]
        placed += waiting[: len(world.free_slots)]
        company = [request for request in placed if world.random.random() < 0.8]
        world.random.shuffle(company)
        if company:
            portions = (1, 3, 17, 60, 200)
            drafts = (0, 0, 2, 5)
            world.step(
                [(r, world.random.choice(portions), world.random.choice(drafts)) for r in company]
            )
        for request in running:
            if request.done:
                world.drop(request)
    return preempted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preempt", [pytest.param(0.0, marks=pytest.mark.soak), 0.15])
def test_streams_are_those_of_each_request_alone(shape: str, preempt: float) -> None:
    wanted, alone = requests(shape), alone_of(shape)
    for name, request in zip(SETTINGS, alone, strict=True):
        assert request.status == 0 and len(request.outputs) == OUTPUTS, name
    running = [with_guesses(r, a.outputs) for r, a in zip(wanted, alone, strict=True)]
    with EngineWorld(shape, seed=2) as world:
        preempted = run_together(world, running, preempt=preempt)
        assert len(world.free_slots) == 8
    assert (preempted > 10) == (preempt > 0)
    for got, one in zip(running, alone, strict=True):
        assert_same(got, one)


def test_preempted_at_every_step() -> None:
    """Re-reading prompt and outputs gives the same next token, logprobs and penalties included."""
    wanted, alone = requests("short"), alone_of("short")
    with EngineWorld("short", num_slots=1, seed=4) as world:
        for request, one in zip(wanted, alone, strict=True):
            while not request.done:
                world.step([(request, 500, 0)])
                world.drop(request)
            assert_same(request, one)


@pytest.mark.parametrize("length", [1, 37, 128, 141])
def test_a_fork_goes_on_as_if_it_had_read_the_prompt(length: int) -> None:
    """All but the prompt's last token is computed once, for three seeds; parent and children run on in
    one batch, each in its own last block and state."""
    prompt = list(range(3, 3 + length))
    family = [Request(prompt, Sampling(seed=seed, logprobs=1), OUTPUTS) for seed in (1, 2, 3)]
    alone = expected("short", family)
    with EngineWorld("short", seed=8) as world:
        parent, *children = family
        if length > 1:
            world.step([(parent, length - 1, 0)])
            for child in children:
                world.fork(parent, child)
        while not parent.done:
            world.step([(request, 500, 0) for request in (*children, parent)])
    for got, one in zip(family, alone, strict=True):
        assert_same(got, one)


def test_settings_matter() -> None:
    """Else equal streams would say little: one prompt and seed give different streams."""
    prompt = list(range(50, 80))
    same_seed = [replace(sampling, seed=5) for sampling in SETTINGS.values()]
    beside = [Request(prompt, sampling, OUTPUTS) for sampling in same_seed]
    with EngineWorld("tiny-a", num_slots=len(beside)) as world:
        while open_ones := [request for request in beside if not request.done]:
            world.step([(request, len(request.known), 0) for request in open_ones])
    # "nearly cold" is greedy, and a filter may have had nothing to cut.
    assert len({tuple(request.outputs) for request in beside}) >= len(SETTINGS) - 3


def test_nearly_cold_is_finite_and_sharp() -> None:
    prompt = list(range(60, 90))
    cold = Sampling(temperature=1e-4, seed=3, logprobs=2)
    with EngineWorld("tiny-a", num_slots=1) as world:
        got = world.finish(Request(prompt, cold, OUTPUTS))
        greedy = world.finish(Request(prompt, Sampling(temperature=0.0, seed=3), OUTPUTS))
    assert got.status == 0
    for entry in got.logprobs:
        assert entry is not None and math.isfinite(entry.logprob)
        assert entry.logprob > -1.0
    assert got.outputs == greedy.outputs


def test_min_tokens_and_first_n_hold_back_the_end() -> None:
    """The bias makes the end likely: without the bans it comes at once."""
    sampling = SETTINGS["late end"]
    with EngineWorld("tiny-a", num_slots=1) as world:
        held = world.finish(Request(range(40, 60), sampling, OUTPUTS)).outputs
    ends = {1, 17, 18}
    assert not ends & set(held[: OUTPUTS // 2])
    assert ends & set(held[OUTPUTS // 2 :])


def test_blocked_ids_never_come() -> None:
    prompt = list(range(40, 60))
    with EngineWorld("tiny-a", num_slots=1) as world:
        free = world.finish(Request(prompt, Sampling(seed=4, top_k=5), OUTPUTS)).outputs
        blocked = tuple(set(free))
        other = Sampling(seed=4, top_k=5, blocked_token_ids=blocked)
        assert not set(world.finish(Request(prompt, other, OUTPUTS)).outputs) & set(blocked)


def test_raw_logprobs_are_the_models_own() -> None:
    """Beside a neighbour that asks for processed ones; the token is the same either way."""
    prompt = list(range(40, 60))
    sampling = Sampling(seed=4, temperature=0.5, top_k=3, logit_bias={7: 2.0}, logprobs=3)
    plain = Sampling(seed=4, logprobs=3)  # temperature 1 and nothing else: processed is raw
    with EngineWorld("tiny-a", num_slots=1) as world:
        processed = world.finish(Request(prompt, sampling, 1))
        raw = world.finish(Request(prompt, replace(sampling, raw_logprobs=True), 1))
        own = world.finish(Request(prompt, plain, 1))
    assert raw.outputs == processed.outputs
    assert raw.logprobs[0] is not None and own.logprobs[0] is not None
    assert raw.logprobs[0].top_logprobs == own.logprobs[0].top_logprobs
    assert raw.logprobs[0].top_logprobs != processed.logprobs[0].top_logprobs  # type: ignore[union-attr]


def test_prompt_logprobs_are_those_of_the_model() -> None:
    """Those that decoding reports as raw, and with ranks as the whole row tells them."""
    (wanted,) = [r for r in requests("tiny-a") if r.sampling.prompt_logprobs == 2]
    with EngineWorld("tiny-a", num_slots=1) as world:
        got = world.finish(wanted.again())
    ids = list(wanted.prompt)
    reader = Reader(weights_of("tiny-a"), len(ids))
    whole = reader.score(ids, 17, 512)
    assert list(got.scores) == list(range(1, len(ids)))
    for at, found in got.scores.items():
        order = whole.top_ids[at - 1].tolist()
        assert found.logprob == float(whole.logprobs[at - 1])
        assert found.rank == 1 + order.index(ids[at])
        assert found.top_ids == tuple(order[:2])
        assert found.top_logprobs == tuple(whole.top_logprobs[at - 1, :2].tolist())
    assert len({found.rank for found in got.scores.values()}) > 20


def test_scores_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a large vocabulary are made for a few rows at a time: the same numbers."""
    alone = [r for r in alone_of("short") if r.sampling.prompt_logprobs is not None]
    wanted = [request.again() for request in alone]
    monkeypatch.setattr(scoring, "LOGITS_ELEMENTS", 5 * weights_of("short").config.vocab_size)
    for got, one in zip(expected("short", wanted), alone, strict=True):
        assert_same(got, one)


def test_a_broken_prompt_is_told_by_nan() -> None:
    prompt = list(range(100, 117))
    with EngineWorld("tiny-a", num_slots=1) as world:
        whole = world.finish(Request(prompt, Sampling(seed=1, prompt_logprobs=1), 1)).scores
        broken = Request(prompt, Sampling(seed=1, prompt_logprobs=1), 1)
        world.step([(broken, 9, 0)])
        world.engine.pools.rings[broken.slot] = 0x7F
        world.step([(broken, 500, 0)])
    assert broken.status == SampleStatus.NAN
    for at, found in broken.scores.items():
        if at <= 9:
            assert found == whole[at]
        else:
            assert math.isnan(found.logprob) and found.top_ids == ()


@pytest.mark.parametrize("break_it", ["ring", "bias"])
def test_a_broken_request_ends_alone(break_it: str) -> None:
    """Not a number in its window, or a bias that overflows: it gets a status, the others get their
    tokens, and so does whoever takes its slot and blocks."""
    wanted, alone = requests("tiny-a")[2:6], alone_of("tiny-a")[2:6]
    prompt = list(range(100, 117))
    bias = {9: math.inf} if break_it == "bias" else {}
    victim = Request(prompt, Sampling(temperature=0.8, seed=1, logit_bias=bias), OUTPUTS)
    with EngineWorld("tiny-a", num_slots=5, seed=6) as world:
        running = [request.again() for request in wanted]
        if break_it == "ring":
            world.step([(victim, 500, 0), *((request, 500, 0) for request in running)])
            assert victim.status == 0
            world.engine.pools.rings[victim.slot] = 0x7F
        while any(not request.done for request in running):
            company = [victim, *running]  # first in the batch
            world.step([(request, 500, 0) for request in company if not request.done])
        assert victim.status == SampleStatus.NAN
        assert len(victim.outputs) == (1 if break_it == "ring" else 0)
        for got, one in zip(running, alone, strict=True):
            assert_same(got, one)
        slot = victim.slot
        for request in (victim, *running):
            world.drop(request)
        world.free_slots.remove(slot)
        world.free_slots[:] = [slot]
        assert_same(world.finish(wanted[1].again()), alone[1])


def test_an_engine_is_as_truncated_as_its_configuration() -> None:
    keep = weights_of("tiny-a").config.sliding_window + 6
    worker = WorkerConfig(yoco_truncation="compact", yoco_keep_tokens=keep)
    wanted = requests("tiny-a")[5:6]
    with EngineWorld("tiny-a", num_slots=1, worker=worker) as world:
        streams = []
        for portion in (500, 13):
            request = wanted[0].again()
            while not request.done:
                world.step([(request, portion, 0)])
            world.drop(request)
            streams.append((request.outputs, request.logprobs))
        preempted = wanted[0].again()
        while not preempted.done:
            world.step([(preempted, 500, 0)])
            world.drop(preempted)
        streams.append((preempted.outputs, preempted.logprobs))
    assert streams[0] == streams[1] == streams[2]
    assert streams[0][1] != alone_of("tiny-a")[5].logprobs


def test_another_scheduler_makes_what_the_last_one_handed_out_stale() -> None:
    """The KV store may still have its puts, and blocks and places of states are in other use soon."""
    with EngineWorld("short", num_slots=1) as world:
        hello = world.engine.hello()
        for name, nbytes in (
            (hello.block_arena, hello.block_bytes),
            (hello.snapshot_arena, hello.slot_bytes),
        ):
            with Arena.attach(name) as arena:
                before = arena.handle(0, nbytes)
                assert len(arena.view(before)) == nbytes
                world.engine.reset()
                with pytest.raises(StaleHandle):
                    arena.check(before)
