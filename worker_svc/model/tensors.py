"""Every tensor of a checkpoint as data: name, shape, dtype, and what it belongs to (model.md B)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.worker_svc.model.config import ModelConfig, VisionConfig

ITEM_BYTES: Final = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor. `part` groups tensors for accounts: attention, expert, engram_table, ..."""

    name: str
    shape: tuple[int, ...]  # as stored: two FP4 values are one I8 element
    dtype: str  # safetensors name
    part: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_params(self) -> int:
        """Weights stored here; scales are not parameters."""
        if self.dtype == "F8_E8M0":
            return 0
        return math.prod(self.shape) * (2 if self.dtype == "I8" else 1)


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors that a checkpoint of this configuration has, by name, in a fixed order."""
    return {spec.name: spec for spec in _all(config)}


def layer_prefix(config: ModelConfig, layer: int) -> str:
    """Name prefix of a layer; draft stages count on after the last backbone layer."""
    depth = config.num_hidden_layers
    return f"layers.{layer}" if layer < depth else f"mtp.{layer - depth}"


def num_experts(config: ModelConfig, layer: int) -> int:
    """Routed experts of a backbone layer or draft stage."""
    is_draft = layer >= config.num_hidden_layers
    return config.dspark_n_routed_experts if is_draft else config.n_routed_experts


def expert_names(config: ModelConfig, layer: int, expert: int) -> tuple[str, str, str]:
    """Names (without .weight) of an expert's gate, up and down matrices: w1, w3, w2."""
    prefix = f"{layer_prefix(config, layer)}.ffn.experts.{expert}"
    return f"{prefix}.w1", f"{prefix}.w3", f"{prefix}.w2"


def _all(c: ModelConfig) -> Iterator[TensorSpec]:
    yield _bf16("embed.weight", (c.vocab_size, c.hidden_size), "embedding")
    for layer in range(c.num_hidden_layers + c.draft_stages):
        yield from _layer(c, layer)
        if layer < c.num_hidden_layers:
            yield from _compressor(c, layer)
            yield from _indexer(c, layer)
            yield from _engram(c, layer)
    yield from _draft_heads(c)
    yield _bf16("norm.weight", (c.hidden_size,), "norm")
    yield _bf16("head.weight", (c.vocab_size, c.hidden_size), "head")
    if c.vision is not None:
        yield from _vision(c.vision, c.hidden_size)


def _bf16(name: str, shape: tuple[int, ...], part: str) -> TensorSpec:
    return TensorSpec(name, shape, "BF16", part)


def _f32(name: str, shape: tuple[int, ...], part: str) -> TensorSpec:
    return TensorSpec(name, shape, "F32", part)


def _fp8(name: str, out: int, into: int, part: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (out, into), "F8_E4M3", part)
    yield TensorSpec(f"{name}.scale", (-(-out // BLOCK), -(-into // BLOCK)), "F8_E8M0", part)


def _fp4(name: str, out: int, into: int, part: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (out, into // 2), "I8", part)
    yield TensorSpec(f"{name}.scale", (out, into // BLOCK), "F8_E8M0", part)


def _layer(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    at, dim = layer_prefix(c, layer), c.hidden_size
    yield _bf16(f"{at}.attn_norm.weight", (dim,), "norm")
    yield _bf16(f"{at}.ffn_norm.weight", (dim,), "norm")
    for sublayer in ("attn", "ffn"):
        yield _f32(f"{at}.hc_{sublayer}_fn", (c.mix_size, c.hc_mult * dim), "mhc")
        yield _f32(f"{at}.hc_{sublayer}_base", (c.mix_size,), "mhc")
        yield _f32(f"{at}.hc_{sublayer}_scale", (3,), "mhc")
    yield from _attention(c, f"{at}.attn")
    yield from _moe(c, layer, f"{at}.ffn")


def _attention(c: ModelConfig, at: str) -> Iterator[TensorSpec]:
    heads = c.num_attention_heads * c.head_dim
    lora = c.o_groups * c.o_lora_rank
    yield from _fp8(f"{at}.wq_a", c.q_lora_rank, c.hidden_size, "attention")
    yield _bf16(f"{at}.q_norm.weight", (c.q_lora_rank,), "norm")
    yield from _fp8(f"{at}.wq_b", heads, c.q_lora_rank, "attention")
    yield from _fp8(f"{at}.wkv", c.head_dim, c.hidden_size, "attention")
    yield _bf16(f"{at}.kv_norm.weight", (c.head_dim,), "norm")
    yield _f32(f"{at}.attn_sink", (c.num_attention_heads,), "attention")
    yield from _fp8(f"{at}.wo_a", lora, heads // c.o_groups, "attention")
    yield from _fp8(f"{at}.wo_b", c.hidden_size, lora, "attention")


def _moe(c: ModelConfig, layer: int, at: str) -> Iterator[TensorSpec]:
    dim, inter, experts = c.hidden_size, c.moe_intermediate_size, num_experts(c, layer)
    yield _bf16(f"{at}.gate.weight", (experts, dim), "router")
    yield _f32(f"{at}.gate.bias", (experts,), "router")
    yield _f32(f"{at}.gate.bias_vl", (experts,), "router")
    for expert in range(experts):
        w1, w3, w2 = expert_names(c, layer, expert)
        yield from _fp4(w1, inter, dim, "expert")
        yield from _fp4(w3, inter, dim, "expert")
        yield from _fp4(w2, dim, inter, "expert")
    yield from _fp8(f"{at}.shared_experts.w1", inter, dim, "shared_expert")
    yield from _fp8(f"{at}.shared_experts.w3", inter, dim, "shared_expert")
    yield from _fp8(f"{at}.shared_experts.w2", dim, inter, "shared_expert")


def _compressor(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    if not c.is_kv_owner(layer):
        return
    at = f"layers.{layer}.attn.compressor"
    yield _bf16(f"{at}.wkv.weight", (c.head_dim, c.hidden_size), "compressor")
    if c.ratio(layer) == 2:
        yield _bf16(f"{at}.wgate.weight", (c.head_dim, c.hidden_size), "compressor")
    yield _bf16(f"{at}.norm.weight", (c.head_dim,), "norm")


def _indexer(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    if not c.is_index_owner(layer):
        return
    at = f"layers.{layer}.attn.indexer"
    yield from _fp8(f"{at}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "indexer")
    yield _bf16(f"{at}.weights_proj.weight", (c.index_n_heads, c.hidden_size), "indexer")
    if c.is_kv_owner(layer):
        yield _bf16(f"{at}.wk.weight", (c.index_head_dim, c.head_dim), "indexer")
        yield _bf16(f"{at}.k_norm.weight", (c.index_head_dim,), "norm")


def _engram(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    if not c.is_engram(layer):
        return
    at, dim = f"layers.{layer}.engram", c.engram_head_dim
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    yield TensorSpec(f"{at}.embed.weight", (rows, dim), "F8_E4M3", "engram_table")
    yield TensorSpec(f"{at}.embed.scale", (rows, dim // BLOCK), "F8_E8M0", "engram_table")
    into = c.engram_columns * dim
    yield from _fp8(f"{at}.wkv", (c.hc_mult + 1) * c.hidden_size, into, "engram")
    yield _bf16(f"{at}.q_weight", (c.hc_mult, c.hidden_size), "engram")
    yield _bf16(f"{at}.k_weight", (c.hc_mult, c.hidden_size), "engram")


def _draft_heads(c: ModelConfig) -> Iterator[TensorSpec]:
    if c.draft_stages == 0:
        return
    dim, rank = c.hidden_size, c.dspark_markov_rank
    last = f"mtp.{c.draft_stages - 1}"
    yield from _fp8("mtp.0.main_proj", dim, len(c.dspark_target_layer_ids) * dim, "draft_head")
    yield _bf16("mtp.0.main_norm.weight", (dim,), "norm")
    yield _bf16(f"{last}.norm.weight", (dim,), "norm")
    yield _bf16(f"{last}.markov_head.embed.weight", (c.vocab_size, rank), "draft_head")
    yield _bf16(f"{last}.markov_head.head.weight", (c.vocab_size, rank), "draft_head")
    yield _bf16(f"{last}.confidence_head.proj.weight", (1, dim + rank), "draft_head")


def _vision(v: VisionConfig, text_dim: int) -> Iterator[TensorSpec]:
    dim, inter = v.hidden_size, v.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (dim, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": (dim,),
    }
    for block in range(v.num_hidden_layers):
        at = f"vision.blocks.{block}"
        shapes |= {
            f"{at}.norm1.weight": (dim,),
            f"{at}.norm2.weight": (dim,),
            f"{at}.attn.wqkv.weight": (3 * dim, dim),
            f"{at}.attn.wqkv.bias": (3 * dim,),
            f"{at}.attn.wo.weight": (dim, dim),
            f"{at}.attn.wo.bias": (dim,),
            f"{at}.mlp.w1.weight": (2 * inter, dim),
            f"{at}.mlp.w2.weight": (dim, inter),
        }
    shapes |= {
        "vision.norm.weight": (dim,),
        "aligner.w1.weight": (text_dim, dim * v.downsample_ratio**2),
        "aligner.w1.bias": (text_dim,),
        "aligner.w2.weight": (text_dim, text_dim),
        "aligner.w2.bias": (text_dim,),
        "image_start": (text_dim,),
        "image_end": (text_dim,),
        "image_newline": (text_dim,),
    }
    for name, shape in shapes.items():
        yield _bf16(name, shape, "vision")
