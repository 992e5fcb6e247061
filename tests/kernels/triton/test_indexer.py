"""Index scores over paged keys, the choice of entries and of candidate blocks, against the reference."""

from dataclasses import dataclass, replace

import pytest
import torch
from sass import disassembled, overwritten
from torch import Tensor

from phalanx.kernels.reference import indexer as reference
from phalanx.kernels.reference.quant import (
    decode_index_key,
    encode_index_key,
    qf4_idx_roundtrip,
)
from phalanx.kernels.triton import indexer, indexer_hopper
from phalanx.kernels.triton.configs import Config
from phalanx.kernels.triton.indexer import (
    CANDIDATES,
    CANDIDATES_LISTED,
    CANDIDATES_MANY,
    candidate_blocks,
    candidate_scores,
    paged_scores,
)
from phalanx.kernels.triton.topk import select_top

HIDDEN = float("-inf")
ONE_ROW: Config = {
    "rows": 1,
    "side": 1,
    "piece": 4,
    "tile": 64,
    "tiles": 2,
    "programs": 1,
    "num_warps": 4,
    "num_stages": 3,
    "registers": 0,
}
PIECES: Config = ONE_ROW | {"piece": 1}
FEW_ROWS: Config = ONE_ROW | {"rows": 4, "side": 2, "tiles": 3}


@dataclass(frozen=True)
class Case:
    queries: Tensor  # float32 [R, heads, dim]
    head_weights: Tensor  # float32 [R, heads]
    index_keys: Tensor  # uint8 [num_blocks, N, record]
    block_table: Tensor
    seqs: Tensor
    visible: Tensor
    num_entries: int

    def arguments(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """All but the number of entries, floats as `dtype`."""
        bytes_of_blocks = self.index_keys.flatten(1)
        # Blocks lie apart in the pool, as the engine's do.
        pool = torch.full((len(bytes_of_blocks), bytes_of_blocks.shape[1] + 64), 0xFF).byte()
        pool[:, 32:-32] = bytes_of_blocks
        return [
            self.queries.to(device, dtype),
            self.head_weights.to(device, dtype),
            pool.to(device)[:, 32:-32].unflatten(1, self.index_keys.shape[1:]),
            *(x.to(device) for x in (self.block_table, self.seqs, self.visible)),
        ]

    def scores(self, device: torch.device, settings: Config, dtype: torch.dtype) -> Tensor:
        """From tensors of `dtype`."""
        return paged_scores(
            *self.arguments(device, dtype), self.num_entries, out_dtype=dtype, settings=settings
        ).cpu()

    def expected(self) -> Tensor:
        blocks = self.block_table[self.seqs].clamp(0, len(self.index_keys) - 1)
        keys = decode_index_key(self.index_keys[blocks]).flatten(1, 2)[:, : self.num_entries]
        scores = reference.entry_scores(self.queries, keys, self.head_weights)
        return reference.hide_future(scores, self.visible)

    def rows(self, rows: list[int]) -> "Case":
        part = {n: getattr(self, n)[rows] for n in ("queries", "head_weights", "seqs", "visible")}
        return replace(self, **part)


def make_case(
    heads: int, dim: int, block: int, rows_of: list[int], columns: int, *, seed: int = 0
) -> Case:
    """Sequences with `rows_of` rows each, one to `columns` blocks, the last one in part."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_seqs, num_rows = len(rows_of), sum(rows_of)
    keys = encode_index_key(randn(num_seqs * columns, block, dim) * 2)
    seqs = torch.repeat_interleave(torch.arange(num_seqs), torch.tensor(rows_of))
    limit = torch.randint(1, columns * block + 1, (num_seqs,), generator=generator)
    back = torch.randint(0, 3, (num_rows,), generator=generator)
    visible = (limit[seqs] - back).clamp(min=0)
    table = torch.randperm(num_seqs * columns, generator=generator).view(num_seqs, columns)
    # Blocks that no row sees into are never read: the table says nothing there.
    table[torch.arange(columns) * block >= limit.unsqueeze(1)] = 1 << 40
    return Case(
        queries=qf4_idx_roundtrip(randn(num_rows, heads, dim)),
        head_weights=(randn(num_rows, heads) / 64).bfloat16().float(),
        index_keys=keys,
        block_table=table,
        seqs=seqs,
        visible=visible,
        num_entries=columns * block,
    )


def exact_case(heads: int, dim: int) -> Case:
    """Every scale is 1 and every weight a small power of two: all sums are exact in float32."""
    case = make_case(heads, dim, 64, [1, 3], 2, seed=5)
    largest = torch.zeros(dim)
    largest[::32] = 6.0

    def coarse(x: Tensor) -> Tensor:
        return qf4_idx_roundtrip(torch.where(largest > 0, largest, x.clamp(-6, 6)))

    generator = torch.Generator().manual_seed(6)
    powers = torch.randint(-1, 2, case.head_weights.shape, generator=generator)
    keys = coarse(torch.randn((*case.index_keys.shape[:2], dim), generator=generator) * 2)
    return replace(
        case,
        queries=coarse(case.queries * 2),
        head_weights=torch.exp2(powers.float()) * torch.sign(case.head_weights),
        index_keys=encode_index_key(keys),
    )


@pytest.mark.parametrize("settings", [ONE_ROW, FEW_ROWS, PIECES])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(4, 64, torch.float32), (32, 128, torch.bfloat16)]
)
def test_scores_equal_the_reference_where_sums_are_exact(
    device: torch.device, heads: int, dim: int, dtype: torch.dtype, settings: Config
) -> None:
    case = exact_case(heads, dim)
    got = case.scores(device, settings, dtype)
    assert got.dtype == dtype
    assert torch.equal(got.float(), case.expected())


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal, but for some that round to a neighbour."""
    if not torch.equal(got == HIDDEN, expected == HIDDEN):
        return False
    seen = expected != HIDDEN
    off = (got[seen] - expected[seen]).abs()
    return bool(
        (off <= expected[seen].abs() * 2**-7 + 1e-3).all() and (off > 0).float().mean() < 0.01
    )


@pytest.mark.parametrize(
    ("heads", "dim", "block", "settings"),
    [(4, 64, 64, FEW_ROWS), (32, 128, 128, ONE_ROW)],
)
def test_scores(device: torch.device, heads: int, dim: int, block: int, settings: Config) -> None:
    case = make_case(heads, dim, block, [1, 3], 2)
    assert close(case.scores(device, settings, torch.float32), case.expected())


def test_a_row_has_the_same_scores_in_every_batch(device: torch.device) -> None:
    case = make_case(4, 64, 64, [1, 3], 2, seed=1)
    alone = [case.rows([row]).scores(device, ONE_ROW, torch.float32) for row in range(4)]
    together = torch.cat(alone)
    for settings, order in (
        (ONE_ROW, [3, 1, 2]),
        (FEW_ROWS, [0, 1, 2, 3]),
        (FEW_ROWS, [2, 0, 3, 3]),
    ):
        got = case.rows(order).scores(device, settings, torch.float32)
        assert torch.equal(got, together[order])
    # And the comparison would see a difference: the signs of the codes.
    case.index_keys[case.block_table[0, 0], :, :32] ^= 0x88
    changed = case.rows([0]).scores(device, ONE_ROW, torch.float32)
    assert not torch.equal(changed, alone[0])


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, about NaN
def test_a_broken_row_or_key_stays_alone(device: torch.device) -> None:
    case = make_case(4, 64, 64, [6], 2, seed=2)
    before = case.scores(device, FEW_ROWS, torch.float32)
    case.queries[2] = float("nan")
    case.queries[3] = float("inf")
    case.head_weights[4] = float("nan")
    got = case.scores(device, FEW_ROWS, torch.float32)
    whole = [0, 1, 5]
    assert torch.equal(got[whole], before[whole])
    assert got[2, : case.visible[2]].isnan().all()
    last = int(case.visible.max()) - 1
    case.index_keys[case.block_table[0, last // 64], last % 64] = 0xFF
    got = case.scores(device, FEW_ROWS, torch.float32)
    assert torch.equal(got[whole, :last], before[whole, :last])


def test_without_rows_columns_or_visible_entries(device: torch.device) -> None:
    case = make_case(4, 64, 64, [3], 2)
    for settings in (ONE_ROW, FEW_ROWS):
        assert case.rows([]).scores(device, settings, torch.float32).shape == (0, 128)
        none = replace(case, num_entries=0)
        assert none.scores(device, settings, torch.float32).shape == (3, 0)
        blind = replace(
            case,
            visible=torch.zeros_like(case.visible),
            block_table=torch.full_like(case.block_table, 1 << 40),
        )
        assert (blind.scores(device, settings, torch.float32) == HIDDEN).all()


def test_columns_may_end_within_a_tile(device: torch.device) -> None:
    case = make_case(4, 64, 64, [1, 1], 2, seed=3)
    whole = case.scores(device, ONE_ROW, torch.float32)
    for settings in (ONE_ROW, FEW_ROWS):
        got = replace(case, num_entries=90).scores(device, settings, torch.float32)
        assert torch.equal(got, whole[:, :90])


@pytest.mark.parametrize(("size", "count"), [(4, 20), (5, 13)])
def test_scores_of_candidates(device: torch.device, size: int, count: int) -> None:
    case = make_case(4, 64, 64, [1, 3], 2, seed=4)
    case.visible[3] = 7  # fewer than a tile
    whole = case.scores(device, ONE_ROW, torch.float32)
    # Some blocks of each row, one beyond what it sees, and -1 at the end.
    generator = torch.Generator().manual_seed(5)
    in_all = -(-case.num_entries // size)
    wanted = torch.rand((4, in_all), generator=generator) < 0.6
    wanted &= torch.arange(in_all) * size <= case.visible[:, None]
    blocks = reference.select_top(torch.where(wanted, 0.0, HIDDEN), count)
    assert (blocks < 0).any() and (blocks >= 0).any(dim=1).all()
    arguments = case.arguments(device, torch.float32)
    got = candidate_scores(
        *arguments, blocks.to(device), size, out_dtype=torch.float32, settings=ONE_ROW
    ).cpu()
    entries = reference.block_entries(blocks, size)
    unseen = (entries < 0) | (entries >= case.num_entries)
    expected = whole.gather(1, entries.masked_fill(unseen, 0)).masked_fill_(unseen, HIDDEN)
    assert torch.equal(got, expected)
    none = candidate_scores(*arguments, blocks.to(device)[:, :0], size, settings=ONE_ROW)
    assert none.shape == (4, 0)


def test_candidates_by_way_of_all_scores(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows of a sequence score all entries where these are few: to the same bits."""
    case = make_case(4, 64, 64, [9], 2, seed=7)
    case.visible[4] = 7
    wanted = torch.rand((9, 26), generator=torch.Generator().manual_seed(8)) < 0.6
    wanted &= torch.arange(26) * 5 <= case.visible[:, None]
    blocks = reference.select_top(torch.where(wanted, 0.0, HIDDEN), 15).to(device)
    arguments = case.arguments(device, torch.float32)
    calls: list[int] = []
    pick = indexer._pick
    monkeypatch.setattr(indexer, "_pick", lambda *args: (calls.append(1), pick(*args)))
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(indexer, "_ALL_UNTIL", 127)
        alone = candidate_scores(*arguments, blocks, 5, out_dtype=dtype, settings=ONE_ROW)
        assert not calls
        monkeypatch.setattr(indexer, "_ALL_UNTIL", 128)
        among = candidate_scores(*arguments, blocks, 5, out_dtype=dtype, settings=ONE_ROW)
        assert calls.pop()
        assert torch.equal(among, alone) and among.dtype == dtype
        assert (alone == HIDDEN).any() and (alone > HIDDEN).any()


def test_unsupported_keys_are_refused(device: torch.device) -> None:
    case = make_case(4, 64, 64, [1], 1)
    with pytest.raises(ValueError, match="multiple of 64"):
        replace(case, index_keys=case.index_keys[:, :8]).scores(device, ONE_ROW, torch.float32)
    with pytest.raises(ValueError, match="dimension"):
        replace(case, queries=case.queries[:, :, :32]).scores(device, ONE_ROW, torch.float32)
    with pytest.raises(ValueError, match="count"):
        select_top(torch.zeros(1, 4, device=device), 1 << 20)


def coarse_scores(rows: int, entries: int, seed: int) -> Tensor:
    """Scores with many ties, among them both zeros, some rows with few visible entries."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-40, 41, (rows, entries), generator=generator).float() / 16
    minus = torch.rand((rows, entries), generator=generator) < 0.5
    scores = torch.where((scores == 0) & minus, -0.0, scores)
    visible = torch.randint(0, entries + 1, (rows,), generator=generator)
    visible[0] = entries
    return reference.hide_future(scores, visible)


SMALL_TILE: Config = {"tile": 64, "num_warps": 4, "registers": 0}


@pytest.mark.parametrize(("entries", "count"), [(1, 3), (64, 64), (300, 8), (1500, 8)])
def test_choice(device: torch.device, entries: int, count: int) -> None:
    scores = coarse_scores(3, entries, entries)
    expected = reference.select_top(scores, count)
    # One tile a row, and several.
    for dtype, settings in ((torch.float32, None), (torch.bfloat16, SMALL_TILE)):
        got = select_top(scores.to(device, dtype), count, settings=settings)
        assert torch.equal(got.cpu(), expected)


def test_choice_among_candidates(device: torch.device) -> None:
    """The same as among all, with what is no candidate hidden."""
    scores = coarse_scores(4, 300, 1)
    visible = (scores != HIDDEN).sum(dim=1)
    shape = {"block_size": 7, "num_blocks": 20}
    mask = reference.candidate_mask(scores, visible, **shape)
    expected = reference.select_top(scores.masked_fill(~mask, HIDDEN), 20)
    blocks = reference.candidate_blocks(scores, visible, **shape)
    entries = reference.block_entries(blocks, 7)
    among = scores.gather(1, entries.clamp(0, 299)).masked_fill(
        (entries < 0) | (entries > 299), HIDDEN
    )
    assert torch.equal(reference.select_top(among, 20, blocks), expected)
    for settings in (None, SMALL_TILE):
        got = select_top(among.to(device), 20, blocks.to(device), settings=settings)
        assert torch.equal(got.cpu(), expected)


def test_choice_of_all_the_values_there_are(device: torch.device) -> None:
    """Every bf16 but the NaNs with a sign."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    values = bits.to(torch.int16).view(torch.bfloat16).float()
    values = values[~(values.isnan() & (bits < 0))]
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(2))
    scores = values[order].view(1, -1)
    for part in (scores, scores[:, :5000]):
        got = select_top(part.to(device), 512)
        assert torch.equal(got.cpu(), reference.select_top(part, 512))


def test_nothing_to_choose_from(device: torch.device) -> None:
    assert select_top(torch.empty((2, 0), device=device), 3).tolist() == [[-1] * 3] * 2
    assert select_top(torch.empty((0, 5), device=device), 3).shape == (0, 3)
    hidden = torch.full((2, 5), HIDDEN, device=device)
    assert select_top(hidden, 3).tolist() == [[-1] * 3] * 2
    broken = torch.full((2, 5), float("nan"), device=device)
    broken[1] = -broken[1]
    got = select_top(broken, 3)
    assert ((got >= -1) & (got < 5)).all()


@pytest.mark.parametrize(
    ("size", "blocks", "entries"), [(8, 4, 100), (3, 5, 50), (1, 2, 9), (8, 4, 5)]
)
def test_candidates(device: torch.device, size: int, blocks: int, entries: int) -> None:
    scores = coarse_scores(6, entries, 7)
    visible = (scores != HIDDEN).sum(dim=1)
    shape = {"block_size": size, "num_blocks": blocks}
    expected = reference.candidate_blocks(scores, visible, **shape)
    for dtype in (torch.float32, torch.bfloat16):
        got = candidate_blocks(scores.to(device, dtype), visible.to(device), **shape)
        assert torch.equal(got.cpu(), expected)
    empty = candidate_blocks(scores[:, :0].to(device), visible.to(device), **shape)
    assert empty.tolist() == [[-1] * blocks] * 6


# --- On a GPU, at the model's dimensions ----------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODEL: dict[str, int] = {"block_size": 8, "num_blocks": 2048}


def model_pool(num_blocks: int, block: int) -> Tensor:
    """Index keys uint8 [num_blocks, block, 68] in blocks of 114,048 bytes."""
    pool = torch.randint(0, 256, (num_blocks, 114048), dtype=torch.uint8, device="cuda")
    keys = pool[:, 22784 : 22784 + block * 68].unflatten(1, (block, 68))
    keys[..., 64:] = torch.randint(120, 128, keys[..., 64:].shape, device="cuda").byte()
    return keys


def model_case(rows_of: list[int], columns: int, block: int) -> tuple[list[Tensor], int]:
    """Arguments of `paged_scores`; the pool is larger than 2^31 bytes."""
    num_seqs, num_rows = len(rows_of), sum(rows_of)
    keys = model_pool(max(20000, num_seqs * columns), block)
    seqs = torch.repeat_interleave(
        torch.arange(num_seqs, device="cuda"), torch.tensor(rows_of, device="cuda")
    )
    table = torch.randperm(len(keys), device="cuda")[: num_seqs * columns].view(num_seqs, columns)
    visible = torch.randint(0, columns * block + 1, (num_rows,), device="cuda")
    queries = qf4_idx_roundtrip(torch.randn(num_rows, 32, 128, device="cuda"))
    weights = (torch.randn(num_rows, 32, device="cuda") / 64).bfloat16().float()
    return [queries, weights, keys, table, seqs, visible], columns * block


def model_expected(arguments: list[Tensor], num_entries: int, row: int) -> Tensor:
    queries, weights, keys, table, seqs, visible = arguments
    row_keys = decode_index_key(keys[table[seqs[row]]]).flatten(0, 1)[:num_entries]
    scores = reference.entry_scores(
        queries[row : row + 1].cpu(), row_keys[None].cpu(), weights[row : row + 1].cpu()
    )
    return reference.hide_future(scores, visible[row : row + 1].cpu())[0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("block", "columns"), [(128, 40), (64, 70)])
def test_scores_at_the_model_dimensions(block: int, columns: int) -> None:
    torch.manual_seed(0)
    arguments, num_entries = model_case([1, 6, 30, 2, 1], columns, block)
    got = paged_scores(*arguments, num_entries)
    for row in range(0, 40, 5):
        assert close(got[row].float().cpu(), model_expected(arguments, num_entries, row))
    for settings in CANDIDATES[::5] + CANDIDATES_MANY[::4]:
        other = paged_scores(*arguments, num_entries, settings=settings | {"tiles": 5})
        assert torch.equal(other, got), settings
        # And where columns end within a tile.
        other = paged_scores(*arguments, num_entries - 37, settings=settings | {"tiles": 5})
        assert torch.equal(other, got[:, : num_entries - 37]), settings
    for row in (0, 3, 17):
        part = [x[row : row + 1] if x.shape[0] == 40 else x for x in arguments]
        assert torch.equal(paged_scores(*part, num_entries)[0], got[row])
    # A broken row, in the middle of one sequence, stays alone.
    arguments[0][20], arguments[1][21] = float("nan"), float("inf")
    for settings in (CANDIDATES[0], CANDIDATES_MANY[0]):
        other = paged_scores(*arguments, num_entries, settings=settings)
        assert torch.equal(other[:20], got[:20]) and torch.equal(other[22:], got[22:]), settings
        assert other[20, : int(arguments[5][20])].isnan().all()


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs Hopper",
)


@pytest.mark.gpu
@needs_hopper
def test_the_way_for_hopper_has_the_same_bits() -> None:
    """Programs share tiles of rows that see much, little and nothing."""
    torch.manual_seed(2)
    for attempt in range(24):
        num_seqs = (1, 5, 60, 300)[attempt % 4]
        arguments, num_entries = model_case([1] * num_seqs, 40, 128)
        arguments[3] = arguments[3][torch.randint(0, num_seqs, (num_seqs,), device="cuda")]
        short = torch.rand(num_seqs, device="cuda") < 0.3
        arguments[5][short] %= 200
        num_entries -= 4 * attempt  # columns end within a tile
        assert indexer_hopper.suits(arguments[0], arguments[2], num_entries)
        plain = paged_scores(*arguments, num_entries, settings=CANDIDATES[0])
        for dtype in (torch.bfloat16, torch.float32) * 2:
            out = torch.empty((num_seqs, num_entries), dtype=dtype, device="cuda")
            indexer_hopper.scores(*arguments, out)
            assert torch.equal(out, plain.to(dtype))
        assert torch.equal(paged_scores(*arguments, num_entries), plain)
    assert not indexer_hopper.suits(arguments[0], arguments[2], num_entries - 1)
    assert not indexer_hopper.suits(arguments[0], arguments[2][:, :64], num_entries)
    # A broken row stays alone.
    arguments[0][20], arguments[1][21] = float("nan"), float("inf")
    indexer_hopper.scores(*arguments, out)
    whole = torch.ones(num_seqs, dtype=torch.bool, device="cuda")
    whole[20:22] = False
    assert torch.equal(out[whole], plain[whole].float())
    assert out[20, : int(arguments[5][20])].isnan().all()
    cubins = [
        kernel.asm["cubin"]
        for kernel in indexer_hopper._kernel.device_caches[torch.cuda.current_device()][0].values()
    ]
    code = [disassembled(cubin) for cubin in cubins]
    assert all("QGMMA" in sass for sass in code) and code
    assert not any(overwritten(sass) for sass in code)


@pytest.mark.gpu
@needs_gpu
def test_choice_at_the_model_dimensions() -> None:
    torch.manual_seed(0)
    for rows, entries in ((64, 131072), (3, 300000), (64, 16384), (5, 700)):
        scores = (torch.randn(rows, entries, device="cuda") / 8).bfloat16()
        visible = torch.randint(0, entries + 1, (rows,), device="cuda")
        visible[0] = entries
        hidden = torch.arange(entries, device="cuda") >= visible[:, None]
        scores.masked_fill_(hidden, HIDDEN)
        on_cpu = scores.float().cpu()
        assert torch.equal(select_top(scores, 512).cpu(), reference.select_top(on_cpu, 512))
        blocks = candidate_blocks(scores, visible, **MODEL)
        expected = reference.candidate_blocks(on_cpu, visible.cpu(), **MODEL)
        assert torch.equal(blocks.cpu(), expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("block", "columns"), [(128, 140), (64, 70)])
@pytest.mark.parametrize("all_until", [0, 1 << 20])
def test_candidates_at_the_model_dimensions(
    block: int, columns: int, all_until: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of candidates alone, and the choice among them, against hiding all others."""
    monkeypatch.setattr(indexer, "_ALL_UNTIL", all_until)
    torch.manual_seed(1)
    arguments, num_entries = model_case([1, 6, 30, 2, 1], columns, block)
    arguments[5][0] = num_entries
    scores = paged_scores(*arguments, num_entries)
    for shape in (MODEL, {"block_size": 8, "num_blocks": 100}):
        blocks = candidate_blocks(scores, arguments[5], **shape)
        mask = reference.candidate_mask(scores.float(), arguments[5], **shape)
        expected = select_top(scores.masked_fill(~mask, HIDDEN), 512)
        among = candidate_scores(*arguments, blocks, 8)
        assert torch.equal(select_top(among, 512, blocks), expected)
        for settings in CANDIDATES_LISTED[::3]:
            other = candidate_scores(*arguments, blocks, 8, settings=settings | {"tiles": 3})
            assert torch.equal(other, among), settings
        for row in (0, 3, 17):
            part = [x[row : row + 1] if x.shape[0] == 40 else x for x in arguments]
            alone = candidate_scores(*part, blocks[row : row + 1], 8)
            assert torch.equal(alone[0], among[row])


@pytest.mark.gpu
@needs_gpu
def test_all_of_it_within_a_graph() -> None:
    torch.manual_seed(0)
    arguments, num_entries = model_case([1] * 8, 40, 128)

    def run() -> tuple[Tensor, Tensor]:
        scores = paged_scores(*arguments, num_entries)
        blocks = candidate_blocks(scores, arguments[5], block_size=8, num_blocks=64)
        among = candidate_scores(*arguments, blocks, 8)
        return scores, select_top(among, 512, blocks)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    torch.cuda.synchronize()
    for first, second in zip(expected, got, strict=True):
        assert torch.equal(first, second)
