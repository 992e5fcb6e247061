"""The steps before the first request change nothing that a request could see, however little room there is."""

import pytest
import torch
from forward_world import World, alone, weights_of

from phalanx.worker_svc import warm
from phalanx.worker_svc.warm import warm_up


def test_steps_of_any_size_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(warm, "_STEPS", ((1, 1), (3, 6), (2, 600)))
    world = World("tiny-a", num_slots=2)
    experts, layers, told = world.model.experts, list[None](), list[float]()
    warm_up(world.model, weights_of("tiny-a"), 30, lambda: layers.append(None), told.append)
    assert world.model.experts is experts
    assert len(layers) == 3 * world.config.num_hidden_layers
    assert told == [0, 1 / 3, 2 / 3]
    ids = world.tokens(40)
    assert torch.equal(world.run(0, 0, ids), alone("tiny-a", ids))
