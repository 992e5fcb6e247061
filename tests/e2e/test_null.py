"""A node that computes nothing takes every request that a model would, and ends it."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from e2e.node import Node, assert_whole
from phalanx.services.client import Client

pytestmark = pytest.mark.process

CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 50.0),
    "top_p": (0.3,),
    "top_k": (1, 5, -1),
    "min_p": (0.3,),
    "repetition_penalty": (0.01, 5.0),
    "presence_penalty": (2.0,),
    "frequency_penalty": (-2.0,),
    "max_tokens": (0, 1, 9, 40),
    "clamp_max_tokens": (True,),
    "min_tokens": (1,),
    "stop": (("a",), ("zq", "e")),
    "stop_token_ids": ((5, 6, 7),),
    "ignore_eos": (True,),
    "first_n_token_no_eos": (3, 1000),
    "logit_bias": ({5: 100.0},),
    "blocked_token_ids": ((3, 4, 5),),
    "logprobs": (0, 1, 20),
    "raw_logprobs": (True,),
    "prompt_logprobs": (0, 3, 20),
    "predicted_token_ids": ((1, 2, 3), tuple(range(30))),
    "forced_token_ids": ((7, 8, 9), (3,) * 12),
}


def draw(rng: random.Random) -> dict[str, Any]:
    drawn = {"seed": rng.randrange(1000), "max_tokens": 20}
    for name, values in CHOICES.items():
        if rng.random() < 0.35:
            drawn[name] = rng.choice(values)
    if drawn["max_tokens"] == 0:  # to get those of the prompt alone
        drawn = {"prompt_logprobs": 3, **drawn, "min_tokens": 0}
    return drawn


def test_every_combination_of_settings_ends(start_node: Callable[..., Node]) -> None:
    node = start_node(1, "--device", "null")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    alone = [{"max_tokens": 20, name: v} for name, vs in CHOICES.items() for v in vs if v != 0]
    with Client(node.run_dir) as client:
        asked = []
        for sampling in (*alone, *(draw(rng) for _ in range(150))):
            prompt = [rng.randrange(3, 200) for _ in range(rng.choice((1, 2, 9, 130, 700)))]
            n = 1 if sampling["max_tokens"] == 0 else rng.choice((1, 1, 3))
            stream = client.generate(prompt, n=n, stream=rng.random() < 0.7, timeout=60, **sampling)
            asked.append((sampling, len(prompt), stream))
        for sampling, length, stream in asked:
            for result in stream.results():
                assert result.finish_reason in ("stop", "length"), f"{sampling}: {result.error}"
                count = len(result.token_ids) if "logprobs" in sampling else 0
                assert len(result.logprobs) == count, sampling
                for entry in result.logprobs:
                    assert math.isfinite(entry.logprob)
                    assert len(entry.top_ids) == len(entry.top_logprobs) == sampling["logprobs"]
                scored = length if "prompt_logprobs" in sampling and result.index == 0 else 0
                assert len(result.prompt_logprobs) == scored, sampling
    assert_whole(node)
