"""A configuration is read strictly, refused by field, and gives the published derived numbers."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.fields import ConfigError

FULL = Path(__file__).parent / "full_config.json"
TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


@pytest.fixture
def full() -> ModelConfig:
    return ModelConfig.load(FULL)


def raw_tiny() -> dict[str, Any]:
    return copy.deepcopy(json.loads((TINY / "config.json").read_text()))


def test_owners_of_the_full_model(full: ModelConfig) -> None:
    assert [full.kv_owner(layer) for layer in (0, 1, 2, 7, 8, 13, 14, 19, 20, 39, 40)] == [
        None, None, 2, 2, 8, 8, 14, 14, 20, 20, None,
    ]  # fmt: skip
    assert [full.index_owner(layer) for layer in (2, 7, 20, 23, 24, 27, 28, 35, 36, 39)] == [
        2, 2, 20, 20, 24, 24, 28, 32, 36, 36,
    ]  # fmt: skip
    assert [layer for layer in range(40) if full.uses_candidates(layer)] == [24, 28, 32, 36]
    assert [layer for layer in range(43) if not full.uses_yarn(layer)] == [0, 1, 40, 41, 42]


def test_rotary_range_and_record_sizes_of_the_full_model(full: ModelConfig) -> None:
    assert full.yarn_range == (15, 25)
    assert (full.window_record_bytes, full.compressed_record_bytes, full.index_record_bytes) == (
        528,
        288,
        68,
    )
    assert (full.max_positions, full.draft_stages, full.heads_per_group) == (1 << 20, 3, 8)
    assert full.vision is not None and full.unknown_keys == ()


def test_engram_constants_of_the_full_model(full: ModelConfig) -> None:
    assert full.engram_multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert full.engram_primes.sum(axis=(1, 2)).tolist() == [384006168, 384016682]
    assert full.engram_primes[0, 0, :3].tolist() == [16000057, 16000079, 16000081]
    assert full.engram_primes[1, 2, 7] == 16000889
    assert full.engram_offsets[:, :2].tolist() == [[0, 16000057], [0, 16000477]]


def test_engram_constants_match_the_reference_arrays() -> None:
    config = ModelConfig.load(TINY)
    with safe_open(TINY / "expected.safetensors", "np") as arrays:
        for name in ("multipliers", "primes", "offsets"):
            made = getattr(config, f"engram_{name}")
            assert np.array_equal(made, arrays.get_tensor(f"engram.{name}")), name


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("bos_token_id"), "bos_token_id is missing"),
        (lambda c: c["text_config"].pop("head_dim"), "text_config.head_dim is missing"),
        (
            lambda c: c["text_config"].update(head_dim="64"),
            "text_config.head_dim is '64'; it must be an integer",
        ),
        (
            lambda c: c["text_config"].update(hidden_size=True),
            "text_config.hidden_size is True; it must be an integer",
        ),
        (
            lambda c: c["text_config"].update(scoring_func="softmax"),
            "text_config.scoring_func is 'softmax'; it must be 'sqrtsoftplus'",
        ),
        (
            lambda c: c["quantization_config"].update(weight_block_size=[128, 128]),
            r"quantization_config.weight_block_size is \[128, 128\]",
        ),
        (
            lambda c: c["text_config"]["rope_scaling"].update(rope_type="linear"),
            "text_config.rope_scaling.rope_type is 'linear'",
        ),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "only DeepseekV41ForCausalLM"),
        (lambda c: c["text_config"].update(gate_temp=2.0), "gate_temp is 2.0; it must be absent"),
        (
            lambda c: c["text_config"].update(hidden_size=100),
            "hidden_size is 100; .* multiple of 32",
        ),
        (
            lambda c: c["text_config"].update(sliding_window=0),
            "sliding_window is 0; it must be > 0",
        ),
        (lambda c: c.update(eos_token_id=512), r"eos_token_id is 512; it must be in 0\.\.511"),
        (lambda c: c["text_config"]["compress_ratios"].pop(), "compress_ratios has 11 entries"),
        (
            lambda c: c["text_config"]["compress_ratios"].__setitem__(3, 1),
            r"compress_ratios\[3\] is 1; its owner 2 has another",
        ),
        (
            lambda c: c["text_config"].update(kv_source_layer_ids=[4, 6]),
            "layer 2 compresses, but kv_source_layer_ids has no owner below",
        ),
        (
            lambda c: c["text_config"].update(index_source_layer_ids=[2, 6]),
            "kv_source_layer_ids must all be in index_source_layer_ids",
        ),
        (
            lambda c: c["text_config"].update(candidate_source_layer_id=8),
            "candidate_source_layer_id is 8",
        ),
        (
            lambda c: c["text_config"].update(engram_num_embeddings=[660, 863]),
            r"engram_num_embeddings is \[660, 863\]; the hash columns need \[660, 864\]",
        ),
        (
            lambda c: c["text_config"].update(num_experts_per_tok=9),
            "num_experts_per_tok is 9; there are only 8 experts",
        ),
        (
            lambda c: c["text_config"].update(dspark_target_layer_ids=[9, 7]),
            r"dspark_target_layer_ids is \[9, 7\]; it must ascend",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name(edit: Edit, message: str) -> None:
    raw = raw_tiny()
    edit(raw)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.parse(raw)


def test_keys_that_nothing_reads_are_reported_not_refused() -> None:
    raw = raw_tiny()
    raw["custom"] = 1
    raw["text_config"]["note"] = "x"
    assert ModelConfig.parse(raw).unknown_keys == ("custom", "text_config.note")


def test_no_drafter_is_a_valid_model() -> None:
    raw = raw_tiny()
    raw["text_config"]["num_nextn_predict_layers"] = 0
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:10]
    assert ModelConfig.parse(raw).draft_stages == 0


@pytest.mark.parametrize("content", ["[]", "{", "", '{"architectures": 3}'])
def test_a_file_that_is_no_configuration_is_refused_with_its_path(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=str(file)):
        ModelConfig.load(tmp_path)


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*config.json: No such file"):
        ModelConfig.load(tmp_path)
