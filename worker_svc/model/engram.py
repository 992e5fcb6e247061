"""The Engram sublayer: n-gram rows of a large table, gated into each copy of the stream."""

import torch
from torch import Tensor

from phalanx.kernels.ops import add_value, engram_gate, linear
from phalanx.kernels.reference.engram import hash_rows
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.layers import EngramWeights
from phalanx.worker_svc.model.step import Step


class Engram:
    """Hash constants and tables of all Engram layers."""

    def __init__(self, weights: Weights) -> None:
        config = weights.config
        self._weights = weights
        self._config = config
        self._multipliers = torch.from_numpy(config.engram_multipliers)
        self._primes = torch.from_numpy(config.engram_primes)
        self._offsets = torch.from_numpy(config.engram_offsets)
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
        ids = hash_rows(units, self._multipliers[i], self._primes[i], self._offsets[i])
        step.note("engram_ids", layer, ids)
        found = self._weights.engram_rows(layer, ids).float().flatten(1)
        kv = linear(found, weights.wkv)
        kv = kv.view(-1, config.hc_mult + 1, config.hidden_size)
        key, value = kv[:, :-1], kv[:, -1]
        gates = engram_gate(h, key, weights.gate, config.rms_norm_eps)
        step.note("engram_gate", layer, gates)
        h = add_value(h, gates, value)
        step.note("engram_out", layer, h)
        return h
