"""Sequences of one request share their prompt on the real engine: tokens and logprobs are those that each
would have alone, whatever the prompt's place in blocks and windows, with chunks and with abandoned steps;
also where the early tokens of a prompt skip the later layers."""

from functools import cache

import pytest
from engine_served import Ask, Served, Stream
from engine_world import MAX_LEN
from forward_world import weights_of

from phalanx.protocol.config import WorkerConfig
from phalanx.protocol.messages import Sampling

OUTPUTS = 6
SEEDS = (11, 12, 13)
WHOLE = WorkerConfig()


def asks(shape: str, length: int) -> list[Ask]:
    assert length + OUTPUTS <= MAX_LEN
    vocab = weights_of(shape).config.vocab_size
    prompt = [3 + (7 * at * at + length) % (vocab - 3) for at in range(length)]
    sampling = [
        Sampling(seed=seed, max_tokens=OUTPUTS, ignore_eos=True, logprobs=1) for seed in SEEDS
    ]
    return [Ask(f"{length:032x}", i, prompt, one) for i, one in enumerate(sampling)]


@cache
def alone(shape: str, worker: WorkerConfig, lengths: tuple[int, ...]) -> list[list[Stream]]:
    """By length: each sequence as a request of its own, one after the other, its prompt in one step."""
    served = Served(shape, 1024, worker=worker)
    try:
        return [
            [
                served.streams(
                    [Ask(f"{1000 * length + one.index:032x}", 0, one.prompt, one.sampling)]
                )[0]
                for one in asks(shape, length)
            ]
            for length in lengths
        ]
    finally:
        served.close()


def assert_as_if_alone(
    shape: str,
    lengths: tuple[int, ...],
    abandon: int,
    budget: int,
    ahead: int = 1,
    worker: WorkerConfig = WHOLE,
) -> None:
    right = alone(shape, worker, lengths)
    served = Served(shape, budget, ahead=ahead, worker=worker)
    try:
        for length, one_by_one in zip(lengths, right, strict=True):
            before = served.forks
            together = served.streams(asks(shape, length), abandon)
            assert served.forks > before or length == 1
            assert together == one_by_one, f"a prompt of {length} tokens"
            assert all(len(tokens) == OUTPUTS for tokens, _ in together)
        pool = served.core.rank.pool
        assert pool.free == pool.total
    finally:
        served.close()


@pytest.mark.parametrize(
    ("shape", "budget", "abandon", "ahead"),
    [
        pytest.param("tiny-a", 1024, 0, 1, marks=pytest.mark.soak),
        ("short", 1024, 0, 2),
        ("short", 50, 7, 2),
    ],
)
def test_followers_are_as_if_alone(shape: str, budget: int, abandon: int, ahead: int) -> None:
    assert_as_if_alone(shape, (1, 2, 127, 128, 129, 200), abandon, budget, ahead)


@pytest.mark.parametrize("mode", ["compact", "mask"])
@pytest.mark.parametrize(("budget", "abandon"), [(1024, 0), (17, 4)])
def test_followers_of_a_truncated_prompt(mode: str, budget: int, abandon: int) -> None:
    """The row that a follower runs itself is among the last ones, which are computed to the end; the
    windows before it come with its leader's slot."""
    keep = weights_of("tiny-a").config.sliding_window + 6
    worker = WorkerConfig(yoco_truncation=mode, yoco_keep_tokens=keep)  # type: ignore[arg-type]
    assert_as_if_alone("tiny-a", (keep, keep + 1, 129), abandon, budget, worker=worker)
