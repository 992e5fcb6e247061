"""The steps before the first request change nothing that a request could see, however little room there is."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from forward_world import World, alone, weights_of

from phalanx.worker_svc import warm
from phalanx.worker_svc.backend import ModelBackend
from phalanx.worker_svc.warm import rehearse, warm_up

pytest.importorskip("triton")
from phalanx.kernels.triton import compiling

_NEEDED = 12  # 8 kinds of draws, and 4 steps


@contextmanager
def few_needed(
    alive: Callable[[], None],
    on_progress: Callable[[int, int], None],
    on_wait: Callable[[str, float], None],
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


@pytest.mark.parametrize("shape", ["tiny-a", "short"])
def test_a_rehearsal_leaves_nothing_behind(shape: str) -> None:
    weights = weights_of(shape)
    before = [weights.slots(layer) for layer in range(weights.config.num_hidden_layers)]
    rehearse(weights)
    assert before == [weights.slots(layer) for layer in range(weights.config.num_hidden_layers)]
    world = World(shape, num_slots=2)
    ids = world.tokens(20)
    assert torch.equal(world.run(0, 0, ids), alone(shape, ids))


class Asked:
    """What a backend's warm-ups for a group were asked for: (ranks, expert slots), and whether a kernel that is
    compiled meanwhile would be late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, int, bool]] = []
        self.fails = False
        self.slots = 8
        self.backend = object.__new__(ModelBackend)
        self.backend._weights = SimpleNamespace(slots=lambda layer: (0,) * self.slots)  # type: ignore[assignment]
        config = SimpleNamespace(scheduler=SimpleNamespace(max_num_batched_tokens=30))
        log = SimpleNamespace(info=lambda *_, **__: None)
        self.backend._service = SimpleNamespace(config=config, log=log)  # type: ignore[assignment]
        self.backend._warm, self.backend._warm_for = True, (2, 8)
        monkeypatch.setattr("phalanx.worker_svc.backend.warm_up_experts", self._warm_up)

    def _warm_up(self, weights: object, rows: int, ranks: int, *_: object) -> None:
        assert rows == 30
        self.found.append((ranks, self.slots, self.backend._warm))
        if self.fails:
            raise RuntimeError("CUDA out of memory")


def test_a_group_that_asks_for_more_is_warmed_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other; nor is what is compiled for it taken for late."""
    asked = Asked(monkeypatch)
    for ranks, slots in ((2, 8), (1, 8), (3, 8), (2, 8), (3, 12), (1, 12), (1, 9)):
        asked.slots = slots
        asked.backend._warm_up_group(ranks, lambda: None)
        assert asked.backend._warm
    assert asked.found == [(3, 8, False), (3, 12, False), (1, 9, False)]


def test_a_warm_up_that_failed_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.fails = True
    with pytest.raises(RuntimeError):
        asked.backend._warm_up_group(3, lambda: None)
    asked.fails = False
    asked.backend._warm_up_group(3, lambda: None)
    assert asked.found == [(3, 8, False)] * 2 and asked.backend._warm


def test_nothing_is_warmed_up_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.backend._warm = False  # as it stays on a CPU
    asked.backend._warm_up_group(3, lambda: None)
    assert asked.found == []
