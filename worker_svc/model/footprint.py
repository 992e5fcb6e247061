"""What a rank's weights take, before anything is loaded. No torch here.

On a CPU linears are held as float32, and so are small experts; the rest is read where it lies in the
files. On a GPU everything is held as it is stored, but for Engram tables, which stay with the host.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.tensors import TensorSpec, num_experts, tensor_specs

# Counted in totals and never loaded whole: experts have slots, tables are read by row.
NOT_LOADED: Final = ("expert", "engram_table", "vision")
# Multiplied as bf16 pieces or read by row: used as they lie in the file.
_IN_PLACE: Final = ("embedding", "head")
# A larger expert stays packed in the page cache and is unpacked at each use: as float32 it would take
# seven times the memory. Small ones multiply as they are.
PACKED_ABOVE_BYTES: Final = 8 << 20


def packs_experts(config: ModelConfig) -> bool:
    """Whether the model's experts stay packed in memory."""
    return 4 * _expert_values(config) > PACKED_ABOVE_BYTES


def expert_bytes(config: ModelConfig) -> int:
    """One routed expert as it is stored, with its scales."""
    values = _expert_values(config)
    return values // 2 + values // 32


def held_bytes(config: ModelConfig, slots: Sequence[int]) -> int:
    """Memory that a CPU rank takes for itself: its float32 forms.

    Args:
        slots: expert slots of every layer and draft stage.
    """
    held = sum(spec.num_params for spec in _dense(config) if spec.part not in _IN_PLACE)
    if not packs_experts(config):
        held += _expert_values(config) * sum(slots)
    return 4 * held


def shared_bytes(config: ModelConfig) -> int:
    """Page cache that the CPU ranks of a machine read together at every step."""
    shared = sum(spec.num_bytes for spec in _dense(config) if spec.part in _IN_PLACE)
    if packs_experts(config):
        shared += expert_bytes(config) * sum(all_slots(config))
    return shared


def stored_bytes(config: ModelConfig, slots: Sequence[int]) -> int:
    """Memory of a GPU rank's weights, as they are stored."""
    dense = sum(spec.num_bytes for spec in _dense(config))
    return dense + expert_bytes(config) * sum(slots)


def all_slots(config: ModelConfig, slots_per_layer: int | None = None) -> list[int]:
    """Slots of every layer and draft stage: all experts, or so many of each backbone layer's.

    Draft stages have no placement: every rank holds all of their experts.
    """
    depth = config.num_hidden_layers
    layers = range(depth + config.draft_stages)
    counts = [num_experts(config, layer) for layer in layers]
    if slots_per_layer is not None:
        counts[:depth] = [slots_per_layer] * depth
    return counts


@lru_cache(maxsize=2)  # a large model has a hundred thousand tensors
def _dense(config: ModelConfig) -> list[TensorSpec]:
    return [spec for spec in tensor_specs(config).values() if spec.part not in NOT_LOADED]


def _expert_values(config: ModelConfig) -> int:
    return 3 * config.hidden_size * config.moe_intermediate_size
