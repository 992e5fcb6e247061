"""Writing a checkpoint in the released layout: float tensors in, quantized shards out."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.kernels.reference.quant import quant_engram, quant_fp4, quant_fp8_block
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.shards import INDEX_NAME, CheckpointError
from phalanx.worker_svc.model.tensors import TensorSpec, tensor_specs

DEFAULT_SHARD_BYTES: Final = 4 << 30

Source = Callable[[str], Tensor]  # name without .weight -> float32, [out, in] for linears


def write_checkpoint(
    directory: Path,
    config: Mapping[str, object],
    source: Source,
    tokenizer: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write config.json, tokenizer.json, the shards and their index into an empty directory.

    Args:
        config: The content of config.json; it decides which tensors are written.
        source: Gives each tensor once, as float32; it is rounded to its stored format here.
        tokenizer: The tokenizer.json to copy.
        shard_bytes: A shard is closed when the next tensor would take it past this size.

    Raises:
        ConfigError: the configuration is unusable.
        CheckpointError: the directory holds files, or a tensor has the wrong shape.
    """
    parsed = ModelConfig.parse(dict(config))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} is not empty; a checkpoint is written into a new directory"
        )
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    specs = tensor_specs(parsed)
    shards = list(_shards(specs, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, stems in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for stem in stems:
            tensors |= _stored(stem, specs, source(stem))
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(spec.num_bytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def _shards(specs: Mapping[str, TensorSpec], limit: int) -> Iterable[list[str]]:
    """Names without .weight, split into files; a weight and its scale stay together."""
    shard: list[str] = []
    size = 0
    for stem, num_bytes in _stem_bytes(specs).items():
        if shard and size + num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(stem)
        size += num_bytes
    yield shard


def _stem_bytes(specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, spec in specs.items():
        stem = name.removesuffix(".scale" if spec.dtype == "F8_E8M0" else ".weight")
        sizes[stem] = sizes.get(stem, 0) + spec.num_bytes
    return sizes


def _stored(stem: str, specs: Mapping[str, TensorSpec], value: Tensor) -> dict[str, Tensor]:
    """The stored form of one tensor by full name; two entries when it has scales."""
    name = stem if stem in specs else f"{stem}.weight"
    spec = specs[name]
    if spec.dtype == "F32":
        stored = {name: value.to(torch.float32)}
    elif spec.dtype == "BF16":
        stored = {name: value.to(torch.bfloat16)}
    else:
        codes, scale = _quantizer(spec)(value)
        stored = {name: codes, f"{stem}.scale": scale.view(torch.float8_e8m0fnu)}
    for full, tensor in stored.items():
        if tuple(tensor.shape) != specs[full].shape:
            raise CheckpointError(
                f"{full} came out as {list(tensor.shape)}, expected {list(specs[full].shape)}"
            )
    return stored


def _quantizer(spec: TensorSpec) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    if spec.dtype == "I8":
        return quant_fp4
    return quant_engram if spec.part == "engram_table" else quant_fp8_block
