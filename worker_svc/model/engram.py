"""The Engram sublayer: n-gram rows of a large table, gated into each copy of the stream."""

import torch
from torch import Tensor

from phalanx.kernels.ops import gate_add_value, hash_rows, linear
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.layers import EngramWeights
from phalanx.worker_svc.model.step import Step


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

    def units(self, step: Step) -> Tensor:
        """Compressed ids of each row's token and those before it, nearest first: int64 [P, n], on the CPU."""
        rows = step.host
        back = rows.positions.unsqueeze(1) - torch.arange(self._config.engram_max_ngram_size)
        ids = step.pools.history[rows.slots.unsqueeze(1), back.clamp(min=0)]
        return torch.where(back >= 0, self._weights.token_map[ids.to(torch.int64)], self._pad)

    def apply(
        self, step: Step, weights: EngramWeights, layer: int, units: Tensor, h: Tensor
    ) -> Tensor:
        """The stream after the sublayer, bf16 values [P, copies, D]."""
        config = self._config
        i = config.engram_layer_ids.index(layer)
        multipliers, primes, offsets = self._hashes[i]
        ids = hash_rows(units.to(multipliers.device), multipliers, primes, offsets)
        step.note("engram_ids", layer, ids)
        found = self._weights.engram_rows(layer, ids).float().flatten(1)
        kv = linear(found, weights.wkv)
        kv = kv.view(-1, config.hc_mult + 1, config.hidden_size)
        key, value = kv[:, :-1], kv[:, -1]
        h, gates = gate_add_value(h, key, value, weights.gate, config.rms_norm_eps)
        step.note("engram_gate", layer, gates)
        step.note("engram_out", layer, h)
        return h
