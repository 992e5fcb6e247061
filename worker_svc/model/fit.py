"""Which numbers of ranks a model fits on, and how many tokens of KV cache then have room."""

from dataclasses import dataclass
from typing import Final

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.placement import slots_per_rank
from phalanx.worker_svc.devices import Devices
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import all_slots, gpu_bytes, held_bytes, shared_bytes
from phalanx.worker_svc.model.layout import BLOCK_TOKENS, CacheLayout

CPU_RANKS: Final = 8  # the most that are worked out for a CPU
USABLE: Final = 0.9  # of what is free: the rest is for activations, libraries and the unforeseen


@dataclass(frozen=True)
class Fit:
    """What one rank holds when there are so many."""

    ranks: int
    expert_slots: int  # of every backbone layer: enough that any one rank may be lost
    weight_bytes: int  # of one rank
    shared_bytes: int  # of the page cache, read by all CPU ranks together; 0 on GPUs
    kv_bytes: int  # left for KV blocks of one rank, after weights and state slots; below 0: missing
    kv_tokens: int  # of one rank; 0 if the model does not fit
    left_kv_tokens: int  # of all others together, when one rank is lost

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0


def fits(config: ModelConfig, devices: Devices, max_ranks: int | None = None) -> list[Fit]:
    """For 1, 2, ... ranks on these devices, up to `max_ranks` (None: one a GPU, a few on a CPU)."""
    if max_ranks is None:
        max_ranks = CPU_RANKS if devices.is_cpu else devices.count
    return [_fit(config, devices, ranks) for ranks in range(1, max_ranks + 1)]


def _fit(config: ModelConfig, devices: Devices, ranks: int) -> Fit:
    layout = CacheLayout(config)
    expert_slots = slots_per_rank(config.n_routed_experts, ranks)
    slots = all_slots(config, expert_slots)
    usable = int(devices.free_bytes * USABLE)
    if devices.is_cpu:
        weights, shared = held_bytes(config, slots), shared_bytes(config)
        room = (usable - shared) // ranks - weights
    else:
        weights, shared = gpu_bytes(config, slots), 0
        room = usable - weights
    room -= SchedulerConfig().max_num_seqs * layout.slot_bytes
    blocks = max(0, room // layout.block_bytes - 1)  # one is the null block
    tokens = blocks * BLOCK_TOKENS
    return Fit(ranks, expert_slots, weights, shared, room, tokens, (ranks - 1) * tokens)
