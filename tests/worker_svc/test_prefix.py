"""A prefix restored from stored blocks and the full window state continues as if it had been computed;
one restored by reading its last tokens again does so only if that reaches back far enough."""

import pytest
import torch
from forward_world import SHAPES, World, alone, weights_of
from torch import Tensor

from phalanx.worker_svc.model.reader import Reader

ALL = pytest.mark.parametrize("shape", SHAPES)


def stored(world: World, slot: int, length: int) -> tuple[list[bytes], bytes]:
    """What a store holds of a prefix: the bytes of its full blocks and of its state slot."""
    blocks = [world.pools.blocks[i].numpy().tobytes() for i in world.blocks[slot][: length // 128]]
    return blocks, world.pools.slots[slot].numpy().tobytes()


def restore(world: World, slot: int, ids: list[int], records: tuple[list[bytes], bytes]) -> None:
    """Into a worker that has never seen the sequence."""
    blocks, state = records
    for place, record in zip(world.blocks[slot], blocks, strict=False):
        world.pools.blocks[place] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    world.pools.slots[slot] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    world.pools.history[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)


@ALL
@pytest.mark.parametrize("portion", [1, 6, 39])
def test_stored_blocks_and_windows_continue_as_computed(shape: str, portion: int) -> None:
    """Another worker, another slot, other block numbers, and company."""
    first, second = World(shape, seed=1, max_len=256), World(shape, seed=2, max_len=256)
    ids, other = first.tokens(167), first.tokens(60)
    first.run(2, 0, ids[:128])
    restore(second, 5, ids[:128], stored(first, 2, 128))
    second.run(0, 0, other[:20])
    got = []
    for at in range(128, 167, portion):
        part = ids[at : at + portion]
        pending = second.forward(second.rows(0, 20, other[20:60]), second.rows(5, at, part))
        pending.commit([0, len(part)])
        got.append(pending.logits[40:])
    assert torch.equal(torch.cat(got), alone(shape, ids)[128:])


@ALL
@pytest.mark.parametrize("lost", ["blocks", "windows"])
def test_both_parts_are_needed(shape: str, lost: str) -> None:
    first, second = World(shape, seed=1), World(shape, seed=2)
    ids = first.tokens(150)
    first.run(0, 0, ids[:128])
    blocks, state = stored(first, 0, 128)
    records = ([], state) if lost == "blocks" else (blocks, bytes(len(state)))
    restore(second, 0, ids[:128], records)
    assert not torch.equal(second.run(0, 128, ids[128:]), alone(shape, ids)[128:])


# --- reading the last tokens again instead of keeping windows ----------------------------------------

LENGTH = 200


def replayed(shape: str, tokens: int) -> tuple[Tensor, Tensor]:
    """(logits after a replay, exact ones) of the tokens after the restored 200."""
    weights = weights_of(shape)
    ids = World(shape).tokens(240)
    exact, reader = Reader(weights, 256), Reader(weights, 256)
    exact.read(ids[:LENGTH])
    reader.take_prefix(exact, LENGTH, tokens)
    return reader.read(ids[LENGTH:]), exact.read(ids[LENGTH:])


def reach(shape: str) -> int:
    config = weights_of(shape).config
    return config.num_hidden_layers * (config.sliding_window - 1)


@pytest.mark.parametrize("shape", ["tiny-a", "short"])
def test_replay_of_all_that_windows_rest_on_is_exact(shape: str) -> None:
    assert reach(shape) < LENGTH
    got, exact = replayed(shape, reach(shape))
    assert torch.equal(got, exact)


@ALL
def test_replay_of_one_window_is_not_exact(shape: str) -> None:
    window = weights_of(shape).config.sliding_window & ~1
    assert window < reach(shape)
    got, exact = replayed(shape, window)
    assert not torch.equal(got, exact)
