"""Forced outputs come out as given, the model goes on from them as from its own, and their logprobs are
its own opinion."""

import pytest
from engine_world import EngineWorld, Request
from forward_world import weights_of

from phalanx.protocol.messages import Sampling

PROMPT = [5, 9, 17, 33, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_continuation_is_that_of_the_longer_prompt(temperature: float) -> None:
    """Noise belongs to seed and position, so what follows does not know where the tokens came from."""
    vocab = weights_of("tiny-a").config.vocab_size
    forced = tuple(3 + (11 * at) % (vocab - 3) for at in range(6))
    free = Sampling(temperature=temperature, seed=3, ignore_eos=True)
    with EngineWorld("tiny-a") as world:
        told = Sampling(temperature=temperature, seed=3, ignore_eos=True, forced_token_ids=forced)
        outputs = world.finish(Request(PROMPT, told, 14)).outputs
        assert outputs[:6] == list(forced)
        assert outputs[6:] == world.finish(Request([*PROMPT, *forced], free, 8)).outputs


def test_bans_do_not_hold_back_what_is_forced() -> None:
    banned = Sampling(seed=1, forced_token_ids=(1, 20), logit_bias={20: -100.0}, min_tokens=4)
    with EngineWorld("tiny-a") as world:
        assert world.finish(Request(PROMPT, banned, 3)).outputs[:2] == [1, 20]


def test_logprobs_are_those_of_the_unforced_model() -> None:
    """Forcing what a greedy request says changes nothing, logprobs included."""
    with EngineWorld("tiny-a") as world:
        greedy = world.finish(Request(PROMPT, Sampling(temperature=0.0, seed=1, logprobs=2), 8))
        told = Sampling(
            temperature=1.0, seed=9, logprobs=2, top_k=1, forced_token_ids=tuple(greedy.outputs)
        )
        again = world.finish(Request(PROMPT, told, 8))
    assert again.outputs == greedy.outputs and again.logprobs == greedy.logprobs
    assert None not in again.logprobs
