"""Noise is SplitMix64 to the bit, strictly inside (0, 1), and uncorrelated in every part of its key."""

import math

import numpy as np
import pytest
import torch

from phalanx.kernels.reference.noise import (
    GOLDEN,
    Purpose,
    exponential,
    mix64_,
    row_keys,
    uniform,
)

WORD = (1 << 64) - 1


def mix(word: int) -> int:
    word &= WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def word_of(seed: int, position: int, purpose: int, token: int) -> int:
    request = mix(seed + GOLDEN)
    row = mix(request + (4 * position + purpose + 1) * GOLDEN)
    return mix(row + (token + 1) * GOLDEN)


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_published_splitmix64_outputs() -> None:
    start = 1234567
    words = ints(*(signed((start + i * GOLDEN) & WORD) for i in range(1, 6)))
    assert [word & WORD for word in mix64_(words).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_equals_plain_integer_arithmetic() -> None:
    rng = np.random.default_rng(1)
    seeds = [0, 1, 2**53 - 1, *rng.integers(0, 2**53, 20).tolist()]
    positions = [0, 1, 2**40, *rng.integers(0, 10**6, 20).tolist()]
    tokens = [0, 1, 129_279, 4095, 7]
    for purpose in Purpose:
        got = uniform(row_keys(ints(*seeds), ints(*positions), purpose), ints(*tokens))
        want = [
            [((word_of(s, p, purpose, t) >> 12) + 0.5) / 2**52 for t in tokens]
            for s, p in zip(seeds, positions, strict=True)
        ]
        assert got.tolist() == want


def test_ends_of_the_range_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, want in ((0, 2.0**-53), (-1, 1 - 2.0**-53)):
        monkeypatch.setattr(
            "phalanx.kernels.reference.noise._output",
            lambda start, number, word=word: torch.full((1, 1), word, dtype=torch.int64),
        )
        got = uniform(ints(0), ints(0)).item()
        assert got == want and 0 < got < 1
        assert 0 < exponential(ints(0), ints(0)).item() < 37


def test_ids_may_differ_by_row_and_depend_on_nothing_else() -> None:
    keys = row_keys(ints(5, 6), ints(10, 10), Purpose.SAMPLE)
    everything = uniform(keys, torch.arange(500))
    some = uniform(keys, torch.tensor([[499, 3], [7, 0]]))
    assert some.tolist() == [
        [everything[0, 499].item(), everything[0, 3].item()],
        [everything[1, 7].item(), everything[1, 0].item()],
    ]


def axes(count: int) -> dict[str, torch.Tensor]:
    """Long sequences of noise along each part of the key, the rest held fixed."""
    index = torch.arange(count)
    fixed = torch.full_like(index, 17)
    token = ints(3)

    def along(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        return uniform(row_keys(seed, position, purpose), token)[:, 0]

    return {
        "token ids": uniform(row_keys(ints(17), ints(17), Purpose.SAMPLE), index)[0],
        "positions": along(fixed, index, Purpose.SAMPLE),
        "seeds": along(index, fixed, Purpose.SAMPLE),
        "far seeds": along(index << 33, fixed, Purpose.SAMPLE),
        "seed and position together": along(index, index, Purpose.SAMPLE),
        "seed against position": along(index, count - index, Purpose.SAMPLE),
        "draft positions": along(fixed, index, Purpose.DRAFT),
    }


def test_uniform_along_every_axis() -> None:
    """1,000 equal bins, 200,000 draws: chi-square within 5 standard deviations of its mean."""
    bins, count = 1000, 200_000
    for name, noise in axes(count).items():
        counts = torch.bincount((noise * bins).long(), minlength=bins).double()
        chi2 = ((counts - count / bins) ** 2 / (count / bins)).sum().item()
        assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1)), name


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1])


def test_neighbours_are_uncorrelated_along_every_axis() -> None:
    """Serial correlation at small and power-of-two lags: below 5 / sqrt(n) in size."""
    count = 200_000
    for name, noise in axes(count).items():
        for lag in (1, 2, 3, 4, 64, 4096):
            assert abs(correlation(noise[lag:], noise[:-lag])) < 5 / math.sqrt(count - lag), name


def test_axes_and_purposes_are_uncorrelated_with_each_other() -> None:
    count = 200_000
    noises = list(axes(count).values())
    position = torch.arange(count)
    seed = torch.full_like(position, 99)
    noises += [uniform(row_keys(seed, position, p), ints(0))[:, 0] for p in Purpose]
    for i, a in enumerate(noises):
        for b in noises[i + 1 :]:
            assert abs(correlation(a, b)) < 5 / math.sqrt(count)


def test_pairs_fill_the_square() -> None:
    """(noise at t, noise at t + 1) over a 32 x 32 grid: catches dependence correlation misses."""
    count, side = 200_000, 32
    for name, noise in axes(count).items():
        cells = (noise[:-1] * side).long() * side + (noise[1:] * side).long()
        counts = torch.bincount(cells, minlength=side * side).double()
        expected = (count - 1) / side**2
        chi2 = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi2 - (side**2 - 1)) < 5 * math.sqrt(2 * (side**2 - 1)), name
