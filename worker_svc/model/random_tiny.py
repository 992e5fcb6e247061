"""The random-tiny model: a whole V4.1 network of 2 million weights, made on demand and kept.

Finding it needs no torch. Building it does, and takes about two seconds, once per tokenizer and
version of the code.
As a command it prints the model's directory: `python -m phalanx.worker_svc.model.random_tiny`.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from phalanx.worker_svc.model.cache import cache_dir
from phalanx.worker_svc.model.config import ModelConfig, engram_table_rows
from phalanx.worker_svc.model.shards import INDEX_NAME, CheckpointError
from phalanx.worker_svc.model.token_map import engram_token_map

SEED: Final = 20261129
TOKENIZER_DIR: Final = Path(__file__).parents[2] / "services" / "tokenizer"
EMBEDDED: Final = ("tiny", "random-tiny")


def resolve_model(name: str) -> Path:
    """The checkpoint directory of a model name: `tiny`, `random-tiny`, or a directory itself.

    Raises:
        CheckpointError: it is neither an embedded model nor a directory with a config.json.
    """
    if name in EMBEDDED:
        return ensure_random_tiny()
    directory = Path(name).expanduser().resolve()
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"model {name!r}: no {directory / 'config.json'}; "
            f"give a checkpoint directory, or one of {', '.join(EMBEDDED)}"
        )
    return directory


def ensure_random_tiny() -> Path:
    """The model's directory in the cache; built first if it is not there.

    Several processes may call this at once: each builds aside, the first to finish is kept.
    """
    target = cache_dir() / f"random-tiny-{_digest()}"
    if _is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".random-tiny-", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        build_random_tiny(made)
        if target.exists() and not _is_complete(target):
            shutil.rmtree(target, ignore_errors=True)
        try:
            made.rename(target)
        except OSError:
            if not _is_complete(target):
                raise
    return target


def build_random_tiny(directory: Path) -> None:
    """Write the model into an empty or new directory. Raises CheckpointError if it holds files."""
    import torch  # here, so that finding a model that exists stays cheap

    from phalanx.worker_svc.model.random_weights import RandomWeights
    from phalanx.worker_svc.model.writer import write_checkpoint

    tokenizer = TOKENIZER_DIR / "tokenizer.json"
    config = config_json()
    weights = RandomWeights(ModelConfig.parse(config), SEED, _speakable(tokenizer))
    write_checkpoint(
        directory,
        config,
        lambda name: torch.from_numpy(weights(name)),
        tokenizer,
        shard_bytes=4 << 20,
    )


def config_json() -> dict[str, object]:
    """The content of config.json: model.md F, with the packaged tokenizer's vocabulary."""
    special = json.loads((TOKENIZER_DIR / "special_ids.json").read_bytes())
    vocab = int(special["vocab_size"])
    ids = engram_token_map(TOKENIZER_DIR / "tokenizer.json", vocab)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": special["bos_token_id"],
        "eos_token_id": special["eos_token_id"],
        "pad_token_id": special["pad_token_id"],
        "image_token_id": special["image_token_id"],
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": _SHAPE
        | {
            "vocab_size": vocab,
            "engram_pad_token_id": special["pad_token_id"],
            "engram_compressed_vocab_size": int(ids.max()) + 1,
            "dspark_noise_token_id": special["dspark_noise_token_id"],
        },
    }


_SHAPE: Final[dict[str, object]] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 8,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": engram_table_rows(101, layers=2, columns=6),
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def _speakable(tokenizer: Path) -> list[bool]:
    """Which tokens the model may say: whole visible text, and the end of the sequence."""
    from tokenizers import Tokenizer

    special = json.loads((TOKENIZER_DIR / "special_ids.json").read_bytes())
    parsed = Tokenizer.from_file(str(tokenizer))
    texts = [
        parsed.decode([token], skip_special_tokens=False) for token in range(special["vocab_size"])
    ]
    spoken = [_is_visible(text) for text in texts]
    for token in special["tokens"].values():
        spoken[token] = token == special["eos_token_id"]
    return spoken


def _is_visible(text: str) -> bool:
    """Whole characters (half of one decodes to U+FFFD), and none that moves a terminal's cursor."""
    return "\ufffd" not in text and text.replace("\n", "").replace("\t", "").isprintable()


def _digest() -> str:
    """What the model is made from: the tokenizer, and the code that makes it (its version)."""
    here = Path(__file__)
    quantizers = here.parents[2] / "kernels" / "reference" / "quant.py"
    code = (here, here.with_name("random_weights.py"), here.with_name("writer.py"), quantizers)
    content = hashlib.sha256()
    for file in (*code, TOKENIZER_DIR / "tokenizer.json", TOKENIZER_DIR / "special_ids.json"):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _is_complete(directory: Path) -> bool:
    return (directory / INDEX_NAME).is_file() and (directory / "config.json").is_file()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print a model's directory, building it if needed."
    )
    parser.add_argument("model", nargs="?", default="random-tiny", help="tiny, random-tiny or DIR")
    parser.add_argument("--out", type=Path, help="build random-tiny into this directory instead")
    arguments = parser.parse_args()
    try:
        if arguments.out is not None:
            build_random_tiny(arguments.out)
        print(arguments.out if arguments.out is not None else resolve_model(arguments.model))
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
