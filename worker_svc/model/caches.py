"""Cache memory as raw bytes: 128-token block records and one state slot per sequence.

Raw bytes, so that pools can lie in shared memory and records can travel to a store unchanged.
"""

import math
from typing import Final

import torch
from torch import Tensor

from phalanx.worker_svc.model.layout import BLOCK_TOKENS, NULL_BLOCK, CacheLayout

CPU: Final = torch.device("cpu")

__all__ = ["BLOCK_TOKENS", "CPU", "NULL_BLOCK", "CacheLayout", "CachePools"]


class CachePools:
    """The blocks and slots of one worker, and typed views into them.

    Args:
        num_blocks: blocks including the null block 0.
        num_slots: sequences that can have state at a time.
        block_buffer, slot_buffer: writable memory of at least num_blocks * block_bytes and
            num_slots * slot_bytes bytes, which must outlive the pools; None to allocate.
        history_len: token ids kept per slot; the longest sequence by default.
        device: where blocks and slots are allocated that have no buffer.

    Attributes:
        blocks: uint8 [num_blocks, block_bytes].
        slots: uint8 [num_slots, slot_bytes].
        history: int32 [num_slots, history_len], token ids by position; always on the CPU.
        rings: uint8 [num_slots, num_rings, ring_size, window record], a view of `slots`.
        pairs: float32 [num_slots, owners of ratio 2, 2, head_dim], kv and score; a view of `slots`.
        compressed, index_keys: per KV owner's layer, uint8 [num_blocks, entries, record], views of
            `blocks`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        num_slots: int,
        block_buffer: memoryview | None = None,
        slot_buffer: memoryview | None = None,
        *,
        history_len: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.layout = layout
        config = layout.config
        self.blocks = _pool("block", block_buffer, num_blocks, layout.block_bytes, device)
        self.slots = _pool("slot", slot_buffer, num_slots, layout.slot_bytes, device)
        length = config.max_positions if history_len is None else history_len
        self.history = torch.zeros((num_slots, length), dtype=torch.int32)
        shape = (layout.num_rings, layout.ring_size, config.window_record_bytes)
        self.rings = self.slots[:, : math.prod(shape)].view(num_slots, *shape)
        pair_shape = (len(layout.pair_owners), 2, config.head_dim)
        end = layout.pair_offset + math.prod(pair_shape) * 4
        pairs = self.slots[:, layout.pair_offset : end].view(torch.float32)
        self.pairs = pairs.view(num_slots, *pair_shape)
        self.compressed: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        for owner in layout.owners:
            self.compressed[owner.layer] = self._entries(
                owner.compressed_offset, owner.num_entries, config.compressed_record_bytes
            )
            self.index_keys[owner.layer] = self._entries(
                owner.index_offset, owner.num_entries, config.index_record_bytes
            )

    def _entries(self, offset: int, count: int, record: int) -> Tensor:
        return self.blocks[:, offset : offset + count * record].view(-1, count, record)


def _pool(
    kind: str, buffer: memoryview | None, count: int, size: int, device: torch.device
) -> Tensor:
    if buffer is None:
        return torch.zeros((count, size), dtype=torch.uint8, device=device)
    if buffer.readonly or buffer.nbytes < count * size:
        raise ValueError(
            f"the {kind} buffer has {buffer.nbytes} bytes{' and is read-only' * buffer.readonly}; "
            f"{count} {kind}s need {count * size} writable bytes"
        )
    return torch.frombuffer(buffer, dtype=torch.uint8, count=count * size).view(count, size)
