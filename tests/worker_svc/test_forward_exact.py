"""A row's numbers are the same bits whatever is computed beside it, in whatever portions, however
often, and wherever the experts are; and the test would notice if they were not."""

import random
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from forward_world import DEVICE, SHAPES, World, alone, weights_of
from torch import Tensor

from phalanx.kernels.reference import indexer
from phalanx.kernels.reference.rows import round_bf16
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.invariance import InvarianceError, check_invariance, check_operation
from phalanx.worker_svc.model.moe import run_expert_pairs

ALL = pytest.mark.parametrize("shape", SHAPES)


def random_schedule(shape: str, seed: int) -> None:
    """Sequences advance in random company by random portions: prompt chunks, single tokens, and
    verification rows of which some are wrong; some steps are abandoned. Every logit is compared."""
    world = World(shape, seed=seed)
    choose = random.Random(seed)
    slots = list(range(6))
    texts = {slot: world.tokens(choose.choice((1, 2, 33, 70, 139))) for slot in slots}
    expected = {slot: alone(shape, ids) for slot, ids in texts.items()}
    done = dict.fromkeys(slots, 0)
    while any(done[slot] < len(texts[slot]) for slot in slots):
        company = [
            slot for slot in slots if done[slot] < len(texts[slot]) and choose.random() < 0.7
        ]
        choose.shuffle(company)
        parts, accepted = [], []
        for slot in company:
            start, ids = done[slot], texts[slot]
            count = min(choose.choice((1, 1, 1, 6, 6, 17, 40)), len(ids) - start)
            right = choose.randint(1, count) if count <= 6 else count
            # Wrong rows after the right ones: a rejected draft.
            parts.append((slot, start, ids[start : start + right] + world.tokens(count - right)))
            accepted.append(right)
        if not parts:
            continue
        pending = world.forward(*(world.rows(*part) for part in parts))
        row = 0
        for (slot, start, ids), right in zip(parts, accepted, strict=True):
            got = pending.logits[row : row + right]
            assert torch.equal(got, expected[slot][start : start + right]), (slot, start, right)
            row += len(ids)
        if choose.random() < 0.25:
            continue  # abandoned: nothing may have changed
        pending.commit(accepted)
        for slot, right in zip(company, accepted, strict=True):
            done[slot] += right


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_any_company_and_portions_give_the_same_bits(shape: str, seed: int) -> None:
    random_schedule(shape, seed)


@ALL
def test_token_by_token_equals_one_step(shape: str) -> None:
    world = World(shape)
    ids = world.tokens(50)
    rows = [world.run(0, position, [token]) for position, token in enumerate(ids)]
    assert torch.equal(torch.cat(rows), alone(shape, ids))


@ALL
def test_caches_are_the_same_bytes_after_any_portions(shape: str) -> None:
    """Slots may be stored and blocks shared, so they must not remember how they came to be."""
    once, often = World(shape, num_slots=1, seed=1), World(shape, num_slots=1, seed=1)
    ids = once.tokens(141)
    once.run(0, 0, ids)
    for start in range(0, 141, 13):
        often.run(0, start, ids[start : start + 13])
    # Entries of an unfinished block beyond the last token are nobody's.
    first = once.blocks[0][0]
    assert torch.equal(once.pools.blocks[first], often.pools.blocks[first])
    window, ring = once.config.sliding_window, once.pools.layout.ring_size
    places = [(141 - back) % ring for back in range(1, window + 1)]
    depth = once.config.num_hidden_layers
    a, b = (world.pools.rings[0, :depth, places] for world in (once, often))
    assert torch.equal(a, b)
    assert torch.equal(once.pools.pairs, often.pools.pairs)


@ALL
def test_a_long_chunk_that_is_abandoned_does_no_harm(shape: str) -> None:
    """The chunk is longer than ring and window: written early, it would destroy what a redo reads."""
    world = World(shape)
    ids = world.tokens(120)
    world.run(0, 0, ids[:31])
    slots = world.pools.slots.clone()
    world.forward(world.rows(0, 31, ids[31:]))
    assert torch.equal(world.pools.slots, slots)
    assert torch.equal(world.run(0, 31, ids[31:]), alone(shape, ids)[31:])


@ALL
@pytest.mark.parametrize("start", [30, 31])
@pytest.mark.parametrize("right", range(1, 7))
def test_every_acceptance_of_six_rows(shape: str, start: int, right: int) -> None:
    """Also for a prompt of odd length, whose last token waits for its partner."""
    world = World(shape)
    ids = world.tokens(44)
    expected = alone(shape, ids)
    world.run(0, 0, ids[:start])
    pending = world.forward(
        world.rows(0, start, ids[start : start + right] + world.tokens(6 - right))
    )
    assert torch.equal(pending.logits[:right], expected[start : start + right])
    pending.commit([right])
    at = start + right
    assert torch.equal(world.run(0, at, ids[at:]), expected[at:])


def test_zero_accepted_rows_leave_a_sequence_as_it_was() -> None:
    world = World("tiny-a")
    ids = world.tokens(20)
    pending = world.forward(world.rows(0, 0, ids), world.rows(1, 0, ids))
    before = world.pools.slots[0].clone()
    pending.commit([0, 20])
    assert torch.equal(world.pools.slots[0], before)
    assert torch.equal(world.run(0, 0, ids), alone("tiny-a", ids))


def test_a_prefix_block_and_its_state_may_be_handed_over() -> None:
    """What a prefix cache does: same blocks, a copied slot, and the token history."""
    world = World("tiny-a", max_len=256)
    ids = world.tokens(150)
    world.run(0, 0, ids[:128])
    world.pools.slots[3] = world.pools.slots[0]
    world.pools.history[3, :128] = torch.tensor(ids[:128], dtype=torch.int32)
    world.blocks[3] = [world.blocks[0][0], world.blocks[3][1]]
    assert torch.equal(world.run(3, 128, ids[128:]), alone("tiny-a", ids)[128:])


class SpreadExperts:
    """Experts on three ranks with copies and a shuffled order of slots; pairs in shuffled order."""

    def __init__(self, shape: str, seed: int) -> None:
        self._choose = random.Random(seed)
        weights = weights_of(shape)
        config = weights.config
        depth = config.num_hidden_layers + config.draft_stages
        counts = [len(weights.slots(layer)) for layer in range(depth)]
        self.slots = [
            [self._choose.sample(range(count), count) for count in counts] for _ in range(3)
        ]
        directory = weights.checkpoint.directory
        self._ranks = [load_checkpoint(directory, slots, device=DEVICE) for slots in self.slots]

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> Tensor:
        num_rows, num_topk = topk_idx.shape
        out = x.new_empty((num_rows * num_topk, x.shape[1]))
        pairs = list(range(num_rows * num_topk))
        self._choose.shuffle(pairs)
        for rank in range(3):
            mine = torch.tensor(pairs[rank::3], dtype=torch.int64, device=x.device)
            slot_of = {expert: slot for slot, expert in enumerate(self.slots[rank][layer])}
            slots = [slot_of[expert] for expert in topk_idx.flatten()[mine].tolist()]
            out[mine] = run_expert_pairs(
                self._ranks[rank],
                layer,
                torch.tensor(slots, dtype=torch.int64, device=x.device),
                x[mine // num_topk],
                topk_weights.flatten()[mine],
            )
        return out.view(num_rows, num_topk, -1)

    def combine(self, handle: Tensor) -> Tensor:
        return handle


@ALL
def test_where_an_expert_runs_changes_nothing(shape: str) -> None:
    world = World(shape, experts=SpreadExperts(shape, 5))
    ids = world.tokens(70)
    got = [world.run(0, 0, ids[:60])] + [world.run(0, p, [ids[p]]) for p in range(60, 70)]
    assert torch.equal(torch.cat(got), alone(shape, ids))


# --- the tests above can fail -----------------------------------------------------------------------


def patch_everywhere(
    monkeypatch: pytest.MonkeyPatch, name: str, replacement: Callable[..., Tensor]
) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("phalanx.") and hasattr(module, name):
            monkeypatch.setattr(module, name, replacement)


PLANTED_IN_A_REFERENCE = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU runs kernels")


def fails(shape: str) -> bool:
    try:
        for seed in range(3):
            random_schedule(shape, seed)
    except AssertionError:
        return True
    return False


@PLANTED_IN_A_REFERENCE
def test_without_padding_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpadded(x: Tensor, weight: Tensor, *, rounded: bool = False) -> Tensor:
        return round_bf16(x @ weight.t()) if rounded else x @ weight.t()

    patch_everywhere(monkeypatch, "matmul_rows", unpadded)
    assert fails("wide")


@PLANTED_IN_A_REFERENCE
def test_without_a_rule_for_ties_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_ordered_keys", lambda scores: scores)
    assert fails("short")


def next_up(weight: Tensor, index: tuple[int, ...], dtype: torch.dtype) -> None:
    """The next larger number of the stored format: the smallest change that a checkpoint can hold."""
    stored = weight[index].to(dtype)
    assert stored.float() == weight[index] and stored > 0
    bits = torch.int16 if dtype == torch.bfloat16 else torch.uint8
    weight[index] = (stored.view(bits) + 1).view(dtype).float()


def entry_weights(world: World) -> Tensor:
    compressor = world.model.layers[world.config.decoder_start].attention.compressor
    assert compressor is not None
    return compressor.norm


WEIGHTS: list[tuple[str, Callable[[World], Tensor]]] = [
    ("attention norm", lambda world: world.model.layers[0].attention.norm),
    ("expert norm", lambda world: world.model.layers[3].moe.norm),
    ("last norm", lambda world: world.model.final_norm),
    ("compressor norm", entry_weights),
]


@ALL
@pytest.mark.parametrize(("name", "weight"), WEIGHTS)
def test_one_ulp_in_one_weight_shows(
    shape: str, name: str, weight: Callable[[World], Tensor]
) -> None:
    """What a scrubber that compares bits may hope to see: the last bit of one stored number."""
    world = World(shape)
    ids = world.tokens(70)
    next_up(weight(world), (0,), torch.bfloat16)
    assert not torch.equal(world.run(0, 0, ids), alone(shape, ids)), name


def lose_waiting_token(world: World) -> None:
    world.pools.pairs[0] = 0


def lose_oldest_window_entry(world: World) -> None:
    oldest = (51 - world.config.sliding_window + 1) % world.pools.layout.ring_size
    world.pools.rings[0, :, oldest] = 0


def lose_entries(world: World) -> None:
    world.pools.blocks[world.blocks[0][0]] = 0


def lose_last_token(world: World) -> None:
    world.pools.history[0, 50] = 0


@ALL
@pytest.mark.parametrize(
    "damage", [lose_waiting_token, lose_oldest_window_entry, lose_entries, lose_last_token]
)
def test_every_piece_of_state_is_read(shape: str, damage: Callable[[World], None]) -> None:
    world = World(shape)
    ids = world.tokens(70)
    world.run(0, 0, ids[:51])
    damage(world)
    assert not torch.equal(world.run(0, 51, ids[51:]), alone(shape, ids)[51:])


# --- the machine check ------------------------------------------------------------------------------


def test_this_machine_is_fit() -> None:
    check_invariance()


@pytest.mark.parametrize(
    ("name", "operation", "shape"),
    [
        # As a product does on some CPUs: how the sum is cut depends on how many rows there are.
        (
            "a sum in as many parts as rows",
            lambda x: sum(part.sum(1, keepdim=True) for part in x.chunk(len(x), dim=1)),
            (1280,),
        ),
        ("normalised over the batch", lambda x: x / x.sum(), (8,)),
    ],
)
def test_a_dependent_operation_is_named(
    name: str, operation: Callable[[Tensor], Tensor], shape: Sequence[int]
) -> None:
    x = torch.randn((21, *shape), generator=torch.Generator().manual_seed(3))
    with pytest.raises(InvarianceError, match=name):
        check_operation(name, operation, x)


class BrokenExperts:
    """What an aborted exchange may leave: rows of zeros, or of anything."""

    def __init__(self, value: float) -> None:
        self._value = value

    def dispatch(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy_keys: Tensor
    ) -> tuple[int, ...]:
        return (*topk_idx.shape, x.shape[1])

    def combine(self, handle: tuple[int, ...]) -> Tensor:
        return torch.full(handle, self._value, dtype=torch.bfloat16, device=DEVICE)


@ALL
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 3e38])
def test_rows_of_any_content_do_no_harm(shape: str, value: float) -> None:
    """The step computes nonsense, is abandoned, and the redo is exact: blocks were overwritten."""
    world = World(shape)
    ids = world.tokens(60)
    world.run(0, 0, ids[:41])
    experts, world.model.experts = world.model.experts, BrokenExperts(value)
    world.forward(world.rows(0, 41, ids[41:]))
    world.model.experts = experts
    assert torch.equal(world.run(0, 41, ids[41:]), alone(shape, ids)[41:])


@ALL
@pytest.mark.parametrize("first", [True, False])
def test_broken_numbers_stay_with_their_sequence(shape: str, first: bool) -> None:
    """A step goes wrong for one sequence and is even kept: neighbours, and whoever gets the slot and
    the blocks next, must not see it."""
    world = World(shape)
    ids, broken = world.tokens(70), world.tokens(40)
    experts, world.model.experts = world.model.experts, BrokenExperts(float("nan"))
    world.run(3, 0, broken[:39])
    world.model.experts = experts
    parts = [world.rows(3, 39, broken[39:]), world.rows(1, 0, ids)]
    pending = world.forward(*(parts if first else parts[::-1]))
    neighbour = pending.logits[1:] if first else pending.logits[:-1]
    assert torch.equal(neighbour, alone(shape, ids))
    if DEVICE.type == "cpu":  # a GPU's records may hold a number in the place of a NaN
        assert pending.logits[0 if first else -1].isnan().all()
    pending.commit([1, 70] if first else [70, 1])
    assert torch.equal(world.run(3, 0, ids), alone(shape, ids))
