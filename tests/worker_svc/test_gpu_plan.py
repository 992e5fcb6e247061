"""The memory plan of a GPU names all that is allocated there: in sizes of the full model without a GPU, and on one
against what torch says it holds."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from forward_world import DEVICE
from torch import Tensor

from phalanx.kernels import registry
from phalanx.protocol.config import KVStoreConfig, NodeConfig, SchedulerConfig, WorkerConfig
from phalanx.worker_svc.engine import Engine
from phalanx.worker_svc.experts import OwnExperts
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import CPU
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import all_slots, gpu_bytes
from phalanx.worker_svc.model.gpu_weights import GpuWeights
from phalanx.worker_svc.model.model import DenseParts
from phalanx.worker_svc.model.recorded import RecordedSteps, cuda_graphs
from phalanx.worker_svc.model.tensors import ITEM_BYTES, TensorSpec, tensor_specs
from phalanx.worker_svc.pools import GpuPlan
from phalanx.worker_svc.warm import warm_up
from worker_svc import full_dims

FULL: Final = Path(__file__).parent / "full_config.json"
MIB: Final = 1 << 20
# What is not worked out beforehand: where experts are, how often they were chosen, constants of hashes.
SMALL_TABLES: Final = 1 * MIB
META: Final = torch.device("meta")


# --- without a GPU -------------------------------------------------------------------------------------

_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
}


class Sizes:
    """As much of a checkpoint as its tensors' names and sizes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.specs = config, tensor_specs(config)


class SizesOnly(GpuWeights):
    """The weights of a rank whose tensors have shapes and types, and no bytes."""

    def __init__(self, config: ModelConfig, slots: list[int]) -> None:
        self.config, self.dequantize, self.packs_experts = config, True, True
        self.device, self.token_map = META, torch.zeros(config.vocab_size, dtype=torch.int64)
        self.checkpoint: Any = Sizes(config)
        self._plain, self._linears, self._readable, self._tables = {}, {}, {}, {}
        self._slots, self._experts, self._pools = [], [], []
        for name, spec in self.checkpoint.specs.items():
            if spec.dtype in ("BF16", "F32") and spec.part != "vision":
                # With the host, like a mapped file: no page of it is touched.
                self._plain[name.removesuffix(".weight")] = self._empty(name, CPU)
        for count in slots:
            self._slots.append(list(range(count)))
            self._make_slots(count)

    def _mapped(self, name: str) -> Tensor:
        return self._empty(name, META)

    def _empty(self, name: str, device: torch.device) -> Tensor:
        spec: TensorSpec = self.checkpoint.specs[name]
        assert _DTYPES[spec.dtype].itemsize == ITEM_BYTES[spec.dtype]
        return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device=device)


def held(root: object) -> int:
    """Bytes of all tensors on META that can be reached from an object, each memory once."""
    found: dict[int, int] = {}
    seen, left = set[int](), [root]
    while left:
        here = left.pop()
        if id(here) in seen or isinstance(here, Sizes | type | ModuleType):
            continue
        seen.add(id(here))
        if isinstance(here, Tensor):
            if here.device == META:
                storage = here.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        elif isinstance(here, dict):
            left += here.values()
        elif isinstance(here, list | tuple | set):
            left += here
        elif hasattr(here, "__dict__"):
            left += vars(here).values()
    return sum(found.values())


@pytest.fixture
def kernels() -> Iterator[None]:
    pytest.importorskip("triton")
    registry.interpret(True)
    yield
    registry.interpret(False)


def node(num_blocks: int = 50, **scheduler: int) -> NodeConfig:
    return NodeConfig(
        run_dir=f"/plan-{os.getpid()}",  # a name: nothing is made there
        device="cuda",
        kvstore=KVStoreConfig(enabled=False),
        worker=WorkerConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(**scheduler),
    )


def test_every_tensor_of_the_full_model_is_counted(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.load(FULL)
    slots = all_slots(config, 128)
    made, planned, load = list[DenseParts](), list[int](), DenseParts.of

    def loaded(weights: Weights) -> DenseParts:
        made.append(load(weights))
        return made[-1]

    def plan(*_: object) -> GpuPlan:
        planned.append(
            held([weights, experts, made])
        )  # what is left of a GPU beside this is given out
        return GpuPlan("H", 1 << 40, 0, 0, 0)

    monkeypatch.setattr(DenseParts, "of", loaded)
    monkeypatch.setattr(GpuPlan, "of", plan)
    weights = SizesOnly(config, slots)
    experts = OwnExperts(weights)
    engine = Engine(weights, experts, node(), 0, 1, 1, "test")
    try:
        sizes = engine.sizes
        caches = sizes.num_blocks * sizes.block_bytes + sizes.num_slots * sizes.slot_bytes
        everything = held([engine, weights, experts])
        worked_out = gpu_bytes(config, slots)
        assert worked_out > 10**11
        assert 0 <= everything - caches - worked_out < SMALL_TABLES
        assert 0 <= planned[0] - worked_out < SMALL_TABLES
    finally:
        engine.close()


# --- on one --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def few_layers() -> Iterator[Path]:
    """One layer of each kind with every dimension of the full model: about 5 GB."""
    scratch = Path(tempfile.mkdtemp(prefix="phalanx-full-"))
    try:
        full_dims.write(scratch / "model", seed=1)
        yield scratch / "model"
    finally:
        shutil.rmtree(scratch)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
def test_what_is_allocated_is_what_the_plan_says(few_layers: Path) -> None:
    """Of a rank that started and computed steps of all sizes, up to the largest that there may be."""
    rows = 2048
    config = node(2000, max_num_batched_tokens=rows)
    free = torch.cuda.mem_get_info()[0]
    model = ModelConfig.load(few_layers)
    slots = all_slots(model, model.n_routed_experts)
    weights = load_checkpoint(few_layers, [range(count) for count in slots], device=DEVICE)
    experts = OwnExperts(weights)
    with torch.inference_mode():
        engine = Engine(weights, experts, config, 0, 1, 1, "test")
        try:
            sizes, plan = engine.sizes, engine.sizes.gpu
            assert plan is not None
            caches = sizes.num_blocks * sizes.block_bytes + sizes.num_slots * sizes.slot_bytes
            started = torch.cuda.memory_allocated()
            print("worked out", gpu_bytes(model, slots), "plan", plan.weights, "caches", caches)
            torch.cuda.reset_peak_memory_stats()
            warm_up(engine.model, weights, rows, lambda: None, lambda *_: None)
            # And the step that needs most: as many rows as there may be, at the end of the longest context.
            start = model.max_positions - rows
            blocks = [1 + i % (sizes.num_blocks - 1) for i in range(-(-model.max_positions // 128))]
            longest = SequenceRows(0, start, [7] * rows, blocks, logits=True)
            engine.model.forward(StepBatch.of([longest])).commit([0])
            torch.cuda.synchronize()
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            print("steps", peak - started, reserved - started, "planned", plan.workspace)
            torch.cuda.empty_cache()
            after = torch.cuda.memory_allocated()
            outside = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
            print("kept by steps", after - started, "outside of torch", outside)
            recorded = RecordedSteps(engine.model, experts, cuda_graphs(), engine.rooms())
            engine.model.recorded = recorded
            torch.cuda.synchronize()
            graphs = torch.cuda.memory_reserved() - after
            beside = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved() - outside
            print("graphs", graphs, "beside", beside, "planned", plan.graphs, recorded.failure)
        finally:
            engine.close()
    assert gpu_bytes(model, slots) <= plan.weights < gpu_bytes(model, slots) + 64 * MIB
    assert started - plan.weights - caches < MIB
    assert reserved - started < plan.workspace
    assert not recorded.failure and graphs < plan.graphs
    assert after - started < 64 * MIB
