"""What a rank's weights take, before anything is loaded. No torch here.

On a CPU linears are held as float32, and so are small experts; the rest is read where it lies in the
files. On a GPU matrices are held as they are stored, but for Engram tables, which stay with the host.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.tensors import TensorSpec, layer_prefix, num_experts, tensor_specs

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
        shared += expert_bytes(config) * sum(all_slots(config, config.n_routed_experts))
    return shared


def gpu_bytes(config: ModelConfig, slots: Sequence[int]) -> int:
    """Memory of a GPU rank's weights and rotary tables.

    Args:
        slots: expert slots of every layer and draft stage. A stage without any is not there at all.
    """
    unused = tuple(
        f"{layer_prefix(config, layer)}."
        for layer, count in enumerate(slots)
        if layer >= config.num_hidden_layers and not count
    )
    dense = sum(_gpu_bytes(spec) for spec in _dense(config) if not spec.name.startswith(unused))
    ropes = 2 * 2 * 4 * config.max_positions * config.qk_rope_head_dim  # two kinds, cos and sin
    return dense + ropes + slot_bytes(config) * sum(slots)


def slot_bytes(config: ModelConfig) -> int:
    """One expert slot on a GPU: as stored, in whole tiles of 64 x 128 weights, and three factors."""

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // 64) * -(-columns // 128)

    inter, hidden = config.moe_intermediate_size, config.hidden_size
    return (2 * tiles(inter, hidden) + tiles(hidden, inter)) * 64 * (64 + 4) + 3 * 4


def _gpu_bytes(spec: TensorSpec) -> int:
    """As stored, but for vectors, which are widened, and what is not read."""
    if spec.part == "norm":
        return 4 * spec.num_params
    return 0 if spec.name.endswith(".bias_vl") else spec.num_bytes


def all_slots(config: ModelConfig, slots_per_layer: int | None = None) -> list[int]:
    """Slots of every layer and draft stage: all experts; or of a rank that serves, so many of each
    backbone layer's and none of the draft stages', from which no node serves."""
    depth = config.num_hidden_layers
    if slots_per_layer is not None:
        return [slots_per_layer] * depth + [0] * config.draft_stages
    return [num_experts(config, layer) for layer in range(depth + config.draft_stages)]


@lru_cache(maxsize=2)  # a large model has a hundred thousand tensors
def _dense(config: ModelConfig) -> list[TensorSpec]:
    return [spec for spec in tensor_specs(config).values() if spec.part not in NOT_LOADED]


def _expert_values(config: ModelConfig) -> int:
    return 3 * config.hidden_size * config.moe_intermediate_size
