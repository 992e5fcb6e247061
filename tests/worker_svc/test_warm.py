"""The steps before the first request change nothing that a request could see, however little room there is."""

import pytest
import torch
from forward_world import World, alone, weights_of

from phalanx.worker_svc import warm
from phalanx.worker_svc.warm import warm_up


def test_steps_of_any_size_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(warm, "_STEPS", ((1, 1), (3, 6), (2, 600)))
    monkeypatch.setattr(warm, "_CONTEXTS", (0, 300))
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
    assert len(layers) == 2 * 6 * world.config.num_hidden_layers
    assert [what for what, _ in told] == ["warm up"] * 6
    assert [share for _, share in told] == pytest.approx([step / 6 for step in range(6)])
    ids = world.tokens(40)
    assert torch.equal(world.run(0, 0, ids), alone("tiny-a", ids))
