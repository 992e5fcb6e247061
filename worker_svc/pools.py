"""How many KV blocks and state slots a rank gets, from what it was given or from what is free."""

import shutil
from dataclasses import dataclass
from typing import Final

import torch

from phalanx.protocol.arena import SHM
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError, NoRoom, PhalanxError
from phalanx.worker_svc.model.attention import SCORES_AT_ONCE
from phalanx.worker_svc.model.batch import step_rooms
from phalanx.worker_svc.model.caches import CPU
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.layout import BLOCK_TOKENS, CacheLayout
from phalanx.worker_svc.model.memory import available_bytes, shown_bytes

NUM_SNAPSHOTS: Final = 8  # window states that may wait for the KV store at a time
_MARGIN = 1.25
_DRIVER_BYTES: Final = 1 << 30  # of a GPU's memory that nobody holds and nobody can have
# Left free where nobody says how many blocks there shall be: the next worker needs a little more or less.
_SPARE_SHARE: Final = 64
# CUDA's, for the code of kernels that were launched: 96 MiB with all of the full model's on an H200.
KERNELS_BYTES: Final = 256 << 20
_LAYER_LAUNCHES = 3 << 17  # bytes, of one layer in one room
_SHM_SHARE = 0.8  # of what is free there may hold the copies of a GPU's blocks
_FREE_SHARE = 4  # all ranks together take at most a quarter of the free memory


@dataclass(frozen=True)
class GpuPlan:
    """A GPU's memory once the weights are there, in bytes."""

    name: str
    total: int
    weights: int  # and whatever else this process holds already
    others: int  # held by other processes, and by the driver
    workspace: int  # for the activations of the largest step
    # For recorded steps: what they compute in between and leave, and their launches.
    graphs: int = 0
    kernels: int = 0  # their code, once they were launched

    @property
    def room(self) -> int:
        """What caches may take."""
        return self.total - self.weights - self.others - self._steps

    @property
    def _steps(self) -> int:
        return self.workspace + self.graphs + self.kernels

    def refusal(self, what: str, need: int, advice: str) -> PhalanxError:
        """Why `what` does not fit. NoRoom where it would if other processes held nothing."""
        others = max(0, self.others - _DRIVER_BYTES)
        text = (
            f"{what} need {shown_bytes(need)} of GPU memory, {shown_bytes(max(0, self.room))} are left"
            f" ({self.name}: {shown_bytes(self.total)}, weights {shown_bytes(self.weights)}, driver and"
            f" other processes {shown_bytes(self.others)}, steps {shown_bytes(self._steps)}): {advice}"
        )
        if need <= self.room + others:
            return NoRoom(f"{text}, or end the other processes on this GPU")
        return ConfigError(text)

    @classmethod
    def of(cls, model: ModelConfig, config: NodeConfig, device: torch.device) -> "GpuPlan":
        torch.cuda.empty_cache()  # what loading left behind
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        workspace, graphs = workspace_bytes(model, config), graphs_bytes(model, config)
        name = torch.cuda.get_device_name(device)
        return cls(name, total, held, total - free - held, workspace, graphs, KERNELS_BYTES)

    def lines(self) -> list[tuple[str, str]]:
        return [
            ("GPU", f"{self.name}, {shown_bytes(self.total)}"),
            ("weights and tables", shown_bytes(self.weights)),
            ("driver and other processes", shown_bytes(self.others)),
            ("workspace of a step", shown_bytes(self.workspace)),
            ("recorded steps", shown_bytes(self.graphs) if self.graphs else "none"),
            ("code of kernels", shown_bytes(self.kernels)),
        ]


def workspace_bytes(model: ModelConfig, config: NodeConfig) -> int:
    """Activations of the largest step on a GPU: the widest tensors that live at a time, with a margin.

    The stream and its successor, the expert pairs with their results (those of all ranks may choose
    experts that are here), logits of every sequence with its drafts, and the index scores of all rows
    over the longest context.
    """
    scheduler = config.scheduler
    sampled = scheduler.max_num_seqs * (model.dspark_block_size + 1)
    return _activations(model, scheduler.max_num_batched_tokens, sampled, config.ranks)


def graphs_bytes(model: ModelConfig, config: NodeConfig) -> int:
    """Recorded steps on a GPU: the activations of the largest room, in which all others have room too,
    and what describes each room's launches. 0 if none are recorded."""
    if not config.records_steps:
        return 0
    rooms = step_rooms(config.scheduler.max_num_seqs, model.max_positions)
    rows = rooms[0].rows
    return _activations(model, rows, rows) + len(rooms) * model.num_hidden_layers * _LAYER_LAUNCHES


def _activations(model: ModelConfig, rows: int, sampled: int, ranks: int = 1) -> int:
    stream = 4 * 4 * rows * model.hc_mult * model.hidden_size
    queries = 2 * 4 * rows * model.num_attention_heads * model.head_dim
    pairs = ranks * rows * model.num_experts_per_tok
    experts = pairs * (8 * model.hidden_size + 12 * model.moe_intermediate_size)
    logits = 3 * 4 * sampled * model.vocab_size
    # As bf16, and half as much again for the best of every tile.
    scores = 4 * min(rows * model.max_positions, SCORES_AT_ONCE)
    return int(_MARGIN * (stream + queries + experts + logits + scores))


@dataclass(frozen=True)
class PoolSizes:
    """How many blocks (the null block included) and state slots fit, and what they take."""

    num_blocks: int
    num_slots: int
    block_bytes: int
    slot_bytes: int
    budget_bytes: int
    stored: bool = True  # whether full blocks lie where the KV store can read them
    gpu: GpuPlan | None = None

    def lines(self) -> list[tuple[str, str]]:
        """The memory plan for people."""
        tokens = (self.num_blocks - 1) * BLOCK_TOKENS
        return [
            *(self.gpu.lines() if self.gpu else ()),
            ("budget of caches", shown_bytes(self.budget_bytes)),
            (
                "KV blocks",
                f"{self.num_blocks - 1} x {shown_bytes(self.block_bytes)}: {tokens} tokens",
            ),
            ("state slots", f"{self.num_slots} x {shown_bytes(self.slot_bytes)}"),
            ("copies for the KV store", self._copies()),
        ]

    def _copies(self) -> str:
        if not self.stored:
            return "none: /dev/shm has no room for the blocks, or the store is off"
        if self.gpu is None:
            return "none needed"
        copies = self.num_blocks * self.block_bytes + NUM_SNAPSHOTS * self.slot_bytes
        return f"{shown_bytes(copies)} of /dev/shm, blocks and {NUM_SNAPSHOTS} window states"


def pool_sizes(
    layout: CacheLayout, config: NodeConfig, device: torch.device = CPU, before: int = 0
) -> PoolSizes:
    """Split the rank's budget into state slots (one a running sequence) and blocks.

    The budget is worker.kv_bytes, or this rank's share of what is free in memory and in /dev/shm; never
    more blocks than all running sequences at full length could use.

    Args:
        before: blocks of the worker that sat here before. This one gets as many, however little is free
            just now: what was accepted must fit.

    Raises ConfigError, with the numbers, when not even one sequence of a block would fit, or what was asked
    for does not fit the GPU; NoRoom when it would if other processes held nothing there, or in /dev/shm.
    """
    num_slots = config.scheduler.max_num_seqs
    longest = -(-layout.config.max_positions // BLOCK_TOKENS)
    gpu = None if device.type == "cpu" else GpuPlan.of(layout.config, config, device)
    budget = config.worker.kv_bytes
    if not budget:
        budget = gpu.room - gpu.total // _SPARE_SHARE if gpu else free_share(config.ranks)
    num_blocks = config.worker.num_blocks or before
    if num_blocks == 0:
        room = budget - num_slots * layout.slot_bytes
        num_blocks = min(room // layout.block_bytes, num_slots * longest + 1)
    if gpu is not None:
        _check_gpu(gpu, layout, num_slots, max(num_blocks, 2))
    if num_blocks < 2:
        need = num_slots * layout.slot_bytes + 2 * layout.block_bytes
        if gpu is None and not config.worker.kv_bytes:
            _check_shm(need, num_slots, config.ranks)
        raise ConfigError(
            f"a rank has {budget} bytes for caches, {num_slots} state slots and two blocks need {need}:"
            " raise worker.kv_bytes, lower scheduler.max_num_seqs, or free memory"
        )
    stored = gpu is None or (
        config.kvstore.enabled and _fits_in_shm(layout, num_blocks, config.ranks)
    )
    return PoolSizes(
        num_blocks, num_slots, layout.block_bytes, layout.slot_bytes, budget, stored, gpu
    )


def _check_gpu(gpu: GpuPlan, layout: CacheLayout, num_slots: int, num_blocks: int) -> None:
    """Raises NoRoom or ConfigError unless the GPU has room for the pools."""
    slots = num_slots * layout.slot_bytes
    need, fit = slots + num_blocks * layout.block_bytes, (gpu.room - slots) // layout.block_bytes
    if need <= gpu.room:
        return
    advice = "lower scheduler.max_num_seqs or scheduler.max_num_batched_tokens"
    if fit >= 2:
        advice = f"{fit - 1} blocks would fit, of {BLOCK_TOKENS} tokens: lower worker.num_blocks"
        advice += " or worker.kv_bytes"
    raise gpu.refusal(f"{num_blocks - 1} KV blocks and {num_slots} state slots", need, advice)


def _check_shm(need: int, num_slots: int, ranks: int) -> None:
    """Raises NoRoom or ConfigError where it is /dev/shm that leaves a rank less than `need`."""
    shm, all_ranks = shutil.disk_usage(SHM), need * _FREE_SHARE * ranks
    if shm.free >= all_ranks:
        return
    text = (
        f"{SHM} has {shown_bytes(shm.free)} free of {shown_bytes(shm.total)}, and a rank's caches take"
        f" 1/{_FREE_SHARE * ranks} of that: {num_slots} state slots and two blocks need {need} bytes, so"
        f" {shown_bytes(all_ranks)} must be free:"
    )
    advice = "set worker.kv_bytes, lower scheduler.max_num_seqs, or give the container a larger --shm-size"
    if all_ranks <= shm.total:
        raise NoRoom(f"{text} free some of it, {advice}")
    raise ConfigError(f"{text} {advice}")


def _fits_in_shm(layout: CacheLayout, num_blocks: int, ranks: int) -> bool:
    copies = num_blocks * layout.block_bytes + NUM_SNAPSHOTS * layout.slot_bytes
    return copies * ranks <= _SHM_SHARE * shutil.disk_usage(SHM).free


def free_share(ranks: int) -> int:
    """One rank's part of a quarter of what is free, here and in /dev/shm, where the blocks lie."""
    return min(available_bytes(), shutil.disk_usage(SHM).free) // (_FREE_SHARE * ranks)
