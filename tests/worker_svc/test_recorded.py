"""A recorded step leaves the bits of the step itself, whatever room it took and whoever was there before.

Here the records are done again as they were, over the same fixed memory; on a GPU they are CUDA graphs.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from engine_world import EngineWorld, Request
from forward_world import DEVICE, SHAPES, World, weights_of
from torch import Tensor

from phalanx.kernels import registry
from phalanx.protocol.messages import Sampling
from phalanx.protocol.placement import initial_placement
from phalanx.worker_svc.experts import OwnExperts
from phalanx.worker_svc.model.batch import Room, SequenceRows, step_rooms
from phalanx.worker_svc.model.model import PendingStep
from phalanx.worker_svc.model.moe import LocalExperts
from phalanx.worker_svc.model.recorded import (
    Record,
    RecordedSteps,
    Work,
    cuda_graphs,
    done_again,
)

ON_GPU = DEVICE.type == "cuda"
ROOMS = [Room(rows, columns) for rows in (8, 16, 48) for columns in (1, 2)]


@pytest.fixture(autouse=True)
def gpu_way() -> Iterator[None]:
    if ON_GPU:
        yield
        return
    torch.set_num_threads(1)
    weights_of.cache_clear()
    registry.interpret(True)
    registry.prefer("reference")
    yield
    registry.interpret(False)
    registry.prefer("auto")
    weights_of.cache_clear()


def record() -> Record:
    return cuda_graphs() if ON_GPU else done_again


def worlds(shape: str) -> tuple[World, World]:
    """Two that are alike; the second has records."""
    plain, other = (
        World(shape, num_slots=10, seed=4, draft_experts=LocalExperts(weights_of(shape)))
        for _ in range(2)
    )
    recorded = RecordedSteps(other.model, LocalExperts(weights_of(shape)), record(), ROOMS)
    assert recorded.failure == "" and len(recorded) == len(ROOMS)
    other.pools.blocks.copy_(plain.pools.blocks)  # recording leaves something there
    other.pools.slots.copy_(plain.pools.slots)
    other.model.recorded = recorded
    return plain, other


def steps(world: World, seed: int) -> Iterator[list[tuple[SequenceRows, int]]]:
    """Prompts, single tokens, rows of drafts that are kept in part, in any company; with the rows that stay."""
    rng = random.Random(seed)
    lengths = dict.fromkeys(range(10), 0)
    for count, most in ((3, 13), (10, 1), (10, 6), (1, 45), (2, 120), (9, 1), (1, 1), (8, 2)):
        parts = []
        for slot in rng.sample(range(10), count):
            rows = rng.randint(1, most) if most > 1 else 1
            ids = [rng.randrange(world.config.vocab_size) for _ in range(rows)]
            kept = rng.choice((rows, rows, rng.randint(0, rows)))
            parts.append((world.rows(slot, lengths[slot], ids), kept))
            lengths[slot] += kept
        yield parts


def left(world: World, pending: PendingStep, kept: list[int]) -> list[Tensor]:
    logits = pending.logits.clone()
    picks = [pending.expert_picks[i].clone() for i in range(world.config.num_hidden_layers)]
    last = pending.logits_of(slice(0, 1)).clone()
    pending.commit(kept)
    return [logits, *picks, last, world.pools.blocks.clone(), world.pools.slots.clone()]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_in_any_room(shape: str) -> None:
    plain, other = worlds(shape)
    used = set[int]()
    for parts in steps(plain, 1):
        sequences, kept = [rows for rows, _ in parts], [count for _, count in parts]
        expected = left(plain, plain.forward(*sequences), kept)
        pending = other.forward(*sequences)
        used.add(pending._step.host.num_padded)
        for got, wanted in zip(left(other, pending, kept), expected, strict=True):
            assert torch.equal(got, wanted)
    assert {8, 16, 48} < used, "every room, and a step that none holds"


def test_rows_go_to_no_expert_where_none_is_picked() -> None:
    weights = weights_of("tiny-a")
    config = weights.config
    own, all_here = OwnExperts(weights), LocalExperts(weights)
    slots = initial_placement(config.num_hidden_layers, config.n_routed_experts, [0], 8)
    own.enter_epoch(slots, 0)
    x = torch.randn(3, config.hidden_size, device=DEVICE).bfloat16()
    picks = torch.tensor([[0, 7], [-1, -1], [3, 5]], device=DEVICE)
    parts = x, picks, torch.rand(3, 2, device=DEVICE), picks[:, 0]
    found = own.combine(own.dispatch(2, *parts))
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    real = [part[[0, 2]] for part in parts]
    assert torch.equal(found[[0, 2]], all_here.combine(all_here.dispatch(2, *real)))


def test_what_cannot_be_recorded_is_computed_as_before() -> None:
    """A room that fails is left out, its steps take a larger one. And no record is used that does not suit."""
    world, suits = World("tiny-a"), [True]
    attempts: list[int] = []

    def fails(work: Work) -> Work:
        attempts.append(1)
        if len(attempts) == 3:
            raise RuntimeError("not here\nwith a long story")
        return record()(work)

    experts = LocalExperts(weights_of("tiny-a"))
    recorded = RecordedSteps(world.model, experts, fails, ROOMS, suits=lambda: suits[0])
    assert recorded.failure == "Room(rows=48, columns=1): not here"
    assert len(recorded) == len(ROOMS) - 1
    assert world.model.experts is not experts
    world.model.recorded = recorded
    ids = world.tokens(20)
    assert world.forward(world.rows(0, 0, ids))._step.rows.block_table.shape == (48, 2)
    picks = recorded._records[-1]._results.picks  # also of the rows that fill the room
    assert bool((picks[:, :20] >= 0).all()) and bool((picks[:, 20:] == -1).all())
    suits[0] = False
    assert world.forward(world.rows(0, 0, ids))._step.rows.num_padded == 24


def test_rooms_for_the_sequences_and_blocks_that_there_are() -> None:
    assert step_rooms(64, 1 << 20)[0] == Room(64, 8192)
    assert {room.rows for room in step_rooms(64, 256)} == {8, 16, 32, 64}
    assert step_rooms(1, 5000) == [Room(8, 40), Room(8, 32)]
    assert step_rooms(65, 100)[0] == Room(128, 1)
    assert step_rooms(4096, 100)[0] == Room(256, 1)


def test_an_engine_makes_the_same_tokens() -> None:
    found = [outputs(recorded) for recorded in (False, True)]
    assert found[0] == found[1]


def outputs(recorded: bool) -> object:
    """Of a few requests side by side, with what each asks for; and how often experts were picked."""
    with EngineWorld("tiny-a") as world:
        engine = world.engine
        if recorded:
            experts, rooms = LocalExperts(weights_of("tiny-a")), engine.rooms()
            engine.model.recorded = RecordedSteps(engine.model, experts, record(), rooms)
        settings = (
            Sampling(temperature=0.0, logprobs=2, prompt_logprobs=1),
            Sampling(seed=3, temperature=0.8, frequency_penalty=0.4),
            Sampling(seed=4, predicted_token_ids=(5, 6, 7)),
        )
        rng = random.Random(2)
        requests = [
            Request([rng.randrange(10, 200) for _ in range(5 + 7 * i)], sampling, 6)
            for i, sampling in enumerate(settings)
        ]
        while live := [request for request in requests if not request.done]:
            world.step([(request, 9, 2) for request in live])
        told = [(r.outputs, r.logprobs, r.scores, r.status) for r in requests]
        return told, engine.expert_counts.tolist()
