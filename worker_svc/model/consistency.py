"""What a configuration's fields must agree on. Every refusal names the field and the number."""

from typing import TYPE_CHECKING

from phalanx.worker_svc.model.fields import ConfigError

if TYPE_CHECKING:
    from phalanx.worker_svc.model.config import ModelConfig

_BLOCK = 32  # columns that share a scale: quantized dimensions are whole blocks


def validate(c: "ModelConfig") -> None:
    """Refuse a configuration that contradicts itself. Raises ConfigError naming the field."""
    _check_sizes(c)
    _check_layers(c)
    _check_engram(c)
    _check_draft(c)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_sizes(c: "ModelConfig") -> None:
    may_be_zero = ("bos_token_id", "candidate_source_layer_id", "num_nextn_predict_layers")
    for name, value in vars(c).items():
        if isinstance(value, int | float) and not name.endswith("token_id"):
            _require(
                value > 0 or (name in may_be_zero and value == 0),
                f"{name} is {value}; it must be > 0",
            )
        if name.endswith("token_id"):
            _require(
                0 <= value < c.vocab_size,
                f"{name} is {value}; it must be in 0..{c.vocab_size - 1} (vocab_size)",
            )
    grouped = (
        "hidden_size",
        "head_dim",
        "q_lora_rank",
        "moe_intermediate_size",
        "index_head_dim",
        "engram_head_dim",
    )
    for name in grouped:
        _require(
            getattr(c, name) % _BLOCK == 0,
            f"{name} is {getattr(c, name)}; it must be a multiple of {_BLOCK}",
        )
    _require(
        c.num_attention_heads % c.o_groups == 0,
        f"o_groups is {c.o_groups}; it must divide num_attention_heads ({c.num_attention_heads})",
    )
    _require(
        c.o_groups * c.o_lora_rank % _BLOCK == 0,
        f"o_lora_rank is {c.o_lora_rank}; times o_groups it must be a multiple of {_BLOCK}",
    )
    rope, room = c.qk_rope_head_dim, min(c.head_dim, c.index_head_dim)
    _require(
        rope % 2 == 0 and rope <= room,
        f"qk_rope_head_dim is {rope}; it must be even and at most {room} (head_dim, index_head_dim)",
    )
    for name, experts in (
        ("num_experts_per_tok", c.n_routed_experts),
        ("dspark_num_experts_per_tok", c.dspark_n_routed_experts),
    ):
        _require(
            getattr(c, name) <= experts,
            f"{name} is {getattr(c, name)}; there are only {experts} experts",
        )


def _check_layers(c: "ModelConfig") -> None:
    layers = c.num_hidden_layers
    wanted = layers + c.draft_stages
    _require(
        len(c.compress_ratios) == wanted,
        f"compress_ratios has {len(c.compress_ratios)} entries; layers and draft stages are {wanted}",
    )
    for layer, ratio in enumerate(c.compress_ratios):
        _require(
            ratio in ((0, 1, 2) if layer < layers else (0,)),
            f"compress_ratios[{layer}] is {ratio}; layers take 0, 1 or 2, draft stages 0",
        )
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        _check_layer_list(c, name)
    _require(
        set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids),
        "kv_source_layer_ids must all be in index_source_layer_ids: owners make the index keys",
    )
    for owner in c.index_source_layer_ids:
        _require(
            c.ratio(owner) > 0,
            f"index_source_layer_ids has {owner}, a layer with compress_ratios 0",
        )
    for layer in range(layers):
        if c.ratio(layer) == 0:
            continue
        below = [owner for owner in c.kv_source_layer_ids if owner <= layer]
        _require(
            bool(below), f"layer {layer} compresses, but kv_source_layer_ids has no owner below"
        )
        _require(
            c.ratio(below[-1]) == c.ratio(layer),
            f"compress_ratios[{layer}] is {c.ratio(layer)}; its owner {below[-1]} has another",
        )
    source = c.candidate_source_layer_id
    _require(
        source in c.kv_source_layer_ids and source == c.kv_source_layer_ids[-1],
        f"candidate_source_layer_id is {source}; it must be the last of kv_source_layer_ids",
    )


def _check_layer_list(c: "ModelConfig", name: str) -> None:
    ids: tuple[int, ...] = getattr(c, name)
    _require(
        list(ids) == sorted(set(ids)) and all(0 <= i < c.num_hidden_layers for i in ids),
        f"{name} is {list(ids)}; it must ascend within 0..{c.num_hidden_layers - 1}",
    )


def _check_engram(c: "ModelConfig") -> None:
    _require(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries; "
        f"engram_layer_ids has {len(c.engram_layer_ids)}",
    )
    rows = [int(total) for total in c.engram_primes.sum(axis=(1, 2))]
    _require(
        rows == list(c.engram_num_embeddings),
        f"engram_num_embeddings is {list(c.engram_num_embeddings)}; the hash columns need {rows}",
    )
    _require(
        c.engram_compressed_vocab_size <= c.vocab_size,
        f"engram_compressed_vocab_size is {c.engram_compressed_vocab_size}; "
        f"vocab_size is only {c.vocab_size}",
    )


def _check_draft(c: "ModelConfig") -> None:
    if c.draft_stages == 0:
        return
    taps = c.dspark_target_layer_ids
    _require(bool(taps), "dspark_target_layer_ids is empty; the draft stages need taps")
    _check_layer_list(c, "dspark_target_layer_ids")
