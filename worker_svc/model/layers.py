"""A layer's weights in the form the forward pass reads: [out, in], joined where inputs agree.

On a CPU everything is float32. On a GPU matrices stay as they are stored; what is not a matrix is float32.
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.kernels.matrix import Matrix, join_rows
from phalanx.kernels.reference.hyper import MixWeights
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.tensors import layer_prefix


@dataclass(frozen=True)
class CompressorWeights:
    wkv: Matrix  # [d, D], ratio 2: [2d, D] with the score projection below
    norm: Tensor  # [d]


@dataclass(frozen=True)
class IndexKeyWeights:
    wk: Matrix  # [index dim, d]
    norm: Tensor  # [index dim]


@dataclass(frozen=True)
class IndexerWeights:
    wq: Matrix  # [heads * index dim, q_lora]
    weights_proj: Matrix  # [heads, D]


@dataclass(frozen=True)
class AttentionWeights:
    norm: Tensor  # [D]
    q_kv: Matrix  # [q_lora + d, D]
    q_norm: Tensor  # [q_lora]
    wq_b: Matrix  # [heads * d, q_lora]
    kv_norm: Tensor  # [d]
    sink: Tensor  # [heads]
    wo_a: Matrix  # [groups, o_lora, heads per group * d]; quantized [groups * o_lora, ...]
    wo_b: Matrix  # [D, groups * o_lora]
    compressor: CompressorWeights | None
    index_keys: IndexKeyWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    norm: Tensor  # [D]
    gate: Matrix  # [experts, D]
    bias: Tensor  # [experts]
    shared_up: Matrix  # [2 * inter, D], the gate half first
    shared_down: Matrix  # [D, inter]


@dataclass(frozen=True)
class EngramWeights:
    wkv: Matrix  # [(copies + 1) * D, columns * dim]
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

    def matrix(name: str) -> Matrix:
        return weights.take_matrix(f"{at}.{name}")

    def mix(part: str) -> MixWeights:
        fn, scale, base = (get(f"hc_{part}_{name}") for name in ("fn", "scale", "base"))
        return MixWeights.from_stored(fn, scale, base, copies)

    moe = MoeWeights(
        norm=get("ffn_norm"),
        gate=matrix("ffn.gate"),
        bias=get("ffn.gate.bias"),
        shared_up=join_rows(matrix("ffn.shared_experts.w1"), matrix("ffn.shared_experts.w3")),
        shared_down=matrix("ffn.shared_experts.w2"),
    )
    engram = None
    if config.is_engram(layer):
        engram = EngramWeights(
            matrix("engram.wkv"), get("engram.q_weight") * get("engram.k_weight")
        )
    return LayerWeights(mix("attn"), _attention(weights, layer), mix("ffn"), moe, engram)


def _attention(weights: Weights, layer: int) -> AttentionWeights:
    config = weights.config
    at = layer_prefix(config, layer)

    def get(name: str) -> Tensor:
        return weights.take(f"{at}.attn.{name}")

    def matrix(name: str) -> Matrix:
        return weights.take_matrix(f"{at}.attn.{name}")

    compressor, index_keys, indexer = None, None, None
    if config.is_kv_owner(layer):
        wkv = matrix("compressor.wkv")
        if config.ratio(layer) == 2:
            wkv = join_rows(wkv, matrix("compressor.wgate"))
        compressor = CompressorWeights(wkv, get("compressor.norm"))
        index_keys = IndexKeyWeights(matrix("indexer.wk"), get("indexer.k_norm"))
    if config.is_index_owner(layer):
        indexer = IndexerWeights(matrix("indexer.wq_b"), matrix("indexer.weights_proj"))
    wo_a = matrix("wo_a")
    if isinstance(wo_a, Tensor):
        wo_a = wo_a.view(config.o_groups, config.o_lora_rank, -1)
    return AttentionWeights(
        norm=weights.take(f"{at}.attn_norm"),
        q_kv=join_rows(matrix("wq_a"), matrix("wkv")),
        q_norm=get("q_norm"),
        wq_b=matrix("wq_b"),
        kv_norm=get("kv_norm"),
        sink=get("attn_sink"),
        wo_a=wo_a,
        wo_b=matrix("wo_b"),
        compressor=compressor,
        index_keys=index_keys,
        indexer=indexer,
    )
