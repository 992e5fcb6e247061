"""The Engram sublayer: n-gram rows of a large table, gated into each copy of the stream."""

import torch
from torch import Tensor

from phalanx.kernels.ops import gate_add_value, gather, hash_rows, linear
from phalanx.worker_svc.model.batch import StepRows
from phalanx.worker_svc.model.caches import CPU
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.gpu_weights import GpuWeights
from phalanx.worker_svc.model.layers import EngramWeights
from phalanx.worker_svc.model.step import Picked, Step


class Engram:
    """Hash constants and tables of all Engram layers."""

    def __init__(self, weights: Weights) -> None:
        config = weights.config
        self._weights = weights
        self._config = config
        self._hashes: list[
            tuple[Tensor, ...]
        ] = []  # multipliers, primes, offsets, where ids are wanted
        for i, layer in enumerate(config.engram_layer_ids):
            place = weights.engram_place(layer)
            parts = config.engram_multipliers, config.engram_primes, config.engram_offsets
            self._hashes.append(tuple(torch.from_numpy(part[i]).to(place) for part in parts))
        self._pad = weights.token_map[config.engram_pad_token_id]

    def units(self, rows: StepRows, history: Tensor) -> Tensor:
        """Compressed ids of each row's token and those before it, nearest first: int64 [P, n], on the CPU.

        Args:
            rows: on the CPU.
            history: int32 [slots, positions], with the rows' own tokens.
        """
        back = rows.positions.unsqueeze(1) - torch.arange(self._config.engram_max_ngram_size)
        ids = history[rows.slots.unsqueeze(1), back.clamp(min=0)]
        return torch.where(back >= 0, self._weights.token_map[ids.to(torch.int64)], self._pad)

    def places(self, num_rows: int) -> dict[int, Picked]:
        """Where the host puts the rows of tables that only it can read, by layer, for steps of so many rows."""
        weights, columns = self._weights, self._config.engram_columns
        assert isinstance(weights, GpuWeights)
        found = {}
        for layer in self._config.engram_layer_ids:
            if weights.engram_place(layer) == CPU:
                device = weights.device
                pinned = device.type == "cuda"
                rows = weights.picked_rows(layer, num_rows * columns, pinned=pinned)
                here = torch.arange(num_rows * columns, device=device).view(num_rows, columns)
                found[layer] = Picked(rows, here)
        return found

    def pick(self, units: Tensor, places: dict[int, Picked]) -> None:
        """Put there what the rows need whose units these are: int64 [P, n], on the CPU."""
        for layer, place in places.items():
            place.rows.pick(self._ids(layer, (units, units)).flatten())

    def apply(self, step: Step, weights: EngramWeights, layer: int, h: Tensor) -> Tensor:
        """The stream after the sublayer, bf16 values [P, copies, D]."""
        config = self._config
        picked = step.engram_rows.get(layer)
        if picked is not None:
            found = gather(picked.rows.codes, picked.rows.scales, picked.ids)
        else:
            ids = self._ids(layer, step.units)
            step.note("engram_ids", layer, ids)
            found = self._weights.engram_rows(layer, ids)
        kv = linear(found.float().flatten(1), weights.wkv)
        kv = kv.view(-1, config.hc_mult + 1, config.hidden_size)
        key, value = kv[:, :-1], kv[:, -1]
        h, gates = gate_add_value(h, key, value, weights.gate, config.rms_norm_eps)
        step.note("engram_gate", layer, gates)
        step.note("engram_out", layer, h)
        return h

    def _ids(self, layer: int, units: tuple[Tensor, Tensor]) -> Tensor:
        """Rows of the layer's table, int64 [P, columns], where it is read."""
        constants = self._hashes[self._config.engram_layer_ids.index(layer)]
        here, there = units
        return hash_rows(here if constants[0].device == CPU else there, *constants)
