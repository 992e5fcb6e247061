"""A GPU without memory: a step is computed once more and its tokens are the same, or it ends with the numbers."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import msgspec
import pytest
import torch
from engine_world import EngineWorld, Request
from forward_world import DEVICE, weights_of

from phalanx.kernels import registry
from phalanx.kernels.reference.experts import ExpertPool
from phalanx.protocol.errors import NoRoom
from phalanx.protocol.messages import Sampling
from phalanx.protocol.placement import Placement, initial_placement
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.worker_svc.backend import ModelBackend
from phalanx.worker_svc.experts import CopyTable, GroupExperts
from phalanx.worker_svc.gpu_room import Undone, done, is_out_of_memory, room_for
from phalanx.worker_svc.host_weights import HostWeights
from phalanx.worker_svc.model import gpu_weights
from phalanx.worker_svc.model.footprint import slot_bytes
from phalanx.worker_svc.model.gpu_weights import GpuWeights
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.step import Keep, Step


def requests() -> list[Request]:
    settings = (Sampling(temperature=0.0, seed=1), Sampling(temperature=1.0, seed=2))
    return [Request([7, 9, 11] * (3 + i), s, 12) for i, s in enumerate(settings)]


def run(
    world: EngineWorld, wanted: list[Request], told: list[str], may_repeat: bool = True
) -> None:
    """All requests side by side, each step as a worker computes it."""
    step = world.engine.run
    world.engine.run = lambda plan: done(lambda: step(plan), told.append, may_repeat)  # type: ignore[method-assign]
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
    with EngineWorld("tiny-a") as world, pytest.raises(Undone):
        run(world, requests(), told, may_repeat=False)
    assert told == []


class ShortageAtTheEnd:
    """No memory when a step that counts already is kept: after its windows were written, or its picks stacked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, for_ever: bool = False) -> None:
        self.attempts = self.failed = 0

        def short() -> None:
            self.attempts += 1
            if self.attempts % 3 == 0 or (for_ever and self.failed):
                self.failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        if where == "commit":
            write = Step.write

            def write_and_fail(step: Step, keep: Keep) -> None:
                write(step, keep)
                short()

            monkeypatch.setattr(Step, "write", write_and_fail)
        else:
            ones = torch.ones_like

            def ones_or_not(flat: torch.Tensor) -> torch.Tensor:
                if flat.dtype == torch.int64:
                    short()
                return ones(flat)

            monkeypatch.setattr("phalanx.worker_svc.engine.torch.ones_like", ones_or_not)


@pytest.mark.parametrize("where", ["commit", "count"])
def test_a_step_that_counts_is_kept_once_more(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Not computed again: its tokens are the same, and its picks are counted once."""
    tokens, told = expected(), list[str]()
    with EngineWorld("tiny-a") as world:
        run(world, requests(), [])
        counts = world.engine.expert_counts.clone()
    shortage, wanted, repeated = ShortageAtTheEnd(monkeypatch, where), requests(), list[str]()
    with EngineWorld("tiny-a") as world:
        monkeypatch.setattr(world.engine, "_tell", told.append)
        run(world, wanted, repeated)
        assert torch.equal(world.engine.expert_counts, counts)
    assert [request.outputs for request in wanted] == tokens
    assert repeated == [] and len(told) == shortage.failed > 3
    assert "ran out of memory while a step of" in told[0]


def test_a_shortage_that_stays_when_a_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends with the numbers; and so it does when others take part."""
    ShortageAtTheEnd(monkeypatch, "commit", for_ever=True)
    with EngineWorld("tiny-a") as world, pytest.raises(NoRoom, match="End other processes on it"):
        run(world, requests(), [], may_repeat=False)


# --- a group that forms --------------------------------------------------------------------------------


@pytest.fixture
def on_gpu() -> Iterator[GpuWeights]:
    """Weights as a GPU holds them, on this machine's own device."""
    weights_of.cache_clear()
    registry.interpret(True)
    registry.prefer("reference")
    weights = weights_of("tiny-a")
    assert isinstance(weights, GpuWeights)
    yield weights
    registry.interpret(False)
    registry.prefer("auto")
    weights_of.cache_clear()


def member(weights: GpuWeights, told: list[str]) -> ModelBackend:
    """As much of a backend as prepares for an epoch."""
    backend = object.__new__(ModelBackend)
    backend._weights, backend._seat, backend._warm = weights, 0, False
    backend._experts = GroupExperts(weights, 0, lambda: None)
    backend._host = HostWeights("", {})
    backend._region, backend._exchange = SimpleNamespace(shape=None, seat=0), None  # type: ignore[assignment]
    backend._get_on = lambda epoch: None  # type: ignore[method-assign]
    backend._tell_repeated = told.append  # type: ignore[method-assign]
    return backend


def placement(weights: GpuWeights, spare: int) -> Placement:
    config = weights.config
    experts = config.n_routed_experts
    dealt = initial_placement(config.num_hidden_layers, experts, [0], experts + spare)
    # A slot that holds nothing needs no memory: the spare ones hold second copies.
    layer = ((*range(experts), *range(spare)),)
    return msgspec.structs.replace(dealt, physical_to_logical=(layer,) * config.num_hidden_layers)


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, times: int, after: int = 4
) -> None:
    """The call does its work and then finds no memory, so often after so many calls."""
    work, calls = getattr(owner, name), itertools.count()

    def failing(*args: object) -> object:
        done = work(*args)
        if after <= next(calls) < after + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return done

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("at", ["put", "widen", "tables"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_epoch_is_prepared_once_more(
    on_gpu: GpuWeights, monkeypatch: pytest.MonkeyPatch, at: str, times: int
) -> None:
    told, config = list[str](), on_gpu.config
    backend, wanted = member(on_gpu, told), placement(on_gpu, 1)
    monkeypatch.setattr(gpu_weights, "free_bytes", lambda device: 1 << 40)
    matrices = [on_gpu.pool(3).matrix(part, 2) for part in range(3)]
    for layer in range(config.num_hidden_layers):
        on_gpu._slots[layer][2] = 5  # an expert that the placement wants elsewhere
    if at == "tables":
        short_of_memory(monkeypatch, CopyTable, "of", times, after=0)
    else:
        short_of_memory(monkeypatch, ExpertPool, at, times)
    if times == 2:
        with pytest.raises(NoRoom, match="ran out of memory while"):
            backend.prepare(3, [0], wanted)
        return
    backend.prepare(3, [0], wanted)
    assert len(told) == 1
    for layer in range(config.num_hidden_layers):
        held = on_gpu.slots(layer)
        assert list(held[: config.n_routed_experts]) == list(range(config.n_routed_experts))
        assert on_gpu.pool(layer).num_slots == len(held) == config.n_routed_experts + 1
    for part, matrix in enumerate(matrices):
        assert torch.equal(on_gpu.pool(3).matrix(part, 2), matrix)


def test_a_step_for_others_ends_with_the_numbers(on_gpu: GpuWeights) -> None:
    backend = member(on_gpu, [])
    backend._marks = SimpleNamespace(begin=lambda: None)  # type: ignore[assignment]

    def serve() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    backend._experts = SimpleNamespace(serve=serve)  # type: ignore[assignment]
    with pytest.raises(NoRoom, match="in a step of other ranks: "):
        backend.serve()


def test_a_slot_that_was_written_half_way_holds_no_expert(
    on_gpu: GpuWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(monkeypatch, ExpertPool, "put", 100)
    for slot in range(5):
        with suppress(torch.OutOfMemoryError):
            on_gpu.put_expert(0, slot, 7, None)
    assert on_gpu.slots(0)[:5] == (7, 7, 7, 7, -1)


def test_slots_that_do_not_fit_are_refused_before_any_is_made(
    on_gpu: GpuWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpu.config
    before = [on_gpu.slots(layer) for layer in range(config.num_hidden_layers)]
    added = (
        2 * config.num_hidden_layers + config.n_routed_experts
    )  # slots; the last are an old layer's
    need = added * slot_bytes(config)
    for free in (need - 1, need):
        monkeypatch.setattr(gpu_weights, "free_bytes", lambda device, free=free: free)
        told = list[str]()
        backend = member(on_gpu, told)
        if free < need:
            with pytest.raises(NoRoom, match=r"10 expert slots a layer, where there are 8, need"):
                backend.prepare(3, [0], placement(on_gpu, 2))
            assert before == [on_gpu.slots(layer) for layer in range(config.num_hidden_layers)]
        else:
            backend.prepare(3, [0], placement(on_gpu, 2))
            assert len(on_gpu.slots(0)) == 10
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
                with pytest.raises(Undone), nothing_left():
                    done(lambda: step(plan), failed.append)
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
