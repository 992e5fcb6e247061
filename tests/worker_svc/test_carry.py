"""Plans made before the result of the step before them: the worker itself knows length, newest token and
drafts of each sequence then, whatever became of the drafts. Tokens and logprobs are those of each request
alone, one plan after the other."""

import random
from functools import lru_cache

import msgspec
import numpy as np
import pytest
from engine_served import Ask, Served
from engine_world import EngineWorld, Request
from forward_world import weights_of
from msgspec.structs import replace

from phalanx.protocol.messages import Sampling
from phalanx.protocol.steps import StepPlan

OUTPUTS = 12
SETTINGS = (
    Sampling(temperature=0.0, seed=1),
    Sampling(temperature=1.0, seed=2, logprobs=2),
    Sampling(temperature=1.0, seed=3, top_k=40, top_p=0.9, logprobs=1),
    Sampling(temperature=1.0, seed=4, repetition_penalty=1.3, frequency_penalty=0.6, logprobs=0),
    Sampling(temperature=0.8, seed=5, min_p=0.02, logit_bias={17: 4.0}, min_tokens=6),
    Sampling(temperature=1.0, seed=6, forced_token_ids=(9, 8, 7)),
)
LENGTHS = (1, 30, 128, 61, 5, 121)  # the last one meets its second block while it decodes


def asks(shape: str) -> list[Ask]:
    choose = random.Random(3)
    vocab = weights_of(shape).config.vocab_size
    return [
        Ask(
            f"{number:032x}",
            0,
            [choose.randrange(3, vocab) for _ in range(length)],
            replace(sampling, max_tokens=OUTPUTS, ignore_eos=True),
        )
        for number, (sampling, length) in enumerate(zip(SETTINGS, LENGTHS, strict=True))
    ]


@lru_cache
def alone(shape: str) -> list[tuple[list[int], list[object]]]:
    """Without a scheduler: each prompt in one step, one token after the other."""
    wanted = asks(shape)
    with EngineWorld(shape, num_slots=1, seed=5) as world:
        done = [world.finish(Request(ask.prompt, ask.sampling, OUTPUTS)) for ask in wanted]
    return [(one.outputs, [entry for entry in one.logprobs if entry is not None]) for one in done]


def guessing(
    wanted: list[Ask], right: list[tuple[list[int], list[object]]], wrong: str
) -> list[Ask]:
    """With predictions: all right, every third one wrong, or all of them."""
    found = []
    for ask, (tokens, _) in zip(wanted, right, strict=True):
        guesses = [
            (token % 7 + 3) if wrong == "all" or (wrong == "some" and at % 3 == 2) else token
            for at, token in enumerate(tokens)
        ]
        sampling = replace(ask.sampling, predicted_token_ids=tuple(guesses))
        found.append(Ask(ask.request_id, ask.index, ask.prompt, sampling))
    return found


def spoilt(plan: StepPlan) -> StepPlan:
    """What such a plan says of length and newest token is a bound and a placeholder: nobody may read it."""
    carry = np.frombuffer(plan.carry, np.uint8).astype(bool)
    starts = np.frombuffer(plan.starts, np.int32).copy()
    ids = np.frombuffer(plan.token_ids, np.int32).copy()
    given = np.frombuffer(plan.seqlens_q, np.int32) - np.frombuffer(plan.drafts, np.uint8)
    starts[carry] = 1 << 30
    ids[(np.cumsum(given) - 1)[carry]] = -5
    return msgspec.structs.replace(plan, starts=starts.tobytes(), token_ids=ids.tobytes())


@pytest.mark.parametrize(
    ("wrong", "budget", "abandon"),
    [("none", 1024, 0), ("some", 60, 0), ("some", 60, 5), ("all", 60, 0)],
)
def test_plans_ahead_give_the_tokens_of_plans_in_turn(
    wrong: str, budget: int, abandon: int
) -> None:
    wanted = asks("short")
    right = alone("short")
    served = Served("short", budget, ahead=2, change=spoilt)
    try:
        got = served.streams(guessing(wanted, right, wrong), abandon)
    finally:
        served.close()
    assert got == right
    carried = served.carried
    assert carried.right + carried.wrong > 5
    if not abandon:  # which drains what is under way, so what is carried over it is up to chance
        assert bool(carried.right) == (wrong != "all")
        assert bool(carried.wrong) == (wrong != "none")
    assert bool(served.given_up) == bool(abandon)


def test_plans_ahead_without_drafts() -> None:
    wanted = asks("tiny-a")
    served = Served("tiny-a", 70, ahead=2, change=spoilt)
    try:
        got = served.streams(wanted)
    finally:
        served.close()
    assert got == alone("tiny-a")
    assert served.carried.plain > 20 and not served.carried.right + served.carried.wrong


def test_plans_in_turn_carry_nothing() -> None:
    """Else the tests above would prove nothing."""
    served = Served("short", 60, ahead=1)
    try:
        served.streams(asks("short")[:2])
    finally:
        served.close()
    assert served.carried.plain + served.carried.right + served.carried.wrong == 0
