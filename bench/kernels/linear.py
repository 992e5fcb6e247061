"""The dense products at the model's shapes: few rows against the weights' bytes, many against flops.

The alternative is the faster of cuBLAS on weights dequantized beforehand and `torch._scaled_mm` on
FP8 weights with scales of one row: neither keeps a row's bits when the batch changes, the second not
even its numbers. It says what exactness costs.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from phalanx.bench.kernels.harness import Ceilings, Figure, rotating, time_us
from phalanx.kernels.matrix import Fp8Matrix, Matrix
from phalanx.kernels.reference.quant import E4M3
from phalanx.kernels.triton import linear as ops
from phalanx.kernels.triton.configs import Config

FEW_ROWS: Final = (1, 16, 64)
MANY_ROWS: Final = 4096
_FEW_GOAL: Final = 0.6
_MANY_GOAL: Final = 0.5
_ROTATED_BYTES: Final = 192 << 20  # of different weights before one comes again


@dataclass(frozen=True)
class Shape:
    """A weight of the model; `q8` says that its input is quantized on the way."""

    name: str
    kind: str  # fp8, bf16 or float
    rows: int
    depth: int
    groups: int = 1
    q8: bool = False

    @property
    def size(self) -> int:
        return self.groups * self.rows * self.depth

    @property
    def num_bytes(self) -> int:
        return int(self.size * {"fp8": 1 + 1 / 1024, "bf16": 2, "float": 4}[self.kind])

    def draw(self) -> Matrix:
        rows = self.groups * self.rows
        if self.kind == "float":
            return torch.randn(rows, self.depth, device="cuda")
        if self.kind == "bf16":
            return torch.randn(rows, self.depth, device="cuda", dtype=torch.bfloat16)
        codes = torch.randint(0, 256, (rows, self.depth), dtype=torch.uint8, device="cuda")
        codes[(codes & 0x7F) == 0x7F] = 0
        blocks = (-(-rows // 32), self.depth // 32)
        scales = torch.randint(116, 122, blocks, dtype=torch.uint8, device="cuda")
        return Fp8Matrix(codes.view(E4M3), scales)


SHAPES: Final = (
    Shape("q_kv", "fp8", 1792, 5120, q8=True),
    Shape("wq_b", "fp8", 32768, 1280),
    Shape("wo_a", "fp8", 1024, 4096, groups=8),
    Shape("wo_b", "fp8", 5120, 8192, q8=True),
    Shape("shared_up", "fp8", 4608, 5120),
    Shape("shared_down", "fp8", 5120, 2304),
    Shape("gate", "bf16", 384, 5120),
    Shape("index wq", "fp8", 4096, 1280),
    Shape("weights_proj", "bf16", 32, 5120),
    Shape("compressor", "bf16", 1024, 5120),
    Shape("wk", "bf16", 128, 512),
    Shape("engram", "fp8", 25600, 6144, q8=True),
    Shape("head", "bf16", 129280, 5120),
    Shape("mix", "float", 24, 20480),
    Shape("main_proj", "fp8", 5120, 15360, q8=True),
)


_compiling: bool = False  # kernels are compiled, not run


@contextmanager
def _compiled() -> Iterator[None]:
    """What is run in the block is only compiled, everything side by side."""
    global _compiling
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, **options: Any) -> Any:
        return run(self, *args, **options | {"warmup": True})

    with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
        try:
            _compiling, JITFunction.run = True, warm_up
            yield
        finally:
            _compiling, JITFunction.run = False, run


class _Case:
    """A shape's product for so many rows, on several drawn weights in turn."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        copies = min(8, max(1, _ROTATED_BYTES // shape.num_bytes)) if num_rows <= 256 else 1
        copies = 1 if _compiling else copies
        self.shape, self.num_rows = shape, num_rows
        self.weights = [shape.draw() for _ in range(copies)]
        # The engine's activations: float32 where Q8 comes first, else what a kernel before left.
        dtype = torch.float32 if shape.q8 else torch.bfloat16
        self.x = torch.randn(num_rows, shape.groups, shape.depth, device="cuda").to(dtype)

    def run(self, weight: Matrix, settings: Config | None = None) -> Tensor:
        if self.shape.q8:
            assert isinstance(weight, Fp8Matrix)
            return ops.linear(self.x[:, 0], weight, settings=settings)
        if self.shape.groups > 1:
            return ops.grouped_linear(self.x, weight, settings=settings)
        return ops.matmul_rows(self.x[:, 0], weight, settings=settings)

    def us(self, settings: Config | None = None) -> float:
        if _compiling:
            self.run(self.weights[0], settings)
            return 1.0
        return self._time([partial(self.run, w, settings) for w in self.weights])

    def _time(self, runs: list[Callable[[], object]]) -> float:
        return time_us(rotating(runs)) / len(runs)

    @property
    def num_bytes(self) -> int:
        outputs = 4 * self.num_rows * self.shape.groups * self.shape.rows
        return self.shape.num_bytes + self.x.numel() * self.x.element_size() + outputs

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.shape.size

    def alternatives(self) -> Iterator[tuple[str, float]]:
        shape = self.shape
        x = self.x.bfloat16().transpose(0, 1)
        if shape.kind == "float":
            x = x.float()
        right = [_dense(w, shape).transpose(1, 2) for w in self.weights]
        kind = "float32" if shape.kind == "float" else "bf16"
        yield f"cuBLAS {kind}", self._time([partial(torch.bmm, x, w) for w in right])
        if shape.kind == "fp8" and shape.groups == 1:
            codes, ones = x[0].to(E4M3), torch.ones((), device="cuda")
            right = [w.codes.t() for w in self.weights if isinstance(w, Fp8Matrix)]

            def scaled(w: Tensor) -> Tensor:
                return torch._scaled_mm(codes, w, ones, ones, out_dtype=torch.bfloat16)

            try:
                scaled(right[0])
            except RuntimeError:  # not for every number of rows
                return
            yield "_scaled_mm", self._time([partial(scaled, w) for w in right])


def _dense(weight: Matrix, shape: Shape) -> Tensor:
    """[G, N, K]: bf16, or float32 where the weight is."""
    dense = ops.dequantize(weight) if isinstance(weight, Fp8Matrix) else weight
    return dense.view(shape.groups, shape.rows, shape.depth)


def _figure(limits: Ceilings, case: _Case) -> Figure:
    shape, few = case.shape, case.num_rows != MANY_ROWS
    others = () if _compiling else case.alternatives()
    name, us = min(others, key=lambda one: one[1], default=("none", 1.0))
    label = f"{shape.rows} x {shape.depth} {shape.kind}"
    return Figure(
        kernel=f"linear {shape.name}",
        shape=f"{case.num_rows} rows, "
        + (f"{shape.groups} x {label}" if shape.groups > 1 else label),
        us=case.us(),
        limit=limits.limit(case.num_bytes, case.flops),
        goal=_FEW_GOAL if few else _MANY_GOAL,
        alternative=name,
        alternative_us=us,
    )


def figures(limits: Ceilings) -> list[Figure]:
    """About 6 GB and 15 s, mostly compilation."""
    with _compiled():
        _figures(limits)
    return _figures(limits)


def _figures(limits: Ceilings) -> list[Figure]:
    rows = [_figure(limits, _Case(shape, few)) for shape in SHAPES for few in FEW_ROWS]
    prefill = (shape for shape in SHAPES if shape.name != "head")  # which sees a few rows alone
    rows += [_figure(limits, _Case(shape, MANY_ROWS)) for shape in prefill]
    return rows


_FEW_CANDIDATES: Final[tuple[Config, ...]] = (
    {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4},
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4},
    {"BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
)
_MANY_CANDIDATES: Final[tuple[Config, ...]] = (
    {"BLOCK_R": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
    {"BLOCK_R": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 4},
    {"BLOCK_R": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 5},
    {"BLOCK_R": 128, "BLOCK_N": 256, "num_warps": 8, "num_stages": 3},
    {"BLOCK_R": 128, "BLOCK_N": 256, "num_warps": 8, "num_stages": 4},
    {"BLOCK_R": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 4},
)
_FEW_SIZES: Final = (16, 32, 64, 256)  # one for each class of `settings_key`
_MANY_SIZE: Final = 4096


def tune(limits: Ceilings) -> dict[str, dict[str, Config]]:
    """The best splits, then the fastest tiles for every shape, in about 45 s.

    Splits change the order of summation, so that they are chosen for decoding and hold for all rows.
    """
    with _compiled():
        _tune()
    return _tune()


def _tune() -> dict[str, dict[str, Config]]:
    table: dict[str, dict[str, Config]] = {"splits": {}, "few_rows": {}, "many_rows": {}}
    for shape in SHAPES:
        if shape.kind == "float":
            continue
        key = (shape.groups, shape.rows, shape.depth)
        splits = _best_splits(shape)
        table["splits"]["x".join(map(str, key))] = splits
        for num_rows in _FEW_SIZES:
            case = _Case(shape, num_rows)
            tried = [one | splits for one in _FEW_CANDIDATES]
            if num_rows > 64:  # tiles may be half as high as they could be
                tried += [one | {"BLOCK_R": 64} for one in tried]
            table["few_rows"][ops.settings_key(num_rows, key)] = _fastest(case, tried)
        if shape.name != "head":
            case = _Case(shape, _MANY_SIZE)
            tried = [one | splits for one in _MANY_CANDIDATES]
            table["many_rows"][ops.settings_key(_MANY_SIZE, key)] = _fastest(case, tried)
    return table


def _best_splits(shape: Shape) -> Config:
    """For 16 and 64 rows together; fewer of equals, as many rows like them better."""
    cases = [_Case(shape, num_rows) for num_rows in (16, 64)]
    most = max(1, min(20, shape.depth // 256))
    tried = [{"splits": parts} for parts in ops.possible_splits(shape.depth) if parts <= most]
    times = [sum(case.us(one) for case in cases) for one in tried]
    return next(one for one, us in zip(tried, times, strict=True) if us < 1.03 * min(times))


def _fastest(case: _Case, candidates: list[Config]) -> Config:
    times: list[tuple[float, int]] = []
    for index, settings in enumerate(candidates):
        try:
            times.append((case.us(settings), index))
        except OutOfResources:
            continue
    best = candidates[min(times)[1]]
    return {name: value for name, value in best.items() if name != "splits"}
