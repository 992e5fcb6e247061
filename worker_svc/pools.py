"""How many KV blocks and state slots a rank gets, from what it was given or from what is free."""

import shutil
from dataclasses import dataclass

from phalanx.protocol.arena import SHM
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError
from phalanx.worker_svc.model.layout import BLOCK_TOKENS, CacheLayout
from phalanx.worker_svc.model.memory import available_bytes, shown_bytes

_FREE_SHARE = 4  # all ranks together take at most a quarter of the free memory


@dataclass(frozen=True)
class PoolSizes:
    """How many blocks (the null block included) and state slots fit, and what they take."""

    num_blocks: int
    num_slots: int
    block_bytes: int
    slot_bytes: int
    budget_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """The memory plan for people."""
        tokens = (self.num_blocks - 1) * BLOCK_TOKENS
        return [
            ("budget", shown_bytes(self.budget_bytes)),
            (
                "KV blocks",
                f"{self.num_blocks - 1} x {shown_bytes(self.block_bytes)}: {tokens} tokens",
            ),
            ("state slots", f"{self.num_slots} x {shown_bytes(self.slot_bytes)}"),
        ]


def pool_sizes(layout: CacheLayout, config: NodeConfig) -> PoolSizes:
    """Split the rank's budget into state slots (one a running sequence) and blocks.

    The budget is worker.kv_bytes, or this rank's share of what is free in memory and in /dev/shm; never
    more blocks than all running sequences at full length could use.

    Raises ConfigError, with both numbers, when not even one sequence of a block would fit.
    """
    num_slots = config.scheduler.max_num_seqs
    longest = -(-layout.config.max_positions // BLOCK_TOKENS)
    budget = config.worker.kv_bytes or free_share(config.ranks)
    num_blocks = config.worker.num_blocks
    if num_blocks == 0:
        room = budget - num_slots * layout.slot_bytes
        num_blocks = min(room // layout.block_bytes, num_slots * longest + 1)
    if num_blocks < 2:
        need = num_slots * layout.slot_bytes + 2 * layout.block_bytes
        raise ConfigError(
            f"a rank has {budget} bytes for caches, {num_slots} state slots and two blocks need {need}:"
            " raise worker.kv_bytes, lower scheduler.max_num_seqs, or free memory"
        )
    return PoolSizes(num_blocks, num_slots, layout.block_bytes, layout.slot_bytes, budget)


def free_share(ranks: int) -> int:
    """One rank's part of a quarter of what is free, here and in /dev/shm, where the blocks lie."""
    return min(available_bytes(), shutil.disk_usage(SHM).free) // (_FREE_SHARE * ranks)
