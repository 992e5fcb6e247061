"""The program behind `phalanx bench kernels` and `phalanx tune`: a process of its own, since it loads torch."""

import importlib
import json
import sys
import traceback
from typing import Any, Final

import torch

from phalanx.bench.kernels.harness import Ceilings, Figure, ceilings
from phalanx.kernels.triton import configs

PARTS: Final = ("experts", "linear", "attention", "indexer", "fused", "sample")


def run(parts: list[str]) -> dict[str, Any]:
    """The figures of these parts, beside the limits that the same run measured."""
    limits = ceilings()
    rows, failed = [], {}
    for part in parts:
        module = importlib.import_module(f"phalanx.bench.kernels.{part}")
        try:
            rows += [_row(figure) for figure in module.figures(limits)]
        except Exception as error:  # noqa: BLE001  (the other parts' figures are worth having)
            traceback.print_exc()
            failed[part] = f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()
    return {**_conditions(limits), "failed": failed, "rows": rows}


def tune(parts: list[str]) -> dict[str, dict[str, configs.Config]]:
    """The best settings of each kernel that has some to choose, in the form of `configs.json`."""
    limits = ceilings()
    table = dict(configs.table())
    for part in parts:
        module = importlib.import_module(f"phalanx.bench.kernels.{part}")
        if hasattr(module, "tune"):
            for operation, found in module.tune(limits).items():
                table[operation] = table.get(operation, {}) | found
        torch.cuda.empty_cache()
    return table


def _conditions(limits: Ceilings) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.import_module("triton").__version__,
        "copy_gbps": round(limits.copy_bytes_per_s / 1e9),
        "gemm_tflops": round(limits.gemm_flops_per_s / 1e12, 1),
    }


def _row(figure: Figure) -> dict[str, Any]:
    missed = figure.goal is not None and figure.ratio < figure.goal
    missed |= figure.goal_us is not None and figure.us > figure.goal_us
    return {
        "kernel": figure.kernel,
        "shape": figure.shape,
        "us": round(figure.us, 2),
        "achieved": round(figure.ratio * figure.limit.ceiling, 1),
        "ceiling": round(figure.limit.ceiling, 1),
        "unit": figure.limit.unit,
        "ratio": round(figure.ratio, 3),
        "goal": figure.goal if figure.goal_us is None else f"{figure.goal_us} us",
        "met": None if figure.goal is None and figure.goal_us is None else not missed,
        "alternative": figure.alternative,
        "alternative_us": figure.alternative_us and round(figure.alternative_us, 2),
    }


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU, or a torch without CUDA: the kernels are measured on a GPU")
    wanted = sys.argv[2:] or list(PARTS)
    print(json.dumps(run(wanted) if sys.argv[1] == "run" else tune(wanted)))
