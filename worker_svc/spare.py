"""How many expert slots a rank has beside those it needs, for copies that come while the group runs."""

import torch

from phalanx.protocol.config import NodeConfig
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import (
    all_slots,
    gpu_bytes,
    held_bytes,
    packs_experts,
)
from phalanx.worker_svc.model.layout import CacheLayout
from phalanx.worker_svc.model.memory import available_bytes
from phalanx.worker_svc.pools import KERNELS_BYTES, graphs_bytes, workspace_bytes

# Of what caches would have without spare slots, where nobody says how much they shall have.
_SHARE_OF_CACHES = 8


def spare_slots(config: NodeConfig, model: ModelConfig, device: torch.device, used: int) -> int:
    """Of each layer, before anything is loaded. None for a rank alone, nor beyond one slot for each expert
    or beyond worker.expert_slots.

    Args:
        used: slots of each layer that will hold an expert.
    """
    most = config.worker.expert_slots or model.n_routed_experts
    wanted = min(config.eplb.spare_slots, most - used, model.n_routed_experts - used)
    if config.ranks == 1 or wanted <= 0:
        return 0
    with_one, without = all_slots(model, used + 1), all_slots(model, used)
    if device.type == "cuda":
        each = gpu_bytes(model, with_one) - gpu_bytes(model, without)
        left = torch.cuda.mem_get_info(device)[0] - gpu_bytes(model, without)
        left -= workspace_bytes(model, config) + graphs_bytes(model, config) + KERNELS_BYTES
    elif packs_experts(model):
        return wanted  # slots point into the page cache
    else:
        each = held_bytes(model, with_one) - held_bytes(model, without)
        left = available_bytes() // config.ranks - held_bytes(model, without)
    return that_fit(wanted, each, left, _caches_bytes(config, model))


def that_fit(wanted: int, each: int, left: int, caches: int) -> int:
    """Slots of `each` bytes: as many as leave room for the caches.

    Args:
        left: bytes that weights and steps leave.
        caches: bytes that are said to be theirs; 0: they get what is left, and most of it.
    """
    room = left - caches if caches else left // _SHARE_OF_CACHES
    return min(wanted, max(0, room) // each)


def _caches_bytes(config: NodeConfig, model: ModelConfig) -> int:
    layout, worker = CacheLayout(model), config.worker
    if not worker.num_blocks:
        return worker.kv_bytes
    slots = config.scheduler.max_num_seqs * layout.slot_bytes
    return worker.num_blocks * layout.block_bytes + slots
