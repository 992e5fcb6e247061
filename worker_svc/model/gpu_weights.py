"""A rank's weights on its GPU: matrices and experts as the checkpoint stores them, tables with the host."""

import torch
from torch import Tensor

from phalanx.kernels.matrix import Fp8Matrix, Matrix
from phalanx.kernels.ops import ExpertPool, expert_pool, gather
from phalanx.kernels.reference.quant import dequant_engram_rows
from phalanx.protocol.errors import NoRoom
from phalanx.worker_svc.model.caches import CPU
from phalanx.worker_svc.model.checkpoint import Expert, Packed, Weights
from phalanx.worker_svc.model.footprint import slot_bytes
from phalanx.worker_svc.model.host_tables import PickedRows, readable_by_gpu
from phalanx.worker_svc.model.memory import shown_bytes
from phalanx.worker_svc.model.shards import Checkpoint
from phalanx.worker_svc.model.tensors import expert_names


class GpuWeights(Weights):
    """The tensors of one rank on one GPU.

    Nothing is held twice: what `take` and `take_matrix` hand over is copied from the checkpoint when
    asked for, and experts are written into the layer's slots.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__(checkpoint, dequantize=False)
        self.device = device
        self._pools: list[ExpertPool] = []
        self._readable: dict[int, bool] = {}  # Engram tables that kernels read in the host's memory
        # Those, where they were pinned: another copy that is mapped later (`adopt`) is not.
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A plain tensor (bf16 or float32), or a quantized linear as float32 [out, in], on the GPU."""
        if name in self._plain:
            return self._plain[name].to(self.device)
        return self._fp8(name).dequantize()

    def take(self, name: str) -> Tensor:
        return self[name].float()

    def take_matrix(self, name: str) -> Matrix:
        return self[name] if name in self._plain else self._fp8(name)

    def _fp8(self, name: str) -> Fp8Matrix:
        codes, scales = self.packed(name)
        return Fp8Matrix(codes, scales).to(self.device)  # checked on the host

    def engram_place(self, layer: int) -> torch.device:
        if layer not in self._readable:
            table = self._table(layer)
            self._readable[layer] = self.device.type == "cuda" and readable_by_gpu(*table)
            if self._readable[layer]:
                self._tables[layer] = table
        return self.device if self._readable[layer] else CPU

    def engram_rows(self, layer: int, ids: Tensor) -> Tensor:
        """Rows of a table, int64 [...] in their place -> bf16 [..., engram_head_dim] on the GPU."""
        codes, scales = self._table(layer)
        if ids.is_cuda:
            return gather(codes, scales, ids)
        picked = self.picked_rows(layer, ids.numel(), pinned=False)
        picked.pick(ids.flatten())
        rows = dequant_engram_rows(picked.codes.to(self.device), picked.scales.to(self.device))
        return rows.view(*ids.shape, -1)

    def picked_rows(self, layer: int, count: int, *, pinned: bool) -> PickedRows:
        """A place for `count` rows of a table that the host has to pick."""
        return PickedRows(*self._table(layer), count, pinned=pinned)

    def _table(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer in self._tables:
            return self._tables[layer]
        return self.packed(f"layers.{layer}.engram.embed")

    def pool(self, layer: int) -> ExpertPool:
        """The slots of a layer's experts."""
        return self._pools[layer]

    def load_expert(self, layer: int, expert: int) -> Expert | None:
        """Nothing: the checkpoint's bytes are read when the slot is filled."""
        return None

    def put_expert(self, layer: int, slot: int, expert: int, matrices: Expert | None) -> None:
        parts = [
            part.to(self.device)
            for name in expert_names(self.config, layer, expert)
            for part in self.packed(name)
        ]
        self._slots[layer][slot] = -1  # what fails half-way leaves no expert
        self._pools[layer].put(slot, *parts)
        self._slots[layer][slot] = expert

    def holds(self, layer: int, slot: int, part: int, stored: Packed) -> bool:
        codes, scales = (tensor.to(self.device) for tensor in stored)
        return self._pools[layer].holds(slot, part, codes, scales)

    def flip_bit(self, layer: int, slot: int) -> None:
        self._pools[layer].flip_bit(slot)

    def slot_room(self, ranks: int, keep: int) -> int:
        """As of any weights; a GPU's memory is this rank's alone."""
        layers = self.config.num_hidden_layers
        have = [len(held) for held in self._slots[:layers]]
        each, free = slot_bytes(self.config), free_bytes(self.device) - keep
        # The old slots of one layer stay until they are copied.
        more = (free - each * max(have)) // (each * layers)
        return min(self.config.n_routed_experts, min(have) + max(0, more))

    def check_room(self, slots: int) -> None:
        """Raises NoRoom, with the numbers, unless every backbone layer can be widened to so many slots.
        Nothing was changed then."""
        have = [len(held) for held in self._slots[: self.config.num_hidden_layers]]
        added = sum(max(0, slots - count) for count in have)
        if not added:
            return
        # The old slots of one layer stay until they are copied.
        need = slot_bytes(self.config) * (added + max(have))
        free = free_bytes(self.device)
        if need > free:
            raise NoRoom(
                f"{slots} expert slots a layer, where there are {min(have)}, need {shown_bytes(need)} more"
                f" of GPU memory, {shown_bytes(free)} are left: keep more ranks, or lower"
                " worker.num_blocks or worker.kv_bytes"
            )

    def widen(self, layer: int, slots: int) -> None:
        have = len(self._slots[layer])
        if slots > have:
            self._pools[layer].widen(slots)  # there may be no room for it
            self._slots[layer] += [-1] * (slots - have)

    def _make_slots(self, num_slots: int) -> None:
        c = self.config
        pool = expert_pool(num_slots, c.hidden_size, c.moe_intermediate_size, self.device)
        self._pools.append(pool)


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory: what nobody holds, and what torch holds for later."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
