"""The model's configuration: read strictly from config.json, with everything that follows from it.

No torch here: reading a configuration must cost milliseconds. Layout and meaning: model.md A to D.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.worker_svc.model.consistency import validate
from phalanx.worker_svc.model.fields import ConfigError, Fields

ARCHITECTURE = "DeepseekV41ForCausalLM"

# Values this engine implements and no other. A file with another value describes another network.
_FIXED_TOP: Mapping[str, object] = {"model_type": "deepseek_v41"}
_FIXED_QUANTIZATION: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FIXED_TEXT: Mapping[str, object] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_FIXED_VISION: Mapping[str, object] = {"model_type": "deepseek_v41_vision"}
# Keys of sibling architectures: absent here, or neutral. Ignoring them would compute another model.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "gate_temp": (1.0, None),
    "num_hash_layers": (0, None),
    "n_group": (1, None),
    "topk_group": (1, None),
    "first_k_dense_replace": (0, None),
}
# Keys with no effect on inference.
_INERT = ("attention_dropout", "initializer_range", "use_cache")


@dataclass(frozen=True)
class Yarn:
    """Stretching of the rotary frequencies of the layers that read compressed entries."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower's shape. Its tensors are counted and skipped: only text is served."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True)
class ModelConfig:
    """One V4.1 text model. Field names are those of config.json; sizes are in elements.

    A *KV owner* is a layer that makes compressed entries and index keys; an *index owner* selects
    the entries to read. Other layers with a ratio above 0 read from the nearest owner below.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn
    sliding_window: int
    compress_ratios: tuple[int, ...]  # layers, then draft stages
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]  # table rows, one number per engram layer
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int  # draft stages
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None
    unknown_keys: tuple[str, ...]  # keys of the file that nothing here reads

    # --- sizes ---

    @property
    def max_positions(self) -> int:
        """The longest sequence, prompt and output together, in tokens."""
        return self.max_position_embeddings

    @property
    def draft_stages(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.o_groups

    @property
    def mix_size(self) -> int:
        """Rows of an mHC projection: pre and post weights, and the square combination matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def window_record_bytes(self) -> int:
        return self.head_dim + self.head_dim // 32

    @property
    def compressed_record_bytes(self) -> int:
        return self.head_dim // 2 + self.head_dim // 16

    @property
    def index_record_bytes(self) -> int:
        return self.index_head_dim // 2 + self.index_head_dim // 32

    # --- layers ---

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry that the layer reads; 0 if it reads its window alone."""
        return self.compress_ratios[layer]

    def kv_owner(self, layer: int) -> int | None:
        """The layer whose compressed entries and index keys `layer` reads."""
        return self._owner(self.kv_source_layer_ids, layer)

    def index_owner(self, layer: int) -> int | None:
        """The layer whose choice of entries `layer` reads."""
        return self._owner(self.index_source_layer_ids, layer)

    def _owner(self, owners: tuple[int, ...], layer: int) -> int | None:
        if self.ratio(layer) == 0:
            return None
        return max(owner for owner in owners if owner <= layer)

    def is_kv_owner(self, layer: int) -> bool:
        return layer in self.kv_source_layer_ids

    def is_index_owner(self, layer: int) -> bool:
        return layer in self.index_source_layer_ids

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half, whose layers all read the last KV owner's entries."""
        return self.kv_source_layer_ids[-1]

    def uses_candidates(self, layer: int) -> bool:
        """Whether the index owner `layer` chooses only among the candidate source's blocks."""
        return self.is_index_owner(layer) and layer > self.candidate_source_layer_id

    def uses_yarn(self, layer: int) -> bool:
        """Whether the layer turns by `compress_rope_theta` with YaRN, else by `rope_theta` alone."""
        return self.ratio(layer) > 0

    def is_engram(self, layer: int) -> bool:
        return layer in self.engram_layer_ids

    @cached_property
    def yarn_range(self) -> tuple[int, int]:
        """(low, high): rotary pairs up to low keep their frequency, from high on it is divided."""
        rope, yarn = self.qk_rope_head_dim, self.rope_scaling

        def pair(rotations: float) -> float:
            turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
            return rope * math.log(turns) / (2 * math.log(self.compress_rope_theta))

        low = max(math.floor(pair(yarn.beta_fast)), 0)
        return low, min(math.ceil(pair(yarn.beta_slow)), rope - 1)

    # --- Engram (model.md C.3) ---

    @property
    def engram_columns(self) -> int:
        """Rows gathered per token and engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @cached_property
    def engram_multipliers(self) -> npt.NDArray[np.int64]:
        """int64 [engram layers, max n-gram size], odd."""
        bound = ((2**63 - 1) // self.engram_compressed_vocab_size) // 2
        size = self.engram_max_ngram_size
        draws = [
            np.random.default_rng(10007 * layer).integers(0, bound, size=size, dtype=np.int64)
            for layer in self.engram_layer_ids
        ]
        return np.array(draws, np.int64).reshape(-1, size) * 2 + 1

    @cached_property
    def engram_primes(self) -> npt.NDArray[np.int64]:
        """int64 [engram layers, max n-gram size - 1, heads]: table rows of each hash column."""
        shape = (len(self.engram_layer_ids), self.engram_max_ngram_size - 1, self.engram_n_heads)
        primes = _primes_from(self.engram_vocab_size, math.prod(shape))
        return np.array(primes, np.int64).reshape(shape)

    @cached_property
    def engram_offsets(self) -> npt.NDArray[np.int64]:
        """int64 [engram layers, columns]: first table row of each hash column."""
        rows = self.engram_primes.reshape(len(self.engram_layer_ids), -1)
        return np.cumsum(rows, axis=1) - rows

    # --- reading ---

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """Read config.json (or the one in a checkpoint directory).

        Raises:
            ConfigError: the file is missing, is not JSON, or a field is missing or unusable.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON: {error}") from error
        try:
            return cls.parse(raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def parse(cls, raw: object) -> "ModelConfig":
        """Build the configuration from a decoded config.json. Raises ConfigError naming the field."""
        top = Fields("", raw)
        architectures = top.strings("architectures")
        if ARCHITECTURE not in architectures:
            raise ConfigError(f"architectures is {architectures}; only {ARCHITECTURE} is supported")
        top.expect(_FIXED_TOP)
        top.skip("dtype", "torch_dtype", "transformers_version")
        quantization = top.section("quantization_config")
        quantization.expect(_FIXED_QUANTIZATION)
        text = top.section("text_config")
        text.expect(_FIXED_TEXT)
        text.neutral(_NEUTRAL)
        text.skip(*_INERT)
        vision = top.section("vision_config") if top.has("vision_config") else None
        config = _from_fields(top, text, vision)
        validate(config)
        return config


def _from_fields(top: Fields, text: Fields, vision: Fields | None) -> ModelConfig:
    scaling = text.section("rope_scaling")
    scaling.expect({"rope_type": "yarn"})
    yarn = Yarn(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
    numbers = (
        "routed_scaling_factor",
        "swiglu_limit",
        "rms_norm_eps",
        "rope_theta",
        "compress_rope_theta",
        "hc_eps",
    )
    lists = (
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "engram_num_embeddings",
        "dspark_target_layer_ids",
    )
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
    special = ("rope_scaling", "vision", "unknown_keys")
    integers = [
        name
        for name in ModelConfig.__dataclass_fields__
        if name not in numbers + lists + ids + special
    ]
    values: dict[str, object] = {name: text.integer(name) for name in integers}
    values |= {name: text.number(name) for name in numbers}
    values |= {name: text.integers(name) for name in lists}
    values |= {name: top.integer(name) for name in ids}
    tower = _vision(vision) if vision is not None else None
    unknown = top.unread() + text.unread() + scaling.unread()
    return ModelConfig(**values, rope_scaling=yarn, vision=tower, unknown_keys=unknown)  # type: ignore[arg-type]


def _vision(fields: Fields) -> VisionConfig:
    fields.expect(_FIXED_VISION)
    return VisionConfig(
        **{name: fields.integer(name) for name in VisionConfig.__dataclass_fields__}
    )


def engram_table_rows(vocab_size: int, *, layers: int, columns: int) -> list[int]:
    """Rows of each Engram table: its hash columns' primes, counted up from `vocab_size`."""
    primes = _primes_from(vocab_size, layers * columns)
    return [sum(primes[layer * columns :][:columns]) for layer in range(layers)]


def _primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes that are >= start."""
    primes: list[int] = []
    value = max(start, 2)
    while len(primes) < count:
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            primes.append(value)
        value += 1
    return primes
