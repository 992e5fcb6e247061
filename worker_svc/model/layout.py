"""Where everything lies in a block record and in a state slot, in bytes (model.md E).

No torch here: sizes must be known before anything is loaded.
"""

from dataclasses import dataclass
from typing import Final

from phalanx.worker_svc.model.config import ModelConfig

BLOCK_TOKENS: Final = 128
NULL_BLOCK: Final = 0  # pads block tables; never written
_SLOT_ALIGN: Final = 64


@dataclass(frozen=True)
class OwnerRegion:
    """Where one KV owner's entries lie within a block record."""

    layer: int
    ratio: int  # tokens per entry
    num_entries: int  # entries per block
    compressed_offset: int  # bytes
    index_offset: int  # bytes


class CacheLayout:
    """Byte layout of block records and state slots for one configuration.

    A block record holds, owner after owner, its compressed records and then its index keys, and is
    padded to a multiple of the compressed record. A state slot holds a ring of window records for
    every layer and then every draft stage (position p at p mod ring), then for every owner of ratio
    2 the float32 kv and score vectors of a token that waits for its partner.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.owners, used = _regions(config)
        self.block_bytes = _round_up(used, config.compressed_record_bytes)
        self.ring_size = config.sliding_window + config.dspark_block_size + 1
        self.num_rings = config.num_hidden_layers + config.draft_stages
        self.pair_owners = tuple(o.layer for o in self.owners if o.ratio == 2)
        ring_bytes = self.num_rings * self.ring_size * config.window_record_bytes
        self.pair_offset = _round_up(ring_bytes, _SLOT_ALIGN)
        pair_bytes = len(self.pair_owners) * 2 * config.head_dim * 4
        self.slot_bytes = _round_up(self.pair_offset + pair_bytes, _SLOT_ALIGN)


def _regions(config: ModelConfig) -> tuple[tuple[OwnerRegion, ...], int]:
    owners, offset = [], 0
    for layer in config.kv_source_layer_ids:
        ratio = config.ratio(layer)
        entries = BLOCK_TOKENS // ratio
        index_offset = offset + entries * config.compressed_record_bytes
        owners.append(OwnerRegion(layer, ratio, entries, offset, index_offset))
        offset = index_offset + entries * config.index_record_bytes
    return tuple(owners), offset


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
