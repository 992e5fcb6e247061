"""Sequences of one request share their prompt on the real engine: tokens and logprobs are those that each
would have alone, whatever the prompt's place in blocks and windows, with chunks and with abandoned steps;
also where the early tokens of a prompt skip the later layers."""

import pytest
from engine_served import Ask, Served
from engine_world import MAX_LEN
from forward_world import weights_of

from phalanx.protocol.config import WorkerConfig
from phalanx.protocol.messages import Sampling

OUTPUTS = 6
SEEDS = (11, 12, 13)


def assert_as_if_alone(served: Served, shape: str, lengths: tuple[int, ...], abandon: int) -> None:
    vocab = weights_of(shape).config.vocab_size
    for length in lengths:
        assert length + OUTPUTS <= MAX_LEN
        prompt = [3 + (7 * at * at + length) % (vocab - 3) for at in range(length)]
        sampling = [
            Sampling(seed=seed, max_tokens=OUTPUTS, ignore_eos=True, logprobs=1) for seed in SEEDS
        ]
        before = served.forks
        together = served.streams(
            [Ask(f"{length:032x}", i, prompt, one) for i, one in enumerate(sampling)], abandon
        )
        assert served.forks > before or length == 1
        alone = [
            served.streams([Ask(f"{1000 * length + (one.seed or 0):032x}", 0, prompt, one)])[0]
            for one in sampling
        ]
        assert together == alone, f"a prompt of {length} tokens"
        assert all(len(tokens) == OUTPUTS for tokens, _ in together)
    pool = served.core.rank.pool
    assert pool.free == pool.total


@pytest.mark.parametrize(
    ("shape", "budget", "abandon", "ahead"),
    [
        pytest.param("tiny-a", 1024, 0, 1, marks=pytest.mark.soak),
        ("short", 1024, 0, 2),
        ("short", 50, 7, 2),
    ],
)
def test_followers_are_as_if_alone(shape: str, budget: int, abandon: int, ahead: int) -> None:
    served = Served(shape, budget, ahead=ahead)
    try:
        assert_as_if_alone(served, shape, (1, 2, 127, 128, 129, 200), abandon)
    finally:
        served.close()


@pytest.mark.parametrize("mode", ["compact", "mask"])
@pytest.mark.parametrize(("budget", "abandon"), [(1024, 0), (17, 4)])
def test_followers_of_a_truncated_prompt(mode: str, budget: int, abandon: int) -> None:
    """The row that a follower runs itself is among the last ones, which are computed to the end; the
    windows before it come with its leader's slot."""
    keep = weights_of("tiny-a").config.sliding_window + 6
    worker = WorkerConfig(yoco_truncation=mode, yoco_keep_tokens=keep)  # type: ignore[arg-type]
    served = Served("tiny-a", budget, worker=worker)
    try:
        assert_as_if_alone(served, "tiny-a", (keep, keep + 1, 129), abandon)
    finally:
        served.close()
