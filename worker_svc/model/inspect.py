"""What a model is, in numbers, and where it fits: from a checkpoint directory, or a config.json alone.

As a command: `python -m phalanx.worker_svc.model.inspect PATH [--ranks N] [--memory GIB] [--json]`.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from phalanx.worker_svc.devices import Devices, devices_at_hand
from phalanx.worker_svc.model.config import ARCHITECTURE, ModelConfig
from phalanx.worker_svc.model.fields import ConfigError
from phalanx.worker_svc.model.fit import Fit, fits
from phalanx.worker_svc.model.layout import BLOCK_TOKENS, CacheLayout
from phalanx.worker_svc.model.memory import shown_bytes
from phalanx.worker_svc.model.shards import Checkpoint, CheckpointError
from phalanx.worker_svc.model.tensors import TensorSpec, tensor_specs

# Read once per token by row, or once per sampled token: left out of what a token "activates".
_NOT_ACTIVE: Final = ("embedding", "head", "vision", "draft", "engram_table", "expert")

_SUPPOSED: Final = 8  # GPUs of a machine that is not at hand


@dataclass(frozen=True)
class ModelFigures:
    """Sizes of a model. Parameters are weights; scales count as bytes only."""

    path: str
    architecture: str
    complete: bool  # every tensor is there with its shape; False for a config.json alone
    layers: int
    draft_stages: int
    experts: int  # routed, per layer
    experts_per_token: int
    vocab_size: int
    max_positions: int
    vision: bool
    total_params: int
    active_params: int  # multiplied per decoded token, without embedding and output head
    params_by_part: dict[str, int]
    tensors: int
    payload_bytes: int
    bytes_by_dtype: dict[str, int]
    bytes_by_part: dict[str, int]
    kv_bytes_per_token: float  # compressed entries and index keys
    block_tokens: int
    block_bytes: int  # a block record, with its padding
    slot_bytes: int  # windows and pair state of one sequence
    window_ring_bytes: int  # of one layer
    unknown_keys: tuple[str, ...]  # of config.json: read by nothing


def inspect_model(path: Path) -> ModelFigures:
    """Figures of a checkpoint directory, whose tensors are checked, or of a config.json.

    Raises:
        ConfigError: the configuration is missing or unusable.
        CheckpointError: the directory's tensors do not match its configuration.
    """
    checkpoint = Checkpoint(path) if path.is_dir() else None
    config = checkpoint.config if checkpoint else ModelConfig.load(path)
    return figures(config, path=str(path), complete=checkpoint is not None)


def figures(config: ModelConfig, *, path: str, complete: bool) -> ModelFigures:
    """Figures that follow from a configuration alone."""
    specs = list(tensor_specs(config).values())
    layout = CacheLayout(config)
    params = _sum((_part(spec), spec.num_params) for spec in specs)
    entry_bytes = config.compressed_record_bytes + config.index_record_bytes
    return ModelFigures(
        path=path,
        architecture=ARCHITECTURE,
        complete=complete,
        layers=config.num_hidden_layers,
        draft_stages=config.draft_stages,
        experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        vision=config.vision is not None,
        total_params=sum(params.values()),
        active_params=_active_params(config, params),
        params_by_part=params,
        tensors=len(specs),
        payload_bytes=sum(spec.num_bytes for spec in specs),
        bytes_by_dtype=_sum((spec.dtype, spec.num_bytes) for spec in specs),
        bytes_by_part=_sum((_part(spec), spec.num_bytes) for spec in specs),
        kv_bytes_per_token=sum(
            entry_bytes / config.ratio(owner) for owner in config.kv_source_layer_ids
        ),
        block_tokens=BLOCK_TOKENS,
        block_bytes=layout.block_bytes,
        slot_bytes=layout.slot_bytes,
        window_ring_bytes=layout.ring_size * config.window_record_bytes,
        unknown_keys=config.unknown_keys,
    )


def _part(spec: TensorSpec) -> str:
    """The drafter's layers are one part: they are extra to the model proper."""
    return "draft" if spec.name.startswith("mtp.") else spec.part


def _sum(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for key, value in items:
        totals[key] += value
    return dict(totals.most_common())


def _active_params(config: ModelConfig, params: dict[str, int]) -> int:
    dense = sum(count for part, count in params.items() if part not in _NOT_ACTIVE)
    experts = params["expert"] * config.num_experts_per_tok // config.n_routed_experts
    rows = len(config.engram_layer_ids) * config.engram_columns * config.engram_head_dim
    return dense + experts + rows


@dataclass(frozen=True)
class DeviceFits:
    """How the model fits devices of one kind, for 1, 2, ... ranks."""

    devices: Devices
    fits: list[Fit]


def model_fits(
    config: ModelConfig, devices: Iterable[Devices], max_ranks: int | None = None
) -> list[DeviceFits]:
    return [DeviceFits(kind, fits(config, kind, max_ranks)) for kind in devices]


def render_fits(found: DeviceFits) -> str:
    """A table for people."""
    kind = found.devices
    count = f"{kind.count} x " if kind.count > 1 else ""
    lines = [f"  on {count}{kind.name} with {shown_bytes(kind.free_bytes)} free:"]
    if shared := found.fits[0].shared_bytes:
        lines.append(f"    beside {shown_bytes(shared)} of page cache, read by all ranks")
    for fit in found.fits:
        ranks = f"{fit.ranks} rank{'s' if fit.ranks > 1 else ''}"
        weights = f"{shown_bytes(fit.weight_bytes)} of weights a rank"
        left = f"{fit.kv_tokens:,} KV tokens" if fit.fits else f"{shown_bytes(-fit.kv_bytes)} short"
        if fit.left_kv_tokens:
            left += f"; one lost: {fit.left_kv_tokens:,} in all"
        lines.append(f"    {ranks:>8}, {fit.expert_slots} experts a layer: {weights}, {left}")
    return "\n".join(lines)


def render(model: ModelFigures) -> str:
    """The figures as lines for people."""
    kind = "checkpoint, all tensors present" if model.complete else "configuration only"
    shape = (
        f"{model.layers} layers, {model.draft_stages} draft stages, {model.experts} experts "
        f"({model.experts_per_token} per token), vocabulary {model.vocab_size:,}, "
        f"{model.max_positions:,} positions{', vision tower (not served)' * model.vision}"
    )
    params = (
        f"{model.total_params:,} parameters, {model.active_params:,} active per token "
        "(without embedding and output head)"
    )
    size = f"{model.payload_bytes:,} bytes ({shown_bytes(model.payload_bytes)})"
    block = f"a block of {model.block_tokens} tokens is {model.block_bytes:,} bytes"
    slot = f"{model.slot_bytes:,} bytes (window ring {model.window_ring_bytes:,} a layer)"
    lines = [
        f"{model.path}: {model.architecture} ({kind})",
        f"  {shape}",
        f"  {params}",
        f"  {model.tensors:,} tensors, {size}",
        *(f"    {dtype:8} {total:>19,} bytes" for dtype, total in model.bytes_by_dtype.items()),
        *(
            f"    {part:14} {model.params_by_part[part]:>17,} parameters {total:>19,} bytes"
            for part, total in model.bytes_by_part.items()
        ),
        f"  KV: {model.kv_bytes_per_token:g} bytes a token; {block}",
        f"  state slot: {slot}",
    ]
    if model.unknown_keys:
        lines.append(f"  not read from config.json: {', '.join(model.unknown_keys)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a model is, in numbers, and where it fits.")
    parser.add_argument("path", type=Path, help="a checkpoint directory, or a config.json")
    parser.add_argument("--ranks", type=int, help="how many ranks to work out")
    parser.add_argument("--memory", type=float, help="GPUs of so many GiB, instead of what is here")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    try:
        model = inspect_model(arguments.path)
        config = ModelConfig.load(arguments.path)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    found = model_fits(config, _devices(arguments.memory), arguments.ranks)
    if arguments.json:
        devices = [dataclasses.asdict(each) for each in found]
        print(json.dumps(dataclasses.asdict(model) | {"devices": devices}))
    else:
        print("\n".join([render(model), *map(render_fits, found)]))


def _devices(memory_gib: float | None) -> list[Devices]:
    if memory_gib is None:
        return devices_at_hand()
    return [Devices(f"GPU of {memory_gib:g} GiB", False, _SUPPOSED, int(memory_gib * 2**30))]


if __name__ == "__main__":
    main()
