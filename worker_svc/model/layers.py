"""A layer's weights in the form the forward pass reads: float32, [out, in], joined where inputs agree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.reference.hyper import MixWeights
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.tensors import layer_prefix


@dataclass(frozen=True)
class CompressorWeights:
    wkv: Tensor  # [d, D], ratio 2: [2d, D] with the score projection below
    norm: Tensor  # [d]


@dataclass(frozen=True)
class IndexKeyWeights:
    wk: Tensor  # [index dim, d]
    norm: Tensor  # [index dim]


@dataclass(frozen=True)
class IndexerWeights:
    wq: Tensor  # [heads * index dim, q_lora]
    weights_proj: Tensor  # [heads, D]


@dataclass(frozen=True)
class AttentionWeights:
    norm: Tensor  # [D]
    q_kv: Tensor  # [q_lora + d, D]
    q_norm: Tensor  # [q_lora]
    wq_b: Tensor  # [heads * d, q_lora]
    kv_norm: Tensor  # [d]
    sink: Tensor  # [heads]
    wo_a: Tensor  # [groups, o_lora, heads per group * d]
    wo_b: Tensor  # [D, groups * o_lora]
    compressor: CompressorWeights | None
    index_keys: IndexKeyWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    norm: Tensor  # [D]
    gate: Tensor  # [experts, D]
    bias: Tensor  # [experts]
    shared_up: Tensor  # [2 * inter, D], the gate half first
    shared_down: Tensor  # [D, inter]


@dataclass(frozen=True)
class EngramWeights:
    wkv: Tensor  # [(copies + 1) * D, columns * dim]
    gate: Tensor  # [copies, D]


@dataclass(frozen=True)
class LayerWeights:
    attention_mix: MixWeights
    attention: AttentionWeights
    moe_mix: MixWeights
    moe: MoeWeights
    engram: EngramWeights | None


def layer_weights(weights: Weights, layer: int) -> LayerWeights:
    """Collect a layer; draft stage s is layer num_hidden_layers + s."""
    config = weights.config
    at = layer_prefix(config, layer)
    copies = config.hc_mult

    def get(name: str) -> Tensor:
        return weights.take(f"{at}.{name}")

    def mix(part: str) -> MixWeights:
        fn, scale, base = (get(f"hc_{part}_{name}") for name in ("fn", "scale", "base"))
        return MixWeights.from_stored(fn, scale, base, copies)

    moe = MoeWeights(
        norm=get("ffn_norm"),
        gate=get("ffn.gate"),
        bias=get("ffn.gate.bias"),
        shared_up=torch.cat((get("ffn.shared_experts.w1"), get("ffn.shared_experts.w3"))),
        shared_down=get("ffn.shared_experts.w2"),
    )
    engram = None
    if config.is_engram(layer):
        engram = EngramWeights(get("engram.wkv"), get("engram.q_weight") * get("engram.k_weight"))
    return LayerWeights(mix("attn"), _attention(weights, layer), mix("ffn"), moe, engram)


def _attention(weights: Weights, layer: int) -> AttentionWeights:
    config = weights.config
    at = layer_prefix(config, layer)

    def get(name: str) -> Tensor:
        return weights.take(f"{at}.{name}")

    compressor, index_keys, indexer = None, None, None
    if config.is_kv_owner(layer):
        wkv = get("attn.compressor.wkv")
        if config.ratio(layer) == 2:
            wkv = torch.cat((wkv, get("attn.compressor.wgate")))
        compressor = CompressorWeights(wkv, get("attn.compressor.norm"))
        index_keys = IndexKeyWeights(get("attn.indexer.wk"), get("attn.indexer.k_norm"))
    if config.is_index_owner(layer):
        indexer = IndexerWeights(get("attn.indexer.wq_b"), get("attn.indexer.weights_proj"))
    return AttentionWeights(
        norm=get("attn_norm"),
        q_kv=torch.cat((get("attn.wq_a"), get("attn.wkv"))),
        q_norm=get("attn.q_norm"),
        wq_b=get("attn.wq_b"),
        kv_norm=get("attn.kv_norm"),
        sink=get("attn.attn_sink"),
        wo_a=get("attn.wo_a").view(config.o_groups, config.o_lora_rank, -1),
        wo_b=get("attn.wo_b"),
        compressor=compressor,
        index_keys=index_keys,
        indexer=indexer,
    )
