"""The sampling kernel against its reference on the same device, and against itself in other batches."""

import random
from dataclasses import replace

import pytest
import torch

from phalanx.kernels.reference.noise import Purpose, exponential, row_keys
from phalanx.kernels.reference.sample import FORCE_TOP_K, SampleResult, SampleStatus
from phalanx.kernels.reference.sample import sample as reference
from phalanx.kernels.reference.sampling_rows import RowParams, SamplingRows
from phalanx.kernels.triton.configs import Config
from phalanx.kernels.triton.sample import _VECTORS, CANDIDATES, _vectors_to, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

INF, NAN = float("inf"), float("nan")
SMALL = {"lanes": 64, "depth": 2, "group": 4, "tile": 128}  # a short row takes several turns
EOS = 1
FULL_VOCAB = 129_280


def plain_row(rng: random.Random) -> RowParams:
    """A row without edit lists, in any mixture of the rest."""
    return RowParams(
        seed=rng.randrange(1 << 53),
        position=rng.randrange(1 << 20),
        temperature=rng.choice([0.0, 1e-4, 0.3, 0.8, 1.0, 2.0]),
        top_p=rng.choice([1.0, 0.95, 0.5, 1e-9]),
        top_k=rng.choice([0, -1, 1, 5, 50, 10**9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        min_tokens=rng.choice([0, 3]),
        first_n_no_eos=rng.choice([0, 1]),
        num_outputs=rng.choice([0, 7]),
    )


def listed_row(rng: random.Random, vocab: int) -> RowParams:
    def ids(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randrange(most + 1))]

    return replace(
        plain_row(rng),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.1]),
        output_ids=ids(20),
        num_outputs=None,
        stop_ids=ids(2),
        bias={i: rng.uniform(-2, 2) for i in set(ids(3))},
        blocked_ids=ids(3),
    )


def odd_logits(count: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows of different scales; some rounded (full of ties), half blocked, or broken."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=gen)
    logits *= torch.rand(count, 1, generator=gen) * 6 + 0.5
    logits[::3] = logits[::3].round()
    logits[1::4, ::2] = -INF
    logits[4::7, vocab // 2] = NAN
    logits[5::11, 0] = INF
    logits[6::13] = -INF
    return logits


def on(
    device: torch.device, params: list[RowParams], num_top: int = -1, purpose: Purpose | None = None
) -> SamplingRows:
    return SamplingRows.of(
        params,
        eos_id=EOS,
        num_top_logprobs=num_top,
        want_raw_logprobs=num_top >= 0,
        purpose=Purpose.SAMPLE if purpose is None else purpose,
    ).to(device)


def assert_same(got: SampleResult, want: SampleResult) -> None:
    assert got.status.tolist() == want.status.tolist()
    assert got.tokens.tolist() == want.tokens.tolist()
    assert (got.tokens.dtype, got.status.dtype) == (torch.int64, torch.uint8)
    for mine, theirs in ((got.logprobs, want.logprobs), (got.raw_logprobs, want.raw_logprobs)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert torch.equal(mine.logprobs, theirs.logprobs)
            assert torch.equal(mine.top_ids, theirs.top_ids)
            assert torch.equal(mine.top_logprobs, theirs.top_logprobs)


def check(
    device: torch.device,
    logits: torch.Tensor,
    params: list[RowParams],
    mask: torch.Tensor | None = None,
    *,
    force_top_k: int = FORCE_TOP_K,
    num_top: int = -1,
    settings: Config | None = None,
) -> SampleResult:
    """The kernel's result, which must be the reference's."""
    logits, rows = logits.to(device), on(device, params, num_top)
    mask = None if mask is None else mask.to(device)
    before = logits.clone()
    got = sample(logits, rows, mask, force_top_k=force_top_k, settings=settings or SMALL)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    assert_same(got, reference(logits, rows, mask, force_top_k=force_top_k))
    return got


@pytest.mark.parametrize(("vocab", "force_top_k"), [(7, 4096), (600, 4096), (1003, 16), (2000, 1)])
def test_equals_the_reference_in_one_launch(
    device: torch.device, vocab: int, force_top_k: int
) -> None:
    rng = random.Random(vocab)
    params = [plain_row(rng) for _ in range(6)]
    mask = torch.rand(6, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.8
    check(
        device,
        odd_logits(6, vocab, 1),
        params,
        mask if vocab % 2 else None,
        force_top_k=force_top_k,
    )


def test_equals_the_reference_with_edits_and_with_logprobs(device: torch.device) -> None:
    vocab, rng = 700, random.Random(5)
    params, logits = [listed_row(rng, vocab) for _ in range(6)], odd_logits(6, vocab, 2)
    mask = torch.rand(6, vocab) < 0.8
    got = check(device, logits, params, mask, force_top_k=100, num_top=4)
    assert got.logprobs is not None and got.raw_logprobs is not None
    without = check(device, logits, params, mask, force_top_k=100)
    assert torch.equal(got.tokens, without.tokens)


def test_stop_ids_matter_only_before_min_tokens(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0]]).repeat(2, 1)
    row = RowParams(temperature=0.0, stop_ids=(2,), min_tokens=3)
    params = [replace(row, num_outputs=0), replace(row, num_outputs=3)]
    assert check(device, logits, params).tokens.tolist() == [3, 2]
    rows = SamplingRows.of(params)  # on the CPU: moved
    assert sample(logits.to(device), rows).tokens.tolist() == [3, 2]


def test_a_row_does_not_see_the_others(device: torch.device) -> None:
    vocab, rng = 1000, random.Random(9)
    params, logits = [plain_row(rng) for _ in range(5)], odd_logits(5, vocab, 3).to(device)

    def run(index: list[int]) -> tuple[list[int], list[int]]:
        rows = on(device, [params[i] for i in index])
        found = sample(logits[index], rows, force_top_k=64, settings=SMALL)
        return found.tokens.tolist(), found.status.tolist()

    tokens, status = run(list(range(5)))
    order = rng.sample(range(5), 5)
    assert run(order) == ([tokens[i] for i in order], [status[i] for i in order])
    assert run([3]) == ([tokens[3]], [status[3]])


def test_the_noise_is_the_rows_own(device: torch.device) -> None:
    """Equal rows make equal tokens; a different seed, position or purpose makes different ones."""
    logits = torch.zeros(4, 300, device=device)
    same = sample(logits, on(device, [RowParams(seed=9, position=4)] * 4)).tokens.tolist()
    assert len(set(same)) == 1
    seeds = on(device, [RowParams(seed=s, position=4) for s in range(4)])
    places = on(device, [RowParams(seed=9, position=p) for p in range(4)])
    drafts = on(device, [RowParams(seed=9, position=4)] * 4, purpose=Purpose.DRAFT)
    for rows in (seeds, places, drafts):
        got = sample(logits, rows)
        assert_same(got, reference(logits, rows))
        assert got.tokens.tolist() != same


def test_no_launch_setting_changes_a_token(device: torch.device) -> None:
    vocab, rng = 1500, random.Random(11)
    params, logits = [plain_row(rng) for _ in range(3)], odd_logits(3, vocab, 4).to(device)
    rows = on(device, params)
    other = {"lanes": 128, "depth": 3, "group": 2, "tile": 256, "slots": 4, "warps": 4}
    tokens = [sample(logits, rows, force_top_k=100, settings=s).tokens for s in (SMALL, other)]
    assert torch.equal(*tokens)


def test_rows_whose_sample_misleads(device: torch.device) -> None:
    """Equal logits everywhere, a tie across the cut, and all large ones where the sample does not look
    or only where it looks: the exact cut is found by passes over the row."""
    vocab, kept = 1024, 16
    looked_at = torch.zeros(vocab, dtype=torch.bool)
    looked_at.view(-1, 32)[:, :8] = True  # 32 eights for a sample of 256
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    logits = torch.stack(
        [
            torch.zeros(vocab),
            noise.round(),
            torch.where(looked_at, noise - 100, noise),
            torch.where(looked_at, noise, noise - 100),
            torch.where(torch.arange(vocab) < 3, 5.0, 1.0),
            torch.where(torch.arange(vocab) < 20, noise, -INF),
        ]
    )
    params = [RowParams(seed=3 * i, temperature=2.0, top_p=0.9) for i in range(6)]
    check(device, logits, params, force_top_k=kept, settings=SMALL)


def test_ties_at_every_cut_go_to_the_lower_id(device: torch.device) -> None:
    """Ten equal logits of which top-k, top-p or the forced top-k keeps four: no other is ever drawn."""
    logits = torch.full((1, 600), -9.0)
    logits[0, 50:60] = 3.0
    for row, forced in (
        (RowParams(top_k=4), 64),
        (RowParams(), 4),
        (RowParams(top_k=10, top_p=0.4), 64),
    ):
        params = [replace(row, seed=seed) for seed in range(2)]
        got = check(device, logits.repeat(2, 1), params, force_top_k=forced)
        assert set(got.tokens.tolist()) <= {50, 51, 52, 53}
    greedy = check(device, logits, [RowParams(temperature=0.0, top_k=7)])
    assert greedy.tokens.tolist() == [50]


def test_draws_too_close_for_float32(device: torch.device) -> None:
    """Rows whose first two clocks ring within a share of 9e-5: the kernel's scores cannot tell which
    is first."""
    vocab, seeds = 100, torch.arange(60_000)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(6))
    keys = row_keys(seeds, torch.zeros_like(seeds), Purpose.SAMPLE)
    times = exponential(keys, torch.arange(vocab)) / logits.double().exp()
    first, second = times.topk(2, largest=False).values.unbind(1)
    close = seeds[second / first < 1 + 9e-5][:3].tolist()
    assert len(close) == 3
    check(device, logits.repeat(3, 1), [RowParams(seed=seed) for seed in close])


def test_statuses(device: torch.device) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 3.0], [1.0, NAN, 3.0], [1.0, INF, 3.0], [-INF, -INF, -INF], [-INF, 2.0, -INF]]
    ).repeat(2, 1)
    params = [RowParams(temperature=t) for t in (0.0, 1.0) for _ in range(5)]
    got = check(device, logits, params)
    nan = int(SampleStatus.NAN)
    assert got.status.tolist() == [0, nan, nan, nan, 0] * 2
    nothing = torch.zeros(10, 3, dtype=torch.bool)
    blocked = check(device, logits, params, nothing)
    assert blocked.status.tolist() == [SampleStatus.ALL_BLOCKED, nan, nan, nan, 1] * 2
    only_end = torch.zeros(10, 3, dtype=torch.bool)
    only_end[:, EOS] = True
    early = [replace(p, first_n_no_eos=1) for p in params]
    assert check(device, logits, early, only_end).status.tolist() == [1, nan, nan, nan, 1] * 2
    overflow = RowParams(repetition_penalty=0.5, output_ids=(1,))
    rows = [overflow, replace(overflow, temperature=0.0), RowParams(blocked_ids=(0, 1, 2))]
    edited = check(device, torch.tensor([[1.0, 3e38, 3.0]]).repeat(3, 1), rows)
    assert edited.status.tolist() == [nan, nan, SampleStatus.ALL_BLOCKED]


def test_extreme_settings(device: torch.device) -> None:
    settings = [
        RowParams(temperature=1e-30),
        RowParams(temperature=INF),
        RowParams(temperature=NAN),
        RowParams(temperature=-1.0),
        RowParams(top_p=0.0),
        RowParams(top_p=-INF),
        RowParams(top_p=NAN, min_p=NAN),
        RowParams(top_p=1 - 2**-53),
        RowParams(temperature=0.01, top_p=1 - 2**-53),
        RowParams(min_p=1.0),
        RowParams(min_p=7.0),
        RowParams(top_k=-(2**62), position=2**60, seed=-(2**63)),
    ]
    logits = torch.randn(12, 512, generator=torch.Generator().manual_seed(4)) * 50
    logits[:, 9], logits[:, 10] = 3.4e38, -3.4e38
    logits[::2] = torch.tensor([0.0, -0.0]).repeat(256)
    check(device, logits, settings, force_top_k=300)


def test_rows_and_settings_that_lie_apart(device: torch.device) -> None:
    wide = torch.randn(4, 900, device=device)
    params = [RowParams(seed=i, top_p=0.9) for i in range(4)]
    want = reference(wide[:, 100:701].contiguous(), on(device, params))
    assert_same(sample(wide[:, 100:701], on(device, params), settings=SMALL), want)
    rows = on(device, params)
    apart = replace(
        rows,
        seed=torch.stack([rows.seed, rows.seed + 1], 1)[:, 0],
        top_p=torch.stack([rows.top_p, rows.min_p], 1)[:, 0],
    )
    assert_same(sample(wide[:, 100:701], apart, settings=SMALL), want)


def test_rows_on_the_cpu_are_copied_at_once(device: torch.device) -> None:
    rows = on(torch.device("cpu"), [plain_row(random.Random(seed)) for seed in range(9)])
    moved = _vectors_to(rows, device)
    for name in _VECTORS:
        assert torch.equal(getattr(moved, name).cpu(), getattr(rows, name))
    logits = torch.randn(9, 16, device=device)
    assert_same(sample(logits, rows), reference(logits, rows.to(device)))


def test_no_rows(device: torch.device) -> None:
    none = sample(torch.empty(0, 5, device=device), on(device, []))
    assert none.tokens.shape == none.status.shape == (0,)


# At the full vocabulary, on the GPU.


def full_logits(count: int, kind: str, seed: int) -> torch.Tensor:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(count, FULL_VOCAB, generator=gen, device="cuda") * 2.5
    if kind == "bf16":
        return logits.bfloat16().float()
    if kind == "frequent ids first":
        ranks = torch.arange(1, FULL_VOCAB + 1, device="cuda").float()
        return logits - 1.2 * ranks.log()
    return logits


def full_params(count: int, seed: int) -> list[RowParams]:
    rng = random.Random(seed)
    return [plain_row(rng) for _ in range(count)]


def full_rows(count: int, seed: int) -> SamplingRows:
    return on(torch.device("cuda"), full_params(count, seed))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["normal", "bf16", "frequent ids first"])
def test_full_vocabulary_equals_the_reference(kind: str) -> None:
    """1,024 rows. A token may differ only where the last bit of exp or log decides; none is expected."""
    different = 0
    for seed in range(8):
        logits, rows = full_logits(128, kind, seed), full_rows(128, seed)
        got, want = sample(logits, rows), reference(logits, rows)
        assert torch.equal(got.status, want.status)
        different += int((got.tokens != want.tokens).sum())
    print(f"{kind}: {different} of 1024 tokens differ from the reference's")
    assert different <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_vocabulary_alone_and_together() -> None:
    logits, params = full_logits(256, "normal", 1), full_params(256, 1)
    together = sample(logits, on(torch.device("cuda"), params)).tokens
    back = sample(logits.flip(0), on(torch.device("cuda"), params[::-1])).tokens
    assert torch.equal(back.flip(0), together)
    for i in (0, 17, 131, 255):
        alone = sample(logits[i : i + 1], on(torch.device("cuda"), params[i : i + 1]))
        assert alone.tokens.tolist() == [int(together[i])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_vocabulary_ties_masks_and_lists() -> None:
    rng, device = random.Random(2), torch.device("cuda")
    params = [listed_row(rng, FULL_VOCAB) for _ in range(32)]
    logits = full_logits(32, "normal", 2).round()
    logits[3], logits[4, ::2], logits[5, 7] = 0.25, -INF, NAN
    mask = torch.rand(32, FULL_VOCAB, device=device) < 0.5
    mask[6] = False
    mask[6, 77:99] = True
    for rows in (on(device, params, 3), on(device, [plain_row(rng) for _ in range(32)])):
        assert_same(sample(logits, rows, mask), reference(logits, rows, mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_launch_can_be_captured() -> None:
    logits, rows = full_logits(8, "normal", 3), full_rows(8, 3)
    mask = torch.rand(8, FULL_VOCAB, device="cuda") < 0.9
    sample(logits, rows, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, rows, mask)
    logits.copy_(full_logits(8, "bf16", 4))
    graph.replay()
    assert_same(captured, sample(logits, rows, mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_vocabulary_no_launch_setting_changes_a_token() -> None:
    logits, rows = full_logits(64, "normal", 5), full_rows(64, 5)
    want = sample(logits, rows).tokens
    for settings in (*CANDIDATES["many"], *CANDIDATES["few"]):
        assert torch.equal(sample(logits, rows, settings=settings).tokens, want), settings
