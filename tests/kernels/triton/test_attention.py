"""Attention over cache records: equal to the reference within its bound, and the same in any company."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from phalanx.kernels.reference.attention import sink_attention
from phalanx.kernels.reference.quant import (
    decode_compressed,
    decode_window,
    encode_compressed,
    encode_window,
)
from phalanx.kernels.reference.rope import RopeTable, frequencies, rope_table, rotate
from phalanx.kernels.triton import attention
from phalanx.kernels.triton.attention import block_attention, sparse_attention


@dataclass(frozen=True)
class Rows:
    """Rows of a step and the caches they see; every unused byte is garbage."""

    queries: Tensor
    records: Tensor
    ring: Tensor
    slots: Tensor
    positions: Tensor
    within: Tensor
    window_from: Tensor
    window: int
    sink: Tensor
    compressed: Tensor
    table: Tensor
    seqs: Tensor
    chosen: Tensor
    rope: RopeTable

    @property
    def scale(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)

    def attend(self, **kwargs: object) -> Tensor:
        return self.call(block_rows=(self.table, self.seqs), **kwargs)

    def call(self, **kwargs: object) -> Tensor:
        return sparse_attention(
            self.queries, self.records, self.ring, self.slots, self.positions, self.within,
            self.window_from, self.window, self.sink, self.scale,
            **({"compressed": self.compressed, "chosen": self.chosen} | kwargs),  # type: ignore[arg-type]
        )  # fmt: skip

    def take(self, rows: list[int]) -> "Rows":
        """These rows alone; a row needs those of its sequence before it in the same step."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.queries.device)
        return replace(
            self,
            **{
                name: getattr(self, name)[at]
                for name in ("queries", "records", "slots", "positions", "within", "window_from")
            },
            seqs=self.seqs[at],
            chosen=self.chosen[at],
            rope=self.rope.at(at),
        )


def rows(
    device: torch.device,
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    dim: int = 64,
    window: int = 16,
    topk: int = 24,
    entries: int = 8,
    rope_dim: int = 32,
    ratio: int = 2,
    seed: int = 0,
    size: float = 1.0,
) -> Rows:
    """Sequences of (tokens before the step, rows of the step)."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).mul_(size).bfloat16().float()

    def garbage(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)

    starts = torch.tensor([start for start, _ in sequences])
    seqs = torch.arange(len(sequences)).repeat_interleave(torch.tensor([n for _, n in sequences]))
    within = torch.cat([torch.arange(n) for _, n in sequences])
    positions = starts[seqs] + within
    records = encode_window(normal(len(seqs), dim))
    width, ring_size = records.shape[1], window + 6
    # One layer of a pool with more in a slot.
    ring = garbage(len(sequences) + 2, 3, ring_size, width)[:, 1]
    slots = torch.randperm(len(sequences) + 2, generator=g)[: len(sequences)]
    for seq, (start, _) in enumerate(sequences):
        past = torch.arange(max(0, start - window), start)
        ring[slots[seq], past % ring_size] = encode_window(normal(len(past), dim))
    max_blocks = int(positions.max() + 1) // ratio // entries + 1
    table = 1 + torch.randperm(len(sequences) * max_blocks, generator=g).view(-1, max_blocks)
    filled = encode_compressed(normal(table.numel() + 1, entries, dim))
    pool = garbage(table.numel() + 1, 2, entries, filled.shape[-1])
    pool[:, 1] = filled
    chosen = torch.full((len(seqs), topk), -1)
    for row, position in enumerate(positions.tolist()):
        visible = torch.randperm((position + 1) // ratio, generator=g)[:topk]
        places = torch.randperm(topk, generator=g)[: len(visible)]
        chosen[row, places] = visible
    rope = rope_table(frequencies(rope_dim, 1e4), int(positions.max()) + 1).at(positions)
    made = Rows(
        queries=normal(len(seqs), heads, dim) * 2,
        records=records,
        ring=ring,
        slots=slots[seqs],
        positions=positions,
        within=within,
        window_from=torch.zeros_like(positions),
        window=window,
        sink=normal(heads) / size,
        compressed=pool[:, 1],
        table=table,
        seqs=seqs,
        chosen=chosen,
        rope=rope,
    )
    moved = {k: v.to(device) for k, v in vars(made).items() if isinstance(v, Tensor)}
    moved["ring"] = ring._base.to(device)[:, 1]  # type: ignore[union-attr]
    moved["compressed"] = pool.to(device)[:, 1]
    return replace(made, **moved, rope=RopeTable(rope.cos.to(device), rope.sin.to(device)))  # type: ignore[arg-type]


def window_part(step: Rows) -> tuple[Tensor, Tensor]:
    """The window's vectors and which of them are missing, slot by slot as the engine defines them."""
    num_rows, device = len(step.positions), step.queries.device
    back = torch.arange(step.window - 1, -1, -1, device=device)
    at = step.positions[:, None] - back
    empty = at < 0
    first = step.window_from[:, None]
    empty |= (at < first) & (step.positions[:, None] >= first)
    own = (torch.arange(num_rows, device=device)[:, None] - back).clamp(min=0)
    ring = step.ring[step.slots[:, None], at.clamp(min=0) % step.ring.shape[1]]
    near = (back <= step.within[:, None])[..., None]
    record = torch.where(near, step.records[own], ring)
    return decode_window(record.masked_fill(empty[..., None], 0)), empty


def entry_part(step: Rows) -> tuple[Tensor, Tensor]:
    entries, empty = step.compressed.shape[1], step.chosen < 0
    chosen = step.chosen.clamp(min=0)
    block = step.table[step.seqs].gather(1, chosen // entries)
    record = step.compressed[block, chosen % entries].masked_fill(empty[..., None], 0)
    return decode_compressed(record), empty


def close(got: Tensor, step: Rows, parts: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether a result is within the docstring's bounds: every element, and all of them together."""
    want = sink_attention(step.queries.float(), parts, step.sink, step.scale)
    vectors = torch.cat([v for v, _ in parts], dim=1).double()
    empty = torch.cat([e for _, e in parts], dim=1)
    scores = torch.einsum("rhd,rnd->rhn", step.queries.double(), vectors) * step.scale
    scores = scores.masked_fill(empty[:, None], float("-inf"))
    sink = step.sink.double().expand(len(scores), -1)[..., None]
    shares = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    mean = torch.einsum("rhn,rnd->rhd", shares, vectors.abs())
    bound = 1.02 * 2**-8 * (mean + 1.5 * torch.maximum(want.abs(), got.abs()))
    exact = torch.einsum("rhn,rnd->rhd", shares, vectors)
    as_good = (got - exact).norm() <= 1.15 * (want - exact).norm()
    return bool(as_good and ((got.double() - want).abs() <= bound).all())


STEP = [(0, 1), (40, 2)]  # a first token; rows of a longer sequence

FULL = pytest.param(
    512,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
)


@pytest.fixture(params=[64, FULL])
def dim(request: pytest.FixtureRequest) -> int:
    """Dimensions of a vector: any, and those that have a kernel of their own."""
    return int(request.param)


def parts(step: Rows) -> list[tuple[Tensor, Tensor]]:
    return [window_part(step), entry_part(step)]


def test_attention_is_close_to_the_reference(device: torch.device, dim: int) -> None:
    step = rows(device, STEP, dim=dim)
    got = step.attend()
    assert close(got, step, parts(step))
    assert not close(got * (1 + 2**-6), step, parts(step))
    assert torch.equal(got, got.bfloat16().float())


def test_a_window_alone(device: torch.device, dim: int) -> None:
    step = rows(device, STEP, dim=dim)
    got = step.call(compressed=None, chosen=None)
    assert close(got, step, [window_part(step)])


def test_more_entries_than_a_tile_and_heads_that_fill_none(device: torch.device, dim: int) -> None:
    step = rows(device, [(300, 2)], dim=dim, heads=20, topk=70, window=70)
    assert close(step.attend(), step, parts(step))


def test_windows_start_where_they_may(device: torch.device, dim: int) -> None:
    step = rows(device, [(40, 2), (30, 1)], dim=dim)
    step = replace(step, window_from=torch.tensor([38, 38, 31], device=device))
    got = step.attend()
    assert close(got, step, parts(step))
    everything = replace(step, window_from=torch.zeros_like(step.window_from)).attend()
    assert not torch.equal(got[:2], everything[:2])
    assert torch.equal(got[2], everything[2])


def test_results_are_turned_back_as_the_reference_turns(device: torch.device, dim: int) -> None:
    step = rows(device, STEP, dim=dim)
    got = step.attend(cos=step.rope.cos, sin=step.rope.sin)
    assert torch.equal(got, rotate(step.attend(), step.rope.inverse()))


@pytest.mark.parametrize("size", [2.0**-16, 2.0**6])
def test_small_and_large_vectors(device: torch.device, dim: int, size: float) -> None:
    step = rows(device, [(40, 2)], dim=dim, size=size)
    step = replace(step, queries=(step.queries / size**2).bfloat16().float())
    assert close(step.attend(), step, parts(step))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter
def test_scores_far_apart(device: torch.device, dim: int) -> None:
    """One tile weighs nothing beside another, and a sink beside all."""
    step = rows(device, [(200, 1)], dim=dim, window=70)
    step = replace(step, queries=step.queries * 64)
    assert close(step.attend(), step, parts(step))
    drowned = replace(step, sink=torch.full_like(step.sink, 1e30))
    assert not drowned.attend().any()


def test_bf16_narrow_integers_and_blocks_by_row(device: torch.device, dim: int) -> None:
    step = rows(device, STEP, dim=dim)
    names = ("slots", "positions", "within", "window_from", "chosen", "table", "seqs")
    narrow = replace(step, **{name: getattr(step, name).int() for name in names})
    narrow = replace(narrow, queries=step.queries.bfloat16())
    got = narrow.call(block_rows=narrow.table[step.seqs], out_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.float(), step.attend())


def test_a_row_is_the_same_in_any_company(device: torch.device, dim: int) -> None:
    step = rows(device, STEP, dim=dim)
    whole = step.attend()
    order = [1, 2, 0]
    assert torch.equal(step.take(order).attend(), whole[torch.tensor(order, device=device)])
    for some in ([0], [1], [1, 2]):
        assert torch.equal(step.take(some).attend(), whole[some])


def test_a_row_is_the_same_as_decode_and_as_prefill(device: torch.device, dim: int) -> None:
    """A prompt's rows in one step, and each with those before it in the ring."""
    step = rows(device, [(0, 3)], dim=dim)
    whole = step.attend()
    ring = step.ring.clone()
    for row in range(3):
        alone = replace(step.take([row]), within=torch.zeros(1, dtype=torch.int64, device=device))
        assert torch.equal(replace(alone, ring=ring).attend(), whole[row : row + 1])
        ring[step.slots[0], row % ring.shape[1]] = step.records[row]


@pytest.mark.filterwarnings("ignore:.*encountered")
def test_a_broken_row_breaks_no_other(device: torch.device, dim: int) -> None:
    step = rows(device, STEP, dim=dim)
    whole = step.attend()
    queries = step.queries.clone()
    queries[0], queries[2] = float("nan"), float("inf")
    broken = replace(step, queries=queries).attend()
    kept = [row for row in range(len(queries)) if row not in (0, 2)]
    assert torch.equal(broken[kept], whole[kept])


def test_no_rows(device: torch.device, dim: int) -> None:
    assert rows(device, STEP, dim=dim).take([]).attend().shape == (0, 4, dim)


@pytest.mark.parametrize("alone", [True, False])
def test_one_kernel_serves_any_number_of_rows(
    device: torch.device, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number would be compiled while streams wait."""
    constants: list[dict[str, int]] = []
    monkeypatch.setattr(attention, "_attend_anywhere", lambda *args: constants.append(args[-1]))
    for count in (3, 8):
        step = rows(device, [(20, count)])
        window_alone: dict[str, object] = {"compressed": None, "chosen": None, "block_rows": None}
        step.call(**window_alone) if alone else step.attend()
    assert constants[0] == constants[1]


def test_vectors_of_odd_sizes_are_refused(device: torch.device) -> None:
    step = rows(device, [(0, 1)])
    with pytest.raises(ValueError, match="power of two"):
        replace(step, queries=step.queries[..., :48].contiguous()).attend()


def block_parts(step: Rows, block: int) -> list[tuple[Tensor, Tensor]]:
    device = step.queries.device
    at = (step.positions - step.within)[:, None] + torch.arange(-step.window, 0, device=device)
    empty = at < 0
    ring = step.ring[step.slots[:, None], at.clamp(min=0) % step.ring.shape[1]]
    ring = decode_window(ring.masked_fill(empty[..., None], 0))
    own = decode_window(step.records).view(-1, block, ring.shape[-1]).repeat_interleave(block, 0)
    return [(ring, empty), (own, torch.zeros(own.shape[:2], dtype=torch.bool, device=device))]


def block_call(step: Rows, block: int, **kwargs: Tensor) -> Tensor:
    return block_attention(
        step.queries, step.records, step.ring, step.slots, step.positions, step.within,
        block, step.window, step.sink, step.scale, **kwargs,  # type: ignore[arg-type]
    )  # fmt: skip


def test_draft_blocks_see_the_ring_and_all_of_themselves(device: torch.device, dim: int) -> None:
    step = rows(device, [(3, 3), (50, 3)], dim=dim)
    got = block_call(step, 3)
    assert close(got, step, block_parts(step, 3))
    assert torch.equal(block_call(step.take([3, 4, 5]), 3), got[3:])
    turned = block_call(step, 3, cos=step.rope.cos, sin=step.rope.sin)
    assert torch.equal(turned, rotate(got, step.rope.inverse()))


def test_a_draft_block_longer_than_the_first_tile(device: torch.device, dim: int) -> None:
    step = rows(device, [(80, 3)], dim=dim, window=62)
    assert close(block_call(step, 3), step, block_parts(step, 3))


def full_model(device: torch.device, sequences: list[tuple[int, int]]) -> Rows:
    return rows(
        device, sequences, heads=64, dim=512, window=128, topk=512, entries=64, rope_dim=64
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model() -> None:
    device = torch.device("cuda")
    step = full_model(device, [(0, 70), (5000, 1), (1500, 6), (900, 200), (3000, 3)])
    whole = step.attend(cos=step.rope.cos, sin=step.rope.sin)
    plain = step.attend()
    assert torch.equal(whole, rotate(plain.clone(), step.rope.inverse()))
    some = [*range(20), *range(66, 80), *range(270, 280)]
    part = [(vectors[some], empty[some]) for vectors, empty in parts(step)]
    assert close(plain[some], step.take(some), part)
    for row in (0, 70, 71, 77, 277):
        assert torch.equal(step.take([row]).attend(), plain[row : row + 1])
    for few in ([*range(71, 77)], [*range(64)], [*range(77, 277)]):
        assert torch.equal(step.take(few).attend(), plain[few])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_draft_blocks() -> None:
    step = full_model(torch.device("cuda"), [(3, 5), (500, 5), (0, 5)] * 3)
    got = block_call(step, 5)
    assert close(got, step, block_parts(step, 5))
    assert torch.equal(block_call(step.take([5, 6, 7, 8, 9]), 5), got[5:10])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_prompt_of_more_rows_than_a_chunk() -> None:
    step = full_model(torch.device("cuda"), [(700, 1500)])
    whole = step.attend()
    for some in (range(6), range(1020, 1030), range(1400, 1500)):
        few = list(some)
        ring = step.ring.clone()
        at = torch.arange(max(0, few[0] - 127), few[0], device="cuda")
        ring[step.slots[0], step.positions[at] % ring.shape[1]] = step.records[at]
        part = step.take(few)
        part = replace(part, ring=ring, within=torch.arange(len(few), device="cuda"))
        assert torch.equal(part.attend(), whole[few])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_full_model_in_another_order_of_entries() -> None:
    """The control: the same sums in another order do differ, in a few of two million elements."""
    step = full_model(torch.device("cuda"), [(5000, 64)])
    turned = replace(step, chosen=step.chosen.flip(1))
    got, want = turned.attend(), step.attend()
    assert close(got, step, parts(step))
    assert not torch.equal(got, want)
