"""Loading a checkpoint: one rank's share of the experts, and everything else in full."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.matrix import Matrix
from phalanx.kernels.reference.engram import gather_on_host
from phalanx.kernels.reference.quant import dequant_fp4, dequant_fp8_block
from phalanx.kernels.registry import interpreted
from phalanx.protocol.errors import NoRoom
from phalanx.protocol.placement import EMPTY
from phalanx.worker_svc.model.caches import CPU
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import (
    NOT_LOADED,
    expert_bytes,
    gpu_bytes,
    held_bytes,
    packs_experts,
    slot_bytes,
)
from phalanx.worker_svc.model.memory import available_bytes, shown_bytes
from phalanx.worker_svc.model.shards import Checkpoint, CheckpointError, Held
from phalanx.worker_svc.model.tensors import expert_names, layer_prefix, num_experts
from phalanx.worker_svc.model.token_map import engram_token_map

_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
}

Progress = Callable[[int, int], None]  # bytes read, bytes to read
ExpertSlots = Sequence[Sequence[int]]  # [layers + draft stages][slots] -> expert
Expert = tuple[Tensor, Tensor, Tensor]  # w1 (gate), w3 (up), w2 (down), float32 [out, in]
Packed = tuple[Tensor, Tensor]  # codes and ue8m0 scales of a matrix, as stored


class Weights:
    """The tensors of one rank.

    Names are those of the file without `.weight`: `weights["layers.3.attn.wq_a"]`. Draft stages
    are layers, too: stage s is layer `num_hidden_layers + s` wherever a layer number is asked for.
    """

    def __init__(self, checkpoint: Checkpoint, *, dequantize: bool) -> None:
        self.config: ModelConfig = checkpoint.config
        self.dequantize = dequantize
        self.token_map = torch.from_numpy(_token_map(checkpoint))  # int64 [vocab]
        self.checkpoint = checkpoint
        self._plain: dict[str, Tensor] = {}
        self._linears: dict[str, Tensor | None] = {}  # None: handed over by `take`
        self._slots: list[list[int]] = []
        self._experts: list[Expert] = []  # per layer, stacked along slots; empty if packed
        self.packs_experts = packs_experts(self.config)
        self.device = CPU

    def take_matrix(self, name: str) -> Matrix:
        """A weight that rows are multiplied with, [out, in], in the form this device multiplies."""
        return self.take(name)

    def __getitem__(self, name: str) -> Tensor:
        """A plain tensor (bf16 or float32), or a quantized linear as float32 [out, in].

        Raises:
            KeyError: no such tensor was loaded.
        """
        if name in self._plain:
            return self._plain[name]
        linear = self._linears[name]
        return dequant_fp8_block(*self.packed(name)) if linear is None else linear

    def take(self, name: str) -> Tensor:
        """A tensor as float32 memory of the caller's own, which is not kept here as well."""
        if name in self._plain:
            # Copied even if it is float32: a mapped tensor's alignment would depend on the file.
            return self._plain[name].to(torch.float32, copy=True).contiguous()
        linear = self[name]
        self._linears[name] = None
        return linear

    def __contains__(self, name: str) -> bool:
        return name in self._plain or name in self._linears

    def names(self) -> list[str]:
        """What `[]` gives."""
        return [*self._plain, *self._linears]

    def is_quantized(self, name: str) -> bool:
        """Whether the linear's input must go through Q8 first (stored as FP8 or FP4)."""
        spec = self.checkpoint.specs.get(f"{name}.weight")
        return spec is not None and spec.dtype in ("F8_E4M3", "I8")

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes and ue8m0 scales (uint8) of a quantized tensor, as stored, mapped from the file."""
        return self._mapped(f"{name}.weight"), self._mapped(f"{name}.scale")

    def slots(self, layer: int) -> tuple[int, ...]:
        """The expert that each slot of the layer holds."""
        return tuple(self._slots[layer])

    def expert(self, layer: int, slot: int) -> Expert:
        """The matrices of a slot, float32: w1 [inter, dim], w3 [inter, dim], w2 [dim, inter]."""
        w1, w3, w2 = (self.expert_matrices(layer, part, slice(slot, slot + 1)) for part in range(3))
        return w1[0], w3[0], w2[0]

    def expert_matrices(self, layer: int, part: int, slots: slice) -> Tensor:
        """w1, w3 or w2 (part 0, 1 or 2) of neighbouring slots: float32 [slots, out, in]."""
        if not self.packs_experts:
            return self._experts[layer][part][slots]
        names = [
            expert_names(self.config, layer, expert)[part] for expert in self._slots[layer][slots]
        ]
        matrices = [dequant_fp4(*self.packed(name)) for name in names]
        return torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)

    def expert_stack(self, layer: int) -> Expert:
        """The matrices of all slots of the layer: [slots, out, in] each."""
        w1, w3, w2 = (self.expert_matrices(layer, part, slice(None)) for part in range(3))
        return w1, w3, w2

    def load_expert(self, layer: int, expert: int) -> Expert | None:
        """Read one expert from the checkpoint, without putting it anywhere. Safe in any thread.

        None where experts stay packed: there is nothing to hold.
        """
        if self.packs_experts:
            return None
        w1, w3, w2 = expert_names(self.config, layer, expert)
        return (
            dequant_fp4(*self.packed(w1)),
            dequant_fp4(*self.packed(w3)),
            dequant_fp4(*self.packed(w2)),
        )

    def put_expert(self, layer: int, slot: int, expert: int, matrices: Expert | None) -> None:
        """Overwrite a slot. The caller sees to it that no step reads the slot meanwhile."""
        if matrices is not None:
            for stack, matrix in zip(self._experts[layer], matrices, strict=True):
                stack[slot].copy_(matrix)
        self._slots[layer][slot] = expert

    def read_matrix(self, layer: int, expert: int, part: int) -> Packed:
        """Codes and scales of an expert's w1, w3 or w2, read from the checkpoint anew. Safe in any thread."""
        name = expert_names(self.config, layer, expert)[part]
        codes, scales = (
            self._typed(full, memoryview(self.checkpoint.read_anew(full)))
            for full in (f"{name}.weight", f"{name}.scale")
        )
        return codes, scales

    def holds(self, layer: int, slot: int, part: int, stored: Packed) -> bool:
        """Whether a matrix of a slot has, bit for bit, what `put_expert` would make of these."""
        if self.packs_experts:
            name = expert_names(self.config, layer, self._slots[layer][slot])[part]
            return all(map(torch.equal, self.packed(name), stored))
        held = self._experts[layer][part][slot].view(torch.int32)
        return torch.equal(held, dequant_fp4(*stored).view(torch.int32))

    def flip_bit(self, layer: int, slot: int) -> None:
        """Make one bit of a slot wrong: for faults on purpose."""
        if self.packs_experts:  # the page becomes this process's own
            names = expert_names(self.config, layer, self._slots[layer][slot])
            self.packed(names[2])[0].view(-1)[0] ^= 1
        else:
            values = self._experts[layer][2][slot].view(-1)
            values.view(torch.int32)[values.abs().argmax()] ^= 1 << 23  # twice, or half, as much

    def slot_room(self, ranks: int, keep: int) -> int:
        """Expert slots of each backbone layer that there is memory for, with those that are there; at most all.

        Args:
            ranks: that share the memory which is free now.
            keep: bytes of it that are needed for something else.
        """
        experts = self.config.n_routed_experts
        if self.packs_experts:  # slots point into the page cache
            return experts
        layers = self._experts[: self.config.num_hidden_layers]
        have = min(len(held) for held in self._slots[: self.config.num_hidden_layers])
        each = sum(stack[0].nbytes for layer in layers for stack in layer)
        return min(experts, have + max(0, available_bytes() - keep) // (ranks * each))

    def check_room(self, slots: int) -> None:
        """Raises NoRoom where it can be told beforehand that no layer could be widened to so many slots."""

    def widen(self, layer: int, slots: int) -> None:
        """Make room for more experts; the new slots hold none (-1). Fewer slots are never made."""
        have = len(self._slots[layer])
        if slots <= have:
            return
        self._slots[layer] += [-1] * (slots - have)
        if not self.packs_experts:
            w1, w3, w2 = (
                torch.cat((stack, stack.new_zeros(slots - have, *stack.shape[1:])))
                for stack in self._experts[layer]
            )
            self._experts[layer] = (w1, w3, w2)

    def adopt(self, held: Held) -> None:
        """Take what is read from now on from the same shards in memory."""
        self.checkpoint.adopt(held)

    def engram_place(self, layer: int) -> torch.device:
        """Where the ids of an Engram table's rows are wanted."""
        return CPU

    def engram_rows(self, layer: int, ids: Tensor) -> Tensor:
        """Rows of an Engram table: int64 [...] -> bf16 [..., engram_head_dim]."""
        codes, scales = self.packed(f"layers.{layer}.engram.embed")
        return gather_on_host(codes, scales, ids, CPU)

    def _mapped(self, name: str) -> Tensor:
        return self._typed(name, self.checkpoint.view(name))

    def _typed(self, name: str, stored: memoryview) -> Tensor:
        spec = self.checkpoint.specs[name]
        raw = torch.frombuffer(stored, dtype=torch.uint8)
        dtype = _DTYPES[spec.dtype]
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # a file may place tensors at any byte
        return raw.view(dtype).view(spec.shape)

    def _load_plain(self, name: str) -> int:
        """Load one tensor of the file; a scale comes with its weight. Returns the bytes read."""
        spec = self.checkpoint.specs[name]
        stem = name.removesuffix(".weight")
        if spec.dtype in ("BF16", "F32"):
            self._plain[stem] = self._mapped(name)
        elif self.dequantize and spec.dtype == "F8_E4M3":
            self._linears[stem] = dequant_fp8_block(*self.packed(stem))
        return spec.num_bytes

    def _load_experts(self, layer: int, experts: Sequence[int]) -> int:
        c, slots = self.config, len(experts)
        self._slots.append(list(experts))
        self._make_slots(slots)
        for slot, expert in enumerate(experts):
            if expert != EMPTY:
                self.put_expert(layer, slot, expert, self.load_expert(layer, expert))
        return slots * expert_bytes(c)

    def _make_slots(self, slots: int) -> None:
        c = self.config
        if not self.packs_experts:
            up = (slots, c.moe_intermediate_size, c.hidden_size)
            down = (slots, c.hidden_size, c.moe_intermediate_size)
            self._experts.append((torch.empty(up), torch.empty(up), torch.empty(down)))


def load_checkpoint(
    directory: Path,
    expert_slots: ExpertSlots | None = None,
    *,
    dequantize: bool = True,
    memory_limit_bytes: int | None = None,
    held: Held | None = None,
    progress: Progress = lambda done, total: None,
    device: torch.device = CPU,
    dense: Weights | None = None,
) -> Weights:
    """Load what one rank needs.

    Args:
        directory: config.json, tokenizer.json, the safetensors index and its shards.
        expert_slots: For every layer and draft stage the experts of this rank's slots, in slot
            order, EMPTY for a slot that is made and not filled; None loads all experts, expert e in
            slot e.
        dequantize: Hold linears and experts as float32. Otherwise quantized tensors are only
            mapped, `packed` gives them, and no expert has a slot.
        memory_limit_bytes: Refuse to need more; None asks the machine what is available.
        held: Shards that are in memory already (`HostWeights`).
        progress: Called with (bytes read, bytes to read).
        device: A GPU holds everything as it is stored; `dequantize` must stay True.
        dense: What `load_dense` gave for this checkpoint: it gets the experts, and is returned.

    Raises:
        ConfigError, CheckpointError: the checkpoint is unusable, or memory does not suffice.
        NoRoom: a GPU's memory would suffice if nobody else held some.
    """
    checkpoint = Checkpoint(directory, held) if dense is None else dense.checkpoint
    config = checkpoint.config
    slots = _all_experts(config) if expert_slots is None else expert_slots
    _check_slots(config, slots)
    if device.type == "cpu":
        _check_memory(checkpoint, slots, dequantize, memory_limit_bytes)
    else:
        _check_gpu_memory(checkpoint, slots, device, memory_limit_bytes)
    weights = _weights(checkpoint, dequantize, device) if dense is None else dense
    names = _dense_names(checkpoint) if dense is None else []
    total = sum(checkpoint.specs[name].num_bytes for name in names)
    if dequantize:
        total += sum(len(layer) for layer in slots) * expert_bytes(config)
    done = 0
    for name in names:
        done += weights._load_plain(name)
        progress(done, total)
    for layer, experts in enumerate(slots if dequantize else ()):
        done += weights._load_experts(layer, experts)
        progress(done, total)
    return weights


def load_dense(directory: Path, held: Held) -> Weights:
    """Load for a CPU what every rank needs: all but the experts. Raises as `load_checkpoint`."""
    checkpoint = Checkpoint(directory, held)
    weights = Weights(checkpoint, dequantize=True)
    for name in _dense_names(checkpoint):
        weights._load_plain(name)
    return weights


def _dense_names(checkpoint: Checkpoint) -> list[str]:
    return [name for name, spec in checkpoint.specs.items() if spec.part not in NOT_LOADED]


def _weights(checkpoint: Checkpoint, dequantize: bool, device: torch.device) -> Weights:
    if device.type == "cpu" and not interpreted():
        return Weights(checkpoint, dequantize=dequantize)
    from phalanx.worker_svc.model.gpu_weights import GpuWeights

    return GpuWeights(checkpoint, device)


def _all_experts(config: ModelConfig) -> ExpertSlots:
    layers = config.num_hidden_layers + config.draft_stages
    return [range(num_experts(config, layer)) for layer in range(layers)]


def _check_slots(config: ModelConfig, slots: ExpertSlots) -> None:
    layers = config.num_hidden_layers + config.draft_stages
    if len(slots) != layers:
        raise CheckpointError(f"expert slots for {len(slots)} layers; the model has {layers}")
    for layer, experts in enumerate(slots):
        limit = num_experts(config, layer)
        wrong = [expert for expert in experts if not (0 <= expert < limit or expert == EMPTY)]
        if wrong:
            at = layer_prefix(config, layer)
            raise CheckpointError(f"{at} has experts 0..{limit - 1}; slots ask for {wrong[:8]}")


def _check_memory(
    checkpoint: Checkpoint, slots: ExpertSlots, dequantize: bool, limit: int | None
) -> None:
    need = held_bytes(checkpoint.config, [len(layer) for layer in slots]) if dequantize else 0
    have = available_bytes() if limit is None else limit
    if need > have:
        most = max(len(layer) for layer in slots)
        packed = packs_experts(checkpoint.config)
        experts = "beside its experts" if packed else f"with {most} experts a layer"
        advice = "use a smaller model" if packed else "use more ranks, or a smaller model"
        raise CheckpointError(
            f"{checkpoint.directory} needs {shown_bytes(need)} of memory as float32 {experts}; "
            f"{shown_bytes(have)} are available: {advice}"
        )


def _check_gpu_memory(
    checkpoint: Checkpoint, slots: ExpertSlots, device: torch.device, limit: int | None
) -> None:
    """The weights must leave room for caches and for what a step needs."""
    config = checkpoint.config
    need = gpu_bytes(config, [len(layer) for layer in slots])
    have, total, where = limit or 0, 0, "as limited"
    if limit is None:
        have, total = torch.cuda.mem_get_info(device)
        where = f"{torch.cuda.get_device_name(device)}, {shown_bytes(total)}"
    if need > have:
        most = max(len(layer) for layer in slots)
        fits = _experts_that_fit(config, slots, have)
        advice = (
            f"{fits} experts a layer would fit: use more ranks"
            if fits
            else "not even one expert a layer would fit: use a smaller model"
        )
        text = (
            f"{checkpoint.directory} needs {shown_bytes(need)} of GPU memory with {most} experts a "
            f"layer; {shown_bytes(have)} are free ({where}): {advice}"
        )
        if need <= total:
            raise NoRoom(f"{text}, or end the other processes on this GPU")
        raise CheckpointError(text)


def _experts_that_fit(config: ModelConfig, slots: ExpertSlots, have: int) -> int:
    """Of every layer that shall have any."""
    counts = [len(layer) for layer in slots]
    bare = gpu_bytes(config, counts) - slot_bytes(config) * sum(counts)
    return max(0, (have - bare) // (slot_bytes(config) * sum(count > 0 for count in counts)))


def _token_map(checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    config = checkpoint.config
    try:
        ids = engram_token_map(checkpoint.tokenizer, config.vocab_size)
    except OSError as error:
        raise CheckpointError(f"cannot read {checkpoint.tokenizer}: {error.strerror}") from error
    count = int(ids.max()) + 1
    if count != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{checkpoint.tokenizer} gives {count} Engram ids; config.json says "
            f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}: they do not belong together"
        )
    return ids
