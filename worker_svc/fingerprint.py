"""What a rank's numbers depend on, as one short string.

Two ranks with the same fingerprint compute the same bits, so a request may move between them; a
journal or a cached block of another fingerprint is never continued.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import torch

from phalanx.worker_svc.model.truncation import OFF, Truncation

_WHOLE_BYTES = 1 << 30  # shards are hashed whole up to this sum
_SAMPLE_BYTES = 1 << 16  # of each tenth of a larger shard, besides its header


def numerics_fingerprint(
    model_dir: Path, device: str, threads: int, truncation: Truncation = OFF
) -> str:
    """Hash of weights, engine and library versions, device, instruction set, threads, truncation.

    Checkpoints above 1 GiB are not read whole: their headers, sizes and samples of every shard are.
    """
    facts = {
        "weights": _weights_hash(model_dir),
        "engine": version("phalanx-serve"),
        "torch": torch.__version__,
        "device": device,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "numerics": "exact",
        "truncation": truncation.label,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _weights_hash(model_dir: Path) -> str:
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    digest.update((model_dir / "tokenizer.json").read_bytes())
    shards = sorted(model_dir.glob("*.safetensors"))
    whole = sum(shard.stat().st_size for shard in shards) <= _WHOLE_BYTES
    for shard in shards:
        size = shard.stat().st_size
        digest.update(f"{shard.name}:{size}".encode())
        with shard.open("rb") as file:
            if whole:
                digest.update(file.read())
                continue
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header))
            for part in range(10):
                file.seek(size * part // 10)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
