"""What this machine offers a worker, as one JSON document: `python -m phalanx.worker_svc.probe`.

A program of its own because it loads torch, which the command line must not.
"""

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, version

import torch

from phalanx.worker_svc.model.invariance import check_invariance

# Import name -> distribution of the vendor kernel libraries (DeepSeek's own builds).
_VENDOR = {
    "deep_gemm": "deepinfer-gemm",
    "flash_mla": "deepinfer-flashmla",
    "deep_ep": "deepinfer-ep",
}


def probe() -> dict[str, object]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    torch.set_num_threads(1)
    try:
        check_invariance()
        invariant = "yes"
    except RuntimeError as error:
        invariant = f"no: {error}"
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "row-invariant on this CPU": invariant,
        "gpus": gpus,
        "triton": _version("triton"),
        **{name: _version(package) for name, package in _VENDOR.items() if _present(name)},
        "kernels": "torch reference on cpu",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _present(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    print(json.dumps(probe()))
