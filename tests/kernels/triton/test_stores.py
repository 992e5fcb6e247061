"""Fused stores: the bytes of norm, turn and encoding one after the other, in the right places only."""

import pytest
import torch
from hard_values import hard_rows, patterns
from torch import Tensor

from phalanx.kernels.reference import quant, rope
from phalanx.kernels.triton import rows, stores

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

EPS = 1e-20
TABLE = rope.rope_table(rope.frequencies(32, 10000.0), 50)
POSITIONS = torch.tensor([3, 49, 0, 7, 21])


def random(*shape: int, seed: int = 0) -> Tensor:
    """bf16 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def on(device: torch.device, table: rope.RopeTable) -> rope.RopeTable:
    return rope.RopeTable(table.cos.to(device), table.sin.to(device))


def turned(device: torch.device, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The normed vectors, by the kernel with the reference's bound, and these turned."""
    normed = rows.rms_norm(x.to(device), weight.to(device), EPS).cpu()
    return normed, rope.rotate(normed.clone(), TABLE.at(POSITIONS))


@pytest.mark.parametrize("dim", [32, 128])
def test_window_records(device: torch.device, dim: int) -> None:
    x, weight = random(5, dim), random(dim, seed=1)
    x[3] = 0
    expected = quant.encode_window(turned(device, x, weight)[1])
    wide = torch.cat((x, x), dim=1).to(device)[:, dim:]  # as behind the queries' latent
    for dtype in (torch.float32, torch.bfloat16):
        got = stores.window_records(
            wide.to(dtype), weight.to(device), EPS, on(device, TABLE.at(POSITIONS))
        )
        assert torch.equal(got.cpu(), expected)
    whole = on(device, TABLE)
    got = stores.window_records(
        wide[2:], weight.to(device), EPS, whole, positions=POSITIONS[2:].to(device)
    )
    assert torch.equal(got.cpu(), expected[2:])
    assert stores.window_records(wide[:0], weight.to(device), EPS, whole).shape[0] == 0


def test_one_launch_after_the_projection(device: torch.device) -> None:
    both, q_norm, kv_norm = random(5, 96 + 64), random(96, seed=1), random(64, seed=2)
    table, there = on(device, TABLE), both.to(device)
    q_norm, kv_norm, positions = (t.to(device) for t in (q_norm, kv_norm, POSITIONS))
    latent, records = stores.latent_and_window(
        there, q_norm, kv_norm, EPS, table, positions=positions
    )
    assert torch.equal(latent, rows.rms_norm_q8(there[:, :96], q_norm, EPS))
    expected = stores.window_records(there[:, 96:], kv_norm, EPS, table, positions=positions)
    assert torch.equal(records, expected)
    one = rope.RopeTable(table.cos[positions[4:]], table.sin[positions[4:]])
    alone = stores.latent_and_window(there[4:], q_norm, kv_norm, EPS, one, out_dtype=torch.bfloat16)
    assert torch.equal(alone[0].float(), latent[4:]) and torch.equal(alone[1], records[4:])


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("form", ["compressed", "index_key"])
def test_entries_land_in_their_places(device: torch.device, dim: int, form: str) -> None:
    x, weight = random(5, dim), random(dim, seed=1)
    blocks, offsets = torch.tensor([2, -1, 0, 1, 2]), torch.tensor([1, 0, 3, 2, 0])
    normed, vectors = turned(device, x, weight)
    record = getattr(quant, f"encode_{form}")(vectors)
    size = record.shape[1]
    memory = torch.full((3, 4 * size + 32), 7, dtype=torch.uint8)
    expected = memory.clone()
    kept = blocks >= 0
    expected[:, 16 : 16 + 4 * size].view(3, 4, size)[blocks[kept], offsets[kept]] = record[kept]
    memory = memory.to(device)
    pool = memory[:, 16 : 16 + 4 * size].view(3, 4, size)
    args = (x.to(device), weight.to(device), EPS, on(device, TABLE))
    at = (blocks.to(device), offsets.to(device), pool)
    if form == "compressed":
        got = stores.store_compressed(*args, *at, positions=POSITIONS.to(device))
        assert torch.equal(got.cpu(), normed)
    else:
        stores.store_index_keys(*args, *at, positions=POSITIONS.to(device))
    assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("form", ["window", "compressed", "index_key"])
def test_every_value_is_encoded_as_in_the_reference(device: torch.device, form: str) -> None:
    ones, table = torch.ones((1, 128), device=device), on(device, TABLE)
    hard = hard_rows(128).bfloat16().float()
    weights = torch.cat((patterns(device, 128), hard[hard.isfinite().all(dim=1)]))
    # A norm of 1, and position 0: the weights themselves are encoded, with some zeros' signs changed.
    start = torch.zeros(len(weights), dtype=torch.int64)
    expected = getattr(quant, f"encode_{form}")(rope.rotate(weights.clone(), TABLE.at(start)))
    at = torch.zeros(1, dtype=torch.int64, device=device)
    pool = torch.zeros((1, 1, expected.shape[1]), dtype=torch.uint8, device=device)
    for weight, record in zip(weights.to(device), expected, strict=True):
        if form == "window":
            got = stores.window_records(ones, weight, 0.0, table, positions=at)[0]
        elif form == "compressed":
            stores.store_compressed(ones, weight, 0.0, table, at, at, pool, positions=at)
            got = pool[0, 0]
        else:
            stores.store_index_keys(ones, weight, 0.0, table, at, at, pool, positions=at)
            got = pool[0, 0]
        assert torch.equal(got.cpu(), record)


def test_a_broken_vector_spoils_its_own_record(device: torch.device) -> None:
    x, weight, table = random(3, 32), torch.ones(32, device=device), on(device, TABLE)
    clean = stores.window_records(x.to(device), weight, EPS, table)
    x[1] = float("nan")
    got = stores.window_records(x.to(device), weight, EPS, table)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_only_kept_rows_are_committed(device: torch.device) -> None:
    g = torch.Generator().manual_seed(4)
    slots, places = torch.tensor([1, 1, 3, 0, 2]), torch.tensor([0, 4, 2, 1, 3])
    keep = torch.tensor([True, False, True, True, False])
    there = (slots.to(device), places.to(device), keep.to(device))

    records = torch.randint(0, 256, (3, 5, 66), generator=g).to(torch.uint8)
    memory = torch.zeros((4, 1100), dtype=torch.uint8)
    rings = memory[:, : 3 * 5 * 66].view(4, 3, 5, 66)
    expected = rings.clone()
    for ring in range(3):
        expected[slots[keep], ring, places[keep]] = records[ring][keep]
    memory = memory.to(device)
    rings = memory[:, : 3 * 5 * 66].view(4, 3, 5, 66)
    stores.store_window(records.to(device), rings, *there)
    assert torch.equal(rings.cpu(), expected) and (memory[:, 3 * 5 * 66 :] == 0).all()

    pairs = torch.randn(2, 5, 2, 32, generator=g)
    expected = torch.zeros(4, 2, 2, 32)
    for owner in range(2):
        expected[slots[keep], owner] = pairs[owner][keep]
    pool = torch.zeros(4, 200, device=device)[:, 8:136].view(4, 2, 2, 32)
    stores.store_pairs(pairs.to(device), pool, there[0], there[2])
    assert torch.equal(pool.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_model_projection(device: torch.device, dtype: torch.dtype) -> None:
    both = random(200, 1280 + 512).to(device, dtype)
    q_norm, kv_norm = random(1280, seed=1).to(device), random(512, seed=2).to(device)
    table = on(device, rope.rope_table(rope.frequencies(64, 10000.0), 300))
    positions = torch.arange(200, device=device)
    latent, records = stores.latent_and_window(
        both, q_norm, kv_norm, EPS, table, positions=positions
    )
    assert torch.equal(latent, rows.rms_norm_q8(both[:, :1280], q_norm, EPS))
    expected = stores.window_records(both[:, 1280:], kv_norm, EPS, table, positions=positions)
    assert torch.equal(records, expected)
    normed = rows.rms_norm(both[:, 1280:], kv_norm, EPS)
    turned = rows.rotate(normed, table, positions=positions)
    assert torch.equal(records.cpu(), quant.encode_window(turned.cpu()))
    one = stores.latent_and_window(
        both[199:], q_norm, kv_norm, EPS, table, positions=positions[199:]
    )
    assert torch.equal(one[0], latent[199:]) and torch.equal(one[1], records[199:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_records_beyond_two_gigabytes(device: torch.device) -> None:
    """The pool is longer than 2^31 bytes: the last block's place needs 64 bits."""
    num_blocks, block_bytes = 20_000, 114_048
    memory = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)
    pool = memory[:, : 64 * 288].view(num_blocks, 64, 288)
    x, weight = random(5, 512), random(512, seed=1)
    table = rope.rope_table(rope.frequencies(64, 160000.0), 50)
    normed = rows.rms_norm(x.to(device), weight.to(device), EPS)
    blocks = torch.tensor([num_blocks - 1, 0, 18_900, -1, 7], device=device)
    offsets = torch.tensor([63, 1, 2, 3, 4], device=device)
    got = stores.store_compressed(
        x.to(device),
        weight.to(device),
        EPS,
        on(device, table),
        blocks,
        offsets,
        pool,
        positions=POSITIONS.to(device),
    )
    assert torch.equal(got, normed)
    vectors = rope.rotate(normed.cpu().clone(), table.at(POSITIONS))
    record = quant.encode_compressed(vectors)
    for row in (0, 1, 2, 4):
        assert torch.equal(pool[blocks[row], offsets[row]].cpu(), record[row])
    assert int((memory != 0).any(dim=1).sum()) == 4
