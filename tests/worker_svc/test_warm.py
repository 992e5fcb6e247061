"""The steps before the first request change nothing that a request could see, however little room there is."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from forward_world import World, alone, weights_of

from phalanx.worker_svc import warm
from phalanx.worker_svc.warm import warm_up

pytest.importorskip("triton")
from phalanx.kernels.triton import compiling

_NEEDED = 12  # 8 kinds of draws, and 4 steps


@contextmanager
def few_needed(
    alive: Callable[[], None], on_progress: Callable[[int, int], None]
) -> Iterator[Callable[[], int]]:
    """As if the first pieces of work asked for a kernel each, and the others for none."""
    calls = itertools.count()
    yield lambda: min(next(calls), 2 * _NEEDED - 1)
    on_progress(1, 2)


def test_steps_of_any_size_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(warm, "_ROWS", ((1, 1), (3, 6), (2, 600)))
    monkeypatch.setattr(warm, "_CONTEXTS", (200, 300))
    monkeypatch.setattr(compiling, "compiling_ahead", few_needed)
    world = World("tiny-a", num_slots=2)
    experts, layers, told = world.model.experts, list[None](), list[tuple[str, float]]()
    warm_up(
        world.model,
        weights_of("tiny-a"),
        30,
        lambda: layers.append(None),
        lambda *step: told.append(step),
    )
    assert world.model.experts is experts
    # 4 sizes, and 3 after a context: to see what they need, and 4 in earnest.
    assert len(layers) == (7 + 4) * world.config.num_hidden_layers
    loads = [("load kernels", i / _NEEDED) for i in range(_NEEDED)]
    assert told == [("compile kernels", 0.5), *loads]
    ids = world.tokens(40)
    assert torch.equal(world.run(0, 0, ids), alone("tiny-a", ids))
