"""Which variants of kernels the steps of `warm_up` ask for, and which others random steps do. Nothing is compiled.

A process of its own: Triton believes that there is a Hopper GPU, and kernels are not launched, which the
interpreter of other tests would do. Prints one JSON object.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.append(str(Path(__file__).parents[1]))

from forward_world import World, weights_of

from phalanx.kernels import registry
from phalanx.kernels.ops import sample
from phalanx.kernels.reference.sampling_rows import SamplingRows
from phalanx.kernels.triton import attention
from phalanx.kernels.triton.compiling import compiling_ahead
from phalanx.worker_svc import warm
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch

MAX_ROWS, NUM_SLOTS, STEPS = 600, 40, 80
# A group that changed: so many ranks, whose rows may all come here, and expert slots of a layer.
RANKS, EXPERT_SLOTS = 5, 24


class Hopper:
    """As much of Triton's driver as it takes to tell variants apart."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ignored(*_: object) -> None:
    """What is told while kernels are compiled."""


def random_steps(world: World, rng: random.Random) -> Iterator[tuple[StepBatch, list[int]]]:
    """Steps of any shape, and how many rows of each sequence are kept."""
    longest = world.config.max_positions
    for _ in range(STEPS):
        room, parts = rng.choice((1, 3, 17, 64, 100, 300, MAX_ROWS)), list[SequenceRows]()
        for slot in rng.sample(range(NUM_SLOTS), rng.choice((1, 2, 3, 7, 16, 17, NUM_SLOTS))):
            rows = min(rng.choice((1, 1, 1, 2, 6, 15, 16, 17, 33, 64, 100, 127, 200)), room)
            if rows:
                start = min(rng.choice((0, 1, 2, 16, 127, rng.randrange(longest))), longest - rows)
                logits = rng.choice((False, True, range(rows)))
                blocks = world.blocks[slot][: -(-(start + rows) // 128)]
                parts.append(SequenceRows(slot, start, [3] * rows, blocks, logits))
                room -= rows
        yield StepBatch.of(parts), [rng.choice((0, len(part.token_ids))) for part in parts]


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    phases = ("warm up", "serving", "warm up of a group", "serving in it")
    found: dict[str, set[tuple[str, str]]] = {phase: set() for phase in phases}
    phase = "warm up"

    def asked_for(*, fn: Any, key: str, **_: Any) -> bool:
        found[phase].add((fn.name, key))
        return True  # do not compile it

    driver.set_active(Hopper())
    knobs.runtime.jit_cache_hook = asked_for
    registry.interpret(True)
    attention._multiprocessors = lambda device: 132
    torch.cuda.synchronize = lambda device=None: None
    world = World("tiny-a", num_slots=NUM_SLOTS)
    weights = weights_of("tiny-a")
    world.model.experts = warm._OwnExperts(weights, lambda: None)
    with compiling_ahead(lambda: None, ignored, ignored):
        for do in warm._work(world.model, weights, MAX_ROWS, ranks=1):
            do()
    phase = "serving"
    rng = random.Random(1)
    with compiling_ahead(lambda: None, ignored, ignored):
        for batch, kept in random_steps(world, rng):
            pending = world.model.forward(batch)
            if len(pending.logits):
                rows = [rng.choice(warm._SAMPLING) for _ in range(len(pending.logits))]
                sample(pending.logits, SamplingRows.of(rows))
            pending.commit(kept)
    for layer in range(weights.config.num_hidden_layers):
        weights.widen(layer, EXPERT_SLOTS)
    phase = "warm up of a group"
    warm.warm_up_experts(weights, MAX_ROWS, RANKS, lambda: None, ignored)
    phase = "serving in it"
    most = RANKS * MAX_ROWS * weights.config.num_experts_per_tok
    with compiling_ahead(lambda: None, ignored, ignored):
        for _ in range(STEPS):
            warm._experts(weights.config, weights, rng.randrange(1, most + 1))
    warm_in_group = found["warm up"] | found["warm up of a group"]
    late = (found["serving"] - found["warm up"]) | (found["serving in it"] - warm_in_group)
    result = {
        "kernels": len({name for name, _ in found["warm up"]}),
        "variants": len(found["warm up"]),
        "late": sorted(name for name, _ in late),
        "of a group alone": len(found["serving in it"] - found["warm up"]),
    }
    print(json.dumps(result))


main()
