"""Packed experts: exact weights, the reference's results, and bits that no other pair changes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.quant import dequant_fp4, q8_roundtrip, quant_fp4
from phalanx.kernels.reference.rows import round_bf16
from phalanx.kernels.reference.swiglu import swiglu
from phalanx.kernels.triton import expert_groups
from phalanx.kernels.triton.expert_dot import unpack
from phalanx.kernels.triton.expert_groups import group_pairs, num_tiles
from phalanx.kernels.triton.expert_pool import ExpertPool, pack
from phalanx.kernels.triton.experts import DEFAULTS, key_for, run_experts
from phalanx.worker_svc.model.moe import run_expert_pairs

HIDDEN, INTER, SLOTS = 128, 64, 8
SMALL = {"up_n": 64, "down_n": 64}  # less to interpret
LIMIT = 0.5  # bites
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Matrix = tuple[Tensor, Tensor]  # weight and scale as stored


@dataclass
class Stored:
    """Experts as a checkpoint has them, and what the reference asks of its weights."""

    experts: list[tuple[Matrix, Matrix, Matrix]]
    packs_experts: bool = True

    @property
    def config(self) -> Any:
        hidden, inter = self.experts[0][2][0].shape[0], self.experts[0][0][0].shape[0]

        class Config:
            hidden_size, moe_intermediate_size, swiglu_limit = hidden, inter, LIMIT

        return Config

    def slots(self, layer: int) -> range:
        return range(len(self.experts))

    def expert_matrices(self, layer: int, index: int, slots: slice) -> Tensor:
        return torch.stack([dequant_fp4(*expert[index]) for expert in self.experts[slots]])

    def pool(self, device: torch.device) -> ExpertPool:
        config = self.config
        pool = ExpertPool.empty(
            len(self.experts), config.hidden_size, config.moe_intermediate_size, device
        )
        for slot, (gate, up, down) in enumerate(self.experts):
            pool.put(slot, *gate, *up, *down)
        return pool


def stored(slots: int, hidden: int, inter: int, seed: int = 0, device: str = "cpu") -> Stored:
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        drawn = torch.randn((rows, columns), generator=generator, device=device)
        return quant_fp4(drawn * columns**-0.5)

    return Stored(
        [
            (matrix(inter, hidden), matrix(inter, hidden), matrix(hidden, inter))
            for _ in range(slots)
        ]
    )


def drawn_rows(count: int, hidden: int, seed: int = 0) -> Tensor:
    x = torch.randn((count, hidden), generator=torch.Generator().manual_seed(seed))
    return q8_roundtrip(x).bfloat16()


def drawn_weights(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(1)) + 0.1


@pytest.fixture(scope="module")
def experts() -> Stored:
    return stored(SLOTS, HIDDEN, INTER)


@pytest.fixture
def pool(experts: Stored, device: torch.device) -> ExpertPool:
    return experts.pool(device)


def small(num_pairs: int, **changes: int) -> dict[str, int]:
    return key_for(num_pairs, SLOTS, HIDDEN, INTER)[1] | SMALL | changes


def run(pool: ExpertPool, slots: list[int], x: Tensor, weights: Tensor, **changes: int) -> Tensor:
    device = pool.up.device
    ids = torch.tensor(slots, dtype=torch.int64, device=device)
    settings = small(len(slots), **changes)
    return run_experts(pool, ids, x.to(device), weights.to(device), LIMIT, settings=settings).cpu()


@triton.jit
def _unpack_kernel(words_ptr, scales_ptr, out_ptr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0)
    n, c = tl.arange(0, 64), tl.arange(0, 32)
    words = tl.load(words_ptr + tile * 2048 + n[:, None] * 32 + c[None, :])
    scales = tl.load(scales_ptr + tile * 64 + n)
    for place in tl.static_range(4):
        target = out_ptr + tile * 8192 + n[:, None] * 128 + 32 * place + c[None, :]
        tl.store(target, unpack(words, scales, place))


def test_every_code_at_every_scale_up_to_two_is_unpacked_exactly(device: torch.device) -> None:
    codes = torch.arange(192 * 64, dtype=torch.int32).mul_(37).to(torch.uint8).view(192, 64)
    scale = torch.arange(192 * 4).remainder(129).to(torch.uint8).view(192, 4)
    words, scales, raised = pack(codes.to(device), scale.to(device))
    out = torch.empty((3, 64, 128), dtype=torch.bfloat16, device=device)
    _unpack_kernel[(3,)](words, scales, out)
    assert raised.item() == 1.0
    assert torch.equal(out.cpu().view(192, 128).float(), dequant_fp4(codes, scale))


@pytest.mark.parametrize("count", [1, 10, 140, 1100])
def test_pairs_are_grouped_by_slot(
    count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_groups, "_ONE", 1000)
    ids = [(3, -1, 3, 0, 3, 9, 3, 1, 3, 0)[i % 10] for i in range(count)]
    order, tiles = group_pairs(torch.tensor(ids, dtype=torch.int32, device=device), 4, 4)
    assert tiles.shape[0] == num_tiles(count, 4, 4)
    found: dict[int, list[int]] = {}
    for slot, first, size in tiles.tolist():
        if size:
            assert size <= 4
            found.setdefault(slot, []).extend(order[first : first + size].tolist())
    wanted: dict[int, list[int]] = {}
    for pair, slot in enumerate(ids):
        wanted.setdefault(slot if 0 <= slot < 4 else -1, []).append(pair)
    assert {slot: sorted(pairs) for slot, pairs in found.items()} == wanted


def test_results_are_those_of_the_reference(experts: Stored, pool: ExpertPool) -> None:
    """Sums differ by their order alone; nearly all round to the same bf16 value."""
    slots = [5, 0, 5, 7, 0, 5]
    x, weights = drawn_rows(6, HIDDEN), drawn_weights(6)
    expected = run_expert_pairs(experts, 0, torch.tensor(slots), x, weights)  # type: ignore[arg-type]
    found = run(pool, slots, x, weights)
    error = (found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert error.max() < 2e-2  # one activation of 64 by one step of e4m3
    assert (found == expected).float().mean() > 0.9


def test_a_pair_alone_in_any_tile_and_through_an_index_has_the_same_bits(
    pool: ExpertPool, device: torch.device
) -> None:
    slots = [2, 4, 2]
    x, weights = drawn_rows(3, HIDDEN), drawn_weights(3)
    together = run(pool, slots, x, weights)
    alone = run(pool, slots[2:], x[2:], weights[2:], m=32)
    assert torch.equal(alone, together[2:])
    turned = run(pool, slots[::-1], x.flip(0), weights.flip(0), m=16, up_n=128)
    assert torch.equal(turned.flip(0), together)
    gathered = run_experts(
        pool,
        torch.tensor(slots, dtype=torch.int32, device=device),
        x[[2, 0, 1]].to(device),
        weights.to(device),
        LIMIT,
        row_index=torch.tensor([1, 2, 0], dtype=torch.int32, device=device),
        settings=small(3),
    )
    assert torch.equal(gathered.cpu(), together)


def test_a_slot_of_several_tiles(pool: ExpertPool) -> None:
    slots = [1] * 19
    x, weights = drawn_rows(19, HIDDEN), drawn_weights(19)
    two = run(pool, slots, x, weights, m=16)
    assert torch.equal(two, run(pool, slots, x, weights, m=32))


@QUIET
def test_garbage_stays_with_its_pair(experts: Stored, device: torch.device) -> None:
    pool = experts.pool(device)
    for tensor in (pool.up[3], pool.down[3], pool.up_scales[3], pool.down_scales[3]):
        tensor.fill_(-1)
    pool.raised[3] = torch.nan
    x, weights = drawn_rows(5, HIDDEN), drawn_weights(5)
    expected = run(pool, [1, 1], x[:2], weights[:2])
    x[2], x[3, 5], weights[4] = torch.nan, torch.inf, torch.inf
    found = run(pool, [1, 1, 1, SLOTS, 3], x, weights)
    assert torch.equal(found[:2], expected)
    assert torch.equal(found[3], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert run(pool, [], x[:0], weights[:0]).shape == (0, HIDDEN)


@QUIET
def test_large_scales_raise_the_product(device: torch.device) -> None:
    """Bytes up to 145 in the gate, down to 60 in the down projection."""
    one = stored(1, HIDDEN, INTER, seed=3)
    gate, _, down = one.experts[0]
    gate[1].add_(20)
    down[1].sub_(60)
    x, weights = drawn_rows(1, HIDDEN), drawn_weights(1)
    expected = run_expert_pairs(one, 0, torch.tensor([0]), x, weights)  # type: ignore[arg-type]
    pool = one.pool(device)
    assert pool.raised[0, 0] > 1 and pool.raised[0, 2] == 1
    found = run(pool, [0], x, weights).double()
    assert (found - expected.double()).norm() < 2e-2 * expected.double().norm()


def test_a_pool_is_as_large_as_what_is_stored_and_grows() -> None:
    stored_bytes = 3 * 2304 * 5120 * 17 // 32
    assert ExpertPool.num_bytes(10, 5120, 2304) == 10 * (stored_bytes + 12)
    pool = stored(2, HIDDEN, INTER).pool(torch.device("cpu"))
    tensors = (pool.up, pool.up_scales, pool.down, pool.down_scales, pool.raised)
    before = [tensor.clone() for tensor in tensors]
    assert sum(tensor.nbytes for tensor in tensors) == ExpertPool.num_bytes(2, HIDDEN, INTER)
    pool.widen(3)
    assert pool.num_slots == 3
    after = (pool.up, pool.up_scales, pool.down, pool.down_scales, pool.raised)
    assert all(torch.equal(new[:2], old) for new, old in zip(after, before, strict=True))
    with pytest.raises(ValueError):
        pool.widen(1)
    with pytest.raises(ValueError):
        ExpertPool.empty(1, 100, 64, "cpu")


# --- At the model's shapes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> Stored:
    return stored(6, 5120, 2304, device="cuda")


def _expected(experts: Stored, slots: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    y = torch.empty(x.shape, device=x.device)
    for slot, matrices in enumerate(experts.experts):
        mine = slots == slot
        rows = x[mine].float()
        gate, up, down = (dequant_fp4(*matrix) for matrix in matrices)
        a = swiglu(round_bf16(rows @ gate.T), round_bf16(rows @ up.T), LIMIT, weights[mine])
        y[mine] = round_bf16(q8_roundtrip(a) @ down.T)
    return y


@GPU
@pytest.mark.gpu
def test_full_dimensions_follow_the_reference_with_the_same_bits_in_every_tile(
    full: Stored,
) -> None:
    pool = full.pool(torch.device("cuda"))
    count = 700
    slots = torch.randint(0, 6, (count,), generator=torch.Generator().manual_seed(2)).cuda()
    x, weights = drawn_rows(count, 5120).cuda(), drawn_weights(count).cuda()
    backwards = torch.arange(count - 1, -1, -1, device="cuda")
    with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
        for settings in DEFAULTS.values():
            run_experts(pool, slots, x, weights, LIMIT, settings=settings, compile_only=True)
        run_experts(pool, slots, x, weights, LIMIT, row_index=backwards, compile_only=True)
    found = run_experts(pool, slots, x, weights, LIMIT)
    expected = _expected(full, slots, x, weights)
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 5e-3
    for settings in DEFAULTS.values():
        assert torch.equal(run_experts(pool, slots, x, weights, LIMIT, settings=settings), found)
    for some in (slice(0, 1), slice(3, 27), slice(100, 356)):
        part = run_experts(pool, slots[some], x[some], weights[some], LIMIT)
        assert torch.equal(part, found[some])
    turned = run_experts(
        pool, slots.flip(0), x, weights.flip(0).contiguous(), LIMIT, row_index=backwards
    )
    assert torch.equal(turned.flip(0), found)


@GPU
@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs Hopper",
)
def test_the_way_for_hopper_has_the_same_bits_at_every_height(full: Stored) -> None:
    pool = full.pool(torch.device("cuda"))
    counts = torch.tensor([99, 31, 65, 97, 96, 301, 64])
    slots = torch.arange(7).repeat_interleave(counts) - 1
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(4))].cuda()
    x, weights = drawn_rows(len(slots), 5120).cuda(), drawn_weights(len(slots)).cuda()
    plain = DEFAULTS[8] | {"hopper": 0}
    expected = run_experts(pool, slots, x, weights, LIMIT, settings=plain)
    plain["hopper"] = 1
    for _ in range(3):  # the order of pairs within a slot changes
        found = run_experts(pool, slots, x, weights, LIMIT, settings=plain)
        assert torch.equal(found, expected)
    index = torch.arange(len(slots) - 1, -1, -1, device="cuda")
    wide = torch.zeros((len(slots), 5123), device="cuda")  # float32, and rows that start anywhere
    wide[:, 1:5121] = x.flip(0)
    rows = wide[:, 1:5121]
    found = run_experts(pool, slots, rows, weights, LIMIT, row_index=index, settings=plain)
    assert torch.equal(found, expected)
    nothing = torch.full_like(slots, 6)
    assert not run_experts(pool, nothing, x, weights, LIMIT, settings=plain).any()


@GPU
@pytest.mark.gpu
def test_a_launch_is_captured_in_a_graph_and_follows_new_slots(full: Stored) -> None:
    pool = full.pool(torch.device("cuda"))
    slots = torch.zeros(24, dtype=torch.int64, device="cuda")
    x, weights = drawn_rows(24, 5120).cuda(), drawn_weights(24).cuda()
    run_experts(pool, slots, x, weights, LIMIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_experts(pool, slots, x, weights, LIMIT)
    slots.copy_(torch.arange(24) % 7 - 1)
    graph.replay()
    assert torch.equal(out, run_experts(pool, slots, x, weights, LIMIT))
    assert not out[0].any()


def test_a_slot_holds_what_was_put_and_nothing_else(experts: Stored, pool: ExpertPool) -> None:
    def held(slot: int, expert: int) -> list[bool]:
        return [
            pool.holds(slot, part, *(tensor.to(pool.up.device) for tensor in matrix))
            for part, matrix in enumerate(experts.experts[expert])
        ]

    for slot in range(SLOTS):
        assert held(slot, slot) == [True] * 3
        assert held(slot, (slot + 1) % SLOTS) == [False] * 3
    pool.flip_bit(1)
    assert held(1, 1) == [True, True, False] and held(0, 0) == [True] * 3
    pool.flip_bit(1)
    for part, tensor in enumerate((pool.up, pool.up_scales, pool.down_scales)):
        tensor[2].view(-1)[-1] ^= 1 << 14
        assert held(2, 2) == [[True, False, True], [True, False, True], [True, True, False]][part]
        tensor[2].view(-1)[-1] ^= 1 << 14
    assert held(2, 2) == [True] * 3
