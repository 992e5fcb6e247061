"""What a rank's numbers depend on, as one short string.

Two ranks with the same fingerprint compute the same bits, so a request may move between them; a
journal or a cached block of another fingerprint is never continued.
"""

import hashlib
import json
from functools import cache
from importlib.metadata import version

import torch

from phalanx.worker_svc.model.truncation import OFF, Truncation


@cache
def engine_version() -> str:
    """Looked for in the file system, which takes some ms."""
    return version("phalanx-serve")


def numerics_fingerprint(
    weights: str, device: str, threads: int, truncation: Truncation = OFF, kernels: str = ""
) -> str:
    """Hash of weights (`weights_hash`), engine and library versions, device, instruction set, threads,
    truncation; and `kernels`, on a GPU what runs there (`kernels.registry.label`)."""
    facts = {
        "weights": weights,
        "engine": engine_version(),
        "torch": torch.__version__,
        "device": device,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "numerics": "exact",
        "truncation": truncation.label,
    }
    if kernels:
        facts["kernels"] = kernels
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
