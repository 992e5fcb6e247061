"""What this machine offers a worker, as one JSON document: `python -m phalanx.worker_svc.probe`.

A program of its own because it loads torch, which the command line must not.
"""

import json
from importlib.metadata import PackageNotFoundError, version

import torch

from phalanx.kernels import ops  # noqa: F401  (fills the registry)
from phalanx.kernels.registry import DEEP_EP, choices
from phalanx.worker_svc.model.invariance import check_invariance


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
        "exchange": f"shared memory of this machine (not deep_ep: {DEEP_EP.reason((0, 0))})",
        **_kernels(),
    }


def _kernels() -> dict[str, str]:
    """What every operation runs on the first GPU, and why not something else."""
    if not torch.cuda.is_available():
        return {"kernels": "torch reference on cpu"}
    found = {}
    for choice in choices(torch.cuda.get_device_capability()):
        passed = f"; not {', not '.join(choice.passed_over)}" if choice.passed_over else ""
        found[f"kernel: {choice.operation}"] = f"{choice.implementation} ({choice.why}{passed})"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    print(json.dumps(probe()))
