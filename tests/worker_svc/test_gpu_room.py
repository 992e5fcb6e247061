"""A GPU without memory: a step is computed once more and its tokens are the same, or it ends with the numbers."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from engine_world import EngineWorld, Request
from forward_world import DEVICE

from phalanx.protocol.errors import NoRoom
from phalanx.protocol.messages import Sampling
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.worker_svc.gpu_room import StepUndone, computed, is_out_of_memory, room_for
from phalanx.worker_svc.model.model import Model


def requests() -> list[Request]:
    settings = (Sampling(temperature=0.0, seed=1), Sampling(temperature=1.0, seed=2))
    return [Request([7, 9, 11] * (3 + i), s, 12) for i, s in enumerate(settings)]


def run(
    world: EngineWorld, wanted: list[Request], told: list[str], may_repeat: bool = True
) -> None:
    """All requests side by side, each step as a worker computes it."""
    step = world.engine.run
    world.engine.run = lambda plan: computed(lambda: step(plan), may_repeat, told.append)  # type: ignore[method-assign]
    while any(not request.done for request in wanted):
        world.step([(request, 16, 0) for request in wanted if not request.done])


def expected() -> list[list[int]]:
    wanted, told = requests(), list[str]()
    with EngineWorld("tiny-a") as world:
        run(world, wanted, told)
    assert told == []
    return [request.outputs for request in wanted]


class Shortage:
    """No memory in the middle of some steps: every attempt at them, or the first alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int, for_ever: bool = False) -> None:
        self.attempts = 0
        layers = Model._run

        def short(model: Model, *args: object) -> None:
            self.attempts += 1
            layers(model, *args)  # type: ignore[arg-type]
            if self.attempts % every == 0 or (for_ever and self.attempts > every):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        monkeypatch.setattr(Model, "_run", short)


def test_a_step_without_memory_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = expected()
    shortage = Shortage(monkeypatch, every=3)
    wanted, told = requests(), list[str]()
    with EngineWorld("tiny-a") as world:
        run(world, wanted, told)
    assert [request.outputs for request in wanted] == tokens
    assert len(told) == shortage.attempts // 3 > 3
    assert "out of memory in a step of" in told[0]


def test_a_shortage_that_stays_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    Shortage(monkeypatch, every=3, for_ever=True)
    told = list[str]()
    with EngineWorld("tiny-a") as world, pytest.raises(NoRoom, match="End other processes on it"):
        run(world, requests(), told)
    assert len(told) == 1


def test_a_step_with_others_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have done their share of it, and would wait for ever."""
    Shortage(monkeypatch, every=3)
    told = list[str]()
    with EngineWorld("tiny-a") as world, pytest.raises(StepUndone):
        run(world, requests(), told, may_repeat=False)
    assert told == []


def test_what_is_no_shortage_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), room_for("while it started"):
        raise RuntimeError("shapes do not fit")
    with (
        pytest.raises(NoRoom, match="ran out of memory while it started"),
        room_for("while it started"),
    ):
        raise RuntimeError("CUDA error: out of memory")
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
def test_memory_that_is_taken_between_two_steps() -> None:
    """Really: nothing is left while the fourth step is tried, twice; then it is run again."""
    tokens, wanted = expected(), requests()
    with EngineWorld("tiny-a") as world:
        step, failed = world.engine.run, list[str]()

        def run_short(plan: StepPlan) -> StepResult:
            if plan.seq == 4:
                with pytest.raises(StepUndone), nothing_left():
                    computed(lambda: step(plan), True, failed.append)
            return step(plan)

        world.engine.run = run_short  # type: ignore[method-assign]
        while any(not request.done for request in wanted):
            world.step([(request, 16, 0) for request in wanted if not request.done])
    assert len(failed) == 1 and "out of memory in a step of" in failed[0]
    assert [request.outputs for request in wanted] == tokens


@contextmanager
def nothing_left() -> Iterator[None]:
    """Of the memory that this process may have on the GPU."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    taken: list[torch.Tensor] = []
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 9):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
